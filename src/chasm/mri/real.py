"""Fourier transforms and products in real numbers, for runtimes without complex numbers and FFTs.

A complex image is (..., 2, H, W), where the axis of two holds real and imaginary part. Sizes enter only through
tensors, so that an exported program runs at any size.
"""

import math

import torch
from torch import Tensor

from chasm.mri.coils import MIN_SIGNAL, hann


def dft2c(x: Tensor, inverse: bool = False) -> Tensor:
    """Return the centred orthonormal Fourier transform of (..., 2, H, W), or its inverse, by matrix products.

    >>> x = torch.randn(1, 5, 8, dtype=torch.complex64)
    >>> parts = torch.stack([x.real, x.imag], 1)
    >>> k = torch.fft.fftshift(torch.fft.fft2(torch.fft.ifftshift(x, dim=(1, 2)), norm="ortho"), dim=(1, 2))
    >>> torch.allclose(dft2c(parts), torch.stack([k.real, k.imag], 1), atol=1e-5)
    True
    """
    for dim in (-1, -2):
        cosines, sines = _cosines_and_sines(x, x.shape[dim])
        real, imaginary = x.unbind(-3)
        if dim == -1:
            rc, rs, ic, is_ = real @ cosines, real @ sines, imaginary @ cosines, imaginary @ sines
        else:
            rc, rs, ic, is_ = cosines @ real, sines @ real, cosines @ imaginary, sines @ imaginary
        sign = -1 if inverse else 1
        x = torch.stack([rc + sign * is_, ic - sign * rs], -3)  # times e^{-i angle}, or e^{i angle}
    return x


def _cosines_and_sines(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (n, n) of the angles between centred positions and frequencies, over sqrt(n)."""
    at = torch.arange(n, device=x.device) - n // 2
    length = torch.ones_like(at).sum()  # n, but as a tensor: an exported program may be run at another n
    turns = (at[:, None] * at % length).to(x.dtype)  # reduced in integers: as exact for n = 500 as for 4
    angle, scale = turns * (2 * math.pi / length.to(x.dtype)), length.to(x.dtype).rsqrt()
    return angle.cos() * scale, angle.sin() * scale


def complex_product(a: Tensor, b: Tensor, conjugate: bool = False) -> Tensor:
    """Return the complex product a b.

    Args:
        a: (..., 2, H, W).
        b: (..., 2, H, W).
        conjugate: return conj(a) b instead.
    """
    sign = -1 if conjugate else 1
    (ar, ai), (br, bi) = a.unbind(-3), b.unbind(-3)
    return torch.stack([ar * br - sign * ai * bi, ar * bi + sign * ai * br], -3)


def calibration_columns(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the end column of the fully sampled block around W // 2 of a mask (..., W).

    >>> calibration_columns(torch.tensor([1.0, 0, 1, 1, 1, 0]))
    (tensor(2), tensor(5))
    """
    missing = (mask.flatten() == 0).long()
    middle = missing.shape[0] // 2
    left, right = missing[:middle].flip(0), missing[middle:]
    before, after = ((half.cumsum(0) == 0).sum() for half in (left, right))
    center = torch.ones_like(left).sum()
    return center - before, center + after


def estimate_real_maps(k: Tensor, mask: Tensor) -> Tensor:
    """Return sensitivity maps of k-space (B, Q, 2, H, W), the same as those of `chasm.mri.estimate_maps`.

    The calibration block is the one around the centre of the mask of zeros and ones; without one the maps are zero.
    """
    first, end = calibration_columns(mask)
    rows, columns = (torch.arange(n, device=k.device).to(k.dtype) for n in k.shape[-2:])
    middle = torch.ones_like(rows).sum().div(2).floor()
    window = hann(columns, (first + end - 1) / 2, end - first) * hann(rows, middle, end - first)[:, None]
    low = dft2c(k * window, inverse=True)
    total = low.square().sum((1, 2), keepdim=True).sqrt()
    inside = total > MIN_SIGNAL * total.amax((-2, -1), keepdim=True)
    return torch.where(inside, low / total.clamp_min(torch.finfo(k.dtype).tiny), 0)
