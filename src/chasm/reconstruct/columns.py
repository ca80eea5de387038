"""Find out which columns of k-space were measured.

The measured columns are those of the mask that a file stores. Without such a mask they are those of a mask file.
Without a mask file they are the columns that are not empty, if there are empty columns between others. (Empty columns
only at the edges are the zero-padding of fully sampled data.) The middle slice decides, and all others must agree.
K-space with gaps other than whole columns is refused.
"""

from pathlib import Path

import numpy as np
from torch import Tensor

from chasm.data import fault
from chasm.data.filled import between, is_filled, is_undersampled
from chasm.mri import Mask, create_mask, mask_from_array


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
            problem = "undersampled, but not in whole columns (the last axis), the only pattern that is read here"
            advice = ": rows are empty, turn the arrays by 90 degrees" if (between(rows) & ~rows).any() else ""
            raise fault(path, "kspace", problem + advice)
        return None
    if mask is None:
        notes.append("no mask in the file: the columns that are not empty are taken as measured")
        return mask_from_array(columns)
    chosen = create_mask("file", len(columns), file=mask)
    empty = [c for c in chosen.columns if inside[c] and not columns[c]]
    if empty:
        raise ValueError(f"{mask}: keeps columns that are empty in the data ({len(empty)}, first {empty[0]})")
    return chosen


def filled_columns(kspace: Tensor) -> Mask:
    """Return the columns of k-space (..., H, W) that are not empty."""
    return mask_from_array(np.asarray(is_filled(kspace).any(0)))
