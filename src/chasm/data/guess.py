"""Guess the dataset of a path from its files. Only a few headers and one array are read."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from chasm.data.arrays import KEYS
from chasm.data.base import existing
from chasm.data.files import open_npy, reading
from chasm.data.filled import looks_like_kspace
from chasm.data.formats import format_of
from chasm.data.kspace import HDF5, kspace_format
from chasm.data.limits import open_picture, read_npz
from chasm.data.records import fault

MAX_FILES = 5000  # looked at in a folder: a download may have millions
_PICTURES = (".jpg", ".jpeg", ".bmp", ".webp")
_SEGMENTED = ("_seg.nii", "_seg.nii.gz", "-seg.nii", "-seg.nii.gz")


def guess_dataset(path: str | Path) -> str:
    """Return the name of the dataset that reads a file or folder."""
    root = existing(path)
    files = [root] if root.is_file() else list(islice(_walk(root), MAX_FILES))
    first: dict[str, Path] = {}  # format -> its first file
    for file in files:
        first.setdefault(_kind(file), file)
    for kind, guess in (
        ("hdf5", _hdf5),
        (".cfl", lambda file: "kspace"),
        (".dat", lambda file: "kspace"),
        (".npy", _npy),
        (".npz", _npz),
        (".nii", lambda file: "brats" if any(f.name.endswith(_SEGMENTED) for f in files) else "folder"),
        (".dcm", lambda file: "folder"),
        ("picture", lambda file: "images"),
        (".tif", lambda file: "folder"),
        (".png", _png),
    ):
        name = guess(first[kind]) if kind in first else ""
        if name:
            return name
    raise fault(root, "format", "no known format: name it with --as (chasm data list)")


def _walk(root: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(root):
        folders.sort()
        yield from (Path(here, name) for name in sorted(names) if not name.startswith("."))


def _kind(file: Path) -> str:
    suffix = file.suffix.lower()
    if suffix in HDF5:
        return "hdf5"
    if suffix in (".cfl", ".dat"):
        return suffix
    return "picture" if suffix in _PICTURES else format_of(file)


def _hdf5(file: Path) -> str:
    names = {"ISMRMRD": "kspace", "fastMRI": "fastmri", "CC359": "cc359"}
    return names.get(kspace_format(file), "")


def _npy(file: Path) -> str:
    if kspace_format(file) == "CC359":
        return "cc359"
    return "kspace" if _holds_kspace(open_npy(file)) else "folder"


def _npz(file: Path) -> str:
    with reading(file, "archive"), np.load(file, allow_pickle=False) as archive:
        if any(key.endswith(("_images_dx", "_offsets")) or key == "siat_lo" for key in archive.files):
            return "proxy"
        key = next((key for key in KEYS if key in archive.files), None)
        return "kspace" if key is not None and _holds_kspace(read_npz(file, archive, key)) else "folder"


def _holds_kspace(array: np.ndarray) -> bool:
    """Return True if complex values look like k-space in the middle of the first axis, or have four dimensions."""
    if array.dtype.kind != "c" or array.ndim < 2 or not array.size:
        return False
    middle = array if array.ndim == 2 else array[len(array) // 2]
    return array.ndim > 3 or looks_like_kspace(torch.from_numpy(np.array(middle, dtype=np.complex64)))


def _png(file: Path) -> str:
    with reading(file, "image"), open_picture(file, file) as image:
        return "images" if image.mode in ("RGB", "RGBA", "P") else "folder"
