"""The section about harmonisation: from the weights of runs to a table and a figure."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import fill_plan
from safetensors.torch import save_file
from torch import nn

from chasm.mixers import create_mixer
from chasm.studies.harmony import measure_harmony
from chasm.studies.plan import make_plan
from chasm.studies.report import write_report
from chasm.studies.report.harmonisation import stored_mixers
from chasm.studies.results import collect


def slots(name: str, **options: Any) -> nn.ModuleDict:
    """Mixers of two sizes, away from their start."""
    torch.manual_seed(0)
    mixers = {f"{i}": create_mixer(name, 4 * (i + 1), (16 >> i, 12 >> i), **options) for i in (0, 1)}
    with torch.no_grad():
        for mixer in mixers.values():
            for p in mixer.parameters():
                p.add_(0.3 / getattr(mixer, "step_scale", 1) * torch.randn_like(p))
    return nn.ModuleDict(mixers)


def save(folder: Path, mixers: nn.ModuleDict) -> None:
    tensors = {f"slots.{k}": v for k, v in mixers.state_dict().items()}
    save_file({**tensors, "head.weight": torch.zeros(2)}, folder / "weights.safetensors")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with weights for CHASM, untied and FNO-D; the untied run was harmonised in one of two seeds."""
    root = tmp_path_factory.mktemp("runs")
    plan = make_plan("seeds-basis", scale="tiny", seeds=[0, 1], arms=["fno-d", "gfnet"])
    fill_plan(plan, root, "embedded brain", size=24)
    for cell in plan.runs:
        if cell.arm == "gfnet":
            continue
        options = cell.config.mixer.options
        folder = plan.folder(root, cell)
        save(folder, slots(cell.config.mixer.name, **options))
        if cell.arm == "chasm-untied" and cell.seed == 1:
            metrics = json.loads((folder / "metrics.json").read_text())
            for scores in metrics["cases"].values():
                scores["psnr"] -= 0.25
            (folder / "harmonised").mkdir()
            (folder / "harmonised" / "metrics.json").write_text(json.dumps(metrics))
    return write_report(collect(plan, root), root / "out", root=root)


def table(report: Path) -> dict[str, list[str]]:
    text = report.with_suffix(".md").read_text()
    section = text.partition("## Harmonisation measured")[2].partition("\n## ")[0]
    rows = [re.split(r" \| ", line.strip("| \n")) for line in section.splitlines() if line.startswith("| ")]
    return {row[0].strip("*"): row for row in rows}


def test_methods_that_may_differ_stand_beside_chasm(report: Path) -> None:
    rows = table(report)
    assert [name for name in rows if name not in ("Mixer", "---")] == ["Untied basis", "CHASM", "FNO-D"]
    assert rows["CHASM"][1:5] == ["0.0000", "0.0000", "0.0°", "0.0°"]
    assert rows["CHASM"][6:8] == ["0.00 %", "0.00 %"]
    wanted = [h for m in slots("chasm", basis="untied").values() for h in measure_harmony(m).values()]
    mean = sum(h.commutator for h in wanted) / 4
    assert rows["Untied basis"][1] == f"{mean:.4f}"
    assert mean > 0.01
    assert float(rows["FNO-D"][1]) > 0.1


def test_what_the_projection_cost_is_there_for_the_seeds_it_was_scored_for(report: Path) -> None:
    rows = table(report)
    assert rows["Mixer"][8] == "PSNR, harmonised − before"
    assert rows["Untied basis"][8] == "−0.250 dB [−0.250, −0.250]"
    assert rows["CHASM"][8] == rows["FNO-D"][8] == "–"


def test_the_figure_has_one_panel_per_method(report: Path) -> None:
    text = report.read_text()
    assert text.count('alt="commutators over pairs of frequencies"') == 1


def test_without_weights_of_such_a_method_there_is_no_section(tmp_path: Path) -> None:
    plan = make_plan("seeds-basis", scale="tiny", seeds=[0])
    fill_plan(plan, tmp_path, "embedded brain", size=24)
    text = write_report(collect(plan, tmp_path), tmp_path / "out", root=tmp_path).with_suffix(".md").read_text()
    assert "What CHASM learned" in text
    assert "Harmonisation" not in text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chasm", {"basis": "untied", "axes": "cw", "step_scale": 3.0}),
        ("chasm", {"gain": "complex", "bins": 7}),
        ("fno-d", {"modes": [3, 5]}),
    ],
)
def test_mixers_come_back_from_weights(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    mixers = slots(name, **options)
    save(tmp_path, mixers)
    found = stored_mixers(load_file(tmp_path / "weights.safetensors"), name, options)
    for stored, mixer in zip(found, mixers.values(), strict=True):
        assert all(torch.equal(v, mixer.state_dict()[k]) for k, v in stored.state_dict().items())
