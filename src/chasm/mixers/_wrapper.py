"""The layers around CHASM's core."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chasm.common.cost import counted_as
from chasm.common.precision import autocast_dtype
from chasm.common.tracing import has_hooks, is_transformed
from chasm.ops.block import Chain, can_join_layers
from chasm.ops.kernels.layout import is_channels_last


class Pointwise(nn.modules.conv._ConvNd):
    """A 1x1 convolution that is a batched product on a CPU, which is faster there and needs no temporaries."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        C, ones = x.shape[1], [1] * (x.ndim - 2)
        unchanged = bias is not None and weight.shape == (C, C, *ones) and _is_plain(self, 0)
        fast = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        if not (unchanged and fast) or torch.compiler.is_compiling():
            y: Tensor = super()._conv_forward(x, weight, bias)
            return y
        assert bias is not None
        with counted_as("conv"):
            W = weight.flatten(1).expand(x.shape[0], -1, -1)
            return torch.baddbmm(bias[:, None], W, x.flatten(2)).view(x.shape)


class Pointwise1d(Pointwise, nn.Conv1d):
    """Of (B, C, L)."""


class Pointwise2d(Pointwise, nn.Conv2d):
    """Of (B, C, H, W)."""


class Pointwise3d(Pointwise, nn.Conv3d):
    """Of (B, C, D, H, W)."""


POINTWISE = {1: Pointwise1d, 2: Pointwise2d, 3: Pointwise3d}


def joined_layers(x: Tensor, chains: Sequence[Chain], refine: nn.Module | None, fuse: nn.Module | None) -> list[Tensor]:
    """Return weights and biases of L and P_fuse, if the operator of the chains may stand for these layers too.

    It may not where a layer was exchanged, set otherwise or has hooks, nor where its parameters are of another dtype
    than the features (autocast converts them). Then the list is empty.

    Args:
        x: the input of the mixer.
        chains: the passes of its core.
        refine: L.
        fuse: P_fuse.
    """
    if (type(refine), type(fuse)) != (nn.Conv2d, Pointwise2d) or is_transformed(x) or not can_join_layers(x, chains):
        return []
    assert refine is not None
    assert fuse is not None
    found: list[Any] = [refine.weight, refine.bias, fuse.weight, fuse.bias]
    C = x.shape[1]
    shapes = [(C, 1, 3, 3), (C,), (C, C, 1, 1), (C,)]  # these also tell kernel sizes and groups
    if (
        [None if p is None else tuple(p.shape) for p in found] != shapes
        or _is_changed(refine, 1)
        or _is_changed(fuse, 0)
    ):
        return []
    fits = autocast_dtype(x) is not None or all(p.dtype == chains[0].dtype for p in found)
    return found if fits and all(type(p) in (nn.Parameter, Tensor) for p in found) else []


def in_format_of(y: Tensor, x: Tensor) -> Tensor:
    """Return y, channels last if x is that."""
    if is_transformed(x) or not is_channels_last(x):
        return y
    return y.contiguous(memory_format=torch.channels_last)


def _is_changed(conv: Any, padding: int) -> bool:
    """True if a convolution is not the plain one it was built as, or if it has hooks."""
    replaced = "forward" in conv.__dict__ or "_conv_forward" in conv.__dict__
    return replaced or has_hooks(conv) or not _is_plain(conv, padding)


def _is_plain(conv: Any, padding: int) -> bool:
    """True if a convolution has stride 1, dilation 1, and so many zeros around."""
    n = len(conv.kernel_size)
    found = conv.stride, conv.dilation, conv.padding, conv.padding_mode
    return found == ((1,) * n, (1,) * n, (padding,) * n, "zeros")
