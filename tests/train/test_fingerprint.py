"""A run that goes on compares config, data and code with what it was begun with, and says in one line what differs."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import UNET, _one_thread, at_step, checkpoint, recipe  # noqa: F401

from chasm.train import RunConfig, load_recipe, train
from chasm.train.checkpoints import sha256_of
from chasm.train.classical import evaluate_classical


def stop_after(step: int, config: RunConfig, folder: Path) -> None:
    with pytest.raises(SystemExit), at_step(step - 1, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        train(config, folder, quiet=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for i in range(12):
        np.save(folder / f"case{i}.npy", np.random.default_rng(i).random((16, 16), dtype=np.float32))
    return folder


def of_files(folder: Path) -> RunConfig:
    content = recipe(save_every=3).model_dump(mode="json")
    return load_recipe({**content, "data": {"name": "folder", "path": str(folder)}})


@pytest.fixture(scope="module")
def stopped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on files that was stopped at its second step."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    stop_after(2, of_files(data), folder)
    return folder


def error_of(config: RunConfig, folder: Path) -> str:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="folder") as e:
        train(config, folder, quiet=True)
    assert "\n" not in str(e.value)
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}, "nothing was written"
    return str(e.value)


@pytest.mark.parametrize("left", ["missing", "of another run"])
def test_another_config_is_refused_even_where_config_yaml_does_not_tell(
    left: str, stopped: Path, data: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    (folder / "config.yaml").unlink()
    content = of_files(data).model_dump(mode="json")
    other = load_recipe(content, ["seed=5"])
    if left == "of another run":
        (folder / "config.yaml").write_text(json.dumps(other.model_dump(mode="json")))
    assert "another config: seed (is 0, not 5)" in error_of(other, folder)


def test_scores_without_a_config_are_not_taken_for_those_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    assert "config.yaml: not there" in error_of(recipe(), tmp_path)


def test_data_that_are_gone_or_changed_are_noticed(stopped: Path, data: Path, tmp_path: Path) -> None:
    """Under one path, as a run names its data by the path."""
    folder = shutil.copytree(stopped, tmp_path / "run")
    original = data / "case0.npy"
    content = original.read_bytes()
    try:
        original.unlink()
        said = error_of(of_files(data), folder)
        assert "not those that the run began with" in said
        assert "cases (is " in said
        np.save(original, np.zeros((16, 16), np.float64))
        assert ".files (is " in error_of(of_files(data), folder)
    finally:
        original.write_bytes(content)
    train(of_files(data), folder, quiet=True)


def test_files_that_were_written_again_and_other_threads_are_said(
    stopped: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    os.utime(data / "case1.npy")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # two at work would wait for each other on a busy machine
    train(of_files(data), folder, quiet=True)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(said) == 2
    assert "another date" in said[0]
    assert "1 thread', not" in said[1]
    assert "2 threads'" in said[1]


def test_the_same_conditions_are_not_worth_a_word(
    stopped: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    stop_after(4, of_files(data), folder)
    capsys.readouterr()
    train(of_files(data), folder, quiet=True)
    assert capsys.readouterr().err == f"resuming {folder} at step 4 of 6\n"


def test_a_folder_that_was_renamed_and_used_again_keeps_its_one_writer(tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    other = recipe(UNET, lr=0.5)

    def replace() -> None:
        folder.rename(moved)
        folder.mkdir()
        (folder / "training.lock").touch()
        (folder / "config.yaml").write_text(json.dumps(other.model_dump(mode="json")))

    with pytest.raises(OSError, match="run: the folder was renamed or replaced") as e, at_step(4, replace):
        train(recipe(), folder, quiet=True)
    assert "\n" not in str(e.value)
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "training.lock"]
    assert checkpoint(moved)[1]["step"] == 4
    train(recipe(), moved, quiet=True)


def test_a_folder_that_was_renamed_is_left_alone(tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    renamed = pytest.raises(OSError, match="run: the folder was renamed or replaced")
    with renamed, at_step(4, lambda: folder.rename(moved)):
        train(recipe(), folder, quiet=True)
    assert not folder.exists()
    assert train(recipe(), moved, quiet=True)["steps"] == 6


def test_a_folder_that_was_removed_is_made_and_locked_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def look() -> None:
        assert (folder / "training.lock").exists()

    removed = at_step(2, lambda: shutil.rmtree(folder))
    with removed, at_step(4, look), pytest.raises(FileNotFoundError, match=r"config\.yaml: not there"):
        train(recipe(), folder, quiet=True)
    assert train(recipe(), folder, quiet=True)["steps"] == 6  # from the checkpoints since


def test_classical_scores_are_of_the_config_that_asks_for_them(tmp_path: Path) -> None:
    first = evaluate_classical(recipe(data={"cases": 1}), tmp_path)
    assert evaluate_classical(recipe(data={"cases": 1}), tmp_path) == first
    with pytest.raises(ValueError, match=r"another config: data\.options\.cases \(is 1, not 2\)"):
        evaluate_classical(recipe(data={"cases": 2}), tmp_path)


def test_a_checkpoint_carries_what_it_was_made_with(stopped: Path) -> None:
    found: dict[str, Any] = checkpoint(stopped)[1]["fingerprint"]
    assert found["config"]["train"]["steps"] == 6
    assert set(found["data"]) == {"train", "val", "test"}
    assert {"source", "python", "versions", "device", "processes"} <= set(found["code"])


def test_the_config_is_compared_before_the_tensors_which_may_not_fit(stopped: Path, data: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    (folder / "config.yaml").unlink()
    other = load_recipe(of_files(data).model_dump(mode="json"), ["backbone.options.width=8"])
    assert "another config: backbone.options.width (is 4, not 8)" in error_of(other, folder)


def test_a_run_goes_on_from_before_checkpoints_had_this(
    stopped: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    (path,) = folder.glob("checkpoints/*/record.json")
    content = json.loads(path.read_text())
    del content["record_sha256"], content["fingerprint"]
    path.write_text(json.dumps({**content, "record_sha256": sha256_of(content)}))
    train(of_files(data), folder, quiet=True)
    assert f"resuming {folder} at step 2 of 6" in capsys.readouterr().err
