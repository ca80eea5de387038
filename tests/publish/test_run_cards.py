"""`chasm train` writes the card of its run: for every task and kind of data, and over no file of the user."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from chasm.cli.app import app
from chasm.common.files import read_json, write_json
from chasm.publish import write_run_card
from chasm.tasks import TASKS, Reconstruction

RECIPE: dict[str, Any] = {
    "name": "small",
    "data": {"name": "embedded", "options": {"size": 16, "cases": 10, "slices": 1}},
    "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
    "mixer": {"name": "chasm"},
    "train": {"steps": 2, "batch": 2},
}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call `chasm` in an empty folder with a small recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    Path("small.yaml").write_text(yaml.safe_dump(RECIPE))

    def run(*words: str) -> str:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return run


def test_a_run_has_the_card_that_the_models_command_shows(call: Any) -> None:
    call("train", "small.yaml", "--set", "train.flips=true")
    call("train", "small.yaml", "-o", "more", "--set", "train.start=runs/small")
    card, metrics = Path("more/README.md").read_text(), read_json(Path("more/metrics.json"))
    assert f"| {metrics['mean']['psnr']:.4g} [" in card
    assert f"| {metrics['reference']['mean']['psnr']:.4g} |" in card
    assert "| drawn by chasm | MIT | training and scores |" in card
    assert "Not for diagnosis" in card
    assert "Mask: equispaced, 4 of 16 columns (x4), 1 in the centre, the first at column 0." in card
    assert "All training slices had these lines. Expect less of scans with other lines." in card
    start = read_json(Path("more/environment.json"))["start"]
    assert f"Began with the weights of `small` (SHA-256 {start['sha256'][:12]}, trained for 2 steps)." in card
    assert "`metrics.json` has these numbers" in card
    assert "chasm reconstruct scan.h5 --run more" in card
    assert card.split("\n---\n\n")[1].strip() in call("models", "show", "more")
    assert "mirrored" in Path("runs/small/README.md").read_text()


def test_a_readme_of_the_user_stays_and_an_older_card_is_renewed(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("runs/small")
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("# mine\n")
    assert "runs/small/README.md: not a card of chasm, and left as it is" in call("train", "small.yaml")
    assert (folder / "README.md").read_text() == "# mine\n"

    (folder / "README.md").unlink()  # as after a run that was killed before its last file
    call("train", "small.yaml")
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(f"{card}a note\n")
    assert "not a card" not in call("train", "small.yaml")  # it is finished, and nothing in it changes
    assert (folder / "README.md").read_text() == f"{card}a note\n"
    (folder / "README.md").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert "already done" in call("train", "small.yaml")  # where nothing can be written
    assert not (folder / "README.md").exists()
    (folder / "README.md").write_text(f"{card}a note\n")
    (folder / "metrics.json").unlink()
    call("train", "small.yaml")  # the last checkpoint has all steps
    assert (folder / "README.md").read_text() == card


POISSON = "{kind: poisson-2d, acceleration: 2}"
CARDS = {
    "segmentation": (
        ["data.options.content=tumour", "task.name=segmentation"],
        ["segments tumours", "pipeline_tag: image-segmentation", "| Dice |", "chasm eval"],
    ),
    "super-resolution": (
        ["data.options.content=photos", "task.name=superres", "task.options={factor: 2}"],
        ["enlarges photographs", "bicubic", "none stated for the motorcycle", "chasm knows of no terms that allow"],
    ),
    "volume": (
        ["data.options.slices=4", "data.depth=4", "task.name=volume", "backbone.name=unet-3d", "train.batch=1"],
        ["reconstructs volumes", "Mask: poisson-2d, ", " of 4 x 16 points (x"],
    ),
    "self-supervised": (
        ["task.options={complex: true, self_supervised: 0.4, snr_db: 20, masks: slice}"],
        ["it held out 0.4 of the lines", "complex images, and has noise of 20 dB added", "each has its own"],
    ),
    "drawn masks": (
        [f"task.options.sampling={POISSON}", "task.options.masks=epoch", "train.vary=true"],
        [" of 16 x 16 points (x", "Training drew other lines", "turned, zoomed"],
    ),
}


@pytest.mark.parametrize("kind", CARDS)
def test_every_kind_of_run_has_a_card(kind: str, call: Any) -> None:
    changes, expected = CARDS[kind]
    call("train", "small.yaml", "-o", "run", *(word for change in changes for word in ("--set", change)))
    card = Path("run/README.md").read_text()
    missing = [text for text in expected if text not in card]
    assert not missing, card
    assert "nan" not in card


def test_the_terms_of_files_of_the_user_are_the_users_to_state(call: Any, tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    for i in range(10):
        np.save(tmp_path / "scans" / f"patient{i}.npy", np.random.default_rng(i).random((1, 16, 16)))
    call("train", "small.yaml", "--set", "data.name=folder", "--set", f"data.path={tmp_path / 'scans'}")
    card = Path("runs/small/README.md").read_text()
    assert "| dataset `folder` | not stated: only the owner of the data knows them | training and scores |" in card
    assert "chasm knows of no terms that allow these weights to be given away." in card
    assert str(tmp_path) not in card


def test_data_that_only_trains_is_told_from_data_that_scores(call: Any) -> None:
    call("train", "small.yaml")
    other = Path(shutil.copytree("runs/small", "other"))
    config = (other / "config.yaml").read_text().replace("name: embedded", "name: proxy")
    options = "options:\n    part: brain_ixi_pd\n    also: [natural_imagenet]\n"
    (other / "config.yaml").write_text(config.replace("options:\n", options, 1))
    metrics = (other / "metrics.json").read_text().replace('"proxy": false', '"proxy": true')
    (other / "metrics.json").write_text(metrics.replace('"brain0', '"brain_ixi_pd/brain0'))
    assert write_run_card(other, replace=True)
    card = (other / "README.md").read_text()
    assert "RefineGAN: for research only | training and scores |" in card
    assert "| 280 photographs of ImageNet | research and education, without commerce | training |" in card


def test_a_score_that_is_not_finite_leaves_the_run_its_card(call: Any) -> None:
    """A flat picture, enlarged, may be exact: its PSNR is infinite, which is null in JSON."""
    call("train", "small.yaml")
    metrics = read_json(Path("runs/small/metrics.json"))
    next(iter(metrics["reference"]["cases"].values()))["psnr"] = None
    write_json(Path("runs/small/metrics.json"), metrics)
    assert write_run_card("runs/small", replace=True)
    assert "| zero-filled | not finite | 0." in Path("runs/small/README.md").read_text()


def test_a_finished_run_without_its_environment_is_left_alone(call: Any) -> None:
    call("train", "small.yaml")
    card = Path("runs/small/README.md").read_text()
    for name in ("README.md", "environment.json"):
        (Path("runs/small") / name).unlink()
    assert "already done" in call("train", "small.yaml")
    assert Path("runs/small/README.md").read_text().split("Seed")[0] == card.split("Seed")[0]


def test_a_task_of_ones_own_has_a_card(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS._classes, "mine", type("Mine", (Reconstruction,), {}))
    assert "\nreference: psnr " in call("train", "small.yaml", "--set", "task.name=mine")
    metrics = read_json(Path("runs/small/metrics.json"))
    metrics["reference"]["name"] = None  # as before it had a name
    write_json(Path("runs/small/metrics.json"), metrics)
    assert write_run_card("runs/small", replace=True)
    card = Path("runs/small/README.md").read_text()
    assert "This network was trained for the task mine." in card
    assert "|  |  | reference | " in card


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("environment.json", "start", {"name": "small"}),
        ("environment.json", "commit", 3),
        ("metrics.json", "reference", {"name": "zero-filled", "mean": {}, "std": {}}),
        ("metrics.json", "cases", {"a": 1}),
        ("metrics.json", "mean", 3),
        ("metrics.json", "best_step", None),
    ],
)
def test_a_value_of_another_shape_is_one_line_that_names_the_file(
    call: Any, file: str, key: str, value: Any, tmp_path: Path
) -> None:
    call("train", "small.yaml")
    changed = tmp_path / "runs" / "small" / file
    content = {**read_json(changed), key: value}
    write_json(changed, {name: value for name, value in content.items() if value is not None})
    with pytest.raises(ValueError, match=rf"{file}: .*{key}|{file}: not what a finished run writes") as e:
        write_run_card("runs/small", replace=True)
    assert "\n" not in str(e.value)
