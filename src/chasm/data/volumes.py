"""Volumes instead of slices: blocks of neighbouring slices of any dataset, for tasks and hosts with three axes."""

import torch

from chasm.data.base import SliceDataset
from chasm.data.records import DataError, Slice


class Volumes(SliceDataset):
    """Blocks (depth, H, W) of the slices of a dataset, which stand one after the other within a case.

    Blocks do not overlap, and the remaining slices at the end of a case are left out.

    Args:
        data: a dataset of slices with one channel each, magnitude or complex.
        depth: number of slices of a block.

    Example:
        >>> from chasm.data import open_dataset
        >>> Volumes(open_dataset("embedded", split="val", size=32, slices=9), depth=4)[1].image.shape
        torch.Size([4, 32, 32])
    """

    def __init__(self, data: SliceDataset, depth: int) -> None:
        rows_by_case = data.rows_by_case()
        self._blocks = [
            (case, number, rows[number * depth : (number + 1) * depth])
            for case, rows in rows_by_case.items()
            for number in range(len(rows) // depth)
        ]
        if not self._blocks:
            longest = max(map(len, rows_by_case.values()))
            raise DataError(f"data.depth: no case has {depth} slices: expected at most {longest}")
        self.data, self.depth = data, depth
        self.name, self.domain, self.fixed = data.name, data.domain, data.fixed  # type: ignore[misc]
        self.split, self.split_rule = data.split, data.split_rule
        self.cases = list(dict.fromkeys(case for case, *_ in self._blocks))

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, i: int) -> Slice:
        case, number, rows = self._blocks[i]
        slices = [self.data[row] for row in rows]
        if (channels := len(slices[0].image)) != 1:
            problem = f"volumes are made of slices with one channel, got {channels}"
            raise DataError(f"case {case}: {problem}: leave out data.depth")
        return Slice(torch.cat([s.image for s in slices]), None, case, number, slices[0].source)

    def set_epoch(self, epoch: int) -> None:
        self.data.set_epoch(epoch)
