"""A depthwise 3x3 on (B, C, H, W) by the kernels of `local`, with their backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chasm.ops.kernels import applied, gradients
from chasm.ops.kernels.layout import contiguous


def depthwise(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """z (B, C, H, W) in the dtype to compute in, where `local.obstacle` finds none; weight (C, 1, 3, 3); zeros around.

    Sums in float32. The result has z's dtype, whatever that of the parameters.
    """
    if z.numel() == 0:
        return _plain(z, weight, bias)
    y: Tensor = applied(_Depthwise, z, weight, bias)
    return y


def _plain(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same by torch, differentiable any number of times."""
    bias = None if bias is None else bias.to(z.dtype)
    return F.conv2d(z, weight.to(z.dtype), bias, padding=1, groups=z.shape[1])


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from chasm.ops.kernels import local_triton

        return local_triton.depthwise(contiguous(z), weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        from chasm.ops.kernels import local_triton

        z, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the kernels have no second derivative
            return tuple(gradients(_plain(z, weight, bias), g, (z, weight, bias), ctx.needs_input_grad))
        gz, gw, gb = local_triton.depthwise_backward(contiguous(g.to(z.dtype)), contiguous(z), weight)
        return gz, gw.to(weight.dtype), None if bias is None else gb.to(bias.dtype)
