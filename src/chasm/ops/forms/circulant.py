"""A chain of axis passes as products of real matrices, in torch: the form for CPUs.

    u_j = A_{j-1} v_{j-1},   v_j = R_j u_j,   y = A_m v_m,   v_0 = x

A_j are the C x C channel matrices of `operators.merge`, R_j one circulant matrix per channel along an axis. The A_j are
orthogonal, so v_j = A_j^T u_{j+1}, and the gradient of A_j needs u_{j+1} alone: (dL/du_{j+1} u_{j+1}^T) A_j. The
backward therefore keeps the u_j, and computes v_m and the circulants again.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from chasm.ops.gains import impulse_response, impulse_response_adjoint
from chasm.ops.operators import merge, merge_adjoint


def prepare(
    shape: torch.Size,
    dims: Sequence[int],
    gains: Sequence[Tensor],
    bases: Sequence[Tensor],
    dtype: torch.dtype,
    trains: bool,
) -> list[Tensor]:
    """Circulants (C, n, n) of all axes, then with bases the channel matrices (m + 1, C, C).

    `trains`: instead of the circulants their first rows (C, n), because a training step keeps its constants in memory.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    # The last axis is multiplied from the right, u R, any other from the left, R u: no operand is transposed.
    rows = [
        impulse_response(g if dim == len(shape) - 1 else g.conj_physical(), shape[dim]).to(dtype)
        for g, dim in zip(gains, dims, strict=True)
    ]
    tables = rows if trains else [circulants(row) for row in rows]
    return [*tables, merge(bases).to(dtype)] if bases else tables


def forward(
    x: Tensor, dims: Sequence[int], constants: Sequence[Tensor], keep: bool, before_local: bool
) -> tuple[Tensor, list[Tensor]]:
    """y, and with `keep` the u_j. `before_local`: y channels last."""
    mats = _matrices(dims, constants)
    v, kept = x.to(torch.promote_types(x.dtype, torch.float32)), []
    for table, A, dim in zip(constants[: len(dims)], mats[:-1], dims, strict=True):
        u = channel_product(A, v)
        kept.append(u)
        v = _filtered(u, circulants(table), dim)
    return channel_product(mats[-1], v, channels_last=before_local).to(x.dtype), kept if keep else []


def backward(
    g: Tensor,
    kept: Sequence[Tensor],
    dims: Sequence[int],
    gains: Sequence[Tensor],
    bases: Sequence[Tensor],
    constants: Sequence[Tensor],
    needs_x: bool,
    add: Tensor | None,
    symmetric: bool,
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    mats, m = _matrices(dims, constants), len(dims)
    d_rows: list[Tensor] = []
    d_mats: list[Tensor] = []
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    for j in range(m, 0, -1):
        A, dim, R = mats[j], dims[j - 1], circulants(constants[j - 1])
        g = channel_product(None if A is None else A.mT, g).contiguous()
        if bases and j == m:  # gy v^T = A g v^T, and g has the better layout
            # The same layout and order as in the sum for A_{j-1}: where theta has no gradient, as at the start, the
            # two cancel to the last bit. Adam takes full steps along whatever rounding would leave.
            assert A is not None
            d_mats.append(A @ product_sum(g, _filtered(kept[j - 1], R, dim)))
        if gains:
            d_rows.append(_row_gradient(_filter_gradient(kept[j - 1], g, dim)))
        g = _filtered(g, R.mT, dim)
        if bases:
            d_mats.append(product_sum(g, kept[j - 1]) @ constants[-1][j - 1])
    dx = channel_product(None if mats[0] is None else mats[0].mT, g) if needs_x else None
    if dx is not None and add is not None:
        dx = dx.add_(add)
    d_gains = []
    for dim, row, like in zip(dims, reversed(d_rows), gains, strict=False):
        d = impulse_response_adjoint(row, like)
        d_gains.append(d if dim == g.ndim - 1 else d.conj_physical())
    return dx, d_gains, merge_adjoint(d_mats[::-1], bases) if bases else []


# --- steps ----------------------------------------------------------------------------------------


def _matrices(dims: Sequence[int], constants: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """A_0 .. A_m, or as many times None for the identity."""
    return constants[-1].unbind() if len(constants) > len(dims) else [None] * (len(dims) + 1)


def circulants(row: Tensor) -> Tensor:
    """(C, n) -> (C, n, n): R[i, j] = row[j - i], contiguous; what has that shape already is returned as it is."""
    if row.ndim == 3:
        return row
    return torch.cat([row, row], -1).unfold(-1, row.shape[-1], 1)[:, 1:].flip(1)


def _row_gradient(G: Tensor) -> Tensor:
    """The adjoint of `circulants`: sums of G (C, n, n) along its wrapped diagonals."""
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
    if isinstance(x, FakeTensor):  # the compiler may not know the length of the batch
        return out
    for a, b in zip(_slices(x, dim), _slices(out, dim), strict=True):
        torch.bmm(a, R, out=b) if dim == x.ndim - 1 else torch.bmm(R, a, out=b)
    return out


def _filter_gradient(u: Tensor, g: Tensor, dim: int) -> Tensor:
    """The gradient of R in u -> v, for the gradient g of v."""
    G = u.new_empty(u.shape[1], u.shape[dim], u.shape[dim])
    if isinstance(u, FakeTensor):
        return G
    for i, (a, b) in enumerate(zip(_slices(u, dim), _slices(g, dim), strict=True)):
        torch.baddbmm(G, *((a.mT, b) if dim == u.ndim - 1 else (b, a.mT)), beta=min(i, 1), out=G)
    return G


def channel_product(A: Tensor | None, v: Tensor, channels_last: bool = False) -> Tensor:
    """A v, contiguous or channels-last, whatever v is; v itself for None."""
    if A is None:
        return v
    flat, shape = v.flatten(2), v.shape
    if channels_last:
        y = torch.bmm(flat.mT, A.mT.contiguous().expand(len(v), -1, -1)).mT
    else:
        y = torch.bmm(A.expand(len(v), -1, -1), flat)
    return y.view(shape)


def product_sum(g: Tensor, u: Tensor) -> Tensor:
    """The sum over images and positions of g u^T, (C, C). A batched product and a sum take twice the time."""
    G = g.new_zeros(g.shape[1], u.shape[1])
    if isinstance(g, FakeTensor):
        return G
    for a, b in zip(g.flatten(2), u.flatten(2), strict=True):
        torch.addmm(G, a, b.mT, out=G)
    return G
