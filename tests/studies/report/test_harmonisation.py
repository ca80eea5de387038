"""The section about harmonisation: from the weights of runs to a table and a figure."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import fill_plan
from safetensors.torch import save_file

from chasm.studies.harmony import measure_harmony
from chasm.studies.plan import make_plan
from chasm.studies.report import write_report
from chasm.studies.results import collect
from chasm.train.config import RunConfig
from chasm.train.run import build_model


def moved_model(config: RunConfig) -> Any:
    """The run's model, with its slots away from their start."""
    model: Any = build_model(config, config.task.create(), (1, 32, 32))
    torch.manual_seed(0)
    with torch.no_grad():
        for slot in model.slots.values():
            for p in slot.parameters():
                p.add_(0.3 / getattr(slot, "step_scale", 1) * torch.randn_like(p))
    return model


def save(folder: Path, config: RunConfig) -> None:
    """Write what `load_run` needs beside the config."""
    tensors = {k: v.contiguous() for k, v in moved_model(config).state_dict().items()}
    save_file(tensors, folder / "weights.safetensors")
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | {"image_shape": [1, 32, 32]}))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with weights for CHASM, untied and FNO-D; the untied run was harmonised in one of two seeds."""
    root = tmp_path_factory.mktemp("runs")
    plan = make_plan("seeds-basis", scale="tiny", seeds=[0, 1], arms=["fno-d", "gfnet"])
    fill_plan(plan, root, "embedded brain", size=24)
    for cell in plan.runs:
        if cell.arm == "gfnet":
            continue
        folder = plan.folder(root, cell)
        save(folder, cell.config)
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
    run = next(run for run in make_plan("seeds-basis", scale="tiny").runs if run.arm == "chasm-untied")
    wanted = [h for slot in moved_model(run.config).slots.values() for h in measure_harmony(slot).values()]
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


@pytest.mark.usefixtures("numbers_only")
def test_without_weights_of_such_a_method_there_is_no_section(tmp_path: Path) -> None:
    plan = make_plan("seeds-basis", scale="tiny", seeds=[0])
    fill_plan(plan, tmp_path, "embedded brain", size=24)
    text = write_report(collect(plan, tmp_path), tmp_path / "out", root=tmp_path).with_suffix(".md").read_text()
    assert "What CHASM learned" in text
    assert "Harmonisation" not in text


@pytest.mark.usefixtures("numbers_only")
def test_weights_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    plan = make_plan("seeds-basis", scale="tiny", seeds=[0], arms=["fno-d"])
    fill_plan(plan, tmp_path, "embedded brain", size=24)
    for cell in plan.runs:
        save(plan.folder(tmp_path, cell), cell.config)
    damaged = next(plan.folder(tmp_path, cell) for cell in plan.runs if cell.arm == "fno-d") / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    page = write_report(collect(plan, tmp_path), tmp_path / "out", root=tmp_path)
    assert "FNO-D" not in table(page)
    assert re.search(
        r"FNO-D is missing here: .*weights.safetensors: cannot be read", page.with_suffix(".md").read_text()
    )
