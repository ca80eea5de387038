"""Depthwise 3x3 convolution of maps with channels last in memory, with zeros around.

One operator with Triton kernels behind it. cuDNN adds the bias in a pass of its own. These kernels have not been timed
on a card. Only first derivatives are defined.
"""

from typing import Any

import torch
from torch import Tensor

_SCHEMA = "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"


@torch.library.custom_op("chasm::depthwise", mutates_args=(), schema=_SCHEMA)
def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution of every channel by itself, in the dtype of x.

    Args:
        x: (B, H, W, C).
        weight: (C, 1, 3, 3).
        bias: (C,), or None.
    """
    from chasm.backbones.hifi.kernels import depthwise_triton

    if x.shape[-1] != len(weight):
        raise RuntimeError(f"expected {len(weight)} channels, got {x.shape[-1]}")
    bias = None if bias is None else bias.contiguous()
    return depthwise_triton.convolve(x.contiguous(), weight.contiguous(), bias)


@depthwise.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


_BACKWARD_SCHEMA = "(Tensor g, Tensor x, Tensor weight) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("chasm::depthwise_backward", mutates_args=(), schema=_BACKWARD_SCHEMA)
def depthwise_backward(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias, the last two in the dtype of the weight.

    Args:
        g: gradient of the output, like x.
        x: as in `depthwise`.
        weight: as in `depthwise`.
    """
    from chasm.backbones.hifi.kernels import depthwise_triton

    g = g.to(x.dtype).contiguous()
    gx = depthwise_triton.convolve_adjoint(g, weight.contiguous())
    d_weight, d_bias = depthwise_triton.weight_gradients(g, x.contiguous())
    return gx, d_weight.to(weight.dtype), d_bias.to(weight.dtype)


@depthwise_backward.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
    if g is None:
        return None, None, None
    gx, d_weight, d_bias = depthwise_backward(g, *ctx.saved_tensors)
    return gx, d_weight, None if ctx.bias_dtype is None else d_bias.to(ctx.bias_dtype)


depthwise.register_autograd(_backward, setup_context=_save)
