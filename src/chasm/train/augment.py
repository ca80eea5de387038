"""Changes of training slices, drawn anew in every step. They follow from seed and step, so that resuming repeats them.

`train.flips` mirrors slices. `train.vary` also turns, zooms, shifts and shears them and changes their contrast, for
networks that must carry over to scans of another place: other fields of view, resolutions, planes and sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from chasm.data import Batch

MAX_ZOOM = 1.6  # and its inverse: finer detail with an empty margin, or coarser detail with a part outside of the image
MAX_SHEAR = 0.1
MAX_SHIFT = 0.25  # fraction of half the image
MAX_GAMMA = 1.6  # and its inverse
UNCHANGED = 0.4  # fraction of the slices that keep their place, and of those that keep their contrast


def flips_of_step(step: int, batch: int, seed: int) -> list[int]:
    """Return how a step mirrors each of its slices: 0 (not), 1 (left to right), 2 (top to bottom) or 3 (both).

    Args:
        step: number of the step, from 0.
        batch: slices per step.
        seed: seed of the run.
    """
    generator = torch.Generator().manual_seed((1 << 61) + (seed << 28) + step)
    flips: list[int] = torch.randint(4, (batch,), generator=generator).tolist()
    return flips


def vary(batch: Batch, seeds: Sequence[int]) -> Batch:
    """Return the batch with each slice turned, zoomed, shifted and sheared, and with another contrast.

    Some slices keep their place, some their contrast. Labels move with their image.

    Args:
        batch: slices, real or complex.
        seeds: one for each slice.
    """
    drawn = [_draw(seed) for seed in seeds]
    image = _with_gamma(batch.image, torch.tensor([gamma for _, gamma in drawn]))
    theta = torch.stack([theta for theta, _ in drawn])
    label = None if batch.label is None else _resample(batch.label[:, None].float(), theta, "nearest")[:, 0].long()
    return replace(batch, image=_resample(image, theta, "bicubic"), label=label)


def _draw(seed: int) -> tuple[Tensor, float]:
    """Return the map from new to old positions, (2, 3) in halves of the image, and the exponent of the contrast."""
    keeps_place, zoom, angle, shear, down, right, keeps_contrast, gamma = torch.rand(
        8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).tolist()
    theta = torch.eye(2, 3)
    if keeps_place >= UNCHANGED:
        scale, turn = MAX_ZOOM ** (1 - 2 * zoom), 2 * math.pi * angle
        cos, sin, lean = scale * math.cos(turn), scale * math.sin(turn), MAX_SHEAR * (2 * shear - 1)
        shift = [MAX_SHIFT * (2 * x - 1) for x in (right, down)]
        theta = torch.tensor([[cos, -sin + lean * cos, shift[0]], [sin, cos + lean * sin, shift[1]]])
    return theta, 1.0 if keeps_contrast < UNCHANGED else MAX_GAMMA ** (2 * gamma - 1)


def _with_gamma(image: Tensor, gamma: Tensor) -> Tensor:
    """Return (B, M, H, W) with magnitudes raised to the power gamma of their slice, between zero and the maximum."""
    size = image.abs()
    top = size.amax((1, 2, 3), keepdim=True)
    share = size / torch.where(top > 0, top, 1)
    power = gamma.to(size)[:, None, None, None]
    factor = torch.where(share > 0, share, 1) ** (power - 1)
    return image * torch.where(share > 0, factor, 1)


def _resample(image: Tensor, theta: Tensor, mode: str) -> Tensor:
    """Return (B, M, H, W) at the mapped positions, zero outside; a slice with the identity stays as it is."""
    parts = torch.cat([image.real, image.imag], 1) if image.is_complex() else image
    H, W = parts.shape[-2:]
    aspect = torch.tensor([[1, H / W], [W / H, 1]])  # angles are those of pixels, also in an oblong image
    theta = torch.cat([theta[:, :, :2] * aspect, theta[:, :, 2:]], -1)
    grid = F.affine_grid(theta.to(parts), list(parts.shape), align_corners=False)
    moved = F.grid_sample(parts, grid, mode=mode, padding_mode="zeros", align_corners=False)
    if image.is_complex():
        moved = torch.complex(*moved.chunk(2, 1))
    still = torch.tensor([bool((t == torch.eye(2, 3)).all()) for t in theta], device=image.device)
    return torch.where(still[:, None, None, None], image, moved)
