"""The records of datasets: cases before they are opened, and slices and batches afterwards."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.common.text import printable

SPLITS = ("train", "val", "test")


class DataError(ValueError):
    """Something is wrong with the data. The message is one line that names the file and the field."""


def fault(file: Path | str, field: str, problem: str) -> DataError:
    """Return the error for a damaged, missing or unexpected file.

    Args:
        file: the file, or the folder.
        field: the part of it that is wrong, such as "kspace" or "header".
        problem: the problem with it.

    Example:
        >>> fault("a.h5", "kspace", "missing")
        DataError('a.h5: kspace: missing')
    """
    return DataError(f"{file}: {field}: {' '.join(str(problem).split())}")


def patient_name(identity: object) -> str:
    """Return a name for a patient, made from a hash of the ID, so that no report and no manifest shows the ID itself.

    Spaces around the ID do not count.

    >>> patient_name("Doe"), patient_name(" Doe "), patient_name(None)
    ('patient fd53ef83', 'patient fd53ef83', '')
    """
    text = str(identity or "").strip()
    return f"patient {hashlib.sha256(text.encode()).hexdigest()[:8]}" if text else ""


@dataclass(slots=True)
class Slice:
    """One 2-D sample.

    Attributes:
        image: (M, H, W), real magnitude or complex; M counts modalities, coils or colours.
        label: (H, W) int64 classes, if the dataset has any.
        case: the volume, patient or photo it belongs to, which is the unit of splits and of statistics.
        index: the number of the slice within the case.
        source: origin of the slice, for tables and captions.
    """

    image: Tensor
    label: Tensor | None
    case: str
    index: int
    source: str


@dataclass(frozen=True, slots=True)
class RawSlice:
    """The measured data of one slice.

    Attributes:
        kspace: (coils, H, W) complex, zero frequency in the middle; exactly zero where nothing was measured.
        mask: (W,) bool, True for the measured columns, if the file stores a mask.
        size: (H, W) of the image to reconstruct: the k-space may cover a larger field of view.
        case: the case it belongs to.
        index: the number of the slice within the case.
        noise: root-mean-square of the noise of one sample, if it was measured.
    """

    kspace: Tensor
    mask: Tensor | None
    size: tuple[int, int]
    case: str
    index: int
    noise: float | None = None


SOMEWHERE = 2  # NIfTI's code for a coordinate system that is not the scanner's


@dataclass(frozen=True, slots=True)
class Geometry:
    """The position of the voxels of a case.

    Attributes:
        affine: 4 x 4, from voxels (column, row from below, slice) to millimetres to the right, to the front and up.
        code: origin of the millimetres, as in NIfTI: 1 the scanner, 2 (`SOMEWHERE`) another scan or
            something unknown, 3 Talairach, 4 MNI; 0 if the matrix is not to be used.
        qform: the second matrix of a NIfTI file, if it has two that differ.
        qform_code: the code of that.
        note: a line about facts that are missing in the files.
    """

    affine: np.ndarray
    code: int = 1
    qform: np.ndarray | None = None
    qform_code: int | None = None
    note: str = ""


@dataclass(slots=True)
class Batch:
    """Stacked slices: image (B, M, H, W), label (B, H, W) if there are labels, and one case and index for each."""

    image: Tensor
    label: Tensor | None
    case: list[str]
    index: list[int]
    source: str

    def __len__(self) -> int:
        return len(self.case)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return the batch with its tensors on a device."""
        label = None if self.label is None else self.label.to(device, non_blocking=non_blocking)
        return replace(self, image=self.image.to(device, non_blocking=non_blocking), label=label)

    def mirrored(self, flips: Sequence[int]) -> "Batch":
        """Return the batch with each slice as it is (0), mirrored left to right (1), top to bottom (2) or both (3)."""
        image, label = self.image, self.label
        for bit, dim in ((1, -1), (2, -2)):
            chosen = torch.tensor([bool(flip & bit) for flip in flips], device=image.device)
            image = torch.where(chosen[:, None, None, None], image.flip(dim), image)
            label = None if label is None else torch.where(chosen[:, None, None], label.flip(dim), label)
        return replace(self, image=image, label=label)

    def pin_memory(self) -> "Batch":
        """Return the batch in pinned memory. The DataLoader looks for a method of this name."""
        label = None if self.label is None else self.label.pin_memory()
        return replace(self, image=self.image.pin_memory(), label=label)


def collate(slices: Sequence[Slice]) -> Batch:
    """Return slices of one shape as a batch. This is the `collate_fn` of a DataLoader.

    Raises:
        DataError: when shapes differ, or only some of the slices have a label.

    Example:
        >>> collate([Slice(torch.zeros(1, 4, 4), None, "a", k, "zeros") for k in range(3)]).image.shape
        torch.Size([3, 1, 4, 4])
    """
    first = slices[0]
    for s in slices:
        if s.image.shape != first.image.shape:
            shapes = f"shape {tuple(s.image.shape)} differs from {tuple(first.image.shape)} of case {first.case}"
            raise DataError(f"case {s.case} slice {s.index}: image: {shapes}: a batch needs one shape")
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
    """One unit of a split, before it is opened.

    Attributes:
        name: name of the case, unique within the dataset.
        split: "train", "val", "test" or another name; "" until a split is assigned.
        files: the files that hold it.
        group: the patient, if one has several cases: cases of one group share a split. Empty: the case itself.
        frames: numbers of the file and of the image in it, for each slice. Empty for all images of all files.
    """

    name: str
    split: str
    files: tuple[Path, ...]
    group: str = ""
    frames: tuple[tuple[int, int], ...] = ()

    @property
    def patient(self) -> str:
        """The group, or the case itself if it has none: the unit of splits."""
        return self.group or self.name

    def __post_init__(self) -> None:
        # Names of files may have characters that no record, picture or terminal can hold.
        object.__setattr__(self, "name", printable(self.name))
        object.__setattr__(self, "group", printable(self.group))


@dataclass(frozen=True, slots=True)
class CaseFacts:
    """Facts from reading a whole case, for `chasm data check`.

    Attributes:
        shape: (M, H, W) of one slice.
        slices: the number of slices in the case.
        dtype: stored type of the values.
        low: the smallest value.
        high: the largest value.
        group: the patient, if only the content of the file names it.
        kind: the acquisition or similar; cases are counted by kind.
        varies: True if the shape differs between sound cases of this kind.
        digests: a hash of each slice, b"" for a blank one, if the reader makes them (`survey.SliceSurvey`).
    """

    shape: tuple[int, ...]
    slices: int
    dtype: str
    low: float
    high: float
    group: str = ""
    kind: str = ""
    varies: bool = False
    digests: tuple[bytes, ...] = ()


def check_split(split: str, known: Iterable[str] = SPLITS) -> str:
    """Return the split if it is known; otherwise raise a ValueError that suggests one."""
    if split not in known:
        raise ValueError(f"unknown split {split!r}: {suggest(split, known)}")
    return split


def in_split(cases: Sequence[Case], split: str, path: Path) -> list[Case]:
    """Return the cases of one split.

    Args:
        cases: cases of all splits.
        split: a name, or "all".
        path: their folder, for messages.
    """
    check_split(split, {*SPLITS, "all", *(c.split for c in cases)})
    chosen = [c for c in cases if split in (c.split, "all")]
    if not chosen:
        counts = ", ".join(f"{s} {sum(c.split == s for c in cases)}" for s in sorted({c.split for c in cases}))
        raise DataError(f"{path}: split {split!r} has no case (cases found: {counts or 'none'})")
    return chosen
