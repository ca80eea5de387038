"""The layers around CHASM's core."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from chasm import ops
from chasm.common.cost import counted_as
from chasm.common.precision import autocast_dtype
from chasm.common.tracing import is_transformed, is_unchanged
from chasm.ops import Chain
from chasm.ops.block import can_join_layers
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


def with_layers(
    x: Tensor, chains: Sequence[Chain], refine: nn.Module | None, fuse: nn.Module | None, add_input: bool
) -> Tensor:
    """Return X + P_fuse(L(Phi(X))), as one operator where that can compute the layers as well.

    Args:
        x: input of the mixer, X.
        chains: the passes of its core, Phi.
        refine: the depthwise convolution in L, or None for a bare core.
        fuse: P_fuse, or None.
        add_input: whether to add X.
    """
    parameters = joined_parameters(x, chains, refine, fuse)
    if parameters:
        return ops.run(x, chains, layers=parameters, residual=x if add_input else None)
    return after_core(ops.run(x.to(chains[0].dtype), chains), x, refine, fuse, add_input)


def after_core(z: Tensor, x: Tensor, refine: nn.Module | None, fuse: nn.Module | None, add_input: bool) -> Tensor:
    """Return X + P_fuse(L(Z)), layer by layer.

    Args:
        z: result of the core, Z.
        x: input of the mixer, X.
        refine: the depthwise convolution in L, or None for a bare core.
        fuse: P_fuse, or None.
        add_input: whether to add X.
    """
    if refine is not None and fuse is not None:
        z = fuse(gelu(refine(z)))
    y = x + z if add_input else z.to(x.dtype)
    return y if is_transformed(x) or not is_channels_last(x) else y.contiguous(memory_format=torch.channels_last)


def joined_parameters(x: Tensor, chains: Sequence[Chain], refine: Any, fuse: Any) -> list[Tensor]:
    """Return weights and biases of L and P_fuse, if the operator of the chains can compute these layers.

    It cannot if a layer was replaced, changed or has hooks, or if its parameters have another dtype than the features
    and autocast does not convert them. Then the list is empty.

    Args:
        x: input of the mixer.
        chains: the passes of its core.
        refine: what stands in the place of the depthwise convolution of L.
        fuse: what stands in the place of P_fuse.
    """
    if not (is_unchanged(nn.Conv2d, refine) and is_unchanged(Pointwise2d, fuse)):
        return []
    C, dtype = x.shape[1], chains[0].dtype
    plain = _is_plain(refine, (C, C, (3, 3), (1, 1), C)) and _is_plain(fuse, (C, C, (1, 1), (0, 0), 1))
    if not plain or not can_join_layers(x, chains):
        return []
    parameters: list[Any] = [refine.weight, refine.bias, fuse.weight, fuse.bias]
    for p in parameters:
        if type(p) not in (nn.Parameter, Tensor) or (p.dtype != dtype and autocast_dtype(x) is None):
            return []
    return parameters


def _is_plain(conv: Any, expected: tuple[Any, ...]) -> bool:
    """Return True if a convolution has these channels, kernel size, padding and groups, and defaults elsewhere."""
    geometry = conv.in_channels, conv.out_channels, conv.kernel_size, conv.padding, conv.groups
    if geometry != expected or conv.stride != (1, 1) or conv.dilation != (1, 1) or conv.padding_mode != "zeros":
        return False
    return "_conv_forward" not in vars(conv)
