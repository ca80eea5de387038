"""Uncertainty maps: calibrated on drawn data, where the truth is known."""

import json
import sys
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import brains, call, coil_images, make_run

from chasm.data import KSpaceScan, write_scan
from chasm.reconstruct import reconstruct
from chasm.reconstruct.uncertainty import rotate

pytestmark = pytest.mark.usefixtures("no_picture")


def stored(file: Path) -> np.ndarray:
    with h5py.File(file) as f:
        return f["reconstruction"][:]


def smoothed(x: np.ndarray) -> np.ndarray:
    """Root-mean-square over 5 x 5 pixels."""
    x = torch.nn.functional.avg_pool2d(torch.from_numpy(x)[:, None].square(), 5, 1, 2)
    return x.sqrt().numpy().ravel()


@pytest.mark.parametrize(("run", "coils", "strength"), [("tv", 1, 3e-3), ("tv", 1, 3e-2), ("sense", 4, 1e-2)])
def test_it_is_calibrated_where_the_truth_is_known(tmp_path: Path, run: str, coils: int, strength: float) -> None:
    """The size of the errors, how often they are exceeded, and where they are large."""
    size, sigma = (64, 56), 0.02
    rng = np.random.default_rng(0)
    images = coil_images(2, coils, size) if coils > 1 else brains(2, size)[:, None]
    mask = rng.random(56) < 0.35
    mask[23:33] = True
    k = writers.centred_fft(images)
    k = k + sigma * (rng.standard_normal(k.shape) + 1j * rng.standard_normal(k.shape))
    write_scan(KSpaceScan((k * mask).astype(np.complex64), size), tmp_path / "scan.mrd")
    found = reconstruct(tmp_path / "scan.mrd", run, tmp_path / "out.h5", uncertainty=8, strength=strength)
    error = np.abs(stored(tmp_path / "out.h5") - np.abs(brains(2, size)))
    spread = stored(tmp_path / "out.uncertainty.h5")
    assert 0.6 < np.sqrt(np.square(error).mean() / np.square(spread).mean()) < 1.6
    assert 0.45 < (error < spread).mean() < 0.95
    assert (error < 2 * spread).mean() > 0.75
    assert np.corrcoef(smoothed(error), smoothed(spread))[0, 1] > 0.4
    if run == "tv":  # without the calibration it would be too small
        assert found.volumes[0].uncertainty.factor > 1.3


def test_it_is_printed_recorded_and_repeatable(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", brains(2))
    run = make_run(tmp_path / "run", weights="random", complex=True)
    words = [tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.h5", "--uncertainty", 2]
    found = call(*words, "--report", tmp_path / "see.html")
    assert found.exit_code == 0, found.output
    assert "(2 draws, calibrated by " in found.output
    assert f"map {tmp_path / 'out.uncertainty.h5'}" in found.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["uncertainty"]["file"] == "out.uncertainty.h5"
    assert "out.uncertainty.h5" in record["files"]
    assert '"key":"uncertainty"' in (tmp_path / "see.html").read_text()
    before = stored(tmp_path / "out.uncertainty.h5")
    assert before.shape == stored(tmp_path / "out.h5").shape
    assert (before > 0).mean() > 0.9
    assert call(*words).exit_code == 0
    np.testing.assert_array_equal(stored(tmp_path / "out.uncertainty.h5"), before)
    reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.dcm", uncertainty=2)
    assert nibabel.load(tmp_path / "out.uncertainty.nii.gz").shape == (40, 48, 2)


def test_a_map_that_nothing_could_calibrate_says_so(tmp_path: Path) -> None:
    """All columns of fully sampled k-space belong to its centre, of which none is held out."""
    np.save(tmp_path / "scan.npy", writers.centred_fft(brains(1)).astype(np.complex64))
    words = ["-O", "axes=SHW", "--run", "tv", "--uncertainty", 2, "--report", tmp_path / "see.html"]
    found = call(tmp_path / "scan.npy", *words, "-o", tmp_path / "out.h5")
    assert "(2 draws, not calibrated, because no held-out column shows an error)" in found.output
    assert "in each pixel, not calibrated, because" in (tmp_path / "see.html").read_text()


def test_without_draws_there_is_none(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", brains(1))
    for words, expected in (
        (("--run", "tv", "--uncertainty", 1), "expected 2 draws or more"),
        (("--run", "zero-filled", "--uncertainty", 4), "zero-filled does not estimate unmeasured columns"),
    ):
        found = call(tmp_path / "scan.npy", *words, "-o", tmp_path / "out.h5")
        assert found.exit_code == 3
        assert expected in found.output
    assert reconstruct(tmp_path / "scan.npy", "tv", tmp_path / "out.h5").volumes[0].uncertainty is None


def test_turning_is_what_it_says() -> None:
    """A bright point moves around the centre."""
    x = torch.zeros(1, 1, 33, 33, dtype=torch.complex64)
    y, z = torch.meshgrid(torch.arange(33.0), torch.arange(33.0), indexing="ij")
    x[0, 0] = torch.exp(-((y - 16) ** 2 + (z - 26) ** 2) / 4)
    turned = rotate(x, np.radians(30))[0, 0].abs()
    place = divmod(int(turned.argmax()), 33)
    assert np.hypot(place[0] - 16, place[1] - 16) == pytest.approx(10, abs=1)
    assert abs(np.degrees(np.arctan2(place[0] - 16, place[1] - 16))) == pytest.approx(30, abs=5)
