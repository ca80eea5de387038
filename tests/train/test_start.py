"""A run that begins with the weights of another one, and says so."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small import UNET, recipe

from chasm.common.files import sha256
from chasm.train import train


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    train(recipe(steps=3), tmp_path / "first", quiet=True)
    start = str(tmp_path / "first")
    train(recipe(steps=1, lr=1e-12, ema=0.9, start=start), tmp_path / "second", quiet=True)
    a, b = (load_file(tmp_path / name / "weights.safetensors") for name in ("first", "second"))
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, atol=1e-6, rtol=0)
    facts = json.loads((tmp_path / "second" / "environment.json").read_text())["start"]
    assert facts == {"name": "run", "sha256": sha256(tmp_path / "first" / "weights.safetensors"), "steps": 3}


def test_weights_of_another_network_are_refused_in_one_line(tmp_path: Path) -> None:
    train(recipe(steps=1), tmp_path / "first", quiet=True)
    wider = {**UNET, "options": {**UNET["options"], "width": 8}}
    with pytest.raises(ValueError, match=r"train\.start: .* other weights .*: take backbone") as error:
        train(recipe(steps=1, backbone=wider, start=str(tmp_path / "first")), tmp_path / "second", quiet=True)
    assert "\n" not in str(error.value)
