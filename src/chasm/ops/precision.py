"""The precision policy in one place: what autocast must not touch runs inside `full_precision`."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from chasm.ops._cost import counted_as
from chasm.ops.kernels import traced, triton_runs


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Autocast off on the device of x (tensors without storage have no autocast)."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast would run x's products in; None where it is off or leaves x alone (float64)."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


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


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """For programs, never for modules: may float32 products and convolutions round their inputs to TF32 (10 bits)?

    torch's defaults are a silent mixture: no for matrix products, yes for cuDNN's convolutions. The settings of
    before come back at the end. They are torch's older ones, because compiled code still reads those, and fails
    where the newer ones were written.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        before = matmul.allow_tf32, cudnn.allow_tf32
        matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
