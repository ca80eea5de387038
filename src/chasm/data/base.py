"""What a dataset is here: a map-style torch Dataset of 2-D slices, cut into splits by case.

A reader of files subclasses `FileDataset`: it finds its cases without opening image data (`find`), reads one
slice (`read`), and can read a whole case to judge it (`probe`, for `chasm data check`). Readers return what
the file holds; normalisation, masks and FFTs belong to the task, on the batch's device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from chasm.common.registry import Registry, suggest

if TYPE_CHECKING:
    from chasm.data.resident import Resident

SPLITS = ("train", "val", "test")


class DataError(ValueError):
    """Something is wrong with the data: one line that names the file and the field."""


def fault(file: Path | str, field: str, problem: str) -> DataError:
    """The one-line error of a damaged, missing or odd file."""
    return DataError(f"{file}: {field}: {' '.join(str(problem).split())}")


@dataclass(slots=True)
class Slice:
    """One 2-D sample."""

    image: Tensor  # (M,H,W): real magnitude or complex; M = modalities, coils or colours
    label: Tensor | None  # (H,W) int64
    case: str  # volume, patient or photo: the unit of splits and of statistics
    index: int  # position within the case
    source: str  # where it came from, for tables and captions


@dataclass(slots=True)
class Batch:
    """Stacked slices."""

    image: Tensor  # (B,M,H,W)
    label: Tensor | None  # (B,H,W) int64
    case: list[str]
    index: list[int]
    source: str

    def __len__(self) -> int:
        return len(self.case)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        label = None if self.label is None else self.label.to(device, non_blocking=non_blocking)
        return replace(self, image=self.image.to(device, non_blocking=non_blocking), label=label)

    def pin_memory(self) -> "Batch":  # the DataLoader looks for this name
        label = None if self.label is None else self.label.pin_memory()
        return replace(self, image=self.image.pin_memory(), label=label)


def collate(slices: Sequence[Slice]) -> Batch:
    """Stack slices of one shape into a batch: the `collate_fn` of a DataLoader."""
    first = slices[0]
    for s in slices:
        if s.image.shape != first.image.shape:
            raise DataError(
                f"case {s.case} slice {s.index}: image: shape {tuple(s.image.shape)} differs from "
                f"{tuple(first.image.shape)} of case {first.case}: a batch needs one shape"
            )
        if (s.label is None) != (first.label is None):
            raise DataError(f"case {s.case} slice {s.index}: label: only some slices of the batch have a label")
    labels = [s.label for s in slices if s.label is not None]
    return Batch(
        image=torch.stack([s.image for s in slices]),
        label=torch.stack(labels) if labels else None,
        case=[s.case for s in slices],
        index=[s.index for s in slices],
        source=first.source,
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One unit of a split, before it is opened."""

    name: str
    split: str
    files: tuple[Path, ...]
    group: str = ""  # patient: cases of one group must share a split; empty = the case itself


@dataclass(frozen=True, slots=True)
class Facts:
    """What reading a whole case showed."""

    shape: tuple[int, ...]  # of one slice, (M,H,W)
    slices: int  # slices in the file
    dtype: str
    low: float
    high: float
    group: str = ""  # patient, where only the file's content tells
    kind: str = ""  # acquisition or similar, counted in the report
    varies: bool = False  # shapes differ between sound cases of this kind


class SliceDataset(Dataset[Slice]):
    """Base of every reader: `cls(path, split=..., **options)`, then `len`, `[]`, `cases`, `split`."""

    name: ClassVar[str] = ""  # set by register_dataset
    summary: ClassVar[str] = ""  # one line for `chasm data list`
    needs_path: ClassVar[bool] = True
    domain: str = "mri"  # "mri" or "photo": which task and preview fit
    split_rule: str = ""  # how cases got their split, for reports
    fixed: bool = True  # False: a slice changes between epochs (random crops)

    split: str
    cases: list[str]

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, i: int) -> Slice:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch; only datasets with `fixed = False` listen."""

    def to_memory(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> "Resident":
        """Every slice read once into resident tensors on `device`; an error if they would not fit."""
        from chasm.data.resident import Resident

        return Resident(self, device=device, dtype=dtype)


class FileDataset(SliceDataset):
    """Base of the readers of files: cases found below a path, then rows of (case, slice within the case)."""

    published: ClassVar[str] = ""  # how many there should be, for the check to print

    def __init__(self, path: str | Path, split: str, **find: Any) -> None:
        self.root = existing(path)
        found, self.split_rule = self.find(self.root, **find)
        self.split = split
        self._cases = in_split(found, split, self.root)

    def _list(self, slices: Callable[[Case], Iterable[int]]) -> None:
        """Fix the rows. An array, not a list of tuples: forked workers then share its pages for good."""
        numbers = [list(slices(case)) for case in self._cases]
        rows = [(c, k) for c, ks in enumerate(numbers) for k in ks]
        self._rows = np.array(rows, dtype=np.int32).reshape(-1, 2)
        self.cases = [case.name for case, ks in zip(self._cases, numbers, strict=True) if ks]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Slice:
        case, k = self._rows[i]
        return self.read(self._cases[case], int(k))

    def read(self, case: Case, k: int) -> Slice:
        """Slice k of a case."""
        raise NotImplementedError

    @classmethod
    def find(cls, *path: Any, **options: Any) -> tuple[list[Case], str]:
        """`find(path, ...)`: all cases of all splits, and the rule that split them; opens no image data."""
        raise NotImplementedError

    @classmethod
    def probe(cls, case: Case) -> Facts:
        """Read all of a case; a DataError says what is wrong with it."""
        raise NotImplementedError


DATASETS = Registry("dataset", SliceDataset, "chasm.datasets")
_WHERE = (
    "give the folder it was downloaded to: data.path in a recipe (--set data.path=FOLDER), "
    "chasm eval --data FOLDER, chasm study --path NAME=FOLDER"
)
T = TypeVar("T", bound=type[SliceDataset])


def register_dataset(name: str) -> Callable[[T], T]:
    """Class decorator: makes a reader known to `open_dataset` under `name`."""

    def add(cls: T) -> T:
        cls.name = name
        return DATASETS.register(name)(cls)

    return add


def list_datasets(pattern: str = "*") -> list[str]:
    return DATASETS.list(pattern)


def open_dataset(name: str, path: str | Path | None = None, split: str = "train", **options: Any) -> Any:
    """The named dataset at `path`: `open_dataset("cc359", "~/cc359", split="val")`."""
    cls: type[SliceDataset] = DATASETS.get(name)
    if not cls.needs_path:
        if path is not None:
            raise ValueError(f"dataset {name!r} reads no files: leave out the path {path} (data.path, --data)")
        return DATASETS.create(name, split=split, **options)
    if path is None:
        raise ValueError(f"dataset {name!r} reads files: {_WHERE}")
    return DATASETS.create(name, path=existing(path, f": {_WHERE}"), split=split, **options)


def existing(path: str | Path, advice: str = "") -> Path:
    """The path, expanded; a one-line error if nothing is there."""
    p = Path(path).expanduser()
    if not p.exists():
        raise FileNotFoundError(f"{p}: no such file or folder{advice}")
    return p


def check_split(split: str, known: Iterable[str] = SPLITS) -> str:
    if split not in known:
        raise ValueError(f"unknown split {split!r}: {suggest(split, known)}")
    return split


def in_split(cases: Sequence[Case], split: str, path: Path) -> list[Case]:
    """The cases of one split, or of "all"; when there are none, an error that says what there is."""
    check_split(split, {*SPLITS, "all", *(c.split for c in cases)})
    chosen = [c for c in cases if split in (c.split, "all")]
    if not chosen:
        have = ", ".join(f"{s} {sum(c.split == s for c in cases)}" for s in sorted({c.split for c in cases}))
        raise DataError(f"{path}: split {split!r} has no case (cases found: {have or 'none'})")
    return chosen
