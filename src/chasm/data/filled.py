"""Find out which values of k-space were measured, where its zero frequency is, and whether an array is k-space."""

import numpy as np
import torch
from torch import Tensor

from chasm.mri.fft import fft2c

MIN_TISSUE = 0.25  # fraction of the mean magnitude of an image; weaker pixels are air
MIN_FILLED = 0.9  # filled fraction between the outer values: about 1 if padded or round, much less if undersampled


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


def is_centred_kspace(kspace: Tensor) -> bool:
    """Return True if the energy of k-space (..., H, W) is in the middle and not around the corners."""
    return _lies_in_the_middle(_combined(kspace).square())


def is_centred_image(images: Tensor) -> bool:
    """Return True if the object in (..., H, W) is in the middle and not around the corners.

    The test looks for air, not for energy: a bright skull near the edges of a tight field of view would outweigh the
    brain.
    """
    magnitude = _combined(images)
    return _lies_in_the_middle(magnitude > MIN_TISSUE * magnitude.mean())


def _combined(values: Tensor) -> Tensor:
    return values.abs().square().reshape(-1, *values.shape[-2:]).sum(0).sqrt()


def _lies_in_the_middle(weights: Tensor) -> bool:
    """Take each axis of (H, W) as a circle: True if the weights lie around its middle, both axes together."""
    weights = weights.double()
    score = 0.0
    for axis in (0, 1):
        n = weights.shape[axis]
        from_middle = torch.cos(2 * torch.pi * (torch.arange(n) - n // 2) / n)  # 1 in the middle, -1 at the edges
        score += (weights.sum(1 - axis) @ from_middle.double()).item()
    return score >= 0
