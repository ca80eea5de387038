"""What the Fourier mixers share: entry checks, the precision policy and the real transforms.

Precision: a transform, and whatever multiplies its result, runs in float32 (float64 stays float64) with
autocast off; the mixer hands back its input's dtype.
"""

import torch
from torch import Tensor

from chasm.ops.precision import full_precision as full_precision


def is_empty(x: Tensor, channels: int) -> bool:
    """Whether the batch is empty (FFT libraries refuse that); all but a real (B, channels, H, W) raises."""
    if x.ndim != 4 or x.shape[1] != channels or not x.is_floating_point():
        got = f"{tuple(x.shape)} {x.dtype}"
        raise ValueError(f"expected a real map (B, {channels}, H, W), got {got}: check layout and channels")
    if 0 in x.shape[2:]:
        raise ValueError(f"expected H and W of at least 1, got {tuple(x.shape)}: drop empty maps")
    return x.shape[0] == 0


def check_pair(name: str, value: tuple[int, ...]) -> tuple[int, int]:
    """Two positive integers, for sizes and mode counts."""
    if len(value) != 2 or min(value) < 1:
        raise ValueError(f"expected {name} as two positive integers, got {value!r}")
    return value[0], value[1]


def wide(x: Tensor) -> Tensor:
    """x in the dtype the transforms run in."""
    return x if x.dtype == torch.float64 else x.float()


def as_complex(pairs: Tensor) -> Tensor:
    """(..., 2) real -> (...) complex, of a parameter stored in any real dtype."""
    return torch.view_as_complex(wide(pairs).contiguous())  # a model moved to channels-last takes its parameters along


def rfft2(x: Tensor, norm: str) -> Tensor:
    """(..., H, W) real -> (..., H, W//2+1) complex."""
    return torch.fft.rfft2(wide(x), norm=norm)


def irfft2(spectrum: Tensor, size: tuple[int, int], norm: str) -> Tensor:
    """(..., H, K) complex -> (..., H, W) real; columns from K up to W//2+1 are zero.

    A learned multiplier leaves an imaginary part in the DC and (even W) Nyquist columns of the half
    transformed map. No real map has one. CPU libraries drop it silently and GPU ones are not bound to, so
    it is set to zero here.
    """
    width = size[1]
    half = torch.fft.ifft(spectrum, dim=-2, norm=norm)  # back along H; what is left is the 1-D spectrum along W
    k = torch.arange(half.shape[-1], device=half.device)
    has_imag = ((k != 0) & (2 * k != width)).to(half.real.dtype)
    keep = torch.stack((torch.ones_like(has_imag), has_imag), -1)  # (K, 2)
    half = torch.view_as_complex(torch.view_as_real(half) * keep)
    return torch.fft.irfft(half, n=width, dim=-1, norm=norm)
