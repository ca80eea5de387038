"""Layers of HiFi-Mamba in plain torch.

Feature maps are (B, C, H, W) with channels last in memory: a map over the channels is then one matrix product, a
LayerNorm reads contiguous numbers, and the selective scan finds its tokens in order.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chasm.backbones.hifi.kernels import has_kernels
from chasm.backbones.hifi.kernels.depthwise import depthwise
from chasm.common.cost import counted_as
from chasm.common.precision import autocast_dtype
from chasm.ops.library import constant


def over_channels(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a map over the channels of x, as a 1x1 convolution computes it.

    Args:
        x: (B, in, ...).
        weight: (out, in, 1, ...).
        bias: (out,).
    """
    return F.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


class ChannelMap(nn.Conv2d):
    """A 1x1 convolution, computed as one matrix product over the channels.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        bias: whether to add a bias.
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = False) -> None:
        super().__init__(in_channels, out_channels, 1, bias=bias)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return over_channels(x, weight, bias)


class NormalChannelMap(ChannelMap):
    """A ChannelMap that starts from a truncated normal of deviation 0.02."""

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class TokenMap(nn.Conv1d):
    """The ChannelMap of a sequence (B, in, L), without bias.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1, bias=False)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return over_channels(x, weight, bias)


class Depthwise(nn.Conv2d):
    """A 3x3 convolution of every channel by itself, with zeros around the map."""

    def __init__(self, channels: int, bias: bool = True) -> None:
        super().__init__(channels, channels, 3, padding=1, groups=channels, bias=bias)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[2] == x.shape[3] == 1:  # only the middle tap meets the map
            y = x * weight[:, 0, 1, 1, None, None]
            return y if bias is None else y + bias[:, None, None]
        if has_kernels(x):
            tokens = x.to(autocast_dtype(x) or x.dtype).movedim(1, -1)
            with counted_as("conv", macs=9 * x.numel()):
                return depthwise(tokens, weight, bias).movedim(-1, 1)
        return super()._conv_forward(x, weight, bias)


def along_sequence(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Return the convolution of every channel by itself along a sequence, at the same length.

    Args:
        x: (B, C, L).
        weight: (C, 1, taps), with an odd number of taps.
        dilation: distance between taps.
    """
    reach = dilation * (weight.shape[-1] - 1) // 2
    return F.conv1d(x, weight, padding=reach, dilation=dilation, groups=x.shape[1])


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


# The two low-pass filters halve an axis and bring it back to its length. Along one axis that is a matrix of small
# binary fractions, exact in bfloat16, so that a filter is one matrix product per axis.

Filters = tuple[Tensor, Tensor]


def low_pass(x: Tensor, filters: Filters) -> Tensor:
    """Return the low band of x (B, C, H, W) at the size of x."""
    B, C, H, W = x.shape
    rows, columns = (matrix.to(x.dtype) for matrix in filters)
    tokens = x.movedim(1, -1)  # (B, H, W, C)
    with counted_as(
        "conv", macs=B * C * H * W * 15 // 4
    ):  # counted as a filter: five taps for every number of both halvings
        y = torch.bmm(rows.expand(B, H, H), tokens.reshape(B, H, W * C))
        y = torch.bmm(columns.expand(B * H, W, W), y.view(B * H, W, C))
    return y.view(B, H, W, C).movedim(-1, 1)


def low_pass_filters(kind: str, x: Tensor) -> Filters:
    """Return the matrices of a low-pass filter along the rows (H, H) and the columns (W, W) of x.

    Args:
        kind: one of `LOW_PASS`.
        x: features (B, C, H, W) with even H and W.
    """
    H, W = x.shape[2:]
    halve = {"binomial": _halve_binomial, "haar": _halve_haar}[kind]
    rows, columns = (constant(_low_pass_matrix, x, halve, n) for n in (H, W))
    return (2 * rows, columns) if kind == "haar" else (rows, columns)  # orthonormal Haar: twice the mean of four


LOW_PASS = ("binomial", "haar")


def _low_pass_matrix(device: torch.device, halve: Callable[[Tensor, Tensor, int], Tensor], n: int) -> Tensor:
    i, j = torch.arange(n, device=device)[:, None], torch.arange(n // 2, device=device)
    # Bilinear, half-pixel centres, borders repeated: hat functions around the position of i among the halved samples.
    back = (1 - ((i - 0.5) / 2).clamp(0, n // 2 - 1).sub(j).abs()).clamp(min=0)  # (n, n / 2)
    return back @ halve(j[:, None], i.mT, n)


def _halve_binomial(i: Tensor, j: Tensor, n: int) -> Tensor:
    """Return the matrix (n / 2, n) of every second sample of [1 4 6 4 1] / 16, with reflected borders."""

    def tap(distance: Tensor) -> Tensor:
        d = distance.abs()
        return torch.where(d <= 2, 6 - 1.5 * d - 0.5 * d * d, 0.0) / 16

    beyond = torch.where(j > 0, tap(j + 2 * i), 0.0) + torch.where(j < n - 1, tap(2 * (n - 1) - j - 2 * i), 0.0)
    return tap(j - 2 * i) + beyond


def _halve_haar(i: Tensor, j: Tensor, n: int) -> Tensor:
    """Return the matrix (n / 2, n) of means of neighbours."""
    return (j // 2 == i) * 0.5
