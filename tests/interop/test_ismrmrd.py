"""Agreement with the ISMRMRD tools, where they are installed: `make interop`."""

import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
from programs import needs

from chasm.data import open_dataset, read_scans, write_scan

GENERATE, RECONSTRUCT = "ismrmrd_generate_cartesian_shepp_logan", "ismrmrd_recon_cartesian_2d"
pytestmark = [pytest.mark.interop, needs(GENERATE, RECONSTRUCT)]


def generate(file: Path, *words: object) -> Path:
    command = [GENERATE, "-m", 64, "-c", 4, "-n", 0.01, *words, "-o", file]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return file


def their_image(file: Path) -> np.ndarray:
    """Root-sum-of-squares by their program, with the readout along rows, scaled to a norm of 1."""
    subprocess.run([RECONSTRUCT, str(file), "dataset"], check=True, capture_output=True)
    with h5py.File(file) as f:
        image = f["dataset/cpp/data"][0, 0, 0]
    image = image["real"] + 1j * image["imag"] if image.dtype.names else image
    return np.abs(image.T) / np.linalg.norm(image)


def test_their_file_gives_their_image(tmp_path: Path) -> None:
    file = generate(tmp_path / "a.h5", "-C")  # oversampled readout, noise scan
    data = open_dataset("kspace", file, split="all", combine="rss", prewhiten=False)
    image = data[0].image[0].numpy()
    assert image.shape == (64, 64)
    np.testing.assert_allclose(image / np.linalg.norm(image), their_image(file), atol=1e-4)


def test_they_read_what_we_write(tmp_path: Path) -> None:
    file = generate(tmp_path / "a.h5", "-C")
    (scan,) = read_scans(file).values()
    write_scan(scan, tmp_path / "b.mrd")
    np.testing.assert_allclose(their_image(tmp_path / "b.mrd"), their_image(file), atol=1e-5)


def test_acceleration_calibration_and_repetitions(tmp_path: Path) -> None:
    """Two interleaves of two repetitions, each with 16 calibration lines; their sum is the phantom."""
    scans = read_scans(generate(tmp_path / "a.h5", "-a", 2, "-w", 16, "-r", 2))
    assert list(scans) == ["repetition1", "repetition2", "repetition3", "repetition4"]
    even, odd = (scans[name].columns for name in ("repetition1", "repetition2"))
    assert (even | odd).all()
    assert (even & odd).sum() == 16
    assert all(scan.columns.sum() == 40 for scan in scans.values())
    with h5py.File(tmp_path / "a.h5") as f:
        stored = f["dataset/coil_images"][0]
    images = (stored["real"] + 1j * stored["imag"]).transpose(0, 2, 1)  # (coils, readout, lines)
    k = np.where(even, scans["repetition1"].kspace[0], scans["repetition2"].kspace[0])
    found = np.fft.fftshift(np.fft.ifft2(np.fft.ifftshift(k, axes=(-2, -1)), norm="ortho"), axes=(-2, -1))
    scale = np.vdot(found, images) / np.vdot(found, found)
    assert np.abs(scale * found - images).max() < 0.1 * np.abs(images).max()
