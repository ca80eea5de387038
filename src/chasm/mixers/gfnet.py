"""GFNet: Rao et al., "Global Filter Networks for Image Classification", NeurIPS 2021, arXiv 2107.00645.

    X = rfft2(x);  Y[c, k] = K[c, k] X[c, k];  y = irfft2(Y)          (orthonormal transforms)

One complex value per channel and bin: a circular convolution as large as the map, no channel mixing.
Intrinsic: the filter and nothing else (norm, MLP and the residual around both belong to the host).

The published layer runs at one size only; its fine-tuning script converts the filter to another size by
bicubic interpolation of the real and imaginary planes (corners aligned, bins in FFT order). Here that
happens in the forward pass whenever the map is not the one the filter was made for.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chasm.common.cost import counted_as
from chasm.common.tracing import is_traced
from chasm.mixers._spectral import check_pair, complex_of_pairs, full_precision, is_empty, upcast
from chasm.mixers.base import Facts, Mixer, register_mixer


def _axis_matrix(n: int, bins: int, mode: str, like: Tensor) -> Tensor:
    """Return the matrix (bins, n) of an interpolation with aligned corners along one axis."""
    eye = torch.eye(n, dtype=like.dtype, device=like.device)
    return F.interpolate(eye[None, None], (bins, n), mode=mode, align_corners=True)[0, 0]


def resize_filter(pairs: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Resize a filter by matrix products, because torch's interpolation has no deterministic CUDA backward.

    Args:
        pairs: (h, w', C, 2).
        size: bins (H, W//2+1) of the result.
        mode: mode of `torch.nn.functional.interpolate`.
    """
    rows = _axis_matrix(pairs.shape[0], size[0], mode, pairs)
    columns = _axis_matrix(pairs.shape[1], size[1], mode, pairs)
    with counted_as("interpolation"):
        return torch.einsum("jw,iwcp->ijcp", columns, torch.einsum("ih,hwcp->iwcp", rows, pairs))


def hermitian_edges(pairs: Tensor, width: int) -> Tensor:
    """Return a filter with only that part of its DC and (even W) Nyquist columns which leaves a real map real.

    The rest would reach the inverse transform as the imaginary part that `irfft2` of `_spectral` drops from a map;
    dropped here it costs a pass over the filter, and none over the map's spectrum.

    Args:
        pairs: (H, W//2+1, C, 2), real and imaginary part, because ONNX has few operations for complex numbers.
        width: W.
    """

    def part(column: Tensor) -> Tensor:
        real, imaginary = column.flip(0).roll(1, 0).unbind(-1)
        return (column + torch.stack((real, -imaginary), -1)) / 2

    first, last = part(pairs[:, :1]), pairs[:, -1:]
    bins = pairs.shape[1]
    if bins == 1:
        return first
    k = torch.arange(bins, device=pairs.device)[-1:]  # compared as a tensor: an exported graph keeps W free
    last = torch.where(2 * k == width, part(last), last)
    return torch.cat((first, pairs[:, 1:-1], last), 1)


class _CircularConvolution(torch.autograd.Function):
    """(x, K) -> y, X with X = rfft2(x) and y = irfft2(K X), both unscaled, K as `hermitian_edges` leaves it.

    The adjoint is the same with conj(K), one real transform each way; torch's backward of a real transform is a
    complex one of twice the size. X is an output because second derivatives need it.
    """

    @staticmethod
    def forward(x: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
        X = torch.fft.rfft2(x)
        return torch.fft.irfft2(X * K, x.shape[-2:], norm="forward"), X

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], output[1])
        ctx.size = inputs[0].shape[-2:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, gX: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        (K, X), (H, W) = ctx.saved_tensors, ctx.size
        gx = gK = None
        if g is not None:
            G = torch.fft.rfft2(g)
            if ctx.needs_input_grad[0]:
                gx = torch.fft.irfft2(G * K.conj(), (H, W), norm="forward")
            if ctx.needs_input_grad[1]:
                k = torch.arange(W // 2 + 1, device=g.device)
                twins = 2 - ((k == 0) | (2 * k == W)).to(g.dtype)  # bins that a column stands for
                gK = (G * X.conj()).sum(0) * twins
        if gX is not None and ctx.needs_input_grad[0]:
            g_map = torch.fft.ifft2(F.pad(gX, (0, W - W // 2 - 1)), norm="forward").real
            gx = g_map if gx is None else gx + g_map
        return gx, gK


def spectrum_factors(pairs: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Return the factors of the half spectrum of a map, (C, H, W//2+1, 2), with the scale of both transforms.

    Args:
        pairs: the filter (h, w', C, 2).
        size: (H, W) of the map.
        mode: mode of resizing a filter of another size, see `resize_filter`.
    """
    H, W = size
    pairs = upcast(pairs) / (H * W)
    if pairs.shape[:2] != (H, W // 2 + 1):
        pairs = resize_filter(pairs, (H, W // 2 + 1), mode)
    return hermitian_edges(pairs, W).permute(2, 0, 1, 3)


def global_filter(x: Tensor, pairs: Tensor, mode: str) -> Tensor:
    """Multiply the spectrum of x by a filter.

    Args:
        x: (B, C, H, W).
        pairs: the filter (h, w', C, 2), resized if its size is not that of x.
        mode: mode of resizing it, see `resize_filter`.
    """
    H, W = x.shape[-2:]
    with full_precision(x):
        K = complex_of_pairs(spectrum_factors(pairs, (H, W), mode))  # (C, H, W//2+1)
        if is_traced():  # by torch.compile, torch.func, ...
            return torch.fft.irfft2(torch.fft.rfft2(upcast(x)) * K, (H, W), norm="forward").to(x.dtype)
        y: Tensor = _CircularConvolution.apply(upcast(x), K)[0]
        return y.to(x.dtype)


@register_mixer("gfnet")
class GFNet(Mixer):
    """The global filter layer.

    Args:
        channels: the number of channels, C.
        size: the map (H, W) the filter is stored for; without one, the paper's 14x14 (a 14x8 filter).
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    resize_mode = "bicubic"
    spectral_parameters = ("filter",)
    complex_parameters = ("filter",)
    facts = Facts(
        "learned filters",
        "diagonal/filter-wise",
        "filter resized in forward (bicubic); not resolution-invariant",
        paper_params="0.80M",
        note="0.80M is a 128x128 map with a complex number counted once (as two reals: 1.60M)",
    )

    def __init__(
        self,
        channels: int,
        *,
        size: int | tuple[int, ...] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels
        h, w = check_pair("size", 14 if size is None else size)
        self.filter = nn.Parameter(torch.randn(h, w // 2 + 1, channels, 2, device=device, dtype=dtype) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        if is_empty(x, self.channels):
            return x
        return global_filter(x, self.filter, self.resize_mode)
