"""`chasm study`: list, show, run, status."""

import json

import pytest
from typer.testing import CliRunner

from chasm.cli.app import app
from chasm.studies import STUDIES, make_plan, runner, worker
from chasm.studies.plan import save_plan
from chasm.train.config import dump


@pytest.fixture
def chasm_study(monkeypatch):
    monkeypatch.setattr(worker, "count_model", lambda config, size: {"status": "done"})
    monkeypatch.setattr(runner, "local", lambda jobs, at_once: ((j["key"], worker.run_cell(j)) for j in jobs))
    return lambda *words: CliRunner().invoke(app, ["study", *map(str, words)])


def test_list_names_every_study(chasm_study):
    found = chasm_study("list")
    assert found.exit_code == 0
    for name in STUDIES:
        assert f"{name} " in found.output


def test_show_prints_the_grid_beside_the_paper(chasm_study):
    found = chasm_study("show", "basis", "--probe", 0, "--arm", "gfnet")
    assert found.exit_code == 0
    assert "GFNet" in found.output
    assert "Untied basis" in found.output
    assert "chasm(basis=untied, step_scale=30.0)" in found.output
    assert "paper: psnr 28.43, ssim 0.833" in found.output
    assert "paper: psnr 28.68, ssim 0.840" in found.output  # with all the digits that the paper prints


def test_show_names_what_runs_in_the_place_of_the_papers(chasm_study):
    found = chasm_study("show", "basis", "--probe", 0, "--set", "backbone.name=unet", "--set", "data.name=folder")
    assert "cc359-x8 in hifi-mamba: folder ×8; unet" in found.output
    assert "paper:" not in found.output


def test_show_and_status_say_how_far_the_choice_of_step_sizes_is(chasm_study, tmp_path):
    found = chasm_study("show", "seeds-basis", "--protocol", "tuned", "--probe", 0, "--out", tmp_path)
    assert "chasm(basis=untied)" in found.output
    assert "seeds 0, 1, 2, step size not chosen yet: x1 to do, x10 to do, x30 to do, x100 to do" in found.output
    assert "step sizes chosen for 0 of 2 arms; 8 selection runs to do before the others" in found.output
    plan = make_plan("seeds-basis", protocol="tuned")
    save_plan(plan, tmp_path)
    for run in plan.selection_runs:
        if run.arm == "chasm":
            folder = plan.folder(tmp_path, run)
            folder.mkdir(parents=True)
            score = 20 + (run.multiplier == 30)
            (folder / "metrics.json").write_text(json.dumps({"best_val": {"psnr": score}}))
            (folder / "config.yaml").write_text(dump(run.config))
    status = chasm_study("status", "seeds-basis", "--protocol", "tuned", "--out", tmp_path)
    assert "cc359-x8.hifi-mamba.chasm: step size x30 of x1 20, x10 20, x30 21, x100 20" in status.output
    assert "step sizes chosen for 1 of 2 arms; 4 selection runs to do" in status.output
    assert "6 runs: 3 missing, 3 waiting for a step size" in status.output


def test_show_prints_the_cost(chasm_study, monkeypatch):
    from chasm.studies import estimate
    from chasm.studies.estimate import Probe

    monkeypatch.setattr(estimate, "time_batch", lambda *_: Probe(3600.0, 0.0, 10**6))
    found = chasm_study("show", "basis", "--gpus", 2, "--set", "train.steps=10")
    assert "5 runs, 50 steps" in found.output
    assert "50 device-hours; 25 hours on 2 devices" in found.output
    assert "chasm: 3600.0 s a step" in found.output


def test_run_then_status(chasm_study, tmp_path):
    missing = chasm_study("status", "parameters", "--out", tmp_path)
    assert missing.exit_code == 3
    assert "chasm study run parameters" in missing.output
    done = chasm_study("run", "parameters", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "9 done" in done.output
    again = chasm_study("run", "parameters", "--out", tmp_path)
    assert "nothing to do" in again.output
    status = chasm_study("status", "parameters", "--out", tmp_path)
    assert "9 runs: 9 done" in status.output


def test_a_failed_run_gives_exit_code_3(chasm_study, tmp_path):
    found = chasm_study("run", "seeds-basis", "--seeds", 1, "--out", tmp_path, "--set", "data.options.content=brian")
    assert found.exit_code == 3
    assert "2 failed" in found.output
    assert "did you mean 'brain'" in found.output
    status = chasm_study("status", "seeds-basis", "--out", tmp_path)
    assert "traceback.txt" in status.output
    assert "2 runs: 2 failed" in status.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "bassis"), "did you mean 'basis'"),
        (("run", "basis", "--scale", "full"), "--path cc359=FOLDER"),
        (("show", "basis", "--set", "mixer.name=ffc"), "differ in"),
        (("show", "basis", "--set", "train.stepz=3"), "did you mean 'steps'"),
        (("show", "basis", "--path", "here"), "name=folder"),
        (("show", "basis", "--arm", "gfnett"), "did you mean 'gfnet'"),
    ],
)
def test_errors_are_one_line(chasm_study, words, message, tmp_path):
    found = chasm_study(*words, *(("--out", tmp_path) if words[0] == "run" else ()))
    assert found.exit_code == 3
    assert message in found.stderr
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1


def test_an_interrupted_run_is_no_success(chasm_study, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "local", lambda jobs, at_once: ((j["key"], "interrupted") for j in jobs))
    found = chasm_study("run", "parameters", "--out", tmp_path)
    assert found.exit_code == 130
    assert found.stderr == "interrupted: run the same command again to go on\n"


def test_sizes_scores_finished_runs_at_other_resolutions(chasm_study, tmp_path):
    where = ("--only", "host=unet,arm=chasm", "--out", tmp_path)
    shorter = ("--set", "train.steps=1", "--set", "train.val_every=1", "--set", "data.options.cases=10")
    assert chasm_study("run", "wrapper", *where, *shorter).exit_code == 0
    found = chasm_study("sizes", "wrapper", "--size", 48, "--size", 40, *where)
    assert found.exit_code == 0, found.output
    assert "cc359-x8.unet.chasm.m30.s0 at 48 x 48: psnr" in found.output
    scores = json.loads((tmp_path / "tiny/cc359-x8.unet.chasm.m30.s0/sizes/48.json").read_text())
    report = CliRunner().invoke(app, ["report", "wrapper", *map(str, where)])
    assert report.exit_code == 0, report.output
    text = (tmp_path / "tiny/reports/wrapper.default/report.md").read_text()
    assert "| Mixer | as trained | 40 x 40 | 48 x 48 |" in text
    assert f"| {scores['mean']['psnr']:.2f} |" in text.partition("Other resolutions")[2]


@pytest.mark.parametrize("seeds", [0, -1])
def test_no_seeds_are_not_taken_for_the_default(chasm_study, seeds):
    found = chasm_study("show", "basis", "--probe", 0, "--seeds", seeds)
    assert found.exit_code == 2
    assert "--seeds" in found.output
