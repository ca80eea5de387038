"""The base of datasets: a map-style torch Dataset of 2-D slices, cut into splits by case.

A reader of files subclasses `FileDataset`. It finds its cases without opening image data (`find`), reads one slice
(`read`), and can read a whole case to judge it (`probe`, for `chasm data check`). A reader of raw k-space subclasses
`KSpaceDataset` and also returns what was measured (`raw_slice`). Readers return what the file holds; normalisation,
masks and FFTs belong to the task, on the batch's device.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from chasm.common.files import expanded
from chasm.common.registry import Registry
from chasm.data.records import Case, CaseFacts, Geometry, RawSlice, Slice, fault, in_split

BEYOND_SINGLE = "values are beyond float32 (3.4e38): scale the data"
R = TypeVar("R")
T = TypeVar("T", bound="type[SliceDataset]")

if TYPE_CHECKING:
    from chasm.data.resident import Resident


class SliceDataset(Dataset[Slice]):
    """Base of every dataset: `cls(path, split=..., **options)`, then `len`, `[]`, `cases` and `split`.

    Attributes:
        name: the registered name; `register_dataset` sets it.
        summary: one line for `chasm data list`.
        needs_path: False for a dataset that reads no files.
        domain: "mri" or "photo", which decides what task and preview fit.
        split_rule: rule that split the cases, for reports.
        fixed: False if a slice changes between epochs, as random crops do.
        split: the split that was opened.
        cases: the names of its cases.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    needs_path: ClassVar[bool] = True
    domain: str = "mri"
    split_rule: str = ""
    fixed: bool = True

    split: str
    cases: list[str]

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, i: int) -> Slice:
        raise NotImplementedError

    def case_name(self, i: int) -> str:
        """Return the name of the case of row i. Readers override it so that it reads nothing."""
        return self[i].case

    def rows_by_case(self) -> dict[str, list[int]]:
        """Return the rows of every case, by its name, in order."""
        rows: dict[str, list[int]] = {}
        for row in range(len(self)):
            rows.setdefault(self.case_name(row), []).append(row)
        return rows

    def set_epoch(self, epoch: int) -> None:
        """Prepare for an epoch. Only datasets with `fixed = False` use it."""

    def to_memory(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> "Resident":
        """Read every slice once into tensors on a device.

        Args:
            device: device of the tensors.
            dtype: dtype of the images; default: as they are. `torch.uint8` suits photographs.

        Raises:
            DataError: when they would not fit into memory.
        """
        from chasm.data.resident import Resident

        return Resident(self, device=device, dtype=dtype)


class FileDataset(SliceDataset):
    """Base of the readers of files: cases below a path, then rows of (case, slice within the case).

    A subclass calls `super().__init__` and then `list_slices`, and defines `find`, `read` and `probe`.

    Args:
        path: the folder or file of the dataset.
        split: "train", "val", "test", "all", or another name that `find` gives.
        find: options of the reader's `find`.
    """

    published: ClassVar[str] = ""  # number of published cases, for the check to print

    _last: tuple[object, Any] | None = None

    def __init__(self, path: str | Path, split: str, **find: Any) -> None:
        self.root = existing(path)
        cases, self.split_rule = self.find(self.root, **find)
        self.split = split
        self._cases = in_split(cases, split, self.root)

    def list_slices(self, slices: Callable[[Case], Iterable[int]]) -> None:
        """Fix the rows of the dataset: the numbers of the slices of each case that it uses."""
        numbers = [list(slices(case)) for case in self._cases]
        rows = [(c, k) for c, ks in enumerate(numbers) for k in ks]
        # An array and not a list of tuples: forked workers then share its memory pages for good.
        self._rows = np.array(rows, dtype=np.int32).reshape(-1, 2)
        self.cases = [case.name for case, ks in zip(self._cases, numbers, strict=True) if ks]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Slice:
        case, k = self.locate(i)
        item = self.read(case, k)
        if not item.image.isfinite().all():  # an FFT or a sum over coils can leave the range of float32
            raise fault(case.files[0], f"image of slice {k}", BEYOND_SINGLE)
        return item

    def locate(self, i: int) -> tuple[Case, int]:
        """Return the case of row i and the number of its slice within the case. Reads nothing."""
        case, k = self._rows[i]
        return self._cases[case], int(k)

    def case_name(self, i: int) -> str:
        return self.locate(i)[0].name

    def keep_last(self, key: object, read: Callable[[], R]) -> R:
        """Return read(), or its last result if the key is the same. For files whose slices are read one by one."""
        last = self._last
        if last is None or last[0] != key:
            last = self._last = (key, read())
        result: R = last[1]
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}

    def case(self, name: str) -> Case:
        """Return a case of the split by its name."""
        return next(case for case in self._cases if case.name == name)

    def files(self) -> list[Path]:
        """Return the files of all cases of the split."""
        return [file for case in self._cases for file in case.files]

    def geometry(self, case: str) -> Geometry | None:
        """Return where the voxels of a case lie; None if the files do not even say how large they are."""
        return None

    def read(self, case: Case, k: int) -> Slice:
        """Read slice k of a case."""
        raise NotImplementedError

    @classmethod
    def find(cls, *path: Any, **options: Any) -> tuple[list[Case], str]:
        """Return all cases of all splits below a path, and the rule that split them. Opens no image data."""
        raise NotImplementedError

    @classmethod
    def probe(cls, *case: Any, **options: Any) -> CaseFacts:
        """Read all of a case. The options are those that change what is read.

        Raises:
            DataError: if something is wrong with the case.
        """
        raise NotImplementedError


class KSpaceDataset(FileDataset):
    """Base of the readers of raw k-space."""

    def raw_slice(self, i: int) -> RawSlice:
        """Read the measured k-space of row i."""
        raise NotImplementedError


DATASETS = Registry("dataset", SliceDataset, "chasm.datasets")
_PATH_ADVICE = (
    "give the folder it was downloaded to: data.path in a recipe (--set data.path=FOLDER), "
    "chasm eval --data FOLDER, chasm study --path NAME=FOLDER"
)


def register_dataset(name: str) -> Callable[[T], T]:
    """Return a class decorator that makes a reader known to `open_dataset` under a new name."""

    def add(cls: T) -> T:
        cls.name = name
        return DATASETS.register(name)(cls)

    return add


def list_datasets(pattern: str = "*") -> list[str]:
    """Return the names of the datasets that match a shell-style pattern, sorted.

    >>> list_datasets("cc*")
    ['cc359']
    """
    return DATASETS.list(pattern)


def open_dataset(name: str, path: str | Path | None = None, split: str = "train", **options: Any) -> Any:
    """Open a dataset by name.

    Args:
        name: a name of `list_datasets()`.
        path: the folder or file it was downloaded to, if it reads files.
        split: "train", "val", "test" or "all".
        options: options of the reader; `help(chasm.data.CC359)` names those of "cc359".

    Raises:
        ValueError: if a name, option or path is wrong.

    Example:
        >>> open_dataset("embedded", split="val", size=32)[0].image.shape
        torch.Size([1, 32, 32])
    """
    cls: type[SliceDataset] = DATASETS.get(name)
    if not cls.needs_path:
        if path is not None:
            advice = f"leave out the path {path}, or name the format of what lies there (data.name=folder)"
            raise ValueError(f"dataset {name!r} reads no files: {advice}")
        return DATASETS.create(name, split=split, **options)
    if path is None:
        raise ValueError(f"dataset {name!r} reads files: {_PATH_ADVICE}")
    return DATASETS.create(name, path=existing(path, f": {_PATH_ADVICE}"), split=split, **options)


def existing(path: str | Path, advice: str = "") -> Path:
    """Return the path with ~ expanded; a FileNotFoundError that ends in `advice` if nothing is there."""
    p = expanded(path)
    if not p.exists():
        raise FileNotFoundError(f"{p}: no such file or folder{advice}")
    return p
