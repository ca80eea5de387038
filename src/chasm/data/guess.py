"""Which dataset a path is, from the files that lie there. Only a few headers are read."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from chasm.data.base import existing
from chasm.data.files import reading
from chasm.data.formats import format_of
from chasm.data.kspace import HDF5, kspace_format
from chasm.data.limits import open_picture
from chasm.data.records import fault

MAX_FILES = 5000  # looked at in a folder: a download may have millions
_PICTURES = (".jpg", ".jpeg", ".bmp", ".webp")
_SEGMENTED = ("_seg.nii", "_seg.nii.gz", "-seg.nii", "-seg.nii.gz")


def guess_dataset(path: str | Path) -> str:
    """Return the name of the dataset that reads a file or folder.

    Raises:
        DataError: when there is nothing that is known.
    """
    root = existing(path)
    files = [root] if root.is_file() else list(islice(_walk(root), MAX_FILES))
    first: dict[str, Path] = {}  # format -> its first file
    for file in files:
        first.setdefault(_kind(file), file)
    for kind, guess in (
        ("hdf5", _hdf5),
        (".cfl", lambda file: "kspace"),
        (".dat", lambda file: "kspace"),
        (".npy", lambda file: "cc359" if kspace_format(file) == "CC359" else "folder"),
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
    raise fault(root, "format", "nothing that is known: say it with --as (chasm data list)")


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


def _npz(file: Path) -> str:
    with reading(file, "archive"), np.load(file, allow_pickle=False) as archive:
        bundled = any(key.endswith(("_images_dx", "_offsets")) or key == "siat_lo" for key in archive.files)
    return "proxy" if bundled else "folder"


def _png(file: Path) -> str:
    with reading(file, "image"), open_picture(file, file) as image:
        return "images" if image.mode in ("RGB", "RGBA", "P") else "folder"
