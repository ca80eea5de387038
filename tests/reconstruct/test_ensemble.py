"""Several runs: their mean, a map of their disagreement, and its calibration on trained networks."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from runs import brains, call, make_run

from chasm.data import open_dataset
from chasm.reconstruct import reconstruct
from chasm.train import load_recipe, train
from chasm.train.config import dump

pytestmark = pytest.mark.usefixtures("no_picture")


def stored(file: Path) -> np.ndarray:
    with h5py.File(file) as f:
        return f["reconstruction"][:]


def test_the_volume_is_the_mean_and_the_map_the_spread(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", brains(2))
    runs = [make_run(tmp_path / f"run{i}", weights="random", seed=i, complex=True) for i in range(3)]
    single = []
    for run in runs:
        reconstruct(tmp_path / "scan.npy", run, tmp_path / "one.h5", complex=True)
        single.append(stored(tmp_path / "one.h5"))
    words = [word for run in runs for word in ("--run", run)]
    words += ["-o", tmp_path / "out.h5", "--complex", "--report", tmp_path / "see.html"]
    found = call(tmp_path / "scan.npy", *words)
    assert found.exit_code == 0, found.output
    assert "(3 runs, calibrated by " in found.output
    volume = stored(tmp_path / "out.h5")
    np.testing.assert_allclose(volume, np.mean(single, axis=0), rtol=1e-4, atol=1e-5)
    spread = np.sqrt(np.square(np.abs(single) - np.abs(volume)).sum(0) / 2)
    ratio = stored(tmp_path / "out.uncertainty.h5") / spread
    for i in range(2):  # every slice has a factor of its own
        np.testing.assert_allclose(ratio[i], ratio[i].mean(), rtol=1e-2)
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["run"] == "run0 + run1 + run2"
    assert record["uncertainty"]["made_of"] == "3 runs"
    assert "3 runs" in (tmp_path / "see.html").read_text()


def test_runs_that_do_not_go_together_are_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", brains(1))
    a, b = (make_run(tmp_path / name, weights="random", seed=i, complex=True) for i, name in enumerate("ab"))
    other = make_run(tmp_path / "c", complex=True, sampling={"kind": "random", "acceleration": 4})
    magnitudes = make_run(tmp_path / "d")
    cut = make_run(tmp_path / "e", complex=True)
    recipe = yaml.safe_load((cut / "config.yaml").read_text())
    config = load_recipe(recipe, ["data.name=folder", "data.options.plane=sagittal", "data.path=x"])
    (cut / "config.yaml").write_text(dump(config))
    for words, expected in (
        ((a, a), "has the same weights as"),
        ((b, shutil.copytree(b, tmp_path / "copy")), "has the same weights as"),
        ((a, "tv"), "an ensemble needs networks, and tv needs no training"),
        ((a, other), f"trained with another sampling than {a}"),
        ((a, magnitudes), f"trained with another complex than {a}"),
        ((a, cut), f"trained with another data.options.plane than {a}"),
    ):
        found = call(tmp_path / "scan.npy", "--run", words[0], "--run", words[1], "-o", tmp_path / "out.h5")
        assert found.exit_code == 3
        assert expected in found.output
        assert found.output.count("\n") == 1
    found = call(tmp_path / "scan.npy", "--run", a, "--run", b, "--uncertainty", 4, "-o", tmp_path / "out.h5")
    assert "several runs always make an uncertainty map: leave out --uncertainty" in found.output
    with pytest.raises(ValueError, match="no run: give a run folder"):
        reconstruct(tmp_path / "scan.npy", [], tmp_path / "out.h5")
    np.savetxt(tmp_path / "mask.txt", np.arange(40) % 2)  # they share the mask that is asked for
    found = reconstruct(tmp_path / "scan.npy", [a, other], tmp_path / "out.h5", mask=tmp_path / "mask.txt")
    assert found.volumes[0].uncertainty


def wide(images: np.ndarray) -> np.ndarray:
    """Return the heads with empty margins, into which undersampling folds them: a network can learn that."""
    return np.pad(images, ((0, 0), (0, 0), (16, 16)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Small networks with data consistency, trained on the same drawn heads from three seeds."""
    folder = tmp_path_factory.mktemp("trained")
    data = open_dataset("embedded", split="train", size=32, cases=40, slices=2)
    (folder / "heads").mkdir()
    for i in range(len(data)):
        np.save(folder / "heads" / f"{i}.npy", wide(data[i].image.numpy()))
    runs = []
    for seed in range(3):
        recipe = {
            "seed": seed,
            "data": {"name": "folder", "path": str(folder / "heads")},
            "task": {"options": {"sampling": {"kind": "random", "acceleration": 2}, "complex": True}},
            "backbone": {"name": "unet", "options": {"width": 8, "depth": 2, "levels": [], "data_consistency": True}},
            "train": {"steps": 60, "batch": 4, "lr": 1e-2, "val_every": 60},
        }
        train(load_recipe(recipe), folder / f"run{seed}", quiet=True)
        runs.append(folder / f"run{seed}")
    return runs


@pytest.mark.parametrize(
    ("kind", "largest", "within", "within_twice"), [("bootstrap", 1.4, 0.5, 0.85), ("ensemble", 2.0, 0.3, 0.55)]
)
def test_it_is_calibrated_for_trained_networks(
    tmp_path: Path, trained: list[Path], kind: str, largest: float, within: float, within_twice: float
) -> None:
    """On heads that the networks have not seen: the size of the errors, how often they are exceeded, and where.

    The map of an ensemble is too small even so, by less than 2.
    """
    images = wide(brains(4, (32, 32)))
    np.save(tmp_path / "scan.npy", images)
    run, settings = (trained, {}) if kind == "ensemble" else (trained[0], {"uncertainty": 8})
    volume = reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.h5", **settings).volumes[0]
    error = np.abs(stored(tmp_path / "out.h5") - np.abs(images))
    spread = stored(tmp_path / "out.uncertainty.h5")
    assert volume.scores["psnr"] > volume.reference["psnr"] + 0.3
    ratio = np.sqrt(np.square(error).mean() / np.square(spread).mean())
    assert 0.7 < ratio < largest
    assert within < (error < spread).mean() < 0.95
    assert (error < 2 * spread).mean() > within_twice
    assert np.corrcoef(error.ravel(), spread.ravel())[0, 1] > 0.15
    if kind == "ensemble":  # without the calibration it would be too small by more than 3
        assert ratio * volume.uncertainty.factor > 3
