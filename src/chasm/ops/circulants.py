"""A chain of axis passes as matrix products by Triton kernels, with its own backward; half precision on a GPU.

    y = A_m T_m A_{m-1} ... T_1 A_0 x,   A_0 = U_1^T,  A_j = U_{j+1}^T U_j,  A_m = U_m

T_j are the gains of pass j as one circulant matrix per channel. Nothing is transformed: five products in all for two
axes, each one pass over memory.

What the mean gain mu of a pass does is the same in every basis, so it has no part in the gradient of U. Rounded maps
know nothing of that: their errors are in proportion to mu, and the gradient to how far gains differ from it. So a pass
writes two maps, T z and (T - mu) z. With z_j before and v_j after pass j, and their gradients q_j and g_j,

    dU_j = U_{j-1} sum v_{j-1} [(T_j - mu)^T g_j]^T + U_{j+1} sum q_{j+1} [(T_j - mu) z_j]^T,   U_0 = U_{m+1} = 1

up to U S with a symmetric S, which a basis that stays orthogonal does not follow.
"""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chasm.ops._cost import counted_as
from chasm.ops.chain import Once, mix
from chasm.ops.kernels import applied, too_small, triton_runs
from chasm.ops.kernels.layout import contiguous
from chasm.ops.precision import exact_product

LONGEST = 2048  # of an axis: a circulant is as large as a map of it


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
    """One circulant per channel, mean * 1 + scale * matrix. The largest number in each matrix is 1.

    Without a mean that number stands for the mean gain of the channel, which must not be rounded like its neighbours.
    """

    matrix: Tensor  # (C, n, n'), rows filled up to whole 16-byte words
    scale: Tensor  # (C,) float32
    mean: Tensor | None = None  # () float32, of all channels


def matrices(column: Tensor, dtype: torch.dtype, apart: bool = False) -> Circulants:
    """First columns (C, n) -> the circulants they belong to; `apart`: with their mean gain apart."""
    from chasm.ops.kernels import circulant

    return Circulants(*circulant.matrices(column, dtype, apart))


def _transposed(T: Circulants) -> Circulants:
    n = T.matrix.shape[1]
    matrix = torch.zeros_like(T.matrix)
    matrix[..., :n] = T.matrix[..., :n].mT
    return T._replace(matrix=matrix)


class _Circulants(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        along_h: tuple[bool, ...],
        symmetric: bool,
        keep: bool,
        T: list[Circulants],
        mats: Mats,
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """y, x again, and the maps to keep, if any. params: columns of the circulants, bases."""
        z, entered, left, apart = x, [], [], []
        for A, Tj, h in zip(mats[:-1], T, along_h, strict=True):
            z = mixed(A, z)
            if keep and A is not None:  # without a matrix, z is what left the pass before
                entered.append(z)
            z, e = circulant_pass(Tj, z, h)
            if keep:
                left.append(z)
            if e is not None:
                apart.append(e)
        y = mixed(mats[-1], z)
        y = torch.ops.aten._unsafe_view(y, y.shape)  # no view: of those that come with others nobody may write in place
        return y, x.view_as(x), *left[:-1], *apart, *entered

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.along_h, ctx.symmetric, ctx.keep, ctx.T, ctx.mats, *params = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        kept = (x, *output[2:]) if ctx.keep else ()
        ctx.save_for_backward(*params, *kept)  # columns too: a second derivative is an error because of them

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_x: Tensor | None, *_: Any) -> Any:
        if g is None:
            return (g_x, *(None,) * (5 + 2 * len(ctx.T)))
        saved = ctx.saved_tensors  # once: checkpointing makes them again, but only once
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            grads = _Circulants._backward(ctx, saved, contiguous(g), g_x)
        if torch.is_grad_enabled():  # create_graph=True, torch.func
            return Once.apply(len(grads), *grads, g, g_x, *saved)
        return grads

    @staticmethod
    def _backward(ctx: Any, saved: tuple[Tensor, ...], q: Tensor, g_x: Tensor | None) -> Any:
        from chasm.ops.kernels import circulant
        from chasm.ops.kernels.products import gram

        m, T, mats = len(ctx.T), ctx.T, ctx.mats
        bases, saved = [None, *saved[m : 2 * m], None], saved[2 * m :]
        split = m if T[0].mean is not None else 0
        left, apart, entered = saved[:m], saved[m : m + split], list(saved[m + split :])  # left starts with x
        need_column, need_basis = ctx.needs_input_grad[6 : 6 + m], ctx.needs_input_grad[6 + m :]
        d_columns: list[Tensor | None] = [None] * m
        d_bases: list[Tensor | None] = [None] * m
        for j in range(m, 0, -1):
            Tj, h = T[j - 1], ctx.along_h[j - 1]
            if ctx.keep:
                z = entered.pop() if mats[j - 1] is not None else left[j - 1]
            if need_basis[j - 1]:
                g, after = _mixed_and_summed(mats[j], q, apart[j - 1])
                after = _turned(bases[j + 1], after)
            else:
                g = mixed(mats[j], q, transpose=True)
            if need_column[j - 1]:
                d_columns[j - 1] = circulant.gradient(g, z, h)
            q, p = circulant_pass(Tj if ctx.symmetric else _transposed(Tj), g, h)
            if need_basis[j - 1]:
                assert p is not None
                d_bases[j - 1] = after + _turned(bases[j - 1], gram(left[j - 1], p))
        dx = mixed(mats[0], q, transpose=True, add=g_x) if ctx.needs_input_grad[0] else None
        return (dx, *(None,) * 5, *d_columns, *d_bases)


def _turned(U: Tensor | None, G: Tensor) -> Tensor:
    return G if U is None else exact_product(U, G)


def circulant_pass(T: Circulants, x: Tensor, along_h: bool) -> tuple[Tensor, Tensor | None]:
    """T x, and where the mean is apart, T x less mean x."""
    from chasm.ops.kernels import circulant  # imports triton, which not everybody has

    with counted_as("matmul", macs=x.numel() * x.shape[2 if along_h else 3]):
        return circulant.pass_(*T, x, along_h)


def mixed(A: Tensor | None, x: Tensor, transpose: bool = False, add: Tensor | None = None) -> Tensor:
    """(C, C) on the channels of (B, C, H, W), in x's dtype; the identity where there is no matrix. `add` is added."""
    if A is None:
        return x if add is None else x + add
    A = A.mT if transpose else A
    if add is not None or x.shape[2:].numel() % 8:  # a library copies what it adds to, and wants rows that are aligned
        from chasm.ops.kernels import products

        with counted_as("matmul", macs=A.shape[0] * x.numel()):
            return products.product(A, x, x=None if add is None else contiguous(add.to(x.dtype)))
    return mix(A, x.flatten(2)).view(x.shape)


def _mixed_and_summed(A: Tensor | None, q: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """A^T q, and the sum of q e^T over batch and positions."""
    from chasm.ops.kernels import products

    found = None if A is None else products.product_and_gram(A.mT, q, e)
    return found or (mixed(A, q, transpose=True), products.gram(q, e))


def circulants(
    x: Tensor,
    T: list[Circulants],
    columns: list[Tensor],
    mats: Mats,
    bases: Mats,
    dims: tuple[int, ...],
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    """The chain on contiguous x (B, C, H, W), T_j = matrices(column_j) along dimension dims_j; A_j in x's dtype.

    Gradients go to x, columns and bases. And x again: what is added to it later sends its gradient through the last
    product of the backward.
    """
    along_h = tuple(d == 2 for d in dims)
    with torch.autocast(x.device.type, enabled=False):
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*columns, *bases))
        y, again, *_ = applied(_Circulants, x, along_h, symmetric, keep, T, mats, *columns, *bases)
    return y, again
