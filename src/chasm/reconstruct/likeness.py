"""Compare a scan with the training data of a run: its size, coils, measured lines and brightness."""

from typing import Any

import numpy as np
from torch import Tensor

from chasm.common.text import counted
from chasm.data.files import crop_or_pad
from chasm.mri import Mask, ifft2c, mask_from_array
from chasm.mri.plane_masks import PlaneMask
from chasm.reconstruct.inputs import Scan
from chasm.tasks.sampling import MEASURED
from chasm.train import Run
from chasm.train.weights import brightness

MAX_OTHER_ACCELERATION = 1.1  # times that of the training
LINE_SLACK = 2  # lines more or less that masks drawn by one rule may have
MAX_OTHER_CENTRE = 1.5  # times the lines in the centre of the training
CENTRE_SLACK = 2  # lines beside the centre that may belong to the rest
MIN_GAPS = 5  # fewer distances between lines may be alike by chance
MIN_SHARED_LINES = 0.9  # of the lines outside the centre, with a mask that was fixed
MAX_OTHER_BRIGHTNESS = 1.5  # times the brightest, or darkest, slice of the training


def unlike_training(scan: Scan, run: Run) -> str:
    """Return one line that says how the middle slice of a scan differs from the training data; "" if it does not.

    Args:
        scan: the scan to reconstruct.
        run: the run. If its training recorded no facts about the data, only the mask is compared.
    """
    image, mask = _middle(scan, run)
    coils, height, width = image.shape
    differences = []
    trained = run.images.description
    trained_height, trained_width = height, width
    if trained:
        trained_coils, trained_height, trained_width = trained["shape"]
        if (height, width) != (trained_height, trained_width):
            differences.append(f"{height} x {width} pixels (trained on {trained_height} x {trained_width})")
        if trained["complex"] and image.is_complex() and coils != trained_coils:
            differences.append(f"{counted(coils, 'coil')} (trained on {trained_coils})")
    task: Any = run.config.task.create()
    if task.masks != MEASURED:
        differences += unlike_lines(mask, task.sampling.on(trained_height, trained_width), task.masks == "fixed")
    value, limits = brightness(image), trained.get("brightness")
    if value is not None and limits:
        low, high = limits
        if not low / MAX_OTHER_BRIGHTNESS < value < high * MAX_OTHER_BRIGHTNESS:
            differences.append(f"a mean of {value:.2g} of the maximum (trained on {low:.2g} to {high:.2g})")
    return f"unlike the training data, so expect a worse result: {', '.join(differences)}" if differences else ""


def unlike_lines(mask: Mask, trained: Mask | PlaneMask, is_fixed: bool) -> list[str]:
    """Return how the measured lines differ from those of the training.

    Args:
        mask: that undersamples the scan.
        trained: the mask of the training, or one of those that it drew.
        is_fixed: whether training had this one only.

    >>> from chasm.mri import create_mask
    >>> fixed = create_mask("equispaced", 256, 8)
    >>> unlike_lines(create_mask("equispaced", 256, 8, offset=2), fixed, True)
    ['lines at other columns (trained on one fixed mask)']
    >>> unlike_lines(create_mask("random", 256, 8, seed=1), fixed, False)
    ['irregular lines (trained on equispaced ones)']
    """
    differences = []
    is_near = 1 / MAX_OTHER_ACCELERATION < mask.acceleration / trained.acceleration < MAX_OTHER_ACCELERATION
    if not is_near and (is_fixed or abs(mask.lines - mask.width / trained.acceleration) > LINE_SLACK):
        differences.append(f"acceleration {mask.acceleration:.3g} (trained on {trained.acceleration:.3g})")
    if isinstance(trained, PlaneMask):
        return [*differences, f"whole columns (trained on {trained.kind} points)"]
    center, outside, spacing = _lines(mask)
    trained_center, trained_outside, trained_spacing = _lines(trained)
    if spacing and trained_spacing and spacing != trained_spacing:
        differences.append(f"{spacing} lines (trained on {trained_spacing} ones)")
    usual = trained_center * mask.width / trained.width
    if not usual / MAX_OTHER_CENTRE - CENTRE_SLACK <= center <= usual * MAX_OTHER_CENTRE + CENTRE_SLACK:
        differences.append(f"{counted(center, 'line')} in the centre (trained on {usual:.0f})")
    is_comparable = is_fixed and not differences and mask.width == trained.width
    if is_comparable and len(outside & trained_outside) < MIN_SHARED_LINES * len(outside):
        differences.append("lines at other columns (trained on one fixed mask)")
    return differences


def _lines(mask: Mask) -> tuple[int, set[int], str]:
    """Return the number of lines in the centre, those outside of it, and how these follow each other; "" for few."""
    first, end = mask_from_array(np.isin(np.arange(mask.width), mask.columns)).center
    sides = [c for c in mask.columns if c < first], [c for c in mask.columns if c >= end]
    gaps = np.concatenate([np.diff(side) for side in sides])
    if gaps.size < MIN_GAPS:
        return end - first, {*sides[0], *sides[1]}, ""
    is_even = gaps.max() - gaps.min() <= 1  # distances are rounded
    return end - first, {*sides[0], *sides[1]}, "equispaced" if is_even else "irregular"


def _middle(scan: Scan, run: Run) -> tuple[Tensor, Mask]:
    """Return the middle slice (M, H, W), zero-filled if it is undersampled, and its mask."""
    row = len(scan.data) // 2
    if scan.measured is None:
        image = scan.data[row].image
        mask: Mask = run.task.sampling.mask(image.shape[-1])  # type: ignore[attr-defined]
        return image, mask
    raw = scan.data.raw_slice(row)  # type: ignore[attr-defined]
    size = (min(raw.size[0], raw.kspace.shape[-2]), min(raw.size[1], raw.kspace.shape[-1]))
    return crop_or_pad(ifft2c(raw.kspace), size), scan.masks.get(raw.case, scan.measured)
