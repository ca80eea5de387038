"""ISMRMRD files: slices, echoes and averages, partial Fourier, noise, geometry, and what is refused."""

import re
from pathlib import Path
from typing import Any

import h5py
import ismrmrd
import numpy as np
import pytest
import torch
from ismrmrd_writer import H, W, Writer, coil_images, images_of, plain
from writers import centred_fft

from chasm.data import DataError, open_dataset, read_scans
from chasm.data.check import check
from chasm.data.kspace import kspace_format
from chasm.mri.noise import whitening_matrix


def test_ismrmrd_slices_and_patient(tmp_path: Path) -> None:
    images = coil_images(2)
    writer = plain(tmp_path / "a.h5", patient="Jane Doe")
    for k in (1, 0):  # in any order
        writer.slice(centred_fft(images[k]), slice=k)
    (scan,) = read_scans(writer.save()).values()
    np.testing.assert_allclose(images_of(scan), images, atol=1e-5)
    assert scan.size == (H, W)
    assert scan.patient.startswith("patient ")
    assert "Doe" not in scan.patient
    assert kspace_format(tmp_path / "a.h5") == "ISMRMRD"
    assert scan.geometry.affine.diagonal() == pytest.approx([10, 10, 5, 1])
    assert "no directions" in scan.geometry.note


def test_ismrmrd_oversampling_and_recon_space(tmp_path: Path) -> None:
    """Twice the field of view along the readout, a quarter more along the lines: both are cut off."""
    images = coil_images(1, size=(2 * H, 25))
    writer = Writer(tmp_path / "a.mrd", (2 * H, 25, 1), (512, 512, 1), (480, 250, 5, 240, 200, 5))
    writer.slice(centred_fft(images[0]))
    data = open_dataset("kspace", writer.save(), split="all")
    assert data[0].image.shape == (3, H, 20)
    np.testing.assert_allclose(data[0].image, images[0, :, H // 2 : H // 2 + H, 2:22], atol=1e-5)
    rss = open_dataset("kspace", tmp_path / "a.mrd", split="all", combine="rss")[0].image
    np.testing.assert_allclose(rss[0], np.sqrt((np.abs(data[0].image.numpy()) ** 2).sum(0)), atol=1e-5)


def test_ismrmrd_averages_repetitions_and_echoes(tmp_path: Path) -> None:
    images = coil_images(4)
    k = centred_fft(images)
    writer = plain(tmp_path / "a.h5")
    for i in range(4):
        for average, sign in ((0, 1), (1, -1)):
            writer.slice(k[i] + sign * 0.1, repetition=i % 2, contrast=i // 2, average=average)
    scans = read_scans(writer.save())
    assert list(scans) == ["repetition1-echo1", "repetition1-echo2", "repetition2-echo1", "repetition2-echo2"]
    for i, name in enumerate(("repetition1-echo1", "repetition2-echo1", "repetition1-echo2", "repetition2-echo2")):
        np.testing.assert_allclose(scans[name].kspace[0], k[i], atol=1e-5)
        assert scans[name].notes == ["2 averages of a line were averaged"]
    data = open_dataset("kspace", tmp_path / "a.h5", split="all")
    assert data.cases == [f"a/{name}" for name in scans]
    assert {case.group for case in data.find(tmp_path)[0]} == {"a"}  # one file, one patient, one split


def test_ismrmrd_partial_fourier_and_asymmetric_echo(tmp_path: Path) -> None:
    """What was not measured is zero, and what was is where the centres say."""
    k = centred_fft(coil_images(1))[0]
    writer = plain(tmp_path / "a.h5", centres={"kspace_encoding_step_1": 4})
    for line in range(W - 6):  # the first six lines were left out: line 4 is the tenth
        writer.line(k[:, 5:, line + 6], centre=H // 2 - 5, line=line)
    (scan,) = read_scans(writer.save()).values()
    wanted = k.copy()
    wanted[..., :6] = 0
    wanted[:, :5] = 0
    np.testing.assert_allclose(scan.kspace[0], wanted, atol=1e-6)
    assert scan.columns.tolist() == [False] * 6 + [True] * 14
    assert scan.notes == ["partial Fourier: lines 6 to 19 of 20 were measured, and the others are taken as zero"]


def test_ismrmrd_reversed_and_discarded_samples(tmp_path: Path) -> None:
    k = centred_fft(coil_images(1))[0]
    writer = plain(tmp_path / "a.h5")
    for line in range(W):
        padded = np.pad(k[..., line], ((0, 0), (2, 3)), constant_values=9)
        more: dict[str, Any] = {"line": line, "discard_pre": 2, "discard_post": 3}
        if line % 2:
            writer.line(padded, centre=H // 2 + 2, **more)
        else:
            more["discard_pre"], more["discard_post"] = 3, 2
            writer.line(padded[:, ::-1], centre=H + 4 - H // 2 - 2, flags=(ismrmrd.ACQ_IS_REVERSE,), **more)
    (scan,) = read_scans(writer.save()).values()
    np.testing.assert_allclose(scan.kspace[0], k, atol=1e-6)


def test_ismrmrd_noise_calibration_and_navigators(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    k = centred_fft(coil_images(1))[0]
    mixing = rng.standard_normal((3, 3)) + 1j * rng.standard_normal((3, 3))
    noise = mixing @ (rng.standard_normal((3, 4000)) + 1j * rng.standard_normal((3, 4000)))
    for mode, kept in (("embedded", 12), ("separate", 10)):
        writer = plain(tmp_path / f"{mode}.h5", calibration=mode)
        writer.line(noise, flags=(ismrmrd.ACQ_IS_NOISE_MEASUREMENT,))
        writer.line(9 * k[..., 0], flags=(ismrmrd.ACQ_IS_NAVIGATION_DATA,))
        for line in range(0, W, 2):
            writer.line(k[..., line], line=line)
        for line in (9, 11):
            writer.line(k[..., line], line=line, flags=(ismrmrd.ACQ_IS_PARALLEL_CALIBRATION,))
        (scan,) = read_scans(writer.save()).values()
        assert scan.columns.sum() == kept
        assert "left out: 1 navigator lines" in scan.notes[0]
        np.testing.assert_allclose(scan.noise, noise, rtol=1e-5)
    data = open_dataset("kspace", tmp_path / "embedded.h5", split="all", undersampled=True)
    white = torch.from_numpy(whitening_matrix(torch.from_numpy(noise)).numpy() @ noise)
    covariance = torch.cov(white)
    torch.testing.assert_close(covariance, covariance[0, 0].real * torch.eye(3).to(covariance), atol=1e-2, rtol=1e-4)
    expected = torch.einsum("pq,qhw->phw", whitening_matrix(torch.from_numpy(noise)), torch.from_numpy(scan_of(data)))
    torch.testing.assert_close(data.raw_slice(0).kspace, expected)
    assert any("prewhitened with 4,000 samples of noise" in note for note in data.scan(data.locate(0)[0]).notes)
    untouched = open_dataset("kspace", tmp_path / "embedded.h5", split="all", undersampled=True, prewhiten=False)
    np.testing.assert_allclose(untouched.raw_slice(0).kspace[..., 0], k[..., 0], rtol=1e-5)


def scan_of(data: Any) -> np.ndarray:
    """The k-space of the first slice as the file holds it."""
    stored: np.ndarray = next(iter(read_scans(data.files()[0]).values())).kspace[0]
    return stored


def test_too_little_noise_is_said(tmp_path: Path) -> None:
    writer = plain(tmp_path / "a.h5")
    writer.line(np.ones((3, 4)), flags=(ismrmrd.ACQ_IS_NOISE_MEASUREMENT,))
    writer.slice(centred_fft(coil_images(1))[0])
    data = open_dataset("kspace", writer.save(), split="all")
    assert "not prewhitened: noise of 4 samples cannot tell 3 coils apart" in data.scan(data.locate(0)[0]).notes[0]
    with pytest.raises(ValueError, match="zero or the same"):
        whitening_matrix(torch.ones(2, 100, dtype=torch.complex64))


def test_ismrmrd_partitions_become_slices(tmp_path: Path) -> None:
    images = coil_images(6)  # (z, coils, x, y)
    k = np.fft.fftshift(np.fft.fft(np.fft.ifftshift(centred_fft(images), 0), axis=0, norm="ortho"), 0)
    more = {"read_dir": (1, 0, 0), "phase_dir": (0, 1, 0), "slice_dir": (0, 0, 1), "position": (1, 2, 3)}
    for gap in (False, True):
        writer = Writer(tmp_path / "a.h5", (H, W, 6), (H, W, 4), (240, 200, 18, 240, 200, 12))
        for part in range(6):
            if not (gap and part == 3):
                writer.slice(k[part], part=part, **more)
        if gap:
            with pytest.raises(DataError, match="undersampled along the partitions too"):
                read_scans(writer.save())
            return
        (scan,) = read_scans(writer.save()).values()
        np.testing.assert_allclose(images_of(scan), images[1:5], atol=1e-5)  # the outer two are oversampling
        assert scan.geometry.affine[:3, 2] == pytest.approx([0, 0, 3])
        assert scan.geometry.affine[2, 3] == pytest.approx(3 - 2 * 3)


def test_ismrmrd_geometry(tmp_path: Path) -> None:
    """Rows run along the readout and columns along the lines; positions are of the centre of the field of view."""
    read, phase = np.array([0.8, 0.6, 0]), np.array([0.6, -0.8, 0])
    normal, first = np.cross(read, phase), np.array([10.0, 20, 30])
    images = coil_images(3)
    writer = plain(tmp_path / "a.h5")
    for k in range(3):
        place = {"read_dir": read, "phase_dir": phase, "slice_dir": normal, "position": first + 7 * k * normal}
        writer.slice(centred_fft(images[k]), slice=k, **place)
    (scan,) = read_scans(writer.save()).values()
    assert scan.geometry.note == ""
    for k, row, column in ((0, H // 2, W // 2), (2, 0, 0), (1, H - 1, W - 1)):
        left_back_up = first + 7 * k * normal + (row - H // 2) * 10 * read + (column - W // 2) * 10 * phase
        found = scan.geometry.affine @ [column, H - 1 - row, k, 1]
        np.testing.assert_allclose(found[:3], left_back_up * [-1, -1, 1], atol=1e-4)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("radial", "a.h5: trajectory: radial: only Cartesian data can be read"),
        (
            "samples",
            "encodedSpace: a readout of 30 samples around sample 15 does not fit into 24 encoded samples",
        ),
        ("line", "a.h5: encodedSpace: line 40, partition 0 lies outside of 20 x 1 encoded lines"),
        ("coils", "a.h5: acquisitions: lines of 2 and of 3 coils"),
        ("nothing", "a.h5: acquisitions: no line of an image"),
        ("nan", "a.h5: acquisition 0: 1 of 72 values are NaN or infinite"),
        ("cut", "a.h5: file: cannot be read"),
    ],
)
def test_ismrmrd_that_cannot_be_read_is_one_line(tmp_path: Path, spoil: str, message: str) -> None:
    writer = plain(tmp_path / "a.h5", **({"trajectory": "radial"} if spoil == "radial" else {}))
    k = centred_fft(coil_images(1))[0]
    if spoil == "nan":
        k[0, 0, 0] = np.nan
    if spoil != "nothing":
        writer.slice(k)
    extra = {"samples": (np.ones((3, 30)), 0), "line": (k[..., 0], 40), "coils": (k[:2, :, 0], 0)}.get(spoil)
    if extra is not None:
        writer.line(extra[0], line=extra[1])
    if spoil == "nothing":
        writer.line(k[..., 0], flags=(ismrmrd.ACQ_IS_NOISE_MEASUREMENT,))
    writer.save()
    if spoil == "cut":
        (tmp_path / "a.h5").write_bytes((tmp_path / "a.h5").read_bytes()[:3000])
    with pytest.raises(DataError, match=re.escape(message)) as e:
        read_scans(tmp_path / "a.h5", axes=None)
    assert "\n" not in str(e.value)
    if spoil != "cut":
        assert any(message.removeprefix("a.h5: ") in finding for finding in check(tmp_path, "kspace").findings)


def _with_header(file: Path, old: bytes, new: bytes) -> None:
    """A sound file whose header has some words replaced."""
    writer = plain(file)
    writer.slice(centred_fft(coil_images(1))[0])
    with h5py.File(writer.save(), "a") as f:
        xml = f["dataset/xml"][0]
        assert old in xml
        f["dataset/xml"][0] = xml.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"<ismrmrdHeader", b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><ismrmrdHeader', "document type"),
        (b"<x>24</x>", b"<x>many</x>", "xml: cannot be read (invalid literal"),
        (b"<x>24</x>", b"<x>-24</x>", "does not fit into -24 encoded samples"),
    ],
)
def test_a_header_that_is_a_trap_is_one_line(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    _with_header(tmp_path / "a.h5", old, new)
    with pytest.raises(DataError, match=re.escape(message)) as e:
        read_scans(tmp_path / "a.h5")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("size", [b"NaN", b"INF"])
def test_a_field_of_view_that_is_no_number_gives_no_geometry(tmp_path: Path, size: bytes) -> None:
    _with_header(tmp_path / "a.h5", b"<x>240</x>", b"<x>%s</x>" % size)
    (scan,) = read_scans(tmp_path / "a.h5").values()
    assert scan.geometry is None


def test_a_position_that_is_no_number_gives_only_voxel_sizes(tmp_path: Path) -> None:
    writer = plain(tmp_path / "a.h5")
    for k, position in enumerate(([0, 0, 0], [np.nan, 0, 5])):
        where = {"read_dir": [1, 0, 0], "phase_dir": [0, 1, 0], "slice_dir": [0, 0, 1]}
        writer.slice(centred_fft(coil_images(1))[0], slice=k, position=position, **where)
    (scan,) = read_scans(writer.save()).values()
    assert np.isfinite(scan.geometry.affine).all()
    assert "no directions" in scan.geometry.note


def test_many_volumes_cannot_take_all_memory(tmp_path: Path) -> None:
    """Each of the volumes fits, and a line makes one: all together they do not."""
    writer = Writer(tmp_path / "a.h5", (24, 2000, 500), (24, 20, 1), (1, 1, 1, 1, 1, 1))
    for repetition in range(30):
        writer.line(np.ones((3, 24)), repetition=repetition)
    with pytest.raises(DataError, match=r"encodedSpace: 2x3x24x2000x500 values take 1.07 GiB, above the limit"):
        read_scans(writer.save())


@pytest.mark.parametrize("part", ["xml", "data"])
def test_parts_of_fixed_length_are_refused_before_memory_is_taken(tmp_path: Path, part: str) -> None:
    writer = plain(tmp_path / "a.h5")
    writer.slice(centred_fft(coil_images(1))[0])
    with h5py.File(writer.save(), "a") as f:
        head = f["dataset/data"].dtype["head"]
        del f["dataset"][part]
        long = np.dtype([("head", head), ("traj", "f4", (1,)), ("data", "f4", (2**26,))])
        kind = f"S{2**31 - 1}" if part == "xml" else long
        f.create_dataset(f"dataset/{part}", (2000,), kind, chunks=(1,), compression="gzip")
    with pytest.raises(DataError, match=r"GiB, above the limit of 1 GiB"):
        read_scans(tmp_path / "a.h5")


def test_readouts_that_were_never_written_are_not_read(tmp_path: Path) -> None:
    writer = plain(tmp_path / "a.h5")
    writer.slice(centred_fft(coil_images(1))[0])
    with h5py.File(writer.save(), "a") as f:
        kind = f["dataset/data"].dtype
        del f["dataset/data"]
        f.create_dataset("dataset/data", (2 * 10**9,), kind, chunks=(1024,))
    with pytest.raises(DataError, match=r"a\.h5: data: .* GiB, of which 0 bytes were written: damaged or a trap$"):
        read_scans(tmp_path / "a.h5")


@pytest.mark.parametrize(("shape", "says"), [((0, H), "0 coils and 24 samples"), ((3, 0), "3 coils and 0 samples")])
def test_a_line_that_holds_nothing_is_one_line(shape: tuple[int, int], says: str, tmp_path: Path) -> None:
    writer = plain(tmp_path / "a.h5")
    writer.slice(centred_fft(coil_images(1))[0])
    writer.line(np.zeros(shape), repetition=1)
    with pytest.raises(DataError, match=rf"a\.h5: acquisitions: line 0 has {says}$"):
        read_scans(writer.save())
