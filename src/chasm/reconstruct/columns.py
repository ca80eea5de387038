"""What k-space holds: which columns were measured, where its zero frequency is, and whether it is k-space at all.

The measured columns are those of the mask that a file stores. Without one they are those of a mask file, or those that
hold anything, if there are empty columns between others. (Empty columns only at the edges are the zero-padding of fully
sampled data.) They are read off the middle slice and must be the same in all others. K-space that lacks other things
than whole columns is refused.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from chasm.data import fault
from chasm.mri import Mask, create_mask, fft2c, mask_from_array

MIN_FILLED = 0.9  # of a padded or round k-space about all is filled between its outer values, of undersampled much less


def measured_columns(kspace: Tensor, path: Path, mask: Path | None, notes: list[str]) -> Mask | None:
    """Tell which columns of k-space without a stored mask were measured, from its middle slice.

    Args:
        kspace: the middle slice, (..., H, W), exactly zero where nothing was measured.
        path: its file, for messages.
        mask: a file with the mask that was used, if there is one.
        notes: gets a line if the columns are guessed.

    Returns:
        The mask, or None for fully sampled k-space.

    Raises:
        DataError: when the slice is empty, or undersampled in another way than by columns.
        ValueError: when the mask file keeps columns that are empty.
    """
    filled = is_filled(kspace)
    columns, rows = np.asarray(filled.any(0)), np.asarray(filled.any(1))
    inside = between(columns)  # the rest is zero-padding
    if not columns.any():
        raise fault(path, "kspace", "every value of the middle slice is zero")
    if (columns == inside).all():
        if is_undersampled(filled):
            problem = "undersampled, but not in whole columns (the last axis), which is all that is known here"
            advice = ": rows are empty, turn the arrays by 90 degrees" if (between(rows) & ~rows).any() else ""
            raise fault(path, "kspace", problem + advice)
        return None
    if mask is None:
        notes.append("no mask in the file: the columns that hold anything are taken as measured")
        return mask_from_array(columns)
    chosen = create_mask("file", len(columns), file=mask)
    empty = [c for c in chosen.columns if inside[c] and not columns[c]]
    if empty:
        raise ValueError(f"{mask}: keeps columns that are empty in the data ({len(empty)}, first {empty[0]})")
    return chosen


def is_filled(kspace: Tensor) -> np.ndarray:
    """Return (H, W) bool: True where any coil of (..., H, W) is not zero."""
    filled: np.ndarray = (kspace != 0).reshape(-1, *kspace.shape[-2:]).any(0).numpy()
    return filled


def between(filled: np.ndarray, axis: int = 0) -> np.ndarray:
    """Return True from the first True along an axis to the last.

    >>> between(np.array([False, True, False, True, False])).tolist()
    [False, True, True, True, False]
    """
    before = np.logical_or.accumulate(filled, axis)
    after = np.flip(np.logical_or.accumulate(np.flip(filled, axis), axis), axis)
    both: np.ndarray = before & after
    return both


def is_undersampled(filled: np.ndarray) -> bool:
    """Return True if much of (H, W) is empty between filled values, along either axis."""
    hull = between(filled, 0) | between(filled, 1)
    return bool(filled.sum() < MIN_FILLED * hull.sum())


def looks_like_kspace(values: Tensor) -> bool:
    """Return True if complex (..., H, W) is likely k-space.

    K-space has its energy in few values, and an image has it in few values of its transform.
    """

    def energy_of_the_largest(x: Tensor) -> float:
        energy = x.abs().square().flatten()
        return energy.topk(max(1, len(energy) // 64)).values.sum().item()

    return energy_of_the_largest(values) > energy_of_the_largest(fft2c(values))


def has_exchanged_halves(values: Tensor) -> bool:
    """Return True if the middle half of (1, H, W), both ways, gains energy when the halves are exchanged."""

    def middle(x: Tensor) -> float:
        h, w = x.shape[-2:]
        return x[..., h // 4 : h - h // 4, w // 4 : w - w // 4].abs().square().sum().item()

    return middle(torch.fft.fftshift(values, dim=(-2, -1))) > middle(values)
