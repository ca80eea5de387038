"""Fourier transforms and products in real numbers, for runtimes without complex numbers and FFTs.

A complex image is (..., 2, H, W), where the axis of two holds real and imaginary part.

Nothing here depends on sizes in Python, so that an exported program runs at any of them.
"""

import math

import torch
from torch import Tensor


def dft2c(x: Tensor, inverse: bool = False) -> Tensor:
    """The centred orthonormal transform of (..., 2, H, W), real and imaginary part, by matrix products.

    >>> x = torch.randn(1, 5, 8, dtype=torch.complex64)
    >>> parts = torch.stack([x.real, x.imag], 1)
    >>> k = torch.fft.fftshift(torch.fft.fft2(torch.fft.ifftshift(x, dim=(1, 2)), norm="ortho"), dim=(1, 2))
    >>> torch.allclose(dft2c(parts), torch.stack([k.real, k.imag], 1), atol=1e-5)
    True
    """
    for dim in (-1, -2):
        cosines, sines = _turns(x, x.shape[dim])
        real, imaginary = x.unbind(-3)
        if dim == -1:
            rc, rs, ic, is_ = real @ cosines, real @ sines, imaginary @ cosines, imaginary @ sines
        else:
            rc, rs, ic, is_ = cosines @ real, sines @ real, cosines @ imaginary, sines @ imaginary
        sign = -1 if inverse else 1
        x = torch.stack([rc + sign * is_, ic - sign * rs], -3)  # times e^{-i angle}, or e^{i angle}
    return x


def _turns(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (n, n) of the angles between centred positions and frequencies, over sqrt(n)."""
    at = torch.arange(n, device=x.device) - n // 2
    length = torch.ones_like(at).sum()  # n, but as a tensor: an exported program may be run at another n
    turns = (at[:, None] * at % length).to(x.dtype)  # reduced in integers: as exact for n = 500 as for 4
    angle, scale = turns * (2 * math.pi / length.to(x.dtype)), length.to(x.dtype).rsqrt()
    return angle.cos() * scale, angle.sin() * scale


def product(a: Tensor, b: Tensor, conjugate: bool = False) -> Tensor:
    """a b, or conj(a) b, of complex numbers as (..., 2, H, W)."""
    sign = -1 if conjugate else 1
    (ar, ai), (br, bi) = a.unbind(-3), b.unbind(-3)
    return torch.stack([ar * br - sign * ai * bi, ar * bi + sign * ai * br], -3)


def calibration_columns(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the end column of the fully sampled block around W // 2, from a mask (..., W) of zeros and ones.

    >>> calibration_columns(torch.tensor([1.0, 0, 1, 1, 1, 0]))
    (tensor(2), tensor(5))
    """
    missing = (mask.flatten() == 0).long()
    middle = missing.shape[0] // 2
    left, right = missing[:middle].flip(0), missing[middle:]
    before, after = ((half.cumsum(0) == 0).sum() for half in (left, right))
    center = torch.ones_like(left).sum()
    return center - before, center + after


def estimate_maps(k: Tensor, mask: Tensor, floor: float = 0.02) -> Tensor:
    """Sensitivity maps (B, Q, 2, H, W) from k-space (B, Q, 2, H, W), as `chasm.mri.estimate_maps` makes them.

    The calibration block is the one around the centre of the mask. A mask without one gives maps of zeros.
    """
    first, end = calibration_columns(mask)
    rows, columns = (torch.arange(n, device=k.device).to(k.dtype) for n in k.shape[-2:])
    middle = torch.ones_like(rows).sum().div(2).floor()
    window = _hann(columns, (first + end - 1) / 2, end - first) * _hann(rows, middle, end - first)[:, None]
    low = dft2c(k * window, inverse=True)
    total = low.square().sum((1, 2), keepdim=True).sqrt()
    inside = total > floor * total.amax((-2, -1), keepdim=True)
    return torch.where(inside, low / total.clamp_min(torch.finfo(k.dtype).tiny), 0)


def _hann(at: Tensor, middle: Tensor, width: Tensor) -> Tensor:
    """Raised cosine of the given width around `middle`, zero beyond it."""
    t = (at - middle) / (width + 1)
    return torch.where(t.abs() < 0.5, 0.5 + 0.5 * torch.cos(2 * math.pi * t), 0)
