"""A chain of axis passes as matrix products by Triton kernels, with its own backward; half precision on a GPU.

    y = A_m T_m A_{m-1} ... T_1 A_0 x

A_j are the merged channel matrices (see `chain`), T_j the gains of pass j as one circulant matrix per channel. Nothing
is transformed: five products in all for two axes, each one pass over memory. The backward keeps x, and what entered and
what left every pass. Matrices and gains whose gradient is wanted come in float32.
"""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chasm.ops._cost import counted_as
from chasm.ops.chain import Once, mix
from chasm.ops.kernels import too_small, triton_runs

LONGEST = 512  # of an axis: the block of a circulant that a program keeps has a row of it


def obstacle(shape: torch.Size, dims: list[int], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on (B, C, H, W) features; None if they can."""
    if len(shape) != 4:
        return f"it needs 2-D features (B, C, H, W), got {len(shape) - 2} spatial axes"
    if max(shape[d] for d in dims) > LONGEST:
        return f"it takes axes up to {LONGEST}, got {tuple(shape[2:])}"
    if shape[1] * shape[2] * shape[3] >= 2**31:
        return f"offsets in an image are 32 bits wide, got {tuple(shape[1:])}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and (device.type != "cuda" or dtype.itemsize != 2):
        return f"it needs bfloat16 or float16 on a CUDA device, got {dtype} on {device.type}"
    if not triton_runs():
        return "triton cannot be imported"
    return None if interpreted else too_small(device)


Mats = list[Tensor | None]


class Circulants(NamedTuple):
    """One circulant per channel, scale * matrix. The largest number in each matrix is 1.

    That number stands for the mean gain. Rounded itself, it would be off by up to 1 in 512, other than its neighbours';
    the gradient of theta lives on the differences between channels.
    """

    matrix: Tensor  # (C, n, n'), rows filled up to whole 16-byte words
    scale: Tensor  # (C,) float32


def matrices(column: Tensor, dtype: torch.dtype) -> Circulants:
    """First columns (C, n) -> the circulants they belong to."""
    from chasm.ops.kernels import circulant

    return Circulants(*circulant.matrices(column, dtype))


def _transposed(T: Circulants) -> Circulants:
    n = T.matrix.shape[1]
    matrix = torch.zeros_like(T.matrix)
    matrix[..., :n] = T.matrix[..., :n].mT
    return Circulants(matrix, T.scale)


class _Circulants(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        along_h: tuple[bool, ...],
        symmetric: bool,
        T: list[Circulants],
        rounded: Mats,
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """y, x again, and the maps to keep."""
        z, entered, left = x, [], []
        for A, Tj, h in zip(rounded[:-1], T, along_h, strict=True):
            z = _mixed(A, z)
            if A is not None:  # without a matrix, z is what left the pass before
                entered.append(z)
            z = _pass(Tj, z, h)
            left.append(z)
        y = _mixed(rounded[-1], z)
        return y, x.view_as(x), *(left[:-1] if y is z else left), *entered

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.along_h, ctx.symmetric, ctx.T, ctx.rounded, *_ = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *output[2:])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_x: Tensor | None, *_: Any) -> Any:
        m = len(ctx.T)
        if g is None:
            return (g_x, *(None,) * (4 + 2 * m + 1))
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            grads = _Circulants._backward(ctx, g.contiguous(), g_x)
        if torch.is_grad_enabled():  # create_graph=True, torch.func
            return Once.apply(len(grads), *grads, g, g_x, *ctx.saved_tensors)
        return grads

    @staticmethod
    def _backward(ctx: Any, G: Tensor, g_x: Tensor | None) -> Any:
        from chasm.ops.kernels import circulant
        from chasm.ops.kernels.local_triton import gram

        m, T, mats = len(ctx.T), ctx.T, ctx.rounded
        x, *rest = ctx.saved_tensors
        kept = m if mats[m] is not None else m - 1
        left, entered = rest[:kept], rest[kept:]
        need_column, need_mat = ctx.needs_input_grad[5 : 5 + m], ctx.needs_input_grad[5 + m :]
        d_columns: list[Tensor | None] = [None] * m
        d_mats: list[Tensor | None] = [None] * (m + 1)
        for j in range(m, 0, -1):
            Tj, h = T[j - 1], ctx.along_h[j - 1]
            z = entered.pop() if mats[j - 1] is not None else left[j - 2] if j > 1 else x
            if need_mat[j]:
                d_mats[j] = gram(G, left[j - 1])
            G = _mixed(mats[j], G, transpose=True)
            if need_column[j - 1]:
                d_columns[j - 1] = circulant.gradient(G, z, h)
            G = _pass(Tj if ctx.symmetric else _transposed(Tj), G, h)
        if need_mat[0]:
            d_mats[0] = gram(G, x)
        dx = _mixed(mats[0], G, transpose=True, add=g_x) if ctx.needs_input_grad[0] else None
        return (dx, None, None, None, None, *d_columns, *d_mats)


def _pass(T: Circulants, x: Tensor, along_h: bool) -> Tensor:
    from chasm.ops.kernels import circulant  # imports triton, which not everybody has

    with counted_as("matmul", macs=x.numel() * x.shape[2 if along_h else 3]):
        return circulant.pass_(T.matrix, T.scale, x, along_h)


def _mixed(A: Tensor | None, x: Tensor, transpose: bool = False, add: Tensor | None = None) -> Tensor:
    """(C, C) on the channels of (B, C, H, W), in x's dtype; the identity where there is no matrix. `add` is added."""
    if A is None:
        return x if add is None else x + add
    A = A.mT if transpose else A
    if add is not None or x.shape[2:].numel() % 8:  # a library copies what it adds to, and wants rows that are aligned
        from chasm.ops.kernels import local_triton

        with counted_as("matmul", macs=A.shape[0] * x.numel()):
            return local_triton.product(A, x, None if add is None else add.to(x.dtype).contiguous())
    return mix(A, x.flatten(2)).view(x.shape)


def circulants(
    x: Tensor,
    T: list[Circulants],
    columns: list[Tensor],
    mats: Mats,
    rounded: Mats,
    dims: tuple[int, ...],
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    """The chain on contiguous x (B, C, H, W), T_j = matrices(column_j) along dimension dims_j; `rounded`: mats like x.

    And x again: what is added to it later sends its gradient through the last product of the backward.
    """
    along_h = tuple(d == 2 for d in dims)
    with torch.autocast(x.device.type, enabled=False):
        y, again, *_ = _Circulants.apply(x, along_h, symmetric, T, rounded, *columns, *mats)
    return y, again
