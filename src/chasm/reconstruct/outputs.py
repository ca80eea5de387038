"""Where a reconstruction goes: the files of every case, decided before anything is written, and their formats."""

import gzip
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from chasm.common.files import unwritable, write_atomic

K = TypeVar("K")
SUFFIXES = (".h5", ".hdf5", ".nii", ".nii.gz", ".png")


@dataclass
class Result:
    """One reconstructed slice in the units of the data: (H, W) each."""

    image: np.ndarray
    zero_filled: np.ndarray
    target: np.ndarray | None = None


@dataclass(frozen=True)
class Place:
    """The files of one case: its volume (a PNG holds one slice: then one for each), a picture and a record."""

    folder: Path
    stem: str
    suffix: str
    slices: int

    @property
    def files(self) -> list[Path]:
        if self.suffix.lower() != ".png" or self.slices == 1:
            return [self.folder / f"{self.stem}{self.suffix}"]
        digits = len(str(self.slices - 1))
        return [self.folder / f"{self.stem}-{i:0{digits}d}{self.suffix}" for i in range(self.slices)]

    @property
    def earlier(self) -> list[Path]:
        """Slices beside ours that a volume with more of them, or another number of digits, left there."""
        if self.suffix.lower() != ".png" or not self.folder.is_dir():
            return []
        slices = re.compile(re.escape(self.stem) + r"-\d+" + re.escape(self.suffix))
        return sorted(f for f in self.folder.iterdir() if slices.fullmatch(f.name) and f not in self.files)

    @property
    def nifti(self) -> bool:
        return self.suffix.lower() in (".nii", ".nii.gz")

    @property
    def picture(self) -> Path:
        return self.folder / f"{self.stem}.side-by-side.png"

    @property
    def record(self) -> Path:
        return self.folder / f"{self.stem}.json"

    @property
    def all(self) -> list[Path]:
        return [*self.files, self.picture, self.record]


def plan(out: Path, slices: Mapping[str, int]) -> dict[str, Place]:
    """A place for every case (with its number of slices); several cases have their names in it, and share no file."""
    if len(slices) > 1:
        return _apart(out, {case: (_plain(case.split(".")[0]), _plain(case), n) for case, n in slices.items()})
    suffix = suffix_of(out)
    return {case: Place(out.parent, out.name[: -len(suffix)], suffix, n) for case, n in slices.items()}


def names(out: Path, inputs: Mapping[Path, str]) -> list[Path]:
    """For every input (with its name) a file like `out` with that name in it; where names are alike, the whole path."""
    wanted = {path: (_plain(name), _plain(str(path.with_name(name))).strip("_"), 1) for path, name in inputs.items()}
    return [place.folder / f"{place.stem}{place.suffix}" for place in _apart(out, wanted).values()]


def _apart(out: Path, wanted: Mapping[K, tuple[str, str, int]]) -> dict[K, Place]:
    """Places that share no file, for (a name, a longer one where others are alike, number of slices)."""
    suffix = suffix_of(out)
    alike = Counter(short.lower() for short, _, _ in wanted.values())  # lower: some file systems know no case
    places: dict[K, Place] = {}
    taken: set[str] = set()
    for key in sorted(wanted, key=lambda k: alike[wanted[k][0].lower()] > 1):  # a name of one's own is kept
        short, long, slices = wanted[key]
        stem = f"{out.name[: -len(suffix)]}-{short if alike[short.lower()] == 1 else long}"
        for i in count(1):
            place = Place(out.parent, stem + (f"-{i}" if i > 1 else ""), suffix, slices)
            files = {file.name.lower() for file in place.all}
            if taken.isdisjoint(files):
                break
        taken |= files
        places[key] = place
    return {key: places[key] for key in wanted}


def spare(places: Iterable[Place], inputs: Iterable[Path]) -> None:
    """Refuse to write over an input, under whatever name, or over a JSON file that is no record of ours."""
    read = {_identity(file) for file in inputs if file.exists()}
    for place in places:
        for file in place.all:
            if file.exists() and _identity(file) in read:
                raise ValueError(f"{file}: is an input, which would be lost: give another name with --out")
        if place.record.exists() and not _is_record(place.record):
            raise ValueError(f"{place.record}: is not from a reconstruction and would be lost: give another --out")


def _identity(file: Path) -> tuple[int, int]:
    status = os.stat(file)  # of the file itself, whatever link leads to it
    return status.st_dev, status.st_ino


def _is_record(file: Path) -> bool:
    try:
        return {"case", "slices", "sampling"} <= set(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return False


def suffix_of(out: Path) -> str:
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if out.name.lower().endswith(suffix) and out.name.lower() != suffix:
            return out.name[-len(suffix) :]
    raise ValueError(f"{out}: expected a name that ends in {', '.join(SUFFIXES)}: the suffix says the format")


def _plain(case: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in case)


def write(place: Place, images: Iterator[np.ndarray], affine: np.ndarray | None = None) -> None:
    """Slices (H, W) into the files of the place, each as it comes; the affine (4, 4) is for NIfTI."""
    if place.nifti:
        _write_nifti(place, images, np.eye(4) if affine is None else affine)
    else:
        (_write_png if place.suffix.lower() == ".png" else _write_h5)(place, images)


def _write_h5(place: Place, images: Iterator[np.ndarray]) -> None:
    """`reconstruction` (slices, H, W) float32, in the units of the input.

    The library lays the file out, and the slices are written into it by hand: where the disk is full, an open HDF5 file
    cannot be closed, and the process crashes.
    """

    def write(unfinished: Path) -> None:
        with open(unfinished, "wb+") as f:
            for i, image in enumerate(images):
                if i == 0:
                    f.seek(_lay_out(unfinished, (place.slices, *image.shape)))
                f.write(np.ascontiguousarray(image, dtype="<f4").tobytes())

    write_atomic(place.files[0], write)


def _lay_out(file: Path, shape: tuple[int, ...]) -> int:
    """An HDF5 file with one float32 array, contiguous and not yet filled; the position of its first value."""
    import h5py

    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_layout(h5py.h5d.CONTIGUOUS)
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plan.set_obj_track_times(False)  # the same volume is the same file, whenever it is written
    try:
        with h5py.File(file, "w") as f:
            space = h5py.h5s.create_simple(shape)
            return int(h5py.h5d.create(f.id, b"reconstruction", h5py.h5t.IEEE_F32LE, space, plan).get_offset())
    except (RuntimeError, OSError) as e:  # the library's text has several lines
        number = getattr(e, "errno", None)
        raise OSError(os.strerror(number) if number else " ".join(str(e).split())) from None


def _write_nifti(place: Place, images: Iterator[np.ndarray], affine: np.ndarray) -> None:
    """Axial slices, written one after another as the format stores them."""
    import nibabel

    @contextmanager
    def opened(unfinished: Path) -> Iterator[Any]:
        if place.suffix.lower() == ".nii.gz":
            with open(unfinished, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as f:
                yield f
        else:
            with open(unfinished, "wb") as f:
                yield f

    def write(unfinished: Path) -> None:
        with opened(unfinished) as f:
            for i, image in enumerate(images):
                if i == 0:
                    header = nibabel.Nifti1Header()
                    header.set_data_dtype(np.float32)
                    header.set_data_shape((image.shape[1], image.shape[0], place.slices))
                    header.set_sform(affine, code=1)
                    header.set_qform(affine, code=1)  # and the voxel sizes
                    header.set_xyzt_units("mm")
                    header["magic"], header["vox_offset"] = b"n+1", 352
                    f.write(header.binaryblock + b"\0\0\0\0")
                # x runs along a row, y from the last row up: as our reader of NIfTI turns them
                f.write(np.ascontiguousarray(image[::-1]).astype(f"{header.endianness}f4").tobytes())

    write_atomic(place.files[0], write)


def _write_png(place: Place, images: Iterator[np.ndarray]) -> None:
    """16-bit grey, 0 to the maximum of the volume: known after its last slice, so they wait in a nameless file."""
    from PIL import Image

    with _named(place.files[0]), _nameless(place.folder) as waiting:
        top = 0.0
        for image in images:
            top = max(top, float(image.max()))
            shape = image.shape
            waiting.write(np.ascontiguousarray(image, dtype=np.float32).tobytes())
        waiting.seek(0)
        for file in place.files:
            values = np.frombuffer(waiting.read(4 * shape[0] * shape[1]), dtype=np.float32).reshape(shape)
            scaled = np.clip(values / (top if top > 0 else 1) * 65535, 0, 65535).round().astype(np.uint16)
            write_atomic(file, lambda p, a=scaled: Image.fromarray(a).save(p, format="PNG"))  # type: ignore[misc]


@contextmanager
def _nameless(folder: Path) -> Iterator[IO[bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        yield file


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """An error of the system names the file that could not be made."""
    try:
        yield
    except OSError as e:
        if e.errno is None:  # is one of ours, and does
            raise
        raise unwritable(file, e) from None


def side_by_side(path: Path, case: str, kept: dict[int, Result]) -> None:
    """Zero-filled, reconstruction and, where there is one, target and error; one row per slice."""
    from matplotlib.figure import Figure

    first = next(iter(kept.values()))
    columns = 2 if first.target is None else 4
    h, w = first.image.shape
    figure = Figure(figsize=(2.8 * columns, 2.8 * len(kept) * h / w + 0.5), layout="constrained", facecolor="white")
    for row, (i, r) in zip(figure.subplots(len(kept), columns, squeeze=False), kept.items(), strict=True):
        top = float((r.image if r.target is None else r.target).max()) or 1.0
        grey: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": top}
        panels = [("zero-filled", r.zero_filled, grey), (f"reconstruction, slice {i}", r.image, grey)]
        if r.target is not None:
            error = np.abs(r.image - r.target)
            panels += [("target", r.target, grey), ("error x 5", 5 * error, {**grey, "cmap": "inferno"})]
        for ax, (title, image, options) in zip(row, panels, strict=True):
            ax.imshow(image, **options)
            ax.set_title(title, fontsize=9)
            ax.set_axis_off()
    figure.suptitle(case, fontsize=10)
    write_atomic(path, lambda p: figure.savefig(p, format="png", dpi=120))
