"""The command: what it says, and errors in one line."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import call, make_run

from chasm.data.folder import Folder
from chasm.reconstruct import reconstruct
from chasm.reconstruct.slices import Reconstructor
from chasm.train import train
from chasm.train.config import dump, load_recipe
from chasm.train.run import build_model
from chasm.train.weights import TrainingImages, save_weights


@pytest.mark.usefixtures("no_picture")
def test_a_default_name_keeps_its_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    for name in ("scan.001.npy", "scan.002.npy"):
        np.save(name, writers.blob(np.random.default_rng(0), 1, 16, 16))
        reconstruct(name, run)
    assert sorted(p.name for p in tmp_path.glob("*.h5")) == ["scan.001-reconstructed.h5", "scan.002-reconstructed.h5"]


def test_command(tmp_path: Path) -> None:
    file, run = tmp_path / "file1.h5", make_run(tmp_path / "run")
    writers.write_fastmri(file, slices=3, size=(24, 20), recon=16)
    found = call(file, "--run", run, "-o", tmp_path / "out.h5", "--device", "cpu")
    assert found.exit_code == 0, found.output
    assert "psnr" in found.output
    assert "read as: fastMRI single-coil reconstruction_rss, fully sampled (3 slices, 16 x 16)" in found.output
    assert "(hifi)" in found.output
    file = file.rename(tmp_path / "FILE1.H5")
    found = call(file, "--run", run, "-o", tmp_path / "out.h5", "--device", "cpu", "--json")
    assert json.loads(found.output)["volumes"][0]["slices"] == 3


def test_errors_are_one_line(tmp_path: Path) -> None:
    file, run = tmp_path / "file1.h5", make_run(tmp_path / "run")
    writers.write_fastmri(file, slices=2, size=(24, 20), recon=16, test=True)
    np.savetxt(tmp_path / "mask.txt", np.ones(20))
    np.savetxt(tmp_path / "short.txt", np.ones(7))
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    (tmp_path / "broken.h5").write_bytes(b"no HDF5")
    with h5py.File(tmp_path / "other.h5", "w") as f:
        f["data"] = 1
    np.savetxt(tmp_path / "grey.txt", np.full(16, 0.5))
    np.save(tmp_path / "none.npy", np.zeros((0, 16, 16)))
    np.save(tmp_path / "pairs.npy", np.zeros((2, 16, 16, 2)))
    np.savez(tmp_path / "lines.npz", kspace=np.ones((2, 16, 16), np.complex64))
    np.savez(tmp_path / "echo.npz", echo=np.ones((2, 16, 16), np.complex64), time=np.ones(2))
    np.save(tmp_path / "small.npy", np.random.default_rng(0).random((2, 6, 16)))
    (tmp_path / "photo.jpg").write_bytes(b"JFIF")
    (tmp_path / "empty").mkdir()
    for name in ("volumes/a.h5", "volumes/b.h5", "fewer.h5"):
        writers.write_fastmri(tmp_path / name, slices=2, size=(24, 20), recon=16, test=name == "fewer.h5")
    with h5py.File(tmp_path / "fewer.h5", "a") as f:
        f["reconstruction_rss"] = np.ones((1, 16, 16), np.float32)
    phase = make_run(tmp_path / "phase", complex=True)
    other = make_run(tmp_path / "other")
    recipe = load_recipe({"task": {"name": "superres"}, "train": {"steps": 1}})
    (other / "config.yaml").write_text(dump(recipe))
    state = build_model(recipe, recipe.task.create(), (1, 16, 16)).state_dict()
    save_weights(other / "weights.safetensors", state, TrainingImages((1, 16, 16)))
    np.save(tmp_path / "scalar.npy", np.float32(1))
    writers.write_fastmri(tmp_path / "number.h5", slices=2)
    with h5py.File(tmp_path / "number.h5", "a") as f:
        del f["reconstruction_rss"]
        f["reconstruction_rss"] = 1.0
    for words, expected in (
        ((tmp_path / "none.h5", "--run", run), "none.h5: no such file or folder"),
        ((file, "--run", tmp_path / "norun"), "norun: no such run folder or model"),
        ((file, "--run", tmp_path), "config.yaml: not there"),
        ((file, "--run", run, "-o", tmp_path / "out.jpg"), "the suffix says the format"),
        ((file, "--run", run, "-o", tmp_path / "o.h5", "--mask", tmp_path / "mask.txt"), "leave out --mask"),
        ((tmp_path / "scan.npy", "--run", run, "--mask", tmp_path / "short.txt"), "7 columns"),
        ((tmp_path / "broken.h5", "--run", run), "broken.h5"),
        ((tmp_path / "scan.npy", "--run", other), "trained for superres"),
        ((tmp_path / "other.h5", "--run", run), "kspace: missing"),
        ((tmp_path / "scan.npy", "--run", run, "--mask", tmp_path / "grey.txt"), "other values too: 0.5"),
        ((tmp_path / "none.npy", "--run", run), "none.npy: slices: there is none"),
        ((tmp_path / "none.npy", "--run", run, "--as", "kspace", "-O", "axes=SHW"), "none.npy: slices: there is none"),
        ((tmp_path / "scan.npy", "--run", run, "--as", "kspac"), "did you mean 'kspace'"),
        (
            (tmp_path / "scan.npy", "--run", run, "--as", "kspace", "-O", "axes=SHW"),
            "scan.npy: dtype: k-space is complex",
        ),
        ((tmp_path / "pairs.npy", "--run", run, "--as", "image"), "pairs.npy: holds k-space"),
        ((tmp_path / "lines.npz", "--run", run, "--as", "image"), "lines.npz: image: missing; the file has kspace"),
        ((tmp_path / "echo.npz", "--run", run, "--as", "kspace"), "echo.npz: kspace: missing; the file has echo, time"),
        (
            (tmp_path / "photo.jpg", "--run", run),
            "photo.jpg: format: expected k-space (ISMRMRD, fastMRI, CC359, BART, Siemens twix) or .npy",
        ),
        ((tmp_path / "empty", "--run", run), "empty: folder: no file that is read (.npy .npz"),
        ((tmp_path / "volumes", "--run", run), "volumes: folder: 2 .h5 files: give the files,"),
        ((tmp_path / "fewer.h5", "--run", run), "fewer.h5: reconstruction_rss: 1 slice, but kspace has 2"),
        ((tmp_path / "scalar.npy", "--run", run), "scalar.npy: array: expected (H,W) or (slices,H,W), got shape ()"),
        ((tmp_path / "number.h5", "--run", run), "number.h5: reconstruction_rss: expected 3 dimensions, got shape ()"),
        ((tmp_path / "small.npy", "--run", run), "small.npy: image: slices of 6 x 16 cannot be scored"),
        ((tmp_path / "scan.npy", "--run", phase), "scan.npy: magnitudes, and the run was trained on complex images"),
        ((tmp_path / "scan.npy", "--run", run, "--device", "tpu9"), "device 'tpu9' cannot be used here"),
        ((tmp_path / "scan.npy", "--run", run, "--device", "cuda:99"), "device 'cuda:99' cannot be used here"),
    ):
        found = call(*words)
        assert found.exit_code == 3, found.output
        assert expected in found.output
        assert len(found.output.strip().splitlines()) == 1


@pytest.mark.usefixtures("no_picture")
def test_two_files_of_a_run_are_enough(tmp_path: Path) -> None:
    """docs/reconstruct.md promises that; without one of them, the line names it."""
    recipe = {
        "data": {"name": "embedded", "options": {"size": 16, "cases": 10, "slices": 2}},
        "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
        "train": {"steps": 1, "batch": 2},
    }
    train(load_recipe(recipe), tmp_path / "run", quiet=True)
    needed = ["config.yaml", "weights.safetensors"]
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in needed:
        shutil.copy(tmp_path / "run" / name, moved)
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 1, 24, 24))
    outputs = []
    for run in (tmp_path / "run", moved):
        found = call(tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.npy")
        assert "unlike the training data, so expect a worse result: 24 x 24 pixels (trained on 16 x 16)" in found.output
        outputs.append(np.load(tmp_path / "out.npy"))
    np.testing.assert_array_equal(*outputs)
    for name in needed:
        kept = (moved / name).rename(tmp_path / name)
        found = call(tmp_path / "scan.npy", "--run", moved, "-o", tmp_path / "out.h5")
        assert found.exit_code == 3
        assert name in found.output
        kept.rename(moved / name)


@pytest.mark.usefixtures("no_picture")
def test_weights_that_do_not_say_their_image_size_need_the_environment(tmp_path: Path) -> None:
    """Runs of earlier versions have it there."""
    run = make_run(tmp_path / "run")
    save_file(load_file(run / "weights.safetensors"), run / "weights.safetensors")
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 1, 16, 16))
    found = call(tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.h5")
    assert "does not say its image size: copy environment.json of the run, too" in found.output
    (run / "environment.json").write_text('{"image_shape": [1, 16, 16]}')
    assert call(tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.h5").exit_code == 0


@pytest.mark.usefixtures("no_picture")
def test_a_failure_says_what_was_written_before_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abc":
        np.save(tmp_path / "in" / f"{name}.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    first, second, spoilt = Folder(tmp_path / "in", "all").cases
    np.save(tmp_path / "in" / spoilt, np.full((2, 16, 16), np.nan))
    with pytest.raises(ValueError, match=rf"{spoilt}: image 0: 256 .*\(2 volumes of 3 written before\)$"):
        reconstruct(tmp_path / "in", make_run(tmp_path / "run"), tmp_path / "out" / "x.h5")
    assert sorted(f.name for f in (tmp_path / "out").glob("*.h5")) == [f"x-{first[0]}.h5", f"x-{second[0]}.h5"]


def test_ctrl_c_says_so_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, made = Reconstructor.result, list[int]()

    def interrupted(self: Reconstructor, row: int, meters: Any) -> Any:
        made.append(row)
        if len(made) == 3:
            raise KeyboardInterrupt
        return original(self, row, meters)

    monkeypatch.setattr(Reconstructor, "result", interrupted)
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 4, 16, 16))
    found = call(tmp_path / "scan.npy", "--run", make_run(tmp_path / "run"), "-o", tmp_path / "out" / "x.h5")
    assert found.exit_code == 130
    assert "interrupted: " in found.output
    assert list((tmp_path / "out").iterdir()) == []
