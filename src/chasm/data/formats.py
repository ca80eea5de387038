"""Files of magnitude images: .npy, .npz, .png, .tif, .nii(.gz) and DICOM, as arrays (slices, H, W)."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chasm.data.dicom import read_pixels
from chasm.data.files import open_npy, reading
from chasm.data.limits import open_picture, read_npz, read_tiff
from chasm.data.nifti import open_nifti
from chasm.data.records import fault

_SUFFIXES = (".npy", ".npz", ".png", ".tif", ".tiff", ".nii", ".nii.gz", ".dcm", ".ima")
FORMATS = f"{' '.join(_SUFFIXES)} or DICOM"
_LABEL_KEYS = ("label", "labels", "mask", "seg")


@dataclass(frozen=True)
class ReadOptions:
    """The part to read of files that hold several planes or volumes."""

    arrays: tuple[str, ...] = ()  # the names that images may have in an .npz, first choice first
    plane: str | None = None  # plane to cut NIfTI in: "axial", "coronal" or "sagittal"; None for the acquired plane
    volume: int | None = None  # number of the volume in a 4-D NIfTI file, from 0


@dataclass(frozen=True)
class FileImages:
    """The content of a file."""

    images: np.ndarray  # (slices, H, W), real or complex
    labels: np.ndarray | None = None  # integers of the same shape, if the file has any
    note: str = ""  # plane of the slices, if the file leaves a choice


def format_of(file: Path) -> str:
    """Return the suffix that stands for a file's format, or "" if it is none that can be read.

    The name decides; a file without a suffix, as DICOM exports often are, is opened to look for a DICOM preamble.

    >>> format_of(Path("a.NII.GZ")), format_of(Path("a.txt"))
    ('.nii', '')
    """
    name = file.name.lower()
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return {".tiff": ".tif", ".nii.gz": ".nii", ".ima": ".dcm"}.get(suffix, suffix)
    if name != "dicomdir" and (not file.suffix or file.suffix[1:].isdigit()) and file.is_file():
        with open(file, "rb") as f:
            return ".dcm" if f.read(132)[128:] == b"DICM" else ""
    return ""


def is_readable(file: Path) -> bool:
    """Return True for a file in one of the formats; hidden files are left out."""
    return file.is_file() and not file.name.startswith(".") and bool(format_of(file))


def is_single_image(file: Path) -> bool:
    """Return True for one picture in a format that does not say what volume it is a slice of (PNG, TIFF)."""
    return format_of(file) in (".png", ".tif") and count_images(file, ReadOptions()) == 1


def sorted_by_numbers(files: list[Path]) -> list[Path]:
    """Return files sorted by the numbers in their names: 2.png comes before 10.png."""

    def natural(file: Path) -> list[tuple[int, int | str]]:
        return [(0, int(w)) if w.isdigit() else (1, w) for w in re.findall(r"\d+|\D+", file.name)]

    return sorted(files, key=natural)


def count_images(file: Path, options: ReadOptions) -> int:
    """Return how many images a file holds, from its header if it has one."""
    suffix = format_of(file)
    if suffix == ".npy":
        array = open_npy(file)
        if array.ndim < 2:
            raise fault(file, "array", f"expected (H,W) or (slices,H,W), got shape {array.shape}")
        return 1 if array.ndim == 2 else len(array)
    if suffix == ".png":
        return 1
    if suffix == ".nii":
        return open_nifti(file, options.plane, options.volume).shape[0]
    return len(load_images(file, options).images)


def load_images(file: Path, options: ReadOptions) -> FileImages:
    """Read a file of magnitude images."""
    suffix, labels, note = format_of(file), None, ""
    if suffix == ".npy":
        images = open_npy(file)
    elif suffix == ".npz":
        images, labels = _npz(file, options.arrays)
    elif suffix == ".png":
        images = _png(file)
    elif suffix == ".tif":
        with reading(file, "image"):
            images = read_tiff(file)
    elif suffix == ".nii":
        volume = open_nifti(file, options.plane, options.volume)
        images, note = volume.read(), f"{volume.plane} slices of NIfTI"
    else:
        images = read_pixels(file)
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


def _npz(file: Path, arrays: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    with reading(file, "archive"), np.load(file, allow_pickle=False) as archive:
        image = next((k for k in arrays if k in archive.files), None)
        if image is None:
            present = ", ".join(archive.files) or "nothing"
            raise fault(file, arrays[0], f"missing; the file has {present}; name the array {arrays[0]!r}")
        label = next((k for k in _LABEL_KEYS if k in archive.files), None)
        return read_npz(file, archive, image), None if label is None else read_npz(file, archive, label)


def _png(file: Path) -> np.ndarray:
    with reading(file, "image"), open_picture(file, file) as image:
        grey = image.mode in ("L", "I", "F") or image.mode.startswith("I;16")
        return np.asarray(image if grey else image.convert("L"))
