"""Y = X + P(gelu(dw3x3(Z))) on a CPU, for channels-last Z (B, C, H, W), with its own backward for the 1x1 P."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, gelu

from chasm.ops.chain import Once
from chasm.ops.kernels import transformed
from chasm.ops.precision import full_precision
from chasm.ops.product import mixed, product_sum


def fits(z: Tensor, x: Tensor) -> bool:
    """The layouts that the form "product" hands on; where both are the same there is nothing to gain."""
    return (
        z.device.type == "cpu"
        and not transformed()  # nobody asks for strides inside vmap
        and z.dtype == x.dtype
        and z.dtype in (torch.float32, torch.float64)
        and x.is_contiguous()
        and not z.is_contiguous()
        and z.is_contiguous(memory_format=torch.channels_last)
    )


def local_block(z: Tensor, x: Tensor, dw_weight: Tensor, dw_bias: Tensor, pw_weight: Tensor, pw_bias: Tensor) -> Tensor:
    """z and x as `fits` wants them; weights (C, 1, 3, 3) and (C, C, 1, 1)."""
    C = z.shape[1]
    fused = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)  # torch's compiler has it for the same purpose
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (z, dw_weight, dw_bias))
    if wanted or fused is None or z.dtype != torch.float32 or not torch.backends.mkldnn.enabled:
        g = gelu(conv2d(z, dw_weight, dw_bias, padding=1, groups=C))
    else:
        g = fused(z, dw_weight, dw_bias, [1, 1], [1, 1], [1, 1], C, "gelu", [], "none")
    y: Tensor = _AddPointwise.apply(x, g, pw_weight.flatten(1), pw_bias)
    return y


class _AddPointwise(torch.autograd.Function):
    """x + weight g + bias. As a convolution and a sum it takes more passes over memory, and changes of layout."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = x + bias[:, None, None]
        flat = y.flatten(2)
        torch.baddbmm(flat, weight.expand(len(x), -1, -1), g.flatten(2), out=flat)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, g, weight, _ = inputs
        ctx.save_for_backward(g, weight)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:
        g, weight = ctx.saved_tensors
        need_x, need_g, need_weight, need_bias = ctx.needs_input_grad
        with torch.no_grad(), full_precision(gy):
            gy = gy.contiguous()
            grads = (
                gy if need_x else None,
                mixed(weight.mT, gy, channels_last=True) if need_g else None,
                product_sum(gy, g) if need_weight else None,
                gy.sum((0, 2, 3)) if need_bias else None,
            )
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return Once.apply(len(grads), *grads, gy, g, weight)
        return grads
