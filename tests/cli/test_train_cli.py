"""`chasm train` and `chasm eval`: what they print, what they leave, how they fail."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from chasm.cli.app import app
from chasm.train.config import load_recipe, shipped_recipes

RECIPE = """
name: small
data: {name: embedded, options: {size: 16, cases: 10, slices: 1}}
backbone: {name: unet, options: {width: 4, depth: 1, levels: [0]}}
mixer: {name: chasm}
train: {steps: 2, batch: 2}
"""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "small.yaml").write_text(RECIPE)

    def run(*words: str, code: int = 0) -> Result:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words, catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    return run


def test_train_then_eval(call, tmp_path):
    said = call(
        "train", "small.yaml", "--set", "train.lr=1e-3", "--set", "mixer.name=gfnet", "--track", "tensorboard"
    ).output
    folder = tmp_path / "runs" / "small-gfnet"  # another mixer than the recipe's
    metrics = json.loads((folder / "metrics.json").read_text())
    assert f"model: psnr {metrics['mean']['psnr']:.4g}" in said
    assert f"zero-filled: psnr {metrics['reference']['mean']['psnr']:.4g}" in said
    assert "test split, 2 cases, protocol hifi" in said
    assert "run folder: runs/small-gfnet\n" in said
    config = (folder / "config.yaml").read_text()
    assert "lr: 0.001" in config
    assert "name: gfnet" in config
    assert list((folder / "tensorboard").iterdir())

    again = json.loads(call("eval", "runs/small-gfnet", "--json").stdout)
    assert again == {k: metrics[k] for k in again}
    of_one = call("eval", "runs/small-gfnet", "--split", "val").output
    assert "val split, 1 case, protocol" in of_one
    assert "±" not in of_one

    # The same weights under conditions they were not trained for.
    noisy = json.loads(call("eval", "runs/small-gfnet", "--json", "--set", "task.options.snr_db=5").stdout)
    assert noisy["task"]["snr_db"] == 5
    assert noisy["mean"]["psnr"] < metrics["mean"]["psnr"]
    refused = call("eval", "runs/small-gfnet", "--set", "mixer.name=chasm", code=3).stderr
    assert "mixer.name=chasm: a trained run can be scored with other data.* and task.options.* only" in refused
    refused = call("eval", "runs/small-gfnet", "--set", "task.options.sampling.kind=spiral", code=3).stderr
    assert "'spiral'" in refused
    assert refused.count("\n") == 1

    # finished: skipped, and nothing is computed again
    before = (folder / "metrics.json").stat().st_mtime_ns
    again = call("train", "small.yaml", "--set", "train.lr=1e-3", "--set", "mixer.name=gfnet").output
    assert "run folder: runs/small-gfnet (already done" in again
    assert (folder / "metrics.json").stat().st_mtime_ns == before
    refused = call("train", "small.yaml", "-o", "runs/small-gfnet", code=3).stderr
    assert "holds a run with another config: mixer.name (is 'gfnet', not 'chasm'), train.lr" in refused


def test_blank_slices_are_said_and_not_scored(call, tmp_path):
    """One made every score infinite or undefined, and the choice of weights with them."""
    (tmp_path / "scans").mkdir()
    for i in range(10):
        scan = np.random.default_rng(i).random((3, 16, 16))
        scan[1] = 0
        np.save(tmp_path / "scans" / f"patient{i}.npy", scan)
    said = call("train", "small.yaml", "--set", "data.name=folder", "--set", "data.path=scans").output
    assert "not scored: 2 blank slices" in said
    metrics = json.loads((tmp_path / "runs" / "small" / "metrics.json").read_text())
    assert metrics["blank_slices"] == 2
    for row in (metrics, metrics["reference"]):
        assert all(np.isfinite(value) for scores in row["cases"].values() for value in scores.values())
    log = [json.loads(line) for line in (tmp_path / "runs" / "small" / "log.jsonl").read_text().splitlines()]
    validated = [row["val_psnr"] for row in log if "val_psnr" in row]
    assert validated
    assert None not in validated


def test_help_names_the_recipes_and_show_makes_a_copy_to_edit(call, tmp_path):
    told = call("train", "--help").output
    for name in shipped_recipes():
        assert f" {name}: " in told
    copy = tmp_path / "mine.yaml"
    copy.write_text(call("train", "demo", "--set", "train.lr=0.5", "--show").stdout)
    assert load_recipe(copy) == load_recipe("demo", ["train.lr=0.5"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "none.yaml"), "no such recipe"),
        (("train", "dmo"), "dmo: no such recipe: give a YAML file or the name of a recipe, did you mean 'demo'?"),
        (("train", "small.yaml", "--set", "train.stesp=1"), "unknown key 'train.stesp': did you mean 'steps'?"),
        (("train", "small.yaml", "--set", "mixer.options.bin=1"), "has no option 'bin': did you mean 'bins'"),
        (("train", "small.yaml", "--set", "data.name=cc359"), "give the folder it was downloaded to"),
        (("train", "small.yaml", "-o", "small.yaml/run"), "could not be written (Not a directory)"),
        (("train", "."), "a folder, no recipe"),
        (("train", "small.yaml", "--set", "backbone.options.width=abc"), "option 'width': expected int, got 'abc'"),
        (
            ("train", "small.yaml", "--set", "task.options.snr_db=[10,20]"),
            "option 'snr_db': expected float or None, got [10, 20]",
        ),
        (("train", "small.yaml", "--set", "task.options.snr_db=true"), "expected float or None, got True"),
        (("train", "small.yaml", "--set", "backbone.options.width=-4"), "backbone 'unet' with"),
        (("train", "small.yaml", "--set", "backbone.options.levels=3"), "levels=3: 'int' object is not iterable"),
        (("train", "small.yaml", "--set", "data.options.size=32.5"), "size 32.5: expected a number of pixels"),
        (("train", "small.yaml", "--set", "mixer.options.channels=5"), "mixer 'chasm' has no option 'channels'"),
        (("train", "small.yaml", "--set", "backbone.options.size=[9, 9]"), "backbone 'unet' has no option 'size'"),
        (
            ("train", "small.yaml", "--set", "task.options.sampling={kind: random, acceleration: abc}"),
            "task.options.sampling.acceleration: Input should be a valid number, unable to parse",
        ),
        (("eval", "."), "give the folder of a run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_3(call, words, expected):
    said = call(*words, code=3).stderr
    assert said.startswith("error: ")
    assert expected in said
    assert said.count("\n") == 1
