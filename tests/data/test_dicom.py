"""DICOM series: echoes apart, Enhanced multi-frame files, gaps refused, and what is known of the geometry kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from writers import write_dicom

from chasm.data import DataError, open_dataset
from chasm.data.check import check
from chasm.data.files import reading

GRID: dict[str, Any] = {
    "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
    "PixelSpacing": [0.5, 0.7],
    "SliceThickness": 2.5,
    "SeriesInstanceUID": "1.2",
}


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(1, 4000, (20, 16)) + number


def write_series(folder: Path, places: list[float], numbers: list[int] | None = None, **more: Any) -> None:
    for i, z in enumerate(places):
        place = {"ImagePositionPatient": [-5, -6, z]}
        number = i + 1 if numbers is None else numbers[i]
        write_dicom(folder / f"{len(list(folder.glob('*')))}.dcm", pixels(number), number, **{**GRID, **place, **more})


def write_enhanced(file: Path, places: list[float], echoes: list[float], slopes: tuple[float, ...] = ()) -> np.ndarray:
    """An Enhanced MR file with one frame for each place and echo; returns its values, scaled frame by frame."""
    import pydicom
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import EnhancedMRImageStorage, ExplicitVRLittleEndian, generate_uid

    def sequence(**values: Any) -> list[Dataset]:
        item = Dataset()
        for name, value in values.items():
            setattr(item, name, value)
        return [item]

    stored = np.stack([pixels(i) for i in range(len(places))]).astype("<u2")
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, EnhancedMRImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    data = pydicom.Dataset()
    data.file_meta = meta
    data.SOPClassUID, data.SOPInstanceUID = EnhancedMRImageStorage, meta.MediaStorageSOPInstanceUID
    data.SeriesInstanceUID, data.PatientID = "1.2.3", "somebody"
    data.NumberOfFrames, data.Rows, data.Columns = stored.shape
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 16
    data.HighBit, data.PixelRepresentation, data.PixelData = 15, 0, stored.tobytes()
    shared = Dataset()
    shared.PlaneOrientationSequence = sequence(ImageOrientationPatient=[1, 0, 0, 0, 1, 0])
    shared.PixelMeasuresSequence = sequence(PixelSpacing=[0.5, 0.7], SliceThickness=3)
    data.SharedFunctionalGroupsSequence = [shared]
    frames = []
    for i, (z, echo) in enumerate(zip(places, echoes, strict=True)):
        frame = Dataset()
        frame.PlanePositionSequence = sequence(ImagePositionPatient=[-5, -6, z])
        frame.MREchoSequence = sequence(EffectiveEchoTime=echo)
        if slopes:
            frame.PixelValueTransformationSequence = sequence(RescaleSlope=slopes[i], RescaleIntercept=1)
        frames.append(frame)
    data.PerFrameFunctionalGroupsSequence = frames
    file.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(file, enforce_file_format=True)
    return stored * np.array(slopes)[:, None, None] + 1 if slopes else stored


def test_two_echoes_in_a_series_are_two_cases(tmp_path: Path) -> None:
    """Together they lie in the same places, and their geometry was lost for a false reason."""
    for echo in (80.0, 20.0):
        write_series(tmp_path / "p", [0, 3, 6], [int(echo) + i for i in range(3)], EchoTime=echo)
    data = open_dataset("folder", tmp_path, split="all")
    assert data.cases == ["p/echo1", "p/echo2"]
    for first, case in ((20, "p/echo1"), (80, "p/echo2")):
        rows = data.rows_by_case()[case]
        for k, row in enumerate(rows):
            np.testing.assert_array_equal(data[row].image[0], pixels(first + k))
        assert data.geometry(case).affine.diagonal() == pytest.approx([-0.7, 0.5, 3, 1])
    assert check(tmp_path, "folder").findings == []
    assert len({case.group for case in data.find(tmp_path)[0]}) == 1  # one patient, one split


def test_repeated_volumes_and_views_are_cases(tmp_path: Path) -> None:
    write_series(tmp_path / "dynamic", [0, 3, 0, 3])
    write_series(tmp_path / "localiser", [0, 3])
    write_series(tmp_path / "localiser", [0], [9], ImageOrientationPatient=[0, 1, 0, 0, 0, -1])
    write_series(tmp_path / "complex", [0, 3, 6], ImageType=["ORIGINAL", "PRIMARY", "M"])
    write_series(tmp_path / "complex", [0, 3, 6], [7, 8, 9], ImageType=["ORIGINAL", "PRIMARY", "P"])
    data = open_dataset("folder", tmp_path, split="all")
    counts = {case: len(rows) for case, rows in data.rows_by_case().items()}
    assert counts == {
        "complex/m": 3,
        "complex/p": 3,
        "dynamic/time1": 2,
        "dynamic/time2": 2,
        "localiser/view1": 2,
        "localiser/view2": 1,
    }
    row = data.rows_by_case()["dynamic/time2"][1]
    np.testing.assert_array_equal(data[row].image[0], pixels(4))
    assert all(data.geometry(case) is not None for case in counts)


def test_shuffled_instance_numbers_are_put_in_order_of_place(tmp_path: Path) -> None:
    write_series(tmp_path / "p", [0, 3, 6, 9], [2, 4, 1, 3])  # interleaved
    data = open_dataset("folder", tmp_path, split="all")
    for k, number in enumerate((2, 4, 1, 3)):
        np.testing.assert_array_equal(data[k].image[0], pixels(number))
    assert data.geometry("p").affine[2, 2] == pytest.approx(3)


def test_a_missing_slice_is_refused_with_its_place(tmp_path: Path) -> None:
    write_series(tmp_path / "p", [10, 13, 19, 22])
    data = open_dataset("folder", tmp_path, split="all")
    expected = r"2.dcm: ImagePositionPatient: a slice is missing between 13 and 19 mm: the others are 3 mm apart"
    with pytest.raises(DataError, match=expected):
        data.geometry("p")
    (finding,) = check(tmp_path, "folder").findings
    assert "a slice is missing between 13 and 19 mm" in finding


def test_what_is_known_without_a_position_is_kept(tmp_path: Path) -> None:
    write_series(tmp_path / "p", [0, 3])
    write_dicom(tmp_path / "p" / "9.dcm", pixels(9), 9, **GRID)
    geometry = open_dataset("folder", tmp_path, split="all").geometry("p")
    assert geometry.affine.diagonal() == pytest.approx([0.7, 0.5, 2.5, 1])
    assert "ImagePositionPatient" in geometry.note
    assert "voxel sizes" in geometry.note
    write_dicom(tmp_path / "q" / "0.dcm", pixels(0))
    assert open_dataset("folder", tmp_path, split="all").geometry("q") is None


def test_enhanced_files_are_read_with_their_geometry(tmp_path: Path) -> None:
    """Frames of two echoes, out of order, each with a scale of its own."""
    places, echoes = [3.0, 0, 6, 0, 3, 6], [20.0, 20, 20, 80, 80, 80]
    values = write_enhanced(tmp_path / "scan.dcm", places, echoes, slopes=(1, 2, 3, 4, 5, 6))
    for source in (tmp_path, tmp_path / "scan.dcm"):
        data = open_dataset("folder", source, split="all")
        assert data.cases == ["scan.dcm/echo1", "scan.dcm/echo2"]
        rows = data.rows_by_case()
        for case, frames in (("scan.dcm/echo1", (1, 0, 2)), ("scan.dcm/echo2", (3, 4, 5))):
            for row, frame in zip(rows[case], frames, strict=True):
                np.testing.assert_allclose(data[row].image[0], values[frame])
            geometry = data.geometry(case)
            assert geometry.affine.diagonal() == pytest.approx([-0.7, 0.5, 3, 1])
            assert geometry.affine[:3, 3] == pytest.approx([5, 6 - 19 * 0.5, 0])
    assert check(tmp_path, "folder").findings == []
    write_enhanced(tmp_path / "scan.dcm", [0, 3, 9], [20.0] * 3)
    assert "a slice is missing between 3 and 9 mm" in check(tmp_path, "folder").findings[0]


def test_an_enhanced_file_of_one_volume_keeps_its_name(tmp_path: Path) -> None:
    write_enhanced(tmp_path / "p" / "scan.dcm", [0, 3, 6], [20.0] * 3)
    assert open_dataset("folder", tmp_path, split="all").cases == ["p"]


def test_frames_without_places_of_their_own_are_one_volume(tmp_path: Path) -> None:
    """Multi-frame files older than Enhanced MR give one position, that of the first frame."""
    values = np.stack([pixels(i) for i in range(3)])
    frames = {**GRID, "NumberOfFrames": 3, "ImagePositionPatient": [0, 0, 0], "Rows": 20, "Columns": 16}
    write_dicom(tmp_path / "a.dcm", values[0], **frames, PixelData=values.astype("<u2").tobytes())
    data = open_dataset("folder", tmp_path, split="all")
    assert data.cases == ["a.dcm"]
    np.testing.assert_array_equal(data[2].image[0], values[2])
    assert "ImagePositionPatient" in data.geometry("a.dcm").note


def test_a_dicomdir_and_reports_are_no_images(tmp_path: Path) -> None:
    import pydicom

    write_series(tmp_path / "IMAGES", [0, 3])
    report = pydicom.dcmread(tmp_path / "IMAGES" / "0.dcm")
    for name in ("Rows", "Columns", "PixelData"):
        delattr(report, name)
    report.save_as(tmp_path / "IMAGES" / "REPORT")
    report.save_as(tmp_path / "DICOMDIR")
    assert open_dataset("folder", tmp_path, split="all").cases == ["IMAGES"]
    assert check(tmp_path, "folder").findings == []


def test_an_error_of_several_lines_is_not_cut(tmp_path: Path) -> None:
    """pydicom names the packages that a compressed file needs in the lines that were left out."""
    needed = "Unable to decompress because all plugins are missing dependencies:\n\tgdcm - requires gdcm>=3.0.10"
    with pytest.raises(DataError, match=r"dependencies: gdcm - requires gdcm>=3.0.10"), reading(tmp_path / "a.dcm"):
        raise RuntimeError(needed)


@pytest.mark.parametrize(
    "odd", [{"PixelSpacing": [0, 0]}, {"PixelSpacing": "0.5"}, {"ImageOrientationPatient": [0] * 6}]
)
def test_a_geometry_that_cannot_be_is_as_good_as_none(odd: dict[str, Any], tmp_path: Path) -> None:
    write_series(tmp_path, [0, 1], **odd)
    data = open_dataset("folder", tmp_path, split="all")
    assert len(data) == 2
    geometry = data.geometry(data.cases[0])
    assert geometry is None or np.linalg.det(geometry.affine) != 0


def test_empty_rescale_values_change_nothing(tmp_path: Path) -> None:
    write_dicom(tmp_path / "a.dcm", pixels(1), RescaleSlope=None, RescaleIntercept=None)
    image = open_dataset("folder", tmp_path, split="all")[0].image
    np.testing.assert_array_equal(image[0], pixels(1))
