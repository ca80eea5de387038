"""Small products that neither autocast nor TF32 touches."""

from typing import Any

import torch
from torch import Tensor

from chasm.common.precision import autocast_dtype as autocast_dtype
from chasm.common.precision import full_precision as full_precision
from chasm.ops._cost import counted_as
from chasm.ops.kernels import traced, triton_runs


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in a's dtype, which neither autocast nor TF32 touches: through float64 (Apple's GPUs have neither).

    On a GPU a kernel does it in one launch instead of four.
    """
    if a.device.type == "mps":
        return a @ b
    if not _small(a, b):
        return (a.double() @ b.double()).to(a.dtype)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        y: Tensor = _ExactProduct.apply(a, b)
        return y
    return _small_product(a, b)


def _small(a: Tensor, b: Tensor) -> bool:
    if not a.is_cuda or a.dtype != torch.float32 or b.dtype != a.dtype or a.ndim != 2 or b.ndim != 2:
        return False
    return min(*a.shape, *b.shape) > 0 and not traced(a) and not traced(b) and triton_runs()


def _small_product(a: Tensor, b: Tensor) -> Tensor:
    from chasm.ops.kernels import small  # imports triton, which not everybody has

    with counted_as("matmul", macs=a.numel() * b.shape[1]):
        return small.product(a[None], b[None], a.new_empty(1, a.shape[0], b.shape[1]))[0]


class _ExactProduct(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _small_product(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None, None
        a, b = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad
        return exact_product(g, b.mT) if need_a else None, exact_product(a.mT, g) if need_b else None
