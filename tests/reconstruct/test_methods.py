"""`chasm reconstruct --run tv`, `sense` and `zero-filled`: no training, every format, one coil and several."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import brains, call, coil_images, columns, make_run, zero_filled

from chasm.data import KSpaceScan, write_scan
from chasm.reconstruct import reconstruct

pytestmark = pytest.mark.usefixtures("no_picture")


def written(file: Path) -> np.ndarray:
    with h5py.File(file) as f:
        return f["reconstruction"][:]


def error(image: np.ndarray, target: np.ndarray) -> float:
    return float(np.linalg.norm(image - target) / np.linalg.norm(target))


@pytest.mark.parametrize("suffix", [".mrd", ".cfl", ".h5", ".npz"])
def test_several_coils_as_measured(tmp_path: Path, suffix: str) -> None:
    """SENSE undoes the aliasing that zero-filling leaves; total variation does too, in every format."""
    images = coil_images()
    target = np.abs(brains(1))
    mask = np.zeros(40, bool)
    mask[::2], mask[14:26] = True, True
    scan = KSpaceScan((writers.centred_fft(images) * mask).astype(np.complex64), (48, 40))
    write_scan(scan, tmp_path / f"scan{suffix}")
    errors = {}
    for method in ("zero-filled", "sense", "tv"):
        words = ["--as", "kspace", "-O", "axes=SCHW"] if suffix == ".npz" else []
        found = call(tmp_path / f"scan{suffix}", "--run", method, "-o", tmp_path / f"{method}.h5", *words)
        assert found.exit_code == 0, found.output
        assert "as measured: 26 of 40 columns" in found.output
        errors[method] = error(written(tmp_path / f"{method}.h5"), target)
    assert errors["sense"] < 0.5 * errors["zero-filled"]
    assert errors["tv"] < 0.5 * errors["zero-filled"]


def test_one_coil_as_measured(tmp_path: Path) -> None:
    images, mask = brains(2), columns(40).astype(bool)
    scan = KSpaceScan((writers.centred_fft(images)[:, None] * mask).astype(np.complex64), (48, 40))
    write_scan(scan, tmp_path / "scan.mrd")
    reconstruct(tmp_path / "scan.mrd", "zero-filled", tmp_path / "zf.h5")
    wanted = zero_filled(images, mask)
    np.testing.assert_allclose(written(tmp_path / "zf.h5"), wanted, atol=1e-5 * wanted.max())
    reconstruct(tmp_path / "scan.mrd", "tv", tmp_path / "tv.h5")
    assert error(written(tmp_path / "tv.h5"), np.abs(images)) < error(wanted, np.abs(images))
    found = call(tmp_path / "scan.mrd", "--run", "sense")
    assert found.exit_code == 3
    assert "sense combines several coils, and this data has one coil: use tv or zero-filled" in found.output


def test_full_kspace_is_taken_as_it_is_unless_asked_to_undersample(tmp_path: Path) -> None:
    images = coil_images(2)
    write_scan(KSpaceScan(writers.centred_fft(images).astype(np.complex64), (48, 40)), tmp_path / "scan.mrd")
    target = np.abs(brains(2))
    found = reconstruct(tmp_path / "scan.mrd", "zero-filled", tmp_path / "out.h5")
    assert found.read_as == "ISMRMRD k-space of 6 coils, fully sampled (2 slices, 48 x 40)"
    assert found.sampling == "as measured: all 40 columns"
    assert found.volumes[0].scores == {}
    inside = target > 0.2 * target.max()
    assert error(written(tmp_path / "out.h5")[inside], target[inside]) < 0.05
    found = reconstruct(tmp_path / "scan.mrd", "tv", tmp_path / "out.h5", acceleration=2)
    assert "really x2.00" in found.sampling
    assert found.volumes[0].scores["psnr"] > found.volumes[0].reference["psnr"] + 3


def test_images_are_undersampled_and_scored(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", np.abs(brains(1, (64, 64))))
    found = reconstruct(tmp_path / "scan.npy", "tv", tmp_path / "out.h5")
    assert "really x4.00" in found.sampling
    assert found.volumes[0].scores["psnr"] > found.volumes[0].reference["psnr"] + 1
    more = reconstruct(tmp_path / "scan.npy", "tv", tmp_path / "out.h5", acceleration=8)
    assert more.volumes[0].scores["psnr"] < found.volumes[0].scores["psnr"]
    np.save(tmp_path / "scan.npy", brains(1, (64, 64)))  # with a phase
    found = reconstruct(tmp_path / "scan.npy", "tv", tmp_path / "out.h5")
    assert found.volumes[0].scores["psnr"] > found.volumes[0].reference["psnr"] + 0.5


def test_strength(tmp_path: Path) -> None:
    """More regularisation leaves less variation."""
    np.save(tmp_path / "scan.npy", brains(1))
    variation = []
    for strength in (1e-3, 1e-2, 1e-1):
        reconstruct(tmp_path / "scan.npy", "tv", tmp_path / "out.h5", strength=strength)
        variation.append(np.abs(np.diff(written(tmp_path / "out.h5"))).sum())
    assert variation[0] > variation[1] > variation[2]


def test_wrong_choices_are_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", brains(1))
    write_scan(KSpaceScan(writers.centred_fft(brains(1))[:, None] * columns(40), (48, 40)), tmp_path / "scan.mrd")
    np.savetxt(tmp_path / "mask.txt", np.ones(40))
    for words, expected in (
        (("scan.npy", "--run", "tvv"), "tv, sense, zero-filled need no training"),
        (("scan.npy", "--run", "tv", "--strength", "0"), "must be greater than 0, got 0 (default 0.003)"),
        (("scan.npy", "--run", "zero-filled", "--strength", "1"), "has no regularisation"),
        (("scan.npy", "--run", make_run(tmp_path / "run"), "--strength", "1"), "--strength belongs to tv and sense"),
        (("scan.npy", "--run", "tv", "--acceleration", "1"), "acceleration > 1"),
        (("scan.npy", "--run", "tv", "--acceleration", "4", "--mask", tmp_path / "mask.txt"), "leave out --accel"),
        (("scan.mrd", "--run", "tv", "--acceleration", "4"), "undersampled as it was measured: leave out --accel"),
    ):
        found = call(tmp_path / words[0], *words[1:])
        assert found.exit_code == 3, found.output
        assert expected in found.output
        assert len(found.output.strip().splitlines()) == 1
