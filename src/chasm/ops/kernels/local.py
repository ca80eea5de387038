"""Y = X + P(gelu(dw3x3(Z))) on (B, C, H, W) by Triton kernels, with its own backward.

The backward keeps Z alone and computes the rest again. On one H200 it replaces seven passes of torch's over the
features and their conversions between memory layouts.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chasm.ops.kernels import applied, gradients, triton_runs
from chasm.ops.kernels.layout import contiguous

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = 2**22  # positions of an image: offsets inside a tile are 32 bits wide


def obstacle(z: Tensor) -> str | None:
    """Why the kernels cannot run on z; None if they can."""
    if z.ndim != 4:
        return f"it needs features (B, C, H, W), got {z.ndim} axes"
    if z.dtype not in DTYPES:
        return f"it needs bfloat16, float16 or float32, got {z.dtype}"
    if z.shape[2] * z.shape[3] > LARGEST:
        return f"it needs images of at most {LARGEST} positions, got {z.shape[2]}x{z.shape[3]}"
    if not z.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA tensor, got one on {z.device.type}"
    if not triton_runs():
        return "triton cannot be imported"
    return None


def local_block(
    z: Tensor, x: Tensor | None, dw_weight: Tensor, dw_bias: Tensor, pw_weight: Tensor, pw_bias: Tensor
) -> Tensor:
    """z (B, C, H, W) in the dtype to compute in; x like z, of any real dtype, or None; W (C, 1, 3, 3) and (C, C, 1, 1).

    Sums in float32. The result has the dtype x + z would have.
    """
    if z.numel() == 0:
        return _plain(z, x, dw_weight, dw_bias, pw_weight, pw_bias)
    y: Tensor = applied(_Local, z, x, dw_weight, dw_bias, pw_weight, pw_bias)
    return y


def _plain(
    z: Tensor, x: Tensor | None, dw_weight: Tensor, dw_bias: Tensor, pw_weight: Tensor, pw_bias: Tensor
) -> Tensor:
    """The same by operations of torch, differentiable any number of times."""
    dw_weight, dw_bias, pw_weight, pw_bias = (p.to(z.dtype) for p in (dw_weight, dw_bias, pw_weight, pw_bias))
    y = F.conv2d(F.gelu(F.conv2d(z, dw_weight, dw_bias, padding=1, groups=z.shape[1])), pw_weight, pw_bias)
    return y if x is None else x + y


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(z: Tensor, x: Tensor | None, *parameters: Tensor) -> Tensor:
        from chasm.ops.kernels import local_triton

        return local_triton.forward(contiguous(z), None if x is None else contiguous(x), *parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        z, x, *parameters = inputs
        ctx.x_dtype = None if x is None else x.dtype
        ctx.save_for_backward(z, *parameters)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        from chasm.ops.kernels import local_triton

        z, *parameters = ctx.saved_tensors
        gx = None if ctx.x_dtype is None else g.to(ctx.x_dtype)
        if torch.is_grad_enabled():  # create_graph=True: the kernels have no second derivative
            y, (need_z, _, *needs) = _plain(z, None, *parameters), ctx.needs_input_grad
            again = gradients(y, g, (z, *parameters), (need_z, *needs))
            return again[0], gx, *again[1:]
        gz, *rest = local_triton.backward(contiguous(g.to(z.dtype)), contiguous(z), *parameters[:3])
        return gz, gx, *(d.to(p.dtype) for d, p in zip(rest, parameters, strict=True))
