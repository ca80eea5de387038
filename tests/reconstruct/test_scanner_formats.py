"""`chasm reconstruct` on the formats of scanners: every volume with its own lines, and where it lies."""

import sys
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import twix_writer
import writers
from runs import brains, call, columns, make_run, zero_filled

from chasm.data import Geometry, KSpaceScan, write_scan
from chasm.data.bart import write_cfl


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("suffix", [".mrd", ".h5"])
def test_one_coil_as_measured(tmp_path: Path, suffix: str) -> None:
    """An oversampled readout, lines left out, a place in the scanner: zero weights give the zero-filled image there."""
    mask = columns(40).astype(bool)
    images = brains(3, (48, 40))
    k = writers.centred_fft(np.pad(images, ((0, 0), (24, 24), (0, 0))))[:, None]
    affine = np.array([[0, -2, 0, 30], [3, 0, 0, -20], [0, 0, 5, 10], [0, 0, 0, 1.0]])
    write_scan(KSpaceScan((k * mask).astype(np.complex64), (48, 40), Geometry(affine)), tmp_path / f"scan{suffix}")
    run = make_run(tmp_path / "run", complex=True)
    found = call(tmp_path / f"scan{suffix}", "--run", run, "-o", tmp_path / "out.nii")
    assert found.exit_code == 0, found.output
    name = "ISMRMRD k-space of 1 coil" if suffix == ".mrd" else "fastMRI single-coil k-space"
    assert f"read as: {name}, as measured (3 slices, 48 x 40)" in found.output
    assert "as measured: 10 of 40 columns" in found.output
    assert "note" not in found.output
    written = nibabel.load(tmp_path / "out.nii")
    np.testing.assert_allclose(written.affine, affine, atol=1e-4)
    wanted = zero_filled(images, mask)
    np.testing.assert_allclose(written.get_fdata().transpose(2, 1, 0)[:, ::-1], wanted, atol=1e-4 * wanted.max())


@pytest.mark.usefixtures("no_picture")
def test_several_coils_and_volumes(tmp_path: Path) -> None:
    """Two echoes of three coils with different lines; the run was trained on one coil, and coils are combined."""
    rng = np.random.default_rng(0)
    coils = brains(1, (48, 40))[0] * np.array([1, 0.5j, -0.7])[:, None, None]
    array = np.zeros((48, 40, 1, 3, 1, 2), np.complex64)
    masks = []
    for echo in range(2):
        mask = rng.random(40) < 0.5
        mask[14:26] = True
        masks.append(mask)
        array[:, :, 0, :, 0, echo] = (writers.centred_fft(coils) * mask).transpose(1, 2, 0)
    write_cfl(array, tmp_path / "scan.cfl")
    run = make_run(tmp_path / "run", complex=True)
    found = call(tmp_path / "scan.hdr", "--run", run, "-o", tmp_path / "out.h5")
    assert found.exit_code == 0, found.output
    assert "read as: BART k-space of 3 coils, as measured (2 cases, 2 slices, 48 x 40)" in found.output
    for echo, mask in enumerate(masks):
        with h5py.File(tmp_path / f"out-scan_echo{echo + 1}.h5") as f:
            image = f["reconstruction"][0]
        wanted = np.sqrt((zero_filled(coils, mask) ** 2).sum(0))
        inside = wanted > 0.2 * wanted.max()
        np.testing.assert_allclose(image[inside], wanted[inside], rtol=0.2)


def test_scanner_files_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", complex=True)
    write_cfl(np.ones((1, 48, 40)), tmp_path / "radial.cfl")
    k = writers.centred_fft(brains(2))[:, None].astype(np.complex64)
    write_scan(KSpaceScan(k * columns(40), (48, 40), mask=columns(40).astype(bool)), tmp_path / "half.mrd")
    (tmp_path / "meas.dat").write_bytes(b"nothing")
    np.savetxt(tmp_path / "mask.txt", np.ones(40))
    for words, expected in (
        (("radial.cfl",), "only Cartesian data can be read"),
        (("meas.dat",), "meas.dat: measurement: "),
        (("half.mrd", "--mask", tmp_path / "mask.txt"), "stores which lines were measured: leave out --mask"),
        (("half.mrd", "--as", "image"), "half.mrd: holds k-space, not images"),
        (("half.mrd", "-O", "plane=axial"), "no option 'plane'"),
    ):
        found = call(tmp_path / words[0], "--run", run, "-o", tmp_path / "out.h5", *words[1:])
        assert found.exit_code == 3, found.output
        assert expected in found.output
        assert len(found.output.strip().splitlines()) == 1


@pytest.mark.usefixtures("no_picture")
def test_the_residual_is_told_against_the_noise_scan_of_a_twix_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((2, 256)) + 1j * rng.standard_normal((2, 256))
    k = rng.standard_normal((12, 2, 32)) + 1j * rng.standard_normal((12, 2, 32))
    readouts = [twix_writer.readout(noise, "NOISEADJSCAN")]
    readouts += [twix_writer.readout(100 * line, Lin=i) for i, line in enumerate(k)]
    file = twix_writer.write_twix(tmp_path / "a.dat", twix_writer.measurement(readouts))
    found = call(file, "--run", "zero-filled", "-o", tmp_path / "out.h5")
    assert found.exit_code == 0, found.output
    assert "note: prewhitened with 256 samples of noise" in found.output
    level = np.sqrt(np.square(np.abs(noise)).mean() * 30.05 / 10 / 0.793)  # us of a noise sample and of an image sample
    assert f"x the noise, which is {level:.2g} (the noise scan)" in found.output
