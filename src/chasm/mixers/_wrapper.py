"""The layers around CHASM's core, and whether kernels may go past them."""

from typing import Any

import torch
from torch import Tensor, nn

from chasm.common.precision import autocast_dtype
from chasm.ops._cost import counted_as
from chasm.ops.kernels import observed, traced
from chasm.ops.kernels.local import obstacle


class Pointwise(nn.modules.conv._ConvNd):
    """A 1x1 convolution that is a batched product on a CPU, which is faster there and needs no temporaries."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        C, ones = x.shape[1], [1] * (x.ndim - 2)
        usual = bias is not None and weight.shape == (C, C, *ones) and _plain(self, 0)  # somebody may have made another
        here = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        if not (usual and here) or torch.compiler.is_compiling():
            y: Tensor = super()._conv_forward(x, weight, bias)
            return y
        assert bias is not None
        with counted_as("conv"):
            W = weight.flatten(1).expand(x.shape[0], -1, -1)
            return torch.baddbmm(bias[:, None], W, x.flatten(2)).view(x.shape)


class Pointwise1d(Pointwise, nn.Conv1d): ...


class Pointwise2d(Pointwise, nn.Conv2d): ...


class Pointwise3d(Pointwise, nn.Conv3d): ...


def kernels_fit(z: Tensor, refine: nn.Module, fuse: nn.Module) -> bool:
    """Whether z goes through `local_block`."""
    return obstacle(z) is None and ordinary(z, refine, fuse)


def ordinary(z: Tensor, refine: nn.Module, fuse: nn.Module) -> bool:
    """Whether z may go past the layers: not when traced, nor where one was exchanged, set otherwise or has hooks."""
    if traced(z) or (type(refine), type(fuse)) != (nn.Conv2d, Pointwise2d):
        return False
    if any(observed(m) or "forward" in vars(m) or "_conv_forward" in vars(m) for m in (refine, fuse)):
        return False
    cast, given = autocast_dtype(z) is not None, parameters(refine, fuse)
    if not all(type(p) in (nn.Parameter, Tensor) and (cast or p.dtype == z.dtype) for p in given):
        return False
    C = z.shape[1]  # shapes also tell kernel sizes and groups
    shapes = [(C, 1, 3, 3), (C,), (C, C, 1, 1), (C,)]
    return [p.shape for p in given] == shapes and _plain(refine, 1) and _plain(fuse, 0)


def _plain(conv: Any, padding: int) -> bool:
    """Whether a convolution has stride 1, dilation 1, and that many zeros around."""
    n = len(conv.kernel_size)
    found = conv.stride, conv.dilation, conv.padding, conv.padding_mode
    return found == ((1,) * n, (1,) * n, (padding,) * n, "zeros")


def parameters(refine: nn.Module, fuse: nn.Module) -> tuple[Any, ...]:
    return refine.weight, refine.bias, fuse.weight, fuse.bias


POINTWISE = {1: Pointwise1d, 2: Pointwise2d, 3: Pointwise3d}
