"""Measured k-space in the formats of scanners and of the field: what is read, what is written, what is refused."""

import os
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from ismrmrd_writer import H, W, Writer, coil_images, images_of
from writers import centred_fft, write_cc359_multi, write_fastmri

from chasm.data import DataError, Geometry, KSpaceScan, open_dataset, read_scans, write_scan
from chasm.data.bart import read_cfl, write_cfl
from chasm.data.check import check


def example(slices: int = 2, coils: int = 3) -> KSpaceScan:
    """An undersampled, oversampled scan with noise and geometry."""
    k = centred_fft(coil_images(slices, coils, size=(2 * H, W))).astype(np.complex64)
    mask = np.arange(W) % 2 == 0
    mask[8:12] = True
    rng = np.random.default_rng(1)
    noise = (rng.standard_normal((coils, 500)) + 1j * rng.standard_normal((coils, 500))).astype(np.complex64)
    affine = np.array([[0, -2, 0, 30], [3, 0, 0, -20], [0, 0, 5, 10], [0, 0, 0, 1.0]])
    return KSpaceScan(k * mask, (H, W), Geometry(affine), "patient 1", noise, mask)


@pytest.mark.parametrize("suffix", [".mrd", ".h5", ".cfl", ".npy", ".npz"])
def test_every_format_is_read_back(tmp_path: Path, suffix: str) -> None:
    scan = example()
    file = tmp_path / f"out{suffix}"
    notes = write_scan(scan, file).notes
    (found,) = read_scans(file, axes="SCHW" if suffix.startswith(".np") else None).values()
    assert found.columns.tolist() == scan.columns.tolist()
    wanted = scan if suffix == ".mrd" else scan.prewhitened()
    if suffix == ".mrd":
        np.testing.assert_allclose(found.noise, scan.noise)
        assert notes == []
    else:
        assert "prewhitened with 500 samples of noise" in notes
    if suffix in (".mrd", ".h5"):
        assert found.size == (H, W)
        np.testing.assert_allclose(found.kspace, wanted.kspace, atol=1e-6)
        np.testing.assert_allclose(found.geometry.affine, scan.geometry.affine, atol=1e-4)
    else:  # they cannot say what is oversampling
        assert f"oversampling of the readout removed: {H} of {2 * H} rows" in notes
        np.testing.assert_allclose(images_of(found), images_of(wanted)[..., H // 2 : H // 2 + H, :], atol=1e-5)
    assert not list(tmp_path.glob("*.tmp*"))


def test_a_single_coil_and_a_full_scan_as_fastmri(tmp_path: Path) -> None:
    """Such a file is a fastMRI volume: its own reader takes it, with a target."""
    k = centred_fft(coil_images(2, 1)).astype(np.complex64)
    write_scan(KSpaceScan(k, (H - 4, W - 2)), tmp_path / "a.h5")
    data = open_dataset("fastmri", tmp_path / "a.h5", split="all", acquisition=None, slices=None)
    assert data[0].image.shape == (1, H - 4, W - 2)
    np.testing.assert_allclose(data[1].image, np.abs(coil_images(2, 1)[1, :, 2:-2, 1:-1]), atol=1e-5)
    assert check(tmp_path, "fastmri").findings == []


def test_fastmri_and_cc359_are_k_space_too(tmp_path: Path) -> None:
    images = write_fastmri(tmp_path / "a.h5", slices=3, coils=4, recon=12)
    (scan,) = read_scans(tmp_path / "a.h5").values()
    np.testing.assert_allclose(images_of(scan), images, atol=1e-5)
    assert scan.size == (12, 12)
    multi = write_cc359_multi(tmp_path / "b.h5", slices=3)
    (scan,) = read_scans(tmp_path / "b.h5").values()
    scale = np.sqrt(multi.shape[-1] * multi.shape[-2])
    np.testing.assert_allclose(np.abs(images_of(scan)), scale * np.abs(multi), atol=1e-4)


def test_bart_dimensions(tmp_path: Path) -> None:
    """Echoes are volumes, averages are averaged, the third dimension of k-space is transformed into slices."""
    k = centred_fft(coil_images(6))  # (6, coils, H, W)
    array = np.zeros((H, W, 1, 3, 1, 2, *[1] * 7, 3, 2), np.complex64)  # two echoes, three slices, two averages
    for echo in range(2):
        for s in range(3):
            for average, sign in ((0, 1), (1, -1)):
                array[:, :, 0, :, 0, echo, ..., s, average].flat = (k[3 * echo + s] + sign).transpose(1, 2, 0).ravel()
    write_cfl(array, tmp_path / "a.cfl")
    np.testing.assert_array_equal(read_cfl(tmp_path / "a.hdr").squeeze(), array.squeeze())
    for name in ("a.cfl", "a.hdr"):
        scans = read_scans(tmp_path / name)
        assert list(scans) == ["echo1", "echo2"]
        np.testing.assert_allclose(scans["echo2"].kspace, k[3:], atol=1e-5)
        assert scans["echo1"].notes == ["2 averages were averaged"]
    volume = np.fft.fftshift(np.fft.fft(np.fft.ifftshift(k, 0), axis=0, norm="ortho"), 0)
    write_cfl(volume.transpose(2, 3, 0, 1), tmp_path / "b.cfl")
    (scan,) = read_scans(tmp_path / "b.cfl").values()
    np.testing.assert_allclose(scan.kspace, k, atol=1e-5)


def test_bart_averages_without_all_lines_keep_the_magnitude(tmp_path: Path) -> None:
    k = centred_fft(coil_images(1))[0].transpose(1, 2, 0)  # (H, W, coils)
    array = np.zeros((H, W, 1, k.shape[2], *[1] * 10, 2), np.complex64)
    array[..., 0].flat = k.ravel()
    array[:, 3:6, ..., 1] = array[:, 3:6, ..., 0]  # the second average has the middle lines only
    write_cfl(array, tmp_path / "a.cfl")
    (scan,) = read_scans(tmp_path / "a.cfl").values()
    np.testing.assert_allclose(scan.kspace[0], k.transpose(2, 0, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("radial", "the first is 1, as of samples along a trajectory: only Cartesian data can be read"),
        ("short", "a.cfl: file: 16 bytes, but a.hdr asks for 3840"),
        ("alone", "a.cfl: file: missing beside a.hdr"),
        ("words", "a.hdr: header: cannot be read"),
        ("kz", "undersampled along the partitions too"),
        ("wraps", "a.cfl: file: 0 bytes, but a.hdr asks for 147573952589676412928"),
        ("endless", "a.hdr: header: cannot be read (invalid literal for int"),
    ],
)
def test_bart_that_cannot_be_read_is_one_line(tmp_path: Path, spoil: str, message: str) -> None:
    array = np.ones((1, H, W) if spoil == "radial" else (H, W, 6) if spoil == "kz" else (H, W))
    if spoil == "kz":
        array[..., 2] = 0
    write_cfl(array, tmp_path / "a.cfl")
    if spoil == "short":
        (tmp_path / "a.cfl").write_bytes(bytes(16))
    elif spoil == "alone":
        (tmp_path / "a.cfl").unlink()
    elif spoil == "words":
        (tmp_path / "a.hdr").write_text("# Dimensions\nten by ten\n")
    elif spoil == "wraps":  # 2**64 values: as a 64-bit number, none
        (tmp_path / "a.hdr").write_text("# Dimensions\n4294967296 4294967296\n")
        (tmp_path / "a.cfl").write_bytes(b"")
    elif spoil == "endless":
        (tmp_path / "a.hdr").write_bytes(b"")
        os.truncate(tmp_path / "a.hdr", 2**40)
    with pytest.raises(DataError, match=re.escape(message)) as e:
        read_scans(tmp_path / ("a.hdr" if spoil == "alone" else "a.cfl"))
    assert "\n" not in str(e.value)


def test_a_broken_twix_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "meas.dat").write_bytes(b"no raw data")
    with pytest.raises(DataError, match=r"meas.dat: header: ") as e:
        read_scans(tmp_path / "meas.dat")
    assert "\n" not in str(e.value)


def test_undersampled_slices_are_no_targets(tmp_path: Path) -> None:
    write_scan(example(), tmp_path / "a.mrd")
    with pytest.raises(DataError, match="undersampled: no target to train with"):
        open_dataset("kspace", tmp_path, split="all")[0]
    report = check(tmp_path, "kspace")
    assert report.ok
    assert any("ISMRMRD k-space, 12 of 20 lines" in shape for shape in report.shapes)


def test_a_head_that_fills_its_field_of_view_stays_in_the_middle(tmp_path: Path) -> None:
    """With a bright skull near the edges it was taken for an image with exchanged halves."""
    y, x = np.mgrid[-32:32, -32:32]
    radius = np.hypot(y / 28, x / 24)
    head = 0.3 * (radius < 1) + 3.0 * (np.abs(radius - 0.96) < 0.04)
    wrapped = head[:, 14:50] + np.roll(head, 36, 1)[:, 14:50] + np.roll(head, -36, 1)[:, 14:50]
    for shift in ((), (-2, -1)):
        np.save(tmp_path / "a.npy", np.fft.fftshift(centred_fft(wrapped), axes=shift).astype(np.complex64))
        (scan,) = read_scans(tmp_path / "a.npy").values()
        np.testing.assert_allclose(np.abs(images_of(scan)[0, 0]), wrapped, atol=1e-5)


def test_a_header_cannot_take_all_memory(tmp_path: Path) -> None:
    """A matrix that a few bytes declare is not allocated."""
    writer = Writer(tmp_path / "a.h5", (24, 60000, 60000), (24, 20, 1), (1, 1, 1, 1, 1, 1))
    writer.line(np.ones((3, 24)))
    with pytest.raises(DataError, match=r"a.h5: encodedSpace: .* GiB, above the limit of 1 GiB: .*set CHASM_MAX_GIB="):
        read_scans(writer.save())


def test_plain_arrays_in_hdf5(tmp_path: Path) -> None:
    k = centred_fft(coil_images(2)).astype(np.complex64)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["kspace"] = k.transpose(3, 2, 1, 0)
    (scan,) = read_scans(tmp_path / "a.h5", axes="WHCS").values()
    np.testing.assert_allclose(scan.kspace, k, atol=1e-6)
    with pytest.raises(ValueError, match=r"a.txt: expected a name that ends in .mrd, .cfl"):
        write_scan(scan, tmp_path / "a.txt")
