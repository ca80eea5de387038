"""The script that holds bfloat16 against float32, at a size a CPU runs in seconds."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from chasm.common.precision import autocast_dtype
from chasm.mixers import CHASM

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bf16_curve.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    spec = importlib.util.spec_from_file_location("bf16_curve", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_short_run_follows(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--tiny", "--steps", "12", "--out", str(tmp_path / "c.json")]) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    curves = found["curves"]
    assert {len(curve) for curve in curves.values()} == {12}
    assert curves["bf16"] != curves["float32"]  # it did run in another precision
    assert 0 < found["bf16"]["mean"] <= found["bf16"]["max"] < 0.05
    assert {"device", "torch", "commit", "date", "command", "steps", "follows"} <= set(found)
    assert "follows float32: True" in capsys.readouterr().out


def test_one_that_does_not_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CHASM.forward

    def lossy(self: CHASM, x: torch.Tensor) -> torch.Tensor:
        return right(self, x if autocast_dtype(x) is None else -x)

    monkeypatch.setattr(CHASM, "forward", lossy)
    monkeypatch.setattr(script, "ALLOWED_MEAN", 0.01)
    assert script.main(["--tiny", "--steps", "12"]) == 1


def test_deviation_by_hand(script: ModuleType) -> None:
    base, other = [4.0, 2.0, 1.0, 1.0], [4.0, 3.0, 1.0, 2.0]
    wanted = {"mean": (1 / 6 + 1 / 3 + 1 / 2) / 3, "max": 0.5, "end": 0.5}
    assert script.deviation(other, base, 2) == pytest.approx(wanted)
    assert script.deviation(base, base, 3)["max"] == 0
