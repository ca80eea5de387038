"""One axis of CHASM as a basis and its gains, a chain of axes as channel matrices, and the exact products both need."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from chasm.common.cost import counted_as
from chasm.common.tracing import is_transformed
from chasm.ops.kernels import has_triton
from chasm.ops.library import wants_gradient


class AxisOperator(NamedTuple):
    """One axis of CHASM: M(k) = U diag(gains[k]) U^T along dimension `dim` of `(B, C, *spatial)`."""

    dim: int
    U: Tensor | None  # (C, C) shared, (K, C, C) untied, None for the identity basis
    gains: Tensor  # (K, C) real, or complex with real DC and Nyquist


class AxisSource(NamedTuple):
    """One axis as a mixer stores it. A is s theta, Gamma is start + s table, phi is s phase (`gains.stepped`)."""

    dim: int
    theta: Tensor | None  # (C(C-1)/2,), or where it was computed before U (C, C); None for the identity basis
    table: Tensor  # (B, C)
    phase: Tensor | None  # (B, C) of complex gains
    gain: str  # "positive", "signed" or "complex"
    scale: float  # the step scale s


def channel_operators(op: AxisOperator) -> Tensor:
    """Return M(k) = U diag(lambda_k) U^T for every frequency, (K, C, C)."""
    if op.U is None:
        return torch.diag_embed(op.gains)
    if op.gains.is_complex():
        re, im = (exact_product(op.U * part[:, None, :], op.U.mT) for part in (op.gains.real, op.gains.imag))
        return torch.complex(re, im)
    return exact_product(op.U * op.gains[:, None, :], op.U.mT)


def merge(bases: Sequence[Tensor]) -> Tensor:
    """Return (m + 1, C, C) for U_1 .. U_m: A_0 = U_1^T, A_j = U_{j+1}^T U_j, A_m = U_m.

    These are the channel matrices before, between and after the gains of a chain: where two passes meet, their bases
    become one product.
    """
    with counted_as("merged bases"):
        inner = [exact_product(V.mT, U) for U, V in pairwise(bases)]
    return torch.stack([bases[0].mT, *inner, bases[-1]])


def matrices(dims: Sequence[int], constants: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return A_0 .. A_m of `merge`, which stand after one table for each pass; for the identity None each."""
    return constants[-1].unbind() if len(constants) > len(dims) else [None] * (len(dims) + 1)


def merge_adjoint(d: Sequence[Tensor], bases: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of U_1 .. U_m for the gradients d of A_0 .. A_m."""
    gradients = []
    for j in range(len(bases)):
        before = d[0].mT if j == 0 else exact_product(bases[j - 1], d[j].mT)
        after = d[-1] if j == len(bases) - 1 else exact_product(bases[j + 1], d[j + 1])
        gradients.append(before + after)
    return gradients


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in a's dtype, computed in float64, which neither autocast nor TF32 touches.

    Apple's GPUs have no float64, and no TF32 either.
    """
    if not a.is_cuda or not _has_kernel(a, b):
        return a @ b if a.device.type == "mps" else (a.double() @ b.double()).to(a.dtype)
    from chasm.ops.kernels import basis as kernels  # imports triton, which is not installed everywhere

    with counted_as("matmul", macs=a.numel() * b.shape[1]):
        return kernels.product(a[None], b[None])[0]


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    """Return True inside an operator on a GPU, where one kernel stands for the four of a product through float64."""
    if not a.is_cuda or a.dtype != torch.float32 or b.dtype != torch.float32 or a.ndim != 2 or b.ndim != 2:
        return False
    if wants_gradient([a, b]) or torch.compiler.is_compiling() or is_transformed(a):
        return False
    return min(*a.shape, b.shape[1]) > 0 and has_triton()
