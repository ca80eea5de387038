"""From a run to a model that is found by name, shown, copied and used; damaged and forbidden ones are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import chasm
from chasm.app.model import graph_of
from chasm.cli.app import app
from chasm.common.files import read_json
from chasm.models import GRAPH, MODEL_FILES, folders
from chasm.mri import Sampling
from chasm.publish.card import write_card
from chasm.publish.record import with_other_lines
from chasm.tasks import create_task
from chasm.train import Run, evaluate, load_recipe, load_run, train

RECIPE: dict[str, Any] = {
    "name": "small",
    "data": {"name": "embedded", "options": {"size": 16, "cases": 20, "slices": 1}},
    "task": {"name": "reconstruction", "options": {"sampling": {"kind": "equispaced", "acceleration": 4}}},
    "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
    "mixer": {"name": "chasm"},
    "train": {"steps": 2, "batch": 2, "ema": 0.9},
}
OTHER = "data.options.size=20 split=val"


def call(*words: object, code: int = 0) -> Result:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        train(load_recipe(RECIPE), folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def packed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder of that run."""
    folder = tmp_path_factory.mktemp("models") / "tiny-x4"
    call("models", "pack", finished, "tiny-x4", "-o", folder, "--other", OTHER)
    return folder


@pytest.fixture
def shipped(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the model, where the package looks for its own."""
    monkeypatch.setattr(folders, "__file__", str(tmp_path / "package" / "folders.py"))
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(packed, tmp_path / "package" / "tiny-x4"))


def test_a_model_folder_has_its_files_and_no_path_of_the_machine(packed: Path, finished: Path) -> None:
    assert {p.name for p in packed.iterdir()} == set(MODEL_FILES) - {GRAPH}
    for file in packed.iterdir():
        if file.suffix != ".safetensors":
            assert str(finished.parent) not in file.read_text()
    assert (packed / "weights.safetensors").read_bytes() == (finished / "weights.safetensors").read_bytes()


def test_the_card_says_what_the_run_recorded(packed: Path, finished: Path) -> None:
    card = (packed / "README.md").read_text()
    metrics = json.loads((finished / "metrics.json").read_text())
    assert f"{metrics['mean']['psnr']:.4g} [" in card
    assert card.count("embedded") >= 2
    assert "val split, not trained on" in card
    assert "Not for diagnosis" in card
    assert "4 of 16 columns (x4)" in card
    assert "All training slices had these lines. Expect less of scans with other lines." in card
    assert metrics["meaning"] in card
    record = json.loads((packed / "model.json").read_text())
    for scores in record["scores"]:
        for value in scores["values"].values():
            assert value["low"] <= value["mean"] <= value["high"]


def test_a_model_is_scored_with_other_lines_too(packed: Path, finished: Path, tmp_path: Path) -> None:
    moved = next(s for s in read_json(packed / "model.json")["scores"] if "lines" in s["split"])
    assert moved["split"] == "test split, lines moved by 2 columns"  # of five from one line to the next
    run = altered(finished, tmp_path / "moved", "config.yaml", "acceleration: 4", "acceleration: 4\n      offset: 2")
    want = evaluate(run)
    assert moved["values"]["psnr"]["mean"] == pytest.approx(want["mean"]["psnr"], abs=1e-9)
    assert moved["reference"]["psnr"] == pytest.approx(want["reference"]["mean"]["psnr"], abs=1e-9)
    assert moved["values"]["psnr"]["mean"] != read_json(packed / "model.json")["scores"][0]["values"]["psnr"]["mean"]
    as_other = tmp_path / "as-other"
    call("models", "pack", finished, "x", "-o", as_other, "--other", "task.options.sampling.offset=2")
    assert read_json(as_other / "model.json")["scores"][-1]["values"] == moved["values"]


OTHER_LINES: list[tuple[dict[str, Any], str | None]] = [
    ({"sampling": Sampling("random", seed=3), "masks": "epoch"}, "other lines drawn"),
    ({"sampling": Sampling("gaussian", seed=(3, 4))}, "other lines drawn"),
    ({"sampling": Sampling("poisson-2d")}, "other lines drawn"),
    ({"sampling": Sampling("equispaced-plain", 2, offset=1)}, "lines moved by 1 column"),
    ({"sampling": Sampling("equispaced", 2.5, 0, offset=1)}, "lines moved by 1 column"),  # distances of 2 and 3
    ({"sampling": Sampling("equispaced", 2, 0.49)}, None),
    ({"sampling": Sampling("equispaced", 64)}, None),
    ({"sampling": Sampling("equispaced", 64, offset=40)}, None),
    ({"masks": "slice"}, None),
]


@pytest.mark.parametrize(("options", "words"), OTHER_LINES, ids=str)
def test_other_lines_are_as_many_by_the_same_rule(options: dict[str, Any], words: str | None) -> None:
    task, shape = create_task("reconstruction", **options), (1, 64, 64)
    found = with_other_lines(task, shape)
    assert (found and found[1]) == words
    if found:
        old, new = (t.sampling.on(64, 64) for t in (task, found[0]))
        assert not torch.equal(old.tensor(), new.tensor())
        assert old.kind == new.kind
        assert old.acceleration == pytest.approx(new.acceleration, rel=0.1)


def test_the_card_says_what_was_changed_begun_with_and_not_scored(packed: Path) -> None:
    record, environment = (json.loads((packed / name).read_text()) for name in ("model.json", "environment.json"))
    config = load_recipe(RECIPE, ["train.flips=true", "train.vary=true"])
    record["scores"] = record["scores"][:1]
    record["task"]["masks"] = "epoch"
    environment["start"] = {"name": "older", "sha256": "0123456789abcdef", "steps": 7}
    card = write_card(record, config, environment)
    assert "slices were mirrored and turned, zoomed" in card
    assert "Began with the weights of `older` (SHA-256 0123456789ab, trained for 7 steps)" in card
    assert "No data of another source was at hand" in card
    assert "Training drew other lines by the same rule for every slice in every epoch" in card
    plain = (packed / "README.md").read_text()
    assert not any(word in plain for word in ("at random", "Began with", "No data of another source"))


def test_a_shipped_model_is_listed_shown_and_loaded_by_name(shipped: Path, finished: Path) -> None:
    assert chasm.list_models() == ["tiny-x4"]
    assert chasm.list_models("brain*") == []
    assert "reconstruction x4" in call("models", "list").output
    assert "# tiny-x4" in call("models", "show", "tiny-x4").output
    got, want = chasm.load_model("tiny-x4").state_dict(), load_run(finished).model.state_dict()
    assert all(torch.equal(got[k], v) for k, v in want.items())


def test_reconstruct_and_eval_take_the_name(shipped: Path, finished: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "scan.npy", rng.random((2, 16, 16), dtype=np.float32))
    for run, out in (("tiny-x4", "a.h5"), (finished, "b.h5")):
        call("reconstruct", tmp_path / "scan.npy", "--run", run, "-o", tmp_path / out)
    import h5py

    a, b = (h5py.File(tmp_path / name)["reconstruction"][()] for name in ("a.h5", "b.h5"))
    np.testing.assert_array_equal(a, b)
    assert "model: psnr" in call("eval", "tiny-x4").output


def test_get_copies_it(shipped: Path, tmp_path: Path) -> None:
    call("models", "get", "tiny-x4", "-o", tmp_path / "mine")
    assert load_run(tmp_path / "mine").config.name == "tiny-x4"
    assert "already there" in call("models", "get", "tiny-x4", "-o", tmp_path / "mine", code=3).output


def test_an_unknown_name_suggests_the_near_one(shipped: Path) -> None:
    assert "did you mean 'tiny-x4'?" in call("models", "show", "tiny-x5", code=3).output
    assert "did you mean 'tiny-x4'?" in call("reconstruct", shipped, "--run", "tinyx4", code=3).output


@pytest.mark.parametrize("file", ["weights.safetensors", "config.yaml"])
def test_a_changed_file_is_refused(shipped: Path, file: str) -> None:
    content = bytearray((shipped / file).read_bytes())
    content[-2] ^= 1
    (shipped / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file}: changed, by its SHA-256"):
        chasm.load_model("tiny-x4")
    (shipped / file).unlink()
    with pytest.raises(ValueError, match="missing"):
        chasm.load_model("tiny-x4")


def test_a_record_without_checksums_is_refused(shipped: Path) -> None:
    (shipped / "model.json").write_text('{"sha256": {"config.yaml": ""}}')
    with pytest.raises(ValueError, match="sha256: expected one for"):
        chasm.load_model("tiny-x4")


def altered(finished: Path, target: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(finished, target)
    text = (target / file).read_text()
    assert old in text
    (target / file).write_text(text.replace(old, new, 1))
    return target


def test_runs_that_cannot_be_given_away_are_refused(finished: Path, tmp_path: Path) -> None:
    siat = altered(finished, tmp_path / "siat", "config.yaml", "name: embedded", "name: proxy")
    assert "cannot be given away" in call("models", "pack", siat, "x", "-o", tmp_path / "x", code=3).output
    scans = altered(finished, tmp_path / "scans", "config.yaml", "name: embedded", "name: fastmri")
    assert "--licence" in call("models", "pack", scans, "x", "-o", tmp_path / "x", code=3).output
    call("models", "pack", scans, "x", "-o", tmp_path / "x", "--licence", "by agreement")
    own = altered(finished, tmp_path / "own", "environment.json", "{", '{"with": {"mine.py": "a checksum"},')
    assert "code beside chasm's" in call("models", "pack", own, "y", "-o", tmp_path / "y", code=3).output
    (own / "metrics.json").unlink()
    assert "not finished" in call("models", "pack", own, "y", "-o", tmp_path / "y", code=3).output
    assert not (tmp_path / "y").exists()


def test_pack_leaves_the_files_of_others_alone(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    assert "holds other files" in call("models", "pack", finished, "x", "-o", tmp_path, code=3).output


@pytest.mark.parametrize("name", ["../other", "a/b", "..", "a\x1bb"])
def test_a_name_that_no_folder_can_have_is_refused(finished: Path, tmp_path: Path, name: str) -> None:
    result = call("models", "pack", finished, name, "-o", tmp_path / "out", code=3)
    assert "expected a name that a folder can have" in result.output
    assert not (tmp_path / "out").exists()


def test_a_card_cannot_drive_the_terminal(shipped: Path) -> None:
    (shipped / "README.md").write_bytes(b"---\ntags: [a]\n---\nCard \x1b]0;title\x07 \xff end\n")
    shown = call("models", "show", "tiny-x4").output
    assert "Card" in shown
    assert "end" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_model_packed_again_keeps_its_weights_and_gets_new_scores(packed: Path, tmp_path: Path) -> None:
    again = Path(shutil.copytree(packed, tmp_path / "again"))
    call("models", "pack", again, "again", "-o", again, "--other", OTHER, "--other", "data.options.size=24 split=val")
    call("models", "pack", again, "again", "-o", again, "--other", OTHER)
    old, new = (json.loads((folder / "model.json").read_text()) for folder in (packed, again))
    assert (again / "weights.safetensors").read_bytes() == (packed / "weights.safetensors").read_bytes()
    assert {k: new[k] for k in ("parameters", "steps", "trained_on")} == {
        k: old[k] for k in ("parameters", "steps", "trained_on")
    }
    assert new["scores"] == old["scores"]  # those of size 24 had the same split and source, and are replaced
    assert (again / "README.md").read_text() == (packed / "README.md").read_text().replace("tiny-x4", "again")
    assert load_run(again).config.name == "again"


def test_get_leaves_nothing_behind_when_it_fails(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert "No space left" in call("models", "get", "tiny-x4", "-o", tmp_path / "copy", code=3).output
    assert not (tmp_path / "copy").exists()


def test_what_the_run_was_trained_on_stays_with_the_model(packed: Path, finished: Path) -> None:
    """`chasm reconstruct` says when a scan is unlike it."""
    assert load_run(packed).images == load_run(finished).images
    assert load_run(packed).images.description


def test_pack_writes_the_network_for_the_page(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("chasm.app.model._make_graph", lambda run: b"onnx")
    folder = tmp_path / "tiny-x4"
    call("models", "pack", finished, "tiny-x4", "-o", folder, "--page")
    assert {p.name for p in folder.iterdir()} == set(MODEL_FILES)

    def refuse(run: Run) -> bytes:
        raise AssertionError("made again")

    monkeypatch.setattr("chasm.app.model._make_graph", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert graph_of(load_run(folder)) == b"onnx"
    (folder / GRAPH).write_bytes(b"another")
    with pytest.raises(ValueError, match="changed, by its SHA-256"):
        load_run(folder)
    call("models", "pack", finished, "tiny-x4", "-o", folder)
    assert not (folder / GRAPH).exists()
