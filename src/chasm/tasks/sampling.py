"""Choose the mask of each slice: one for all, one for every slice, a new one in every epoch, or as measured."""

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.mri import Sampling, fft2c

MASK_CHOICES = ("fixed", "slice", "epoch")
MEASURED = "measured"
MIN_POWER = 1e-11  # power of a measured column over that of the strongest; an empty one has rounding errors of 1e-14


def check_masks(masks: str, sampling: Sampling, known: Sequence[str] = MASK_CHOICES) -> str:
    """Return `masks`; raise a ValueError if it is unknown, or there is nothing to draw.

    Args:
        masks: one of `known`.
        sampling: the sampling that draws them.
        known: the values that the task allows.
    """
    if masks not in known:
        raise ValueError(f"unknown masks {masks!r}: {suggest(masks, known)}")
    if masks in ("slice", "epoch") and (sampling.kind == "file" or sampling.offset is not None):
        raise ValueError(f"masks={masks!r} draws masks: set masks=fixed for a mask with sampling.offset or from a file")
    return masks


def masks_of(image: Tensor, sampling: Sampling, masks: str) -> Tensor:
    """Return the masks of raw images before training draws any: zeros and ones, (1 or B, 1, 1 or H, W).

    Args:
        image: raw images, (B, M, H, W). With masks="slice" the mask of an image follows from its pixels and the seed
            of the sampling, so that a slice has the same mask in every epoch, split and run.
        sampling: the sampling that makes masks.
        masks: one of `MASK_CHOICES`, or `MEASURED`.
    """
    if masks == MEASURED:
        return detected_columns(image)
    if masks != "slice":
        return sampling.on(*image.shape[-2:]).tensor(image.device)
    pixels = [zlib.crc32(each.cpu().numpy().tobytes()) for each in image]
    return drawn_masks(image, sampling, pixels)


def drawn_masks(image: Tensor, sampling: Sampling, seeds: Sequence[int]) -> Tensor:
    """Return a new mask for every image: zeros and ones, (B, 1, 1 or H, W).

    Args:
        image: images of the size of the masks, (B, M, H, W).
        sampling: the sampling that makes masks. Its own seed moves all of them.
        seeds: one for each image.
    """
    own = sampling.seed if isinstance(sampling.seed, tuple) else (sampling.seed or 0,)
    chosen = [replace(sampling, seed=(*own, seed % 2**32)) for seed in seeds]
    return torch.cat([each.draw(*image.shape[-2:]).tensor() for each in chosen]).to(image.device)


def detected_columns(image: Tensor) -> Tensor:
    """Return the columns of k-space that are not empty in zero-filled images (B, M, H, W), as ones in (B, 1, 1, W).

    >>> from chasm.mri import create_mask, ifft2c
    >>> mask = create_mask("equispaced", 16, 4).tensor()
    >>> image = ifft2c(mask * torch.randn(2, 3, 8, 16, dtype=torch.complex64))
    >>> torch.equal(detected_columns(image), mask.expand(2, 1, 1, 16))
    True
    """
    power = fft2c(image).abs().square().sum((1, 2))
    return (power > MIN_POWER * power.amax(1, keepdim=True)).float()[:, None, None]
