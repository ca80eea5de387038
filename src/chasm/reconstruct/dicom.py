"""A volume as a DICOM series that a PACS takes: one MR image for each slice.

Patient, study and scanner are those of the source, if it names them. Series and images have new UIDs and the type
DERIVED\\SECONDARY. Values are whole numbers without a rescale slope, which viewers of MR images do not expect. They are
in the units of the data if the largest value has a usual size. Otherwise they are scaled, and the derivation
description gives the unit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

import chasm
from chasm.common.files import write_atomic
from chasm.data.records import Geometry

MR_IMAGE = "1.2.840.10008.5.1.4.1.1.4"
LITTLE_ENDIAN = "1.2.840.10008.1.2.1"  # explicit VR
MIN_TOP, MAX_TOP = 1000, 65535  # the largest value of a volume that is written in the units of the data
SCALED_TOP = 4095  # the largest value of others
MAX_SHEAR = 1e-3  # cosine between rows and columns; DICOM allows only right angles
_EMPTY = (  # attributes that must be there, even if they are unknown
    "PatientBirthDate PatientSex StudyDate StudyTime ReferringPhysicianName StudyID AccessionNumber Manufacturer "
    "ScanOptions MRAcquisitionType RepetitionTime EchoTime EchoTrainLength PatientPosition PositionReferenceIndicator"
)


@dataclass
class Series:
    """What the images of a series share.

    Attributes:
        case: name of the volume; also the name of the patient if the source names none.
        description: description of the series.
        derivation: how the images were made, in words.
        source: attributes of the source, as `chasm.data.identity.dicom_attributes` returns them.
        geometry: where the slices lie.
    """

    case: str
    description: str
    derivation: str
    source: Mapping[str, Any]
    geometry: Geometry
    made: datetime = field(default_factory=datetime.now)

    @property
    def notes(self) -> list[str]:
        """One line for each value that is not known or cannot be stored."""
        lines = []
        if "PatientID" not in self.source:
            lines.append(f"the file names no patient: PatientID {self.case[:64]!r} written")
        columns, rows = (v / np.linalg.norm(v) for v in self.geometry.affine[:3, :2].T)
        if abs(columns @ rows) > MAX_SHEAR:
            lines.append("rows and columns are not at right angles, which DICOM requires: written as if they were")
        return lines


def write_series(series: Series, slices: Iterator[tuple[Path, np.ndarray, float]]) -> None:
    """Write one file for each slice.

    Args:
        series: what they share.
        slices: the file, the values (H, W), and the maximum of the volume.
    """
    import pydicom
    from pydicom.uid import generate_uid

    shared = _shared(series)
    for i, (file, values, top) in enumerate(slices):
        data = pydicom.Dataset()
        data.update(shared)
        data.SOPInstanceUID = generate_uid(prefix=None)
        data.InstanceNumber = i + 1
        _set_place(data, series.geometry, values.shape, i)
        _set_pixels(data, values, _unit(top))
        if _unit(top) != 1:
            data.DerivationDescription = f"{series.derivation[:960]}; in units of {_unit(top):.6g}"
        meta = pydicom.dataset.FileMetaDataset()
        meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = MR_IMAGE, data.SOPInstanceUID
        meta.TransferSyntaxUID = LITTLE_ENDIAN
        data.file_meta = meta
        write_atomic(file, lambda partial, data=data: data.save_as(partial, enforce_file_format=True))  # type: ignore[misc]


def _shared(series: Series) -> Any:
    """Return the attributes that all images of the series have in common."""
    import pydicom
    from pydicom.uid import generate_uid

    data, source, made = pydicom.Dataset(), series.source, series.made
    data.SpecificCharacterSet = "ISO_IR 192"
    for name in _EMPTY.split():
        setattr(data, name, "" if name not in ("RepetitionTime", "EchoTime", "EchoTrainLength") else None)
    data.PatientName, data.PatientID, data.StudyID = f"{series.case[:63]}^", series.case[:64], "1"
    data.ScanningSequence, data.SequenceVariant = "RM", "NONE"  # research mode
    data.StudyInstanceUID, data.FrameOfReferenceUID = generate_uid(prefix=None), generate_uid(prefix=None)
    for name, value in source.items():
        setattr(data, name, value)
    if "BodyPartExamined" not in source and "Laterality" not in source:
        data.Laterality = ""
    if "InversionTime" not in source and "IR" in str(data.ScanningSequence):
        data.InversionTime = None
    data.SOPClassUID, data.Modality = MR_IMAGE, "MR"
    data.ImageType = ["DERIVED", "SECONDARY", "OTHER"]
    data.SeriesInstanceUID = generate_uid(prefix=None)
    data.SeriesNumber = int(source.get("SeriesNumber") or 0) + 1000
    before = str(source.get("SeriesDescription") or source.get("ProtocolName") or "")
    data.SeriesDescription = " ".join(filter(None, (before[:30], series.description)))[:64]
    data.DerivationDescription = series.derivation[:1024]
    data.SoftwareVersions = f"chasm {chasm.__version__}"
    for prefix in ("Series", "Content", "InstanceCreation"):
        setattr(data, f"{prefix}Date", made.strftime("%Y%m%d"))
        setattr(data, f"{prefix}Time", made.strftime("%H%M%S"))
    if not data.StudyDate:
        data.StudyDate, data.StudyTime = data.SeriesDate, data.SeriesTime
    return data


def _set_place(data: Any, geometry: Geometry, shape: tuple[int, ...], i: int) -> None:
    affine = geometry.affine.copy()
    affine[:2] *= -1  # DICOM counts x to the left and y to the back
    right, up, step = affine[:3, :3].T
    normal = np.cross(right, -up)
    sizes = [float(np.linalg.norm(v)) for v in (up, right)]
    place = affine @ [0, shape[0] - 1, i, 1]  # of the first pixel, in the upper row
    data.PixelSpacing = [_number(v) for v in sizes]
    data.ImageOrientationPatient = [_number(v) for v in (*(right / sizes[1]), *(-up / sizes[0]))]
    data.ImagePositionPatient = [_number(v) for v in place[:3]]
    data.SliceThickness = data.SpacingBetweenSlices = _number(float(np.linalg.norm(step)))
    data.SliceLocation = _number(float(place[:3] @ normal / np.linalg.norm(normal)))


def _unit(top: float) -> float:
    """Return the value of 1 in the file, in the units of the data."""
    return 1.0 if MIN_TOP <= top <= MAX_TOP or top <= 0 else top / SCALED_TOP


def _set_pixels(data: Any, values: np.ndarray, unit: float) -> None:
    pixels = np.clip(np.round(values / unit), 0, MAX_TOP).astype("<u2")
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.Rows, data.Columns = pixels.shape
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 16, 15, 0
    width = max(1, round(float(np.percentile(pixels, 99.7))))
    data.WindowCenter, data.WindowWidth = _number(width / 2), str(width)
    data.PixelData = pixels.tobytes()


def _number(value: float) -> str:
    """Return a decimal string of DICOM, which has at most 16 characters.

    >>> _number(-1.2345678901234567e-300), _number(0.5)
    ('-1.23456789e-300', '0.5')
    """
    for digits in range(16, 0, -1):
        text = f"{value + 0.0:.{digits}g}"
        if len(text) <= 16:
            return text
    raise ValueError(f"{value!r} does not fit a decimal string")
