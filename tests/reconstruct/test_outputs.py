"""Volumes as a DICOM series, as NumPy arrays, and complex."""

import sys
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pydicom
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import brains, call, columns, make_run

from chasm.data import Folder, Geometry, KSpaceScan, write_scan
from chasm.data.identity import dicom_attributes
from chasm.reconstruct import reconstruct

pytestmark = pytest.mark.usefixtures("no_picture")
# columns to the back, rows to the left, slices up; in NIfTI's directions
AFFINE = np.array([[0, -2.0, 0, 30], [-3, 0, 0, -20], [0, 0, 5, 10], [0, 0, 0, 1]])
SUBJECT = """<subjectInformation><patientName>Doe^Jane</patientName><patientID>X1</patientID>
<patientBirthdate>1970-01-31</patientBirthdate><patientGender>F</patientGender></subjectInformation>
<studyInformation><studyDate>2020-02-03</studyDate><studyTime>12:34:56</studyTime>
<studyInstanceUID>1.2.3.4</studyInstanceUID></studyInformation>"""


def write_raw(file: Path, scale: float = 1.0) -> np.ndarray:
    images = scale * brains(3)
    k = (writers.centred_fft(images)[:, None] * columns(40)).astype(np.complex64)
    write_scan(KSpaceScan(k, (48, 40), Geometry(AFFINE)), file)
    return images


def read_series(folder: Path, stem: str = "out") -> list[pydicom.Dataset]:
    return [pydicom.dcmread(file) for file in sorted(folder.glob(f"{stem}-*.dcm"))]


def test_a_dicom_series_of_kspace(tmp_path: Path) -> None:
    """The patient and the study of the ISMRMRD header, new UIDs, the place, and the values."""
    write_raw(tmp_path / "scan.mrd")
    with h5py.File(tmp_path / "scan.mrd", "a") as f:
        xml = f["dataset/xml"][0].decode()
        f["dataset/xml"][0] = xml.replace("<encoding>", f"{SUBJECT}<encoding>", 1).encode()
    found = call(tmp_path / "scan.mrd", "--run", "tv", "-o", tmp_path / "out.dcm")
    assert found.exit_code == 0, found.output
    assert "note" not in found.output
    reconstruct(tmp_path / "scan.mrd", "tv", tmp_path / "out.nii")
    volume = nibabel.load(tmp_path / "out.nii").get_fdata().transpose(2, 1, 0)[:, ::-1]
    series = read_series(tmp_path)
    assert len(series) == 3
    for i, image in enumerate(series):
        assert (image.PatientName, image.PatientID, image.PatientBirthDate) == ("Doe^Jane", "X1", "19700131")
        assert (image.StudyInstanceUID, image.StudyDate, image.StudyTime) == ("1.2.3.4", "20200203", "123456")
        assert list(image.ImageType[:2]) == ["DERIVED", "SECONDARY"]
        assert image.SeriesDescription == "chasm tv"
        assert image.InstanceNumber == i + 1
        assert "in units of " in image.DerivationDescription  # the largest value is about 1
        unit = float(image.DerivationDescription.split("in units of ")[1])
        np.testing.assert_allclose(image.pixel_array * unit, volume[i], atol=0.6 * unit)
    assert len({image.SOPInstanceUID for image in series}) == 3
    assert len({image.SeriesInstanceUID for image in series}) == 1
    (tmp_path / "series").mkdir()
    for file in tmp_path.glob("out-*.dcm"):
        file.rename(tmp_path / "series" / file.name)
    data = Folder(tmp_path / "series", "all")  # our own reader finds the place again
    np.testing.assert_allclose(data.geometry(data.cases[0]).affine, AFFINE, atol=1e-4)


def test_a_dicom_series_of_a_dicom_series(tmp_path: Path) -> None:
    """The units of usual values stay, and so do patient, study and place; the series is another."""
    images = np.round(4000 * np.abs(brains(2)) / np.abs(brains(2)).max()).astype(np.uint16)
    (tmp_path / "in").mkdir()
    for i, pixels in enumerate(images):
        place = {"ImagePositionPatient": [5, 6, 7 + 4 * i], "ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}
        series = {"SeriesDescription": "T2 tra", "SeriesNumber": 4, "SeriesInstanceUID": "1.2.3"}
        more = {"PatientID": "Y2", "EchoTime": 80, **series, **place}
        writers.write_dicom(tmp_path / "in" / f"{i}.dcm", pixels, i + 1, PixelSpacing=[2, 2], **more)
    reconstruct(tmp_path / "in", "zero-filled", tmp_path / "out" / "out.dcm", acceleration=2)
    series = read_series(tmp_path / "out")
    assert len(series) == 2
    for i, image in enumerate(series):
        assert (image.PatientID, image.EchoTime) == ("Y2", 80)
        assert image.SeriesDescription == "T2 tra chasm zero-filled"
        assert image.SeriesNumber == 1004
        assert image.SeriesInstanceUID != "1.2.3"
        assert "in units of" not in image.DerivationDescription
        np.testing.assert_allclose(image.ImagePositionPatient, [5, 6, 7 + 4 * i], atol=1e-6)
        np.testing.assert_allclose(image.ImageOrientationPatient, [1, 0, 0, 0, 1, 0], atol=1e-6)
        assert np.corrcoef(image.pixel_array.ravel(), images[i].ravel())[0, 1] > 0.9
        assert image.pixel_array.mean() == pytest.approx(images[i].mean(), rel=0.1)


def test_a_dicom_series_of_nobody(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", brains(1))
    found = call(tmp_path / "scan.npy", "--run", "tv", "-o", tmp_path / "out.dcm")
    assert "note: voxel sizes are unknown: 1 mm written" in found.output
    assert "note: the file names no patient: PatientID 'scan.npy' written" in found.output
    assert pydicom.dcmread(tmp_path / "out.dcm").PatientID == "scan.npy"
    assert dicom_attributes(tmp_path / "scan.npy") == {}


@pytest.mark.parametrize("suffix", [".h5", ".nii", ".nii.gz", ".npy"])
def test_complex(tmp_path: Path, suffix: str) -> None:
    """The complex volume has the phase of the data; its magnitude is what is written without --complex."""
    images = write_raw(tmp_path / "scan.mrd", 100.0)
    run = make_run(tmp_path / "run", complex=True)

    def volume(*words: str) -> np.ndarray:
        found = call(tmp_path / "scan.mrd", "--run", run, "-o", tmp_path / f"out{suffix}", *words)
        assert found.exit_code == 0, found.output
        if suffix == ".h5":
            with h5py.File(tmp_path / "out.h5") as f:
                return f["reconstruction"][:]
        if suffix == ".npy":
            return np.load(tmp_path / "out.npy")
        stored = nibabel.load(tmp_path / f"out{suffix}")
        return np.asarray(stored.dataobj).transpose(2, 1, 0)[:, ::-1]

    magnitude, found = volume(), volume("--complex")
    assert (magnitude.dtype, found.dtype) == (np.float32, np.complex64)
    np.testing.assert_allclose(np.abs(found), magnitude, rtol=1e-4, atol=1e-4)
    k = writers.centred_fft(images) * columns(40)
    wanted = np.fft.fftshift(np.fft.ifft2(np.fft.ifftshift(k, axes=(-2, -1)), norm="ortho"), axes=(-2, -1))
    np.testing.assert_allclose(found, wanted, atol=1e-3 * np.abs(wanted).max())


def test_complex_needs_a_format_that_stores_it(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", brains(1))
    for suffix in (".dcm", ".png"):
        found = call(tmp_path / "scan.npy", "--run", "tv", "--complex", "-o", tmp_path / f"out{suffix}")
        assert found.exit_code == 3
        assert "stores no complex values: choose .nii.gz, .h5 or .npy" in found.output
