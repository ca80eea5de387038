"""GELU of a GroupNorm with one group, for maps with channels last in memory.

One operator with Triton kernels behind it. torch's own kernel sums a group in a single thread block, and the code
that torch.compile generates for the sums is slower still. Here a norm and its GELU read the map twice and write it
once. Only first derivatives are defined.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chasm.backbones.hifi.kernels import has_kernels
from chasm.common.precision import upcast


class NormGELU(nn.GroupNorm):
    """GELU(GroupNorm(x)) with one group: every sample is normalised as a whole. The result has the dtype of x."""

    def __init__(self, width: int) -> None:
        super().__init__(1, width)

    def forward(self, x: Tensor) -> Tensor:
        if not has_kernels(x):
            z = upcast(x)
            weight, bias = self.weight.to(z.dtype), self.bias.to(z.dtype)
            return F.gelu(F.group_norm(z, 1, weight, bias, self.eps)).to(x.dtype)
        tokens = x.movedim(1, -1).contiguous()  # no copy where channels are last in memory
        y, _ = norm_gelu(tokens.flatten(1, 2), self.weight, self.bias, self.eps)
        return y.view(tokens.shape).movedim(-1, 1)


_SCHEMA = "(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)"


@torch.library.custom_op("chasm::norm_gelu", mutates_args=(), schema=_SCHEMA)
def norm_gelu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return GELU of the normalised x, and the mean and 1 / deviation of each sample (B, 2), for the backward pass.

    Args:
        x: (B, P, C): P positions with their C channels.
        weight: (C,).
        bias: (C,).
        eps: added to the variance.
    """
    from chasm.backbones.hifi.kernels import norm_triton

    if x.shape[-1] != len(weight):
        raise RuntimeError(f"expected {len(weight)} channels, got {x.shape[-1]}")
    return norm_triton.forward(x.contiguous(), weight.contiguous(), bias.contiguous(), eps)


@norm_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(len(x), 2, dtype=torch.float32)


_BACKWARD_SCHEMA = "(Tensor g, Tensor x, Tensor weight, Tensor bias, Tensor statistics) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("chasm::norm_gelu_backward", mutates_args=(), schema=_BACKWARD_SCHEMA)
def norm_gelu_backward(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias, each in the dtype of its tensor.

    Args:
        g: gradient of the output, like x.
        x: as in `norm_gelu`.
        weight: as in `norm_gelu`.
        bias: as in `norm_gelu`.
        statistics: the second output of `norm_gelu`.
    """
    from chasm.backbones.hifi.kernels import norm_triton

    g, x = g.to(x.dtype).contiguous(), x.contiguous()
    return norm_triton.backward(g, x, weight.contiguous(), bias.contiguous(), statistics)


@norm_gelu_backward.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return None, None, None, None
    return *norm_gelu_backward(g, *ctx.saved_tensors), None


norm_gelu.register_autograd(_backward, setup_context=_save)
