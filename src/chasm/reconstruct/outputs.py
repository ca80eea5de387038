"""Decide the files of every case before anything is written."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TypeVar

from chasm.common.files import read_json, require_replaceable

K = TypeVar("K")
PAGE_SUFFIXES = (".html", ".htm")
PAGE_MARK = b'<meta name="generator" content="chasm reconstruct">'  # near the top of every page
SUFFIXES = (".h5", ".hdf5", ".nii", ".nii.gz", ".npy", ".dcm", ".png")


@dataclass(frozen=True)
class OutputFiles:
    """The files of one case: its volume, a picture and a record. A PNG or DICOM file holds one slice.

    Attributes:
        folder: folder of the files.
        stem: beginning of their names.
        suffix: suffix of the volume, which sets the format.
        slices: number of slices.
        page: the page for a browser, if one is asked for.
        has_map: whether there is an uncertainty map.
    """

    folder: Path
    stem: str
    suffix: str
    slices: int
    page: Path | None = None
    has_map: bool = False

    @property
    def volume(self) -> list[Path]:
        """The file of the volume, or one file for each slice."""
        if not self.is_series or self.slices == 1:
            return [self.folder / f"{self.stem}{self.suffix}"]
        digits = len(str(self.slices - 1))
        return [self.folder / f"{self.stem}-{i:0{digits}d}{self.suffix}" for i in range(self.slices)]

    @property
    def is_series(self) -> bool:
        """True if the format has one file for each slice."""
        return self.suffix.lower() in (".png", ".dcm")

    @property
    def is_dicom(self) -> bool:
        """True if the volume is a DICOM series."""
        return self.suffix.lower() == ".dcm"

    @property
    def has_geometry(self) -> bool:
        """True if the format stores where the volume lies in space."""
        return self.suffix.lower() in (".nii", ".nii.gz", ".dcm")

    @property
    def picture(self) -> Path:
        """The side-by-side picture."""
        return self.folder / f"{self.stem}.side-by-side.png"

    @property
    def uncertainty(self) -> "OutputFiles":
        """The file of the uncertainty map: in the format of the volume, or as NIfTI or HDF5 beside slices in files."""
        suffix = {".dcm": ".nii.gz", ".png": ".h5"}.get(self.suffix.lower(), self.suffix)
        return OutputFiles(self.folder, f"{self.stem}.uncertainty", suffix, self.slices)

    @property
    def record(self) -> Path:
        """The JSON record with the scores."""
        return self.folder / f"{self.stem}.json"

    @property
    def all(self) -> list[Path]:
        """Every file of the case."""
        pages = [] if self.page is None else [self.page]
        return [*self.volume, self.picture, self.record, *pages, *(self.uncertainty.volume if self.has_map else [])]

    def from_earlier_calls(self) -> list[Path]:
        """Return files of slices that an earlier volume of this name left, with more slices or other digits."""
        if not self.is_series or not self.folder.is_dir():
            return []
        slices = re.compile(re.escape(self.stem) + r"-\d+" + re.escape(self.suffix))
        return sorted(f for f in self.folder.iterdir() if slices.fullmatch(f.name) and f not in self.volume)


def plan_outputs(out: Path, slices: Mapping[str, int]) -> dict[str, OutputFiles]:
    """Return the files of every case of one input.

    Args:
        out: the name of the volume. With several cases, the name of each is added to it.
        slices: case -> number of its slices.

    Returns:
        The files of each case. No two cases share one.

    Example:
        >>> [str(f.volume[0]) for f in plan_outputs(Path("r.nii"), {"a": 9, "b": 9}).values()]
        ['r-a.nii', 'r-b.nii']
    """
    if len(slices) > 1:
        return _distinct(out, {case: (_plain(case.split(".")[0]), _plain(case), n) for case, n in slices.items()})
    suffix = suffix_of(out)
    return {case: OutputFiles(out.parent, out.name[: -len(suffix)], suffix, n) for case, n in slices.items()}


def plan_pages(report: Path, outputs: Mapping[str, OutputFiles], several: bool) -> dict[str, OutputFiles]:
    """Return the files with a page for every case.

    Args:
        report: the name of the page. With several cases, the name of the volume of each is added to it, or used
            instead if it begins with that name.
        outputs: case -> its files.
        several: whether there are other inputs.
    """
    if report.suffix.lower() not in PAGE_SUFFIXES:
        raise ValueError(f"{report}: expected a name that ends in .html")
    if not several and len(outputs) == 1:
        return {case: replace(files, page=report) for case, files in outputs.items()}
    stems = {
        case: files.stem if files.stem.startswith(f"{report.stem}-") else f"{report.stem}-{files.stem}"
        for case, files in outputs.items()
    }
    return {case: replace(files, page=report.with_stem(stems[case])) for case, files in outputs.items()}


def name_outputs(out: Path, inputs: Mapping[Path, str]) -> list[Path]:
    """Return one output name for each of several inputs: `out` with the name of the input added.

    Args:
        out: the name that all share.
        inputs: path -> its name. If two names are equal, the whole path is used.
    """
    wanted = {path: (_plain(name), _plain(str(path.with_name(name))).strip("_"), 1) for path, name in inputs.items()}
    return [files.folder / f"{files.stem}{files.suffix}" for files in _distinct(out, wanted).values()]


def _distinct(out: Path, wanted: Mapping[K, tuple[str, str, int]]) -> dict[K, OutputFiles]:
    """Return separate files for each (name, longer name in case others are equal, number of slices)."""
    suffix = suffix_of(out)
    uses = Counter(short.lower() for short, _, _ in wanted.values())  # some file systems ignore case
    outputs: dict[K, OutputFiles] = {}
    names_in_use: set[str] = set()
    for key in sorted(wanted, key=lambda k: uses[wanted[k][0].lower()] > 1):  # unique names come first and stay short
        short, long, slices = wanted[key]
        stem = f"{out.name[: -len(suffix)]}-{short if uses[short.lower()] == 1 else long}"
        for i in count(1):
            files = OutputFiles(out.parent, stem + (f"-{i}" if i > 1 else ""), suffix, slices)
            names = {file.name.lower() for file in files.all}
            if names_in_use.isdisjoint(names):
                break
        names_in_use |= names
        outputs[key] = files
    return {key: outputs[key] for key in wanted}


def refuse_to_overwrite(outputs: Iterable[OutputFiles], inputs: Iterable[Path], force: bool = False) -> None:
    """Raise a ValueError if an output would replace an input, or a file that no earlier reconstruction wrote.

    Args:
        outputs: what will be written.
        inputs: what is read. A link to an input counts as the input.
        force: whether files that are no inputs may be replaced even if chasm did not write them.
    """
    read = {_identity(file) for file in inputs if file.exists()}
    for files in outputs:
        for file in files.all:
            if file.exists() and _identity(file) in read:
                raise ValueError(f"{file}: is an input, which would be lost: give another name with --out")
        earlier = _names_in_record(files.record)
        for file in files.all:
            ours = lambda path, earlier=earlier: path.name in earlier or _is_page(path)  # noqa: E731
            require_replaceable(file, ours, force)


def suffix_of(out: Path) -> str:
    """Return the suffix of an output name, which sets the format.

    >>> suffix_of(Path("scan.v2.nii.gz"))
    '.nii.gz'
    """
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if out.name.lower().endswith(suffix) and out.name.lower() != suffix:
            return out.name[-len(suffix) :]
    raise ValueError(f"{out}: expected a name that ends in {', '.join(SUFFIXES)}: the suffix says the format")


def _identity(file: Path) -> tuple[int, int]:
    status = os.stat(file)  # follows links to the file itself
    return status.st_dev, status.st_ino


def _names_in_record(record: Path) -> set[str]:
    """Return the names of the files that an earlier reconstruction wrote, its record included."""
    try:
        return {*map(str, read_json(record)["files"]), record.name}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _is_page(file: Path) -> bool:
    """Return True for a page that an earlier reconstruction wrote, of this volume or of another."""
    if file.suffix.lower() not in PAGE_SUFFIXES:
        return False
    with open(file, "rb") as f:
        return PAGE_MARK in f.read(200)


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
