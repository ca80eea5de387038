"""A chain of axis passes as products of real matrices, with its own backward: the form for CPUs.

    u_j = A_{j-1} v_{j-1},   v_j = T_j u_j,   y = A_m v_m,   v_0 = x

A_j are the C x C channel matrices of `axis.merged_matrices`, T_j one circulant matrix per channel along an axis. The
A_j are orthogonal, so v_j = A_j^T u_{j+1}, and the gradient of A_j needs u_{j+1} alone: (dL/du_{j+1} u_{j+1}^T) A_j.
The backward therefore keeps the u_j, and makes v_m and circulants again. It does not keep y, which is the caller's to
write to.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from chasm.ops.chain import Once
from chasm.ops.gains import impulse_response
from chasm.ops.precision import full_precision


def circulant_row(gains: Tensor, n: int, last: bool) -> Tensor:
    """(K, C) gains -> (C, n), the first row r of the matrices R[i, j] = r[j - i] that filter an axis.

    The last axis is multiplied from the right, u R, any other from the left, R u: no operand is transposed.
    """
    return impulse_response(gains if last else gains.conj(), n)


def circulant_rows(row: Tensor) -> Tensor:
    """(C, n) -> (C, n, n): R[i, j] = row[j - i], contiguous."""
    return torch.cat([row, row], -1).unfold(-1, row.shape[-1], 1)[:, 1:].flip(1)


def _row_gradient(G: Tensor) -> Tensor:
    """Adjoint of `circulant_rows`: sums of G (C, n, n) along its wrapped diagonals."""
    n, sums = G.shape[1], []
    for part in G.split(16):  # the doubled matrices then fit a cache
        twice = torch.cat([part, part], -1)
        sums.append(twice.as_strided(part.shape, (2 * n * n, 2 * n + 1, 1)).sum(1))
    return torch.cat(sums)


def _slices(x: Tensor, dim: int) -> Iterator[Tensor]:
    """Matrices of x (B, C, *spatial): (C, n, after) with the axis dim as rows; if it is the last, (C, before, n)."""
    for image in x:  # one by one: a broadcast product would copy the circulants for every image
        if dim == x.ndim - 1:
            yield image.view(x.shape[1], -1, x.shape[-1])
        else:
            yield from image.view(x.shape[1], -1, x.shape[dim], x.shape[dim + 1 :].numel()).unbind(1)


def _filtered(x: Tensor, R: Tensor, dim: int) -> Tensor:
    """R (C, n, n) along dimension dim of x."""
    out = torch.empty_like(x)
    for a, b in zip(_slices(x, dim), _slices(out, dim), strict=True):
        torch.bmm(a, R, out=b) if dim == x.ndim - 1 else torch.bmm(R, a, out=b)
    return out


def _filter_gradient(u: Tensor, g: Tensor, dim: int) -> Tensor:
    """Gradient of R in u -> v, given the gradient g of v."""
    G = u.new_empty(u.shape[1], u.shape[dim], u.shape[dim])
    for i, (a, b) in enumerate(zip(_slices(u, dim), _slices(g, dim), strict=True)):
        torch.baddbmm(G, *((a.mT, b) if dim == u.ndim - 1 else (b, a.mT)), beta=min(i, 1), out=G)
    return G


def mixed(A: Tensor | None, v: Tensor, channels_last: bool = False) -> Tensor:
    """A v, contiguous or channels-last, whatever v is; v itself for None."""
    if A is None:
        return v
    flat = v.flatten(2)
    # Into memory that has its shape from the start: autograd lets nobody write to a view that came out of a function.
    out = torch.empty_like(v, memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    if channels_last:
        torch.bmm(flat.mT, A.mT.contiguous().expand(len(v), -1, -1), out=out.flatten(2).mT)
    else:
        torch.bmm(A.expand(len(v), -1, -1), flat, out=out.flatten(2))
    return out


def product_sum(g: Tensor, u: Tensor) -> Tensor:
    """Sum over images and positions of g u^T, (C, C). A batched product and a sum take twice the time."""
    G = g.new_zeros(g.shape[1], u.shape[1])
    for a, b in zip(g.flatten(2), u.flatten(2), strict=True):
        torch.addmm(G, a, b.mT, out=G)
    return G


Tables = list[Tensor]  # of every pass: rows (C, n), or circulants (C, n, n) where no gradient of them is wanted
Mats = list[Tensor | None]


def _forward(
    x: Tensor, dims: tuple[int, ...], channels_last: bool, tables: Tables, mats: Mats, keep: bool
) -> tuple[Tensor, ...]:
    """y, and the u_j if they are to be kept (but never x itself)."""
    v, kept = x, []
    for T, A, dim in zip(tables, mats[:-1], dims, strict=True):
        u = mixed(A, v)
        v = _filtered(u, T if T.ndim == 3 else circulant_rows(T), dim)
        if keep and u is not x:
            kept.append(u)
        del u
    return mixed(mats[-1], v, channels_last), *kept


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, dims: tuple[int, ...], channels_last: bool, *params: Tensor | None) -> tuple[Tensor, ...]:
        m = len(dims)
        with full_precision(x):
            return _forward(x, dims, channels_last, [t for t in params[:m] if t is not None], list(params[m:]), True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.dims, ctx.channels_last, *params = inputs
        _, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        if len(kept) < len(ctx.dims):  # identity basis: u_1 is x
            kept = [x, *kept]
        ctx.save_for_backward(*kept, *params)

    @staticmethod
    def backward(ctx: Any, gy: Tensor | None, *_: Any) -> Any:
        if gy is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # once: checkpointing makes them again, but only once
        with torch.no_grad(), full_precision(gy):
            grads = _Product._backward(ctx, saved, gy)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True, torch.func
            return Once.apply(len(grads), *grads, gy, *saved)
        return grads

    @staticmethod
    def _backward(ctx: Any, saved: tuple[Tensor, ...], gy: Tensor) -> Any:
        dims, m = ctx.dims, len(ctx.dims)
        us, tables, mats = saved[:m], saved[m : 2 * m], saved[2 * m :]
        need_x, need_table, need_mat = (
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[3 : 3 + m],
            ctx.needs_input_grad[3 + m :],
        )
        grad_table: list[Tensor | None] = [None] * m
        grad_mat: list[Tensor | None] = [None] * (m + 1)
        layout = torch.channels_last if ctx.channels_last and mats[m] is not None else torch.contiguous_format
        g = gy.contiguous(memory_format=layout)
        del gy
        for j in range(m - 1, -1, -1):
            dim, u, T, A = dims[j], us[j], tables[j], mats[j + 1]
            g = mixed(None if A is None else A.mT, g).contiguous()
            R = T if T.ndim == 3 else circulant_rows(T)
            if j == m - 1 and need_mat[m]:  # gy v^T = A g v^T, and g has the better layout
                # The same layout and order as in the sum for A_{j-1}: where theta has no gradient, as at the start, the
                # two cancel to the last bit. Adam takes full steps along whatever rounding would leave.
                grad_mat[m] = A @ product_sum(g, _filtered(u, R, dim))
            if need_table[j]:
                G = _filter_gradient(u, g, dim)
                grad_table[j] = G if T.ndim == 3 else _row_gradient(G)
                del G
            g = _filtered(g, R.mT, dim)
            del R
            if need_mat[j]:
                grad_mat[j] = product_sum(g, u) @ mats[j]
        gx = mixed(None if mats[0] is None else mats[0].mT, g) if need_x else None
        return (gx, None, None, *grad_table, *grad_mat)


def product(x: Tensor, dims: tuple[int, ...], tables: Tables, mats: Mats, channels_last: bool = False) -> Tensor:
    """The chain on contiguous x (B, C, *spatial). `channels_last`: let the last product write y in that format."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *tables, *mats)):
        y: Tensor = _Product.apply(x, dims, channels_last, *tables, *mats)[0]
        return y
    with full_precision(x):
        return _forward(x, dims, channels_last, tables, mats, False)[0]
