"""Files of magnitude images: .npy, .npz, .png, .tif, .nii(.gz) and DICOM, as arrays (slices, H, W)."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chasm.data.files import open_npy, reading
from chasm.data.nifti import open_nifti
from chasm.data.records import DataError, Geometry, fault

_SUFFIXES = (".npy", ".npz", ".png", ".tif", ".tiff", ".nii", ".nii.gz", ".dcm", ".ima")
FORMATS = f"{' '.join(_SUFFIXES)} or DICOM"
_LABEL_KEYS = ("label", "labels", "mask", "seg")


@dataclass(frozen=True)
class ReadOptions:
    """What to take from files that hold more than one thing.

    Attributes:
        arrays: the names that images may have in an .npz, first choice first.
        plane: how NIfTI is cut: "axial", "coronal" or "sagittal"; None: in the acquired plane.
        volume: which volume of a 4-D NIfTI file, counted from 0.
    """

    arrays: tuple[str, ...] = ()
    plane: str | None = None
    volume: int | None = None


@dataclass(frozen=True)
class FileImages:
    """The content of a file.

    Attributes:
        images: (slices, H, W), real or complex.
        labels: integers of the same shape, if the file has any.
        note: how the slices were cut, if the file leaves a choice.
    """

    images: np.ndarray
    labels: np.ndarray | None = None
    note: str = ""


def format_of(file: Path) -> str:
    """Return the suffix that stands for a file's format, or "" if it is none that can be read.

    The name decides; a file without a suffix, as DICOM exports often are, is opened to look for a DICOM preamble.

    >>> format_of(Path("a.NII.GZ")), format_of(Path("a.txt"))
    ('.nii', '')
    """
    name = file.name.lower()
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return {".tiff": ".tif", ".nii.gz": ".nii", ".ima": ".dcm"}.get(suffix, suffix)
    if not file.suffix or file.suffix[1:].isdigit():
        with open(file, "rb") as f:
            return ".dcm" if f.read(132)[128:] == b"DICM" else ""
    return ""


def is_readable(file: Path) -> bool:
    """Return True for a file in one of the formats; hidden files are left out."""
    return file.is_file() and not file.name.startswith(".") and bool(format_of(file))


def is_single_image(file: Path) -> bool:
    """Return True for one picture in a format that does not say what volume it is a slice of (PNG, TIFF)."""
    return format_of(file) in (".png", ".tif") and count_images(file, ReadOptions()) == 1


def in_order(files: list[Path]) -> list[Path]:
    """Return the files of a case sorted: by the numbers in their names, or DICOM by instance number."""

    def natural(file: Path) -> list[tuple[int, int | str]]:
        return [(0, int(w)) if w.isdigit() else (1, w) for w in re.findall(r"\d+|\D+", file.name)]

    files = sorted(files, key=natural)
    if len(files) > 1 and all(format_of(f) == ".dcm" for f in files):
        files.sort(key=_instance_number)
    return files


def series_of(file: Path) -> str:
    """Return the UID that the files of a DICOM series share, or "" for other files."""
    try:
        return str(_dicom(file, pixels=False).get("SeriesInstanceUID") or "") if format_of(file) == ".dcm" else ""
    except DataError:  # reading the file reports it
        return ""


def patient_of(file: Path) -> str:
    """Return a name for the patient of a DICOM file, or "" if it does not say.

    The name is made from a hash of the PatientID, so that no report and no manifest shows the ID itself.
    """
    try:
        patient = str(_dicom(file, pixels=False).get("PatientID") or "").strip() if format_of(file) == ".dcm" else ""
    except DataError:  # reading the file reports it
        return ""
    return f"patient {hashlib.sha256(patient.encode()).hexdigest()[:8]}" if patient else ""


def count_images(file: Path, options: ReadOptions) -> int:
    """Return how many images a file holds, from its header if it has one."""
    suffix = format_of(file)
    if suffix == ".npy":
        array = open_npy(file)
        if array.ndim < 2:
            raise fault(file, "array", f"expected (H,W) or (slices,H,W), got shape {array.shape}")
        return 1 if array.ndim == 2 else len(array)
    if suffix == ".dcm":
        return int(_dicom(file, pixels=False).get("NumberOfFrames") or 1)
    if suffix == ".png":
        return 1
    if suffix == ".nii":
        return open_nifti(file, options.plane, options.volume).shape[0]
    return len(load_images(file, options).images)


def load_images(file: Path, options: ReadOptions) -> FileImages:
    """Read a file.

    Raises:
        DataError: when it cannot be read, or holds something else than images.
    """
    suffix, labels, note = format_of(file), None, ""
    if suffix == ".npy":
        images = open_npy(file)
    elif suffix == ".npz":
        images, labels = _npz(file, options.arrays)
    elif suffix == ".png":
        images = _png(file)
    elif suffix == ".tif":
        import tifffile

        with reading(file, "image"):
            images = tifffile.imread(file)
    elif suffix == ".nii":
        volume = open_nifti(file, options.plane, options.volume)
        images, note = volume.read(), f"{volume.plane} slices of NIfTI"
    else:
        images = _dicom_frames(file)
    images = images[None] if images.ndim == 2 else images
    if images.ndim != 3 or 0 in images.shape or images.dtype.kind not in "buifc":
        raise fault(file, "image", f"expected (H,W) or (slices,H,W) numbers, got {images.shape} {images.dtype}")
    if suffix in (".npy", ".npz", ".tif") and len(images) > 1 and images.shape[-1] in (2, 3, 4):
        raise fault(file, "image", f"shape {images.shape} looks like colours last: expected (slices,H,W)")
    if labels is not None:
        labels = labels[None] if labels.ndim == 2 else labels
        if labels.shape != images.shape or labels.dtype.kind not in "bui":
            raise fault(file, "label", f"expected integers {images.shape}, got {labels.shape} {labels.dtype}")
    return FileImages(images, labels, note)


def geometry_of(files: tuple[Path, ...], options: ReadOptions) -> Geometry | None:
    """Return where the images of a case lie, or None if the files do not say.

    A NIfTI file says so, and a DICOM series with orientation, position and spacing.
    """
    if len(files) == 1 and format_of(files[0]) == ".nii":
        return open_nifti(files[0], options.plane, options.volume).geometry
    affine = _dicom_affine(files) if all(format_of(file) == ".dcm" for file in files) else None
    return None if affine is None else Geometry(affine)


def _npz(file: Path, arrays: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    with reading(file, "archive"), np.load(file, allow_pickle=False) as archive:
        image = next((k for k in arrays if k in archive.files), None)
        if image is None:
            present = ", ".join(archive.files) or "nothing"
            raise fault(file, arrays[0], f"missing; the file has {present}; name the array {arrays[0]!r}")
        label = next((k for k in _LABEL_KEYS if k in archive.files), None)
        return archive[image], None if label is None else archive[label]


def _png(file: Path) -> np.ndarray:
    from PIL import Image

    with reading(file, "image"), Image.open(file) as image:
        grey = image.mode in ("L", "I", "F") or image.mode.startswith("I;16")
        return np.asarray(image if grey else image.convert("L"))


# --- DICOM --------------------------------------------------------------------------------------------------------


def _dicom(file: Path, pixels: bool = True) -> Any:
    import pydicom

    with reading(file, "header"):
        return pydicom.dcmread(file, stop_before_pixels=not pixels)


def _instance_number(file: Path) -> int:
    try:
        return int(_dicom(file, pixels=False).get("InstanceNumber") or 0)
    except DataError:  # reading the file reports it
        return 0


def _dicom_frames(file: Path) -> np.ndarray:
    data = _dicom(file)
    with reading(file, "PixelData"):
        pixels = data.pixel_array.astype(np.float32)
    if data.get("SamplesPerPixel", 1) != 1:
        raise fault(file, "SamplesPerPixel", f"expected 1 (grey), got {data.SamplesPerPixel}")
    pixels = pixels * float(data.get("RescaleSlope", 1)) + float(data.get("RescaleIntercept", 0))
    inverted = data.get("PhotometricInterpretation") == "MONOCHROME1"  # small values are shown bright
    return pixels.max() - pixels if inverted else pixels


def _dicom_affine(files: tuple[Path, ...]) -> np.ndarray | None:
    headers = [_dicom(file, pixels=False) for file in files]
    first = headers[0]
    geometry = [
        (h.get("ImageOrientationPatient"), h.get("ImagePositionPatient"), h.get("PixelSpacing")) for h in headers
    ]
    same_grid = all((g[0], g[2]) == (geometry[0][0], geometry[0][2]) for g in geometry)
    if not same_grid or any(None in g for g in geometry) or int(first.get("NumberOfFrames") or 1) > 1:
        return None
    columns, rows = np.array(first.ImageOrientationPatient, float).reshape(2, 3)  # directions in which they count up
    between_rows, between_columns = (float(v) for v in first.PixelSpacing)
    places = np.array([position for _, position, _ in geometry], float)
    if len(files) > 1:
        step = (places[-1] - places[0]) / (len(files) - 1)
        even = np.abs(places - places[0] - np.arange(len(files))[:, None] * step).max() <= 0.01 * np.linalg.norm(step)
        if not even or not step.any():  # slices are missing, or all lie in one place: there is no grid
            return None
    else:
        step = np.cross(columns, rows) * float(first.get("SpacingBetweenSlices") or first.get("SliceThickness") or 1)
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1], affine[:3, 2] = columns * between_columns, -rows * between_rows, step
    affine[:3, 3] = places[0] + (first.Rows - 1) * between_rows * rows  # the lowest row
    affine[:2] *= -1  # DICOM counts x to the left and y to the back
    return affine
