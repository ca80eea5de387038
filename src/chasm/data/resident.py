"""Keep a dataset in memory: all slices are read once, and batches are gathered by indexing."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from chasm.common.text import counted
from chasm.data.base import SliceDataset
from chasm.data.records import Batch, DataError, Slice

UNKNOWN_MEMORY = 4 * 2**30  # bytes, assumed on Windows, which Python cannot ask


def free_bytes(device: torch.device) -> int:
    """Return the memory that can be allocated on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as f:
            fields = dict(line.split(":", 1) for line in f)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        if hasattr(os, "sysconf"):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return UNKNOWN_MEMORY


class Resident(SliceDataset):
    """All slices of a dataset as tensors: `resident.batch(rows)` costs one gather.

    Args:
        data: the dataset to read.
        device: device of the tensors.
        dtype: dtype of the images. `torch.uint8` keeps photographs, whose values are k / 255, in a quarter of memory.

    Raises:
        DataError: when the slices do not fit, differ in shape, or change between epochs.

    Example:
        >>> from chasm.data import open_dataset
        >>> resident = open_dataset("embedded", split="val", size=32).to_memory()
        >>> resident.batch([0, 3, 5]).image.shape
        torch.Size([3, 1, 32, 32])
    """

    def __init__(
        self, data: SliceDataset, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        if not data.fixed:
            raise DataError(f"dataset {data.name!r} changes every epoch: open it with augment=False")
        first, n, where = data[0], len(data), torch.device(device)
        dtype = dtype or first.image.dtype
        if dtype == torch.uint8 and data.domain != "photo":
            raise ValueError(f"only photographs fit 8 bits: keep {data.name!r} as {first.image.dtype}")
        per_slice = first.image.numel() * dtype.itemsize + (0 if first.label is None else first.label.numel())
        need, free = n * per_slice, free_bytes(where)
        if need > 0.8 * free:  # the rest is for the model and for other processes
            what = f"dataset {data.name!r} ({data.split}, {counted(n, 'slice')})"
            memory = f"{need / 2**30:.1f} GiB on {where}, {free / 2**30:.1f} GiB are free"
            raise DataError(f"{what} needs {memory}: read it from disk, or take fewer slices")
        self.split, self.cases, self.source = data.split, data.cases, first.source
        self.domain, self.split_rule = data.domain, data.split_rule
        self.images = torch.empty((n, *first.image.shape), dtype=dtype, device=where)  # (N,M,H,W)
        self.labels: Tensor | None = None  # (N,H,W) uint8 here, int64 in slices and batches
        if first.label is not None:
            self.labels = torch.empty((n, *first.label.shape), dtype=torch.uint8, device=where)
        self.case_ids: list[str] = []
        self.indices: list[int] = []
        for i in range(n):
            s = data[i]
            if (s.label is None) != (first.label is None):
                raise DataError(f"case {s.case} slice {s.index}: label: only some slices of the dataset have a label")
            if s.image.shape != first.image.shape:
                shapes = f"shape {tuple(s.image.shape)}, expected {tuple(first.image.shape)} as in case {first.case}"
                raise DataError(f"case {s.case} slice {s.index}: image: {shapes}: a resident set needs one shape")
            self.images[i].copy_((s.image * 255).round() if dtype == torch.uint8 else s.image)
            if self.labels is not None and s.label is not None:
                if s.label.numel() and not 0 <= int(s.label.min()) <= int(s.label.max()) <= 255:
                    raise DataError(f"case {s.case} slice {s.index}: label: classes must lie in 0..255")
                self.labels[i].copy_(s.label)
            self.case_ids.append(s.case)
            self.indices.append(s.index)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Slice:
        label = None if self.labels is None else self.labels[i].long()
        return Slice(_unit(self.images[i]), label, self.case_ids[i], self.indices[i], self.source)

    def batch(self, rows: Sequence[int] | Tensor) -> Batch:
        """Return the batch of these rows, gathered on the device of the tensors."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        at = index.to(self.images.device, non_blocking=True)
        chosen = index.tolist()
        return Batch(
            image=_unit(self.images.index_select(0, at)),
            label=None if self.labels is None else self.labels.index_select(0, at).long(),
            case=[self.case_ids[i] for i in chosen],
            index=[self.indices[i] for i in chosen],
            source=self.source,
        )


def _unit(x: Tensor) -> Tensor:
    return x.float() / 255 if x.dtype == torch.uint8 else x
