"""Draw a phase for magnitude images, so that a network that is trained on them can reconstruct measured data."""

import torch
from torch import Tensor

COSINES = 3  # cosines along each axis: off-resonance and coils vary slowly over the head


def smooth_phase(size: tuple[int, int], seed: int) -> Tensor:
    """Return exp(i phi) of a smooth phi, a few radians from one side of the image to the other.

    phi is the sum of products of cosines with normal weights that fall with the frequency, and a linear ramp, as an
    echo that is not quite centred leaves.

    Args:
        size: (H, W) of the image.
        seed: seed of the weights.

    Returns:
        (H, W) complex64 of magnitude 1.

    >>> phase = smooth_phase((8, 6), seed=1)
    >>> phase.shape, torch.allclose(phase.abs(), torch.ones(8, 6))
    (torch.Size([8, 6]), True)
    """
    generator = torch.Generator().manual_seed(seed)
    y, x = (torch.linspace(-1, 1, n) for n in size)
    order = torch.arange(COSINES + 1, dtype=torch.float32)
    rows, columns = (torch.cos(torch.pi / 2 * order[:, None] * (t + 1)) for t in (y, x))  # (COSINES + 1, n)
    weights = torch.randn(COSINES + 1, COSINES + 1, generator=generator) / (1 + order[:, None] + order)
    ramp = torch.randn(2, generator=generator)
    phi = rows.T @ weights @ columns + ramp[0] * y[:, None] + ramp[1] * x
    offset = 2 * torch.pi * torch.rand((), generator=generator)
    return torch.polar(torch.ones(size), phi + offset)
