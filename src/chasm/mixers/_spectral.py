"""Entry checks, precision policy and real transforms of the Fourier mixers.

Precision: a transform, and the factors of its result, run in float32 (float64 stays float64) with autocast off.
The mixer returns its input's dtype.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from chasm.common.precision import full_precision as full_precision
from chasm.common.precision import upcast as upcast
from chasm.common.registry import is_count
from chasm.common.tracing import is_traced


def is_empty(x: Tensor, channels: int) -> bool:
    """Return True if the batch is empty, which FFT libraries refuse; raise if x is no real (B, channels, H, W)."""
    if x.ndim != 4 or x.shape[1] != channels or not x.is_floating_point():
        got = f"{tuple(x.shape)} {x.dtype}"
        raise ValueError(f"expected a real map (B, {channels}, H, W), got {got}: check layout and channels")
    if 0 in x.shape[2:]:
        raise ValueError(f"expected H and W of at least 1, got {tuple(x.shape)}: drop empty maps")
    return x.shape[0] == 0


def check_pair(name: str, value: int | tuple[int, ...]) -> tuple[int, int]:
    """Return two positive integers, for sizes and mode counts; one number stands for two that are equal."""
    pair = tuple(value) if isinstance(value, Iterable) else (value, value)
    if len(pair) != 2 or not all(map(is_count, pair)):
        raise ValueError(f"expected {name} as two positive integers or one for both, got {value!r}")
    return int(pair[0]), int(pair[1])


class WideConv2d(nn.Conv2d):
    """A convolution in float32, or in float64 if x has that dtype. Call it with autocast off."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(upcast(x), upcast(weight), None if bias is None else upcast(bias))


def complex_of_pairs(pairs: Tensor) -> Tensor:
    """Return a parameter (..., 2), stored in any real dtype, as complex (...)."""
    return torch.view_as_complex(upcast(pairs).contiguous())  # parameters may be channels-last


def rfft2(x: Tensor, norm: str) -> Tensor:
    """Return the transform (..., H, W//2+1) of a real x (..., H, W)."""
    if not x.is_cuda or is_traced():  # by torch.compile, torch.func, ...
        return torch.fft.rfft2(upcast(x), norm=norm)
    X: Tensor = _Spectrum.apply(upcast(x), norm)
    return X


def irfft2(spectrum: Tensor, size: tuple[int, int], norm: str) -> Tensor:
    """Return the real map (..., H, W) of a spectrum (..., H, K).

    A learned multiplier leaves an imaginary part in the DC and (even W) Nyquist columns of the half
    transformed map. No real map has one. CPU libraries drop it silently and GPU ones are not bound to, so
    it is set to zero here.

    Args:
        spectrum: half spectra; columns from K up to W//2+1 are taken as zero.
        size: (H, W) of the maps.
        norm: as in `torch.fft`.
    """
    width = size[1]
    if spectrum.is_cuda and spectrum.shape[-1] == width // 2 + 1 and not is_traced():
        y: Tensor = _Map.apply(spectrum, size, norm, False)
        return y
    half = torch.fft.ifft(spectrum, dim=-2, norm=norm)  # back along H; what is left is the 1-D spectrum along W
    k = torch.arange(half.shape[-1], device=half.device)
    has_imag = ((k != 0) & (2 * k != width)).to(half.real.dtype)
    keep = torch.stack((torch.ones_like(has_imag), has_imag), -1)  # (K, 2)
    half = torch.view_as_complex(torch.view_as_real(half) * keep)
    return torch.fft.irfft(half, n=width, dim=-1, norm=norm)


# For GPUs, where passes over memory count: torch's backward of rfft2 is a complex transform of the whole spectrum, and
# its transforms along H alone copy their input. The two functions below are each other's adjoint, but for the number of
# bins that a column stands for.
_ADJOINT_NORM = {"ortho": "ortho", "backward": "forward", "forward": "backward"}


def _times_bins(spectrum: Tensor, width: int, power: int) -> Tensor:
    """Multiply columns by the number of bins they stand for: 1 for DC and (even W) Nyquist, 2 otherwise."""
    k = torch.arange(width // 2 + 1, device=spectrum.device)
    bins = 2 - ((k == 0) | (2 * k == width)).to(spectrum.real.dtype)
    return torch.view_as_complex(torch.view_as_real(spectrum.resolve_conj()) * bins[:, None] ** power)


class _Spectrum(torch.autograd.Function):
    """The half spectrum of a map."""

    @staticmethod
    def forward(x: Tensor, norm: str) -> Tensor:
        return torch.fft.rfft2(x, norm=norm)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.size, ctx.norm = inputs[0].shape[-2:], inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Map.apply(g, ctx.size, _ADJOINT_NORM[ctx.norm], True), None


class _Map(torch.autograd.Function):
    """The map of a half spectrum; with `gradient` of one whose columns hold the sum over the bins they stand for."""

    @staticmethod
    def forward(spectrum: Tensor, size: tuple[int, int], norm: str, gradient: bool) -> Tensor:
        width = size[1]
        spectrum = _times_bins(spectrum, width, -1) if gradient else spectrum.clone()
        edges = spectrum[..., :: width if width % 2 else width // 2]  # the columns without a twin
        edges.copy_((edges + edges.flip(-2).roll(1, -2).conj()) / 2)  # what leaves a real map
        return torch.fft.irfft2(spectrum, size, norm=norm)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.size, ctx.norm, ctx.gradient = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        G = _Spectrum.apply(g, _ADJOINT_NORM[ctx.norm])
        return G if ctx.gradient else _times_bins(G, ctx.size[1], 1), None, None, None
