"""GFNet and SpectFormer with a constant filter, for one spatial size.

In an ONNX file the Fourier transforms are products with constant matrices, because not every runtime has transforms. A
complex number is then a pair of real numbers: real parts lie before imaginary parts along the axis transformed next.
"""

import math

import torch
from torch import Tensor, nn

from chasm.common.precision import float64_device
from chasm.common.tracing import is_transformed
from chasm.mixers import GFNet, SpectFormer
from chasm.mixers._spectral import complex_of_pairs, full_precision, upcast
from chasm.mixers.gfnet import spectrum_factors


class FoldedFilter(nn.Module):
    """A GFNet or SpectFormer mixer whose filter is resized and scaled once, for one spatial size."""

    factors: Tensor
    rows: Tensor
    columns: Tensor
    columns_back: Tensor

    def __init__(self, mixer: GFNet | SpectFormer, size: tuple[int, ...]) -> None:
        super().__init__()
        self.size, (H, W) = size, size
        self.enter, self.leave = getattr(mixer, "enter", None), getattr(mixer, "leave", None)
        factors = spectrum_factors(mixer.filter, (H, W), mixer.resize_mode)  # (C, H, W//2+1, 2)
        cos_h, sin_h = (t.to(factors) for t in _cosines_and_sines(H, H, factors.device))
        cos_w, sin_w = (t.to(factors) for t in _cosines_and_sines(W, W // 2 + 1, factors.device))
        k = torch.arange(W // 2 + 1, device=factors.device)
        twins = 2 - ((k == 0) | (2 * k == W)).to(factors.dtype)  # bins that a column stands for
        self.register_buffer("factors", factors.contiguous())
        self.register_buffer("rows", torch.cat((torch.cat((cos_h, sin_h), 1), torch.cat((-sin_h, cos_h), 1))))
        self.register_buffer("columns", torch.cat((cos_w, -sin_w), 1))
        self.register_buffer("columns_back", torch.cat((twins * cos_w, -twins * sin_w), 1).mT.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) != self.size:
            raise ValueError(f"folded for spatial size {self.size}, got {tuple(x.shape[2:])}: fold again for that size")
        if x.shape[0] == 0:
            return x.clone()
        y = x if self.enter is None else self.enter(x)
        with full_precision(y):
            z = upcast(y)
            filtered = self._by_products(z) if is_transformed(x) else self._by_transforms(z)
        y = filtered.to(y.dtype)
        return y if self.leave is None else self.leave(y)

    def _by_transforms(self, x: Tensor) -> Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(x) * complex_of_pairs(self.factors), self.size, norm="forward")

    def _by_products(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        z = x @ self.columns.to(dtype)  # (B, C, H, 2 K)
        z = self.rows.to(dtype) @ torch.cat(z.chunk(2, -1), -2)  # (B, C, 2 H, K)
        (re, im), (a, b) = z.chunk(2, -2), self.factors.to(dtype).unbind(-1)
        z = self.rows.to(dtype).mT @ torch.cat((a * re - b * im, a * im + b * re), -2)
        return torch.cat(z.chunk(2, -2), -1) @ self.columns_back.to(dtype)


def _cosines_and_sines(n: int, bins: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of 2 pi i k / n, (n, bins) each, in float64: on the CPU if the device has none."""
    home = float64_device(device)
    i, k = torch.arange(n, device=home), torch.arange(bins, device=home)
    angle = (i[:, None] * k % n).to(torch.float64) * (2 * math.pi / n)  # reduced in integers, so that it is exact
    return angle.cos(), angle.sin()
