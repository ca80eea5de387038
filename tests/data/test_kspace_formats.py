"""Measured k-space in the formats of scanners and of the field: what is read, what is written, what is refused."""

import re
from pathlib import Path
from typing import Any

import h5py
import ismrmrd
import numpy as np
import pytest
import torch
from writers import blob, centred_fft, write_cc359_multi, write_fastmri

from chasm.data import DataError, Geometry, KSpaceScan, open_dataset, read_scans, write_scan
from chasm.data.bart import read_cfl, write_cfl
from chasm.data.check import check
from chasm.data.kspace import kspace_format
from chasm.mri import ifft2c
from chasm.mri.noise import prewhiten, whitening_matrix

H, W = 24, 20


def coil_images(slices: int, coils: int = 3, size: tuple[int, int] = (H, W), seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return blob(rng, slices, 1, *size) * np.exp(1j * rng.random((1, coils, 1, 1)) * 6) * rng.random((1, coils, 1, 1))


class Writer:
    """An ISMRMRD file of the readouts of k-space (samples, lines), with whatever header a test wants."""

    def __init__(
        self, file: Path, encoded: tuple[int, ...], recon: tuple[int, ...], fov: tuple[float, ...], **more: Any
    ):
        xsd = ismrmrd.xsd
        spaces = []
        for (x, y, z), (a, b, c) in ((encoded, fov[:3]), (recon, fov[3:])):
            matrix, view = xsd.matrixSizeType(x=x, y=y, z=z), xsd.fieldOfViewMm(x=a, y=b, z=c)
            spaces.append(xsd.encodingSpaceType(matrixSize=matrix, fieldOfView_mm=view))
        limits = xsd.encodingLimitsType()
        for name, centre in more.get("centres", {}).items():
            setattr(limits, name, xsd.limitType(minimum=0, maximum=99, center=centre))
        parallel = None
        if "calibration" in more:
            factor = xsd.accelerationFactorType(kspace_encoding_step_1=2, kspace_encoding_step_2=1)
            mode = xsd.calibrationModeType(more["calibration"])
            parallel = xsd.parallelImagingType(accelerationFactor=factor, calibrationMode=mode)
        encoding = xsd.encodingType(
            encodedSpace=spaces[0],
            reconSpace=spaces[1],
            encodingLimits=limits,
            trajectory=xsd.trajectoryType(more.get("trajectory", "cartesian")),
            parallelImaging=parallel,
        )
        subject = xsd.subjectInformationType(patientID=more["patient"]) if "patient" in more else None
        self.header = xsd.ismrmrdHeader(
            experimentalConditions=xsd.experimentalConditionsType(H1resonanceFrequency_Hz=1),
            encoding=[encoding],
            subjectInformation=subject,
        )
        self.file = file
        self.readouts: list[Any] = []

    def line(self, samples: np.ndarray, centre: int | None = None, flags: tuple[int, ...] = (), **more: Any) -> None:
        readout = ismrmrd.Acquisition.from_array(np.ascontiguousarray(samples, np.complex64))
        readout.center_sample = samples.shape[1] // 2 if centre is None else centre
        counters = {"line": "kspace_encode_step_1", "part": "kspace_encode_step_2"}
        for name, value in more.items():
            if name in ("position", "read_dir", "phase_dir", "slice_dir"):
                getattr(readout, name)[:] = value
            elif name in ("discard_pre", "discard_post", "encoding_space_ref"):
                setattr(readout, name, value)
            else:
                setattr(readout.idx, counters.get(name, name), value)
        for flag in flags:
            readout.set_flag(flag)
        self.readouts.append(readout)

    def slice(self, kspace: np.ndarray, **more: Any) -> None:
        """All lines of (coils, samples, lines)."""
        for column in range(kspace.shape[-1]):
            self.line(kspace[..., column], line=column, **more)

    def save(self) -> Path:
        with ismrmrd.File(self.file, "w") as handle:
            handle["dataset"].header, handle["dataset"].acquisitions = self.header, self.readouts
        return self.file


def plain(file: Path, **more: Any) -> Writer:
    return Writer(file, (H, W, 1), (H, W, 1), (240, 200, 5, 240, 200, 5), **more)


def images_of(scan: KSpaceScan) -> np.ndarray:
    return ifft2c(torch.from_numpy(scan.kspace)).numpy()


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
    torch.testing.assert_close(
        data.raw_slice(0).kspace, prewhiten(torch.from_numpy(scan_of(data)), torch.from_numpy(noise))
    )
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


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("radial", "the first is 1, as of samples along a trajectory: only Cartesian data can be read"),
        ("short", "a.cfl: file: 16 bytes, but a.hdr asks for 3840"),
        ("alone", "a.cfl: file: missing beside a.hdr"),
        ("words", "a.hdr: header: cannot be read"),
        ("kz", "undersampled along the third dimension too"),
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
    with pytest.raises(DataError, match=re.escape(message)) as e:
        read_scans(tmp_path / ("a.hdr" if spoil == "alone" else "a.cfl"))
    assert "\n" not in str(e.value)


def test_a_broken_twix_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "meas.dat").write_bytes(b"no raw data")
    with pytest.raises(DataError, match=r"meas.dat: measurement: ") as e:
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
