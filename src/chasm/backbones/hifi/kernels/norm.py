"""GELU of a GroupNorm with one group, on (B, C, H, W), by Triton kernels with their own backward.

Nothing of the size of the map is kept but x. torch's kernels sum a group in one thread block, so that one group leaves
the device idle but for B blocks; and its norm and its GELU each read and write the map.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chasm.ops.kernels import applied, gradients
from chasm.ops.kernels.layout import contiguous


def norm_gelu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x (B, C, H, W) where `local.obstacle` finds none, parameters (C,). Arithmetic in float32, the result like x."""
    if x.numel() == 0:
        return _plain(x, weight, bias, eps)
    y: Tensor = applied(_NormGELU, x, weight, bias, eps)[0]
    return y


def _plain(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The same by torch, differentiable any number of times."""
    return F.gelu(F.group_norm(x, 1, weight.to(x.dtype), bias.to(x.dtype), eps))


class _NormGELU(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from chasm.backbones.hifi.kernels import norm_triton

        return norm_triton.forward(contiguous(x), weight.contiguous(), bias.contiguous(), eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> Any:
        from chasm.backbones.hifi.kernels import norm_triton

        if g is None:
            return None, None, None, None
        x, weight, bias, statistics = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the kernels have no second derivative
            y = _plain(x, weight, bias, ctx.eps)
            return *gradients(y, g, (x, weight, bias), ctx.needs_input_grad[:3]), None
        gx, gw, gb = norm_triton.backward(
            contiguous(g.to(x.dtype)), contiguous(x), weight.contiguous(), bias.contiguous(), statistics
        )
        return gx, gw.to(weight.dtype), gb.to(bias.dtype), None
