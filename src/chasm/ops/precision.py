"""Small products that neither autocast nor TF32 touches."""

import torch
from torch import Tensor

from chasm.common.precision import autocast_dtype as autocast_dtype
from chasm.common.precision import full_precision as full_precision
from chasm.ops._cost import counted_as
from chasm.ops.kernels import has_triton, is_transformed
from chasm.ops.library import wants_gradient


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in a's dtype, computed in float64, which neither autocast nor TF32 touches.

    Apple's GPUs have no float64, and no TF32 either.
    """
    if a.device.type == "mps":
        return a @ b
    if not _has_kernel(a, b):
        return (a.double() @ b.double()).to(a.dtype)
    from chasm.ops.kernels import basis as kernels  # imports triton, which is not installed everywhere

    with counted_as("matmul", macs=a.numel() * b.shape[1]):
        return kernels.product(a[None], b[None])[0]


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    """True inside an operator on a GPU, where one kernel stands for the four of a product through float64."""
    if not a.is_cuda or a.dtype != torch.float32 or b.dtype != torch.float32 or a.ndim != 2 or b.ndim != 2:
        return False
    if wants_gradient([a, b]) or torch.compiler.is_compiling() or is_transformed(a):
        return False
    return min(*a.shape, b.shape[1]) > 0 and has_triton()
