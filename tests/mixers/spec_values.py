"""The input and the parameter values that the golden numbers of the mixers are computed with."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def golden_map(H: int = 8, W: int = 6, C: int = 32) -> Tensor:
    """x[0, c, h, w] = sin(1 + 0.7c + 1.1h + 1.3w + 0.05 c h w), float64."""
    c, h, w = (torch.arange(n, dtype=torch.float64) for n in (C, H, W))
    c, h = c[:, None, None], h[:, None]
    return torch.sin(1 + 0.7 * c + 1.1 * h + 1.3 * w + 0.05 * c * h * w)[None]


def wave(shape: Iterable[int], j: int, phase: float = 0.0) -> Tensor:
    """0.1 cos(1 + i + 10j + phase), i the row-major index, j the place of the parameter in its module."""
    size = torch.Size(shape)
    i = torch.arange(size.numel(), dtype=torch.float64)
    return (0.1 * torch.cos(1 + i + 10 * j + phase)).reshape(size)


@torch.no_grad()
def fill(module: nn.Module, *names: str) -> nn.Module:
    """Set the named parameters, in that order; everything else keeps its default."""
    module.double().eval()
    for j, name in enumerate(names):
        p = module.get_parameter(name)
        p.copy_(wave(p.shape, j))
    return module


def check(y: Tensor, total: float, squares: float, first: float, last: float) -> None:
    got = torch.stack((y.sum(), y.square().sum(), y[0, 0, 0, 0], y[0, -1, -1, -1])).detach()
    expected = torch.tensor((total, squares, first, last), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=0, atol=6e-9)


def band_limited(n: int, channels: int) -> Tensor:
    """A map with frequencies up to 2, sampled n x n."""
    t = torch.arange(n, dtype=torch.float64) * (2 * torch.pi / n)
    c = torch.arange(channels, dtype=torch.float64)[:, None, None]
    return (torch.cos(2 * t[:, None] + t + c) + torch.sin(t[:, None] - 2 * t) * c + 0.3)[None]


def roll(x: Tensor, dh: int = 2, dw: int = 3) -> Tensor:
    return torch.roll(x, (dh, dw), (-2, -1))


def circular_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """Direct sum: x (B, I, H, W), kernel (O, I, H, W)."""
    H, W = x.shape[-2:]
    return sum(
        torch.einsum("oi,bihw->bohw", kernel[..., a, b], torch.roll(x, (a, b), (-2, -1)))
        for a in range(H)
        for b in range(W)
    )
