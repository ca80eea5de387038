"""What `collect` makes of run folders: written here by hand, so that every number is known."""

import json

import pytest

from chasm.studies import collect, make_plan
from chasm.studies.factors import SETTINGS
from chasm.studies.statistics import Interval
from chasm.train.config import dump

CASES = [f"c{i}" for i in range(8)]


def write(plan, root, cell, psnr, val=0.0, seconds=10.0):
    """A finished run in which case i scores psnr + i."""
    cases = {case: {"psnr": psnr + i, "ssim": psnr / 100} for i, case in enumerate(CASES)}
    folder = plan.folder(root, cell)
    folder.mkdir(parents=True)
    reference = {"name": "zero-filled", "cases": {}, "mean": {"psnr": 1.0}, "std": {"psnr": 0.0}}
    metrics = {"cases": cases, "best_val": {"psnr": val}, "reference": reference, "macs": 7, "seconds": seconds}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "config.yaml").write_text(dump(cell.config))


def row(found, arm, setting="cc359-x8"):
    return next(r for r in found.rows if (r.arm, r.setting) == (arm, setting))


def check_json(content):
    """report.json holds the same fields by name, and nothing that JSON cannot."""
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["format"] == 2
    chasm = next(r for r in content["rows"] if r["arm"] == "chasm")
    assert chasm["paper"]["psnr"] == {"mean": 25.72, "spread": 0.61, "over": "cases"}
    done = next(r for r in content["runs"] if r["status"] == "done")
    assert (done["metrics"]["best_val"], done["config"]["backbone"]["name"]) == ({"psnr": 0.0}, "unet")


def test_rows_and_comparisons(tmp_path):
    plan = make_plan("wrapper", seeds=(0, 1))
    psnr = {"baseline": 20.0, "wrapper": 20.0, "chasm": 21.0}
    for cell in plan.runs:
        if cell.host == "unet":
            write(plan, tmp_path, cell, psnr[cell.arm] + 0.5 * cell.seed)
    found = collect(plan, tmp_path)
    check_json(found.to_json())
    assert found.counts == {"done": 6, "missing": 12}
    chasm = row(found, "chasm")
    assert chasm.scores["psnr"].mean == pytest.approx(21 + 0.25 + 3.5)
    assert chasm.scores["psnr"].std_cases == pytest.approx((63 / 12) ** 0.5)  # of 0..7
    assert chasm.scores["psnr"].std_seeds == pytest.approx(0.5 / 2**0.5)
    assert chasm.scores["psnr"].cases["c1"] == pytest.approx(21 + 0.25 + 1)
    assert chasm.paper["psnr"] == (25.72, 0.61, "cases")
    assert (chasm.seeds, chasm.macs, chasm.seconds, chasm.chosen_from) == ([0, 1], 7, 10.0, None)
    got = {(c.arm, c.against): c for c in found.comparisons if c.metric == "psnr"}
    assert set(got) == {("wrapper", "baseline"), ("chasm", "baseline"), ("chasm", "wrapper")}
    win = got["chasm", "baseline"]
    assert (win.mean, win.low, win.high) == (pytest.approx(1), pytest.approx(1), pytest.approx(1))
    assert (win.verdict, win.cases, win.seeds, win.paper) == ("win", 8, 2, 0.93)
    assert got["wrapper", "baseline"].verdict == "level"
    assert got["chasm", "wrapper"].paper is None
    assert [r.setting for r in found.references] == ["cc359-x8"]


def test_verdicts_are_corrected_for_the_comparisons_of_a_table(tmp_path, monkeypatch):
    """p = 0.03 is a win by itself, and not among three comparisons."""
    alone = Interval(0.5, 0.1, 0.9, 8, 2, p=0.03)
    assert alone.verdict == "win"
    monkeypatch.setattr("chasm.studies.comparisons.difference", lambda *_: alone)
    plan = make_plan("wrapper", seeds=(0,))
    for cell in plan.runs:
        if cell.host == "unet":
            write(plan, tmp_path, cell, 20.0)
    found = [c for c in collect(plan, tmp_path).comparisons if c.metric == "psnr"]
    assert [(c.verdict, c.p) for c in found] == [("level", pytest.approx(0.09))] * 3


def test_falsification(tmp_path):
    plan = make_plan("random-mask")
    for cell in plan.runs:
        if cell.setting.startswith("cc359-x8"):
            draw = SETTINGS[cell.setting].draw
            strongest = "fsel" if draw is None else "gfnet"
            rival = 24.0 if draw is None else 24.6 + 0.1 * draw  # 24.8 over the three draws
            psnr = {"chasm": 25.0, strongest: rival, "afno": 24.85 if draw == 1 else 20.0}
            write(plan, tmp_path, cell, psnr.get(cell.arm, 20.0))
    (gain,) = collect(plan, tmp_path).falsification
    assert (gain.setting, gain.rival, gain.rival_random) == ("cc359-x8", "fsel", "gfnet")
    assert gain.draws == 3
    assert gain.structured.mean == pytest.approx(1.0)
    assert gain.random.mean == pytest.approx(0.2)
    assert gain.random.low < 0.15 < 0.25 < gain.random.high  # another draw may be as good or as bad as these
    assert gain.drop.mean == pytest.approx(80)
    assert gain.paper == {"structured": 0.52, "random": 0.08, "drop": 84.6}


def test_a_draw_that_is_not_finished_is_left_out(tmp_path):
    plan = make_plan("random-mask")
    for cell in plan.runs:
        if cell.setting.startswith("fastmri-x8") and (SETTINGS[cell.setting].draw != 2 or cell.arm == "chasm"):
            write(plan, tmp_path, cell, 25.0 if cell.arm == "chasm" else 24.0)
    (gain,) = collect(plan, tmp_path).falsification
    assert gain.draws == 2


def test_seeds_of_one_side_only_are_left_out(tmp_path):
    plan = make_plan("seeds-basis")
    for cell in plan.runs:
        if cell.arm == "chasm" or cell.seed == 1:
            write(plan, tmp_path, cell, 21.0 + cell.seed if cell.arm == "chasm" else 20.0)
    (pair,) = [c for c in collect(plan, tmp_path).comparisons if c.metric == "psnr"]
    assert (pair.arm, pair.against, pair.seeds) == ("chasm", "chasm-untied", 1)
    assert pair.mean == pytest.approx(2.0)


def test_nothing_yet(tmp_path):
    found = collect(make_plan("cc359"), tmp_path)
    assert found.counts == {"missing": 54}
    assert found.rows == found.comparisons == found.falsification == []


def test_an_interval_without_end_is_null(tmp_path):
    plan = make_plan("random-mask")
    for cell in plan.runs:
        if cell.setting.startswith("fastmri-x4"):
            write(plan, tmp_path, cell, 20.0)  # no gain at all: its drop has no meaning
    found = collect(plan, tmp_path)
    content = found.to_json()
    assert content["falsification"][0]["drop"] == {"mean": None, "low": None, "high": None}
    json.dumps(content, allow_nan=False)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"cases": [1]}, "cases"),
        ({"cases": {"c0": {"psnr": "high"}}}, "cases.c0.psnr"),
        ({"best_val": 3}, "best_val"),
        ({"reference": {"name": "zero-filled"}}, "reference.mean"),
        ({"parameters": {"model": {}}}, "parameters.model"),
        ({}, "cases"),
        ({"cases": {"a": {"psnr": 20.0, "ssim": 0.5}, "b": {"psnr": 20.0, "2sim": 0.5}}}, "cases"),
    ],
)
def test_scores_of_another_shape_are_a_failed_run_that_names_file_and_key(content, place, tmp_path):
    plan = make_plan("wrapper", seeds=(0,))
    for cell in plan.runs[:2]:
        write(plan, tmp_path, cell, 20.0)
    file = plan.folder(tmp_path, plan.runs[0]) / "metrics.json"
    file.write_text(json.dumps(content))
    found = collect(plan, tmp_path)
    assert found.counts == {"failed": 1, "done": 1, "missing": len(plan.runs) - 2}
    error = found.runs[0].error
    assert error.startswith(f"{file}: {place}: ")
    assert "\n" not in error
