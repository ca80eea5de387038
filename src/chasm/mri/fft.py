"""Centred orthonormal 2-D Fourier transform: zero frequency at index N // 2, norm preserved.

>>> x = torch.randn(1, 1, 5, 8, dtype=torch.complex64)
>>> torch.allclose(ifft2c(fft2c(x)), x, atol=1e-6)
True
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from chasm.common.precision import float64_device, full_precision

_HW = (-2, -1)


def as_complex(x: Tensor) -> Tensor:
    """Return x as a complex tensor of the same precision.

    Half precision, for which torch has no transform at every size, becomes single precision.
    """
    if x.is_complex():
        return x.to(torch.complex64) if x.dtype == torch.complex32 else x
    return x.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)


def fft2c(x: Tensor) -> Tensor:
    """Return the k-space (..., H, W) of an image (..., H, W): complex64, or complex128 for double input."""
    with full_precision(x):
        return _centred(torch.fft.fft2, as_complex(x))


def ifft2c(k: Tensor) -> Tensor:
    """Return the image (..., H, W) of k-space (..., H, W). This is the inverse and the adjoint of `fft2c`."""
    with full_precision(k):
        return _centred(torch.fft.ifft2, as_complex(k))


def _centred(transform: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return the transform of x (..., H, W), with the origin of both at index N // 2."""
    if 0 in x.shape[:-2]:  # an empty batch, which FFT libraries refuse
        return x
    return torch.fft.fftshift(transform(torch.fft.ifftshift(x, dim=_HW), norm="ortho"), dim=_HW)


def resize_in_kspace(image: Tensor, size: int) -> Tensor:
    """Return the image (..., size, size) of the same field of view and intensity.

    The central part of k-space is kept, as in a scan of lower resolution. Beyond the k-space of the image there are
    zeros, as in the interpolation that scanners do: more pixels, and no more detail.

    Args:
        image: (..., H, W). Complex images stay complex; real ones become the magnitude of the result.
        size: the new height and width.

    >>> resize_in_kspace(torch.ones(1, 6, 5), 8).shape
    torch.Size([1, 8, 8])
    """
    if size < 1:
        raise ValueError(f"expected a positive height and width, got {size}")
    k = fft2c(image)
    for axis in _HW:
        n = k.shape[axis]
        before = size // 2 - n // 2  # the zero frequency is at index N // 2 of N
        after = size - n - before
        k = torch.nn.functional.pad(k, (before, after) if axis == -1 else (0, 0, before, after))  # negative: cut off
    resized = ifft2c(k) * (size / (image.shape[-2] * image.shape[-1]) ** 0.5)
    return resized if image.is_complex() else resized.abs().to(image.dtype)


def exchange_image_halves(k: Tensor) -> Tensor:
    """Return the k-space of ifftshift(image) from the k-space of the image, both (..., H, W) and centred.

    Only phases change, so zeros stay exactly zero and unmeasured columns can still be told from measured ones.

    >>> x = torch.randn(1, 5, 8, dtype=torch.complex64)
    >>> shifted = torch.fft.ifftshift(x, dim=(-2, -1))
    >>> torch.allclose(exchange_image_halves(fft2c(x)), fft2c(shifted), atol=1e-5)
    True
    """
    for axis in _HW:
        n = k.shape[axis]
        turns = torch.arange(n, device=float64_device(k.device)) - n // 2
        angle = (turns * (n // 2) % n).double() * (2 * math.pi / n)
        phase = torch.polar(torch.ones_like(angle), angle).to(k.device, k.dtype)
        k = k * (phase if axis == -1 else phase[:, None])
    return k


def to_channels(x: Tensor) -> Tensor:
    """Return complex (B, M, H, W) as real (B, 2M, H, W), with channels re_1, im_1, re_2, im_2, ..."""
    return torch.view_as_real(x).permute(0, 1, 4, 2, 3).flatten(1, 2)


def to_complex(x: Tensor) -> Tensor:
    """Return real (B, 2M, H, W) as complex (B, M, H, W). This undoes `to_channels`."""
    x = x if x.dtype == torch.float64 else x.float()
    return torch.complex(x[:, 0::2], x[:, 1::2])
