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
        C, zeros = x.shape[1], (0,) * (x.ndim - 2)
        # A kernel of one position and no padding: the stride must be 1, and the dilation has no effect.
        unchanged = bias is not None and weight.shape == (C, C, *(1 for _ in zeros))
        unchanged = unchanged and self.padding == zeros and self.stride == (1,) * len(zeros)
        fast = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        if not (unchanged and fast) or torch.compiler.is_compiling():
            y: Tensor = super()._conv_forward(x, weight, bias)
            return y
        assert bias is not None
        with counted_as("conv"):
            W = weight.flatten(1).expand(x.shape[0], -1, -1)
            return torch.baddbmm(bias[:, None], W, x.flatten(2)).view(x.shape)


class Pointwise1d(Pointwise, nn.Conv1d):
    """A 1x1 convolution of (B, C, L)."""


class Pointwise2d(Pointwise, nn.Conv2d):
    """A 1x1 convolution of (B, C, H, W)."""


class Pointwise3d(Pointwise, nn.Conv3d):
    """A 1x1 convolution of (B, C, D, H, W)."""


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
    if type(refine) is not nn.Conv2d or type(fuse) is not Pointwise2d or is_transformed(x):
        return []
    C = x.shape[1]
    plain = _is_plain(refine, (C, C, (3, 3), (1, 1), C)) and _is_plain(fuse, (C, C, (1, 1), (0, 0), 1))
    if not plain or not can_join_layers(x, chains):
        return []
    found: list[Any] = [refine.weight, refine.bias, fuse.weight, fuse.bias]
    dtype = None if autocast_dtype(x) is not None else chains[0].dtype
    for p in found:
        if type(p) not in (nn.Parameter, Tensor) or (dtype is not None and p.dtype != dtype):
            return []
    return found


def in_format_of(y: Tensor, x: Tensor) -> Tensor:
    """Return y, channels last if x is that."""
    if is_transformed(x) or not is_channels_last(x):
        return y
    return y.contiguous(memory_format=torch.channels_last)


def _is_plain(conv: Any, expected: tuple[Any, ...]) -> bool:
    """True if a convolution has these channels, kernel size, padding and groups, all else as built, and no hooks."""
    found = conv.in_channels, conv.out_channels, conv.kernel_size, conv.padding, conv.groups
    if found != expected or conv.stride != (1, 1) or conv.dilation != (1, 1) or conv.padding_mode != "zeros":
        return False
    replaced = "forward" in conv.__dict__ or "_conv_forward" in conv.__dict__
    return not replaced and not has_hooks(conv)
