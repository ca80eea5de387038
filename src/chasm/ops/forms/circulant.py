"""A chain of axis passes as products of real matrices, in torch: the form for CPUs.

    u_j = A_{j-1} v_{j-1},   v_j = R_j u_j,   y = A_m v_m,   v_0 = x

A_j are the C x C channel matrices of `operators.merge`, R_j one circulant matrix per channel along an axis. The A_j are
orthogonal, so v_j = A_j^T u_{j+1}, and the gradient of A_j needs u_{j+1} alone: (dL/du_{j+1} u_{j+1}^T) A_j. The
backward therefore keeps the u_j, and computes v_m and the circulants again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from chasm.ops.forms.base import Form, Passes, matrices
from chasm.ops.gains import impulse_response, impulse_response_adjoint
from chasm.ops.operators import at_least_float32, merge, merge_adjoint


class Circulant(Form):
    """Products with circulant matrices, in torch."""

    def prepare(self, shape: torch.Size, passes: Passes, dtype: torch.dtype, trains: bool) -> list[Tensor]:
        # Circulants (C, n, n) of all axes, then with bases the channel matrices (m + 1, C, C). `trains`: instead of the
        # circulants their first rows (C, n), because a training step keeps its constants in memory.
        dims, gains, bases = passes
        dtype = at_least_float32(dtype)
        rows = []
        for g, dim in zip(gains, dims, strict=True):
            # The last axis is multiplied from the right, u R, any other from the left, R u: no operand is transposed.
            g = g.conj_physical() if g.is_complex() and dim != len(shape) - 1 else g
            rows.append(impulse_response(g, shape[dim]).to(dtype))
        tables = rows if trains else [circulants(row) for row in rows]
        return [*tables, merge(bases).to(dtype)] if bases else tables

    def forward(
        self, x: Tensor, dims: Sequence[int], constants: Sequence[Tensor], keep: bool, before_local: bool
    ) -> tuple[Tensor, list[Tensor]]:
        # y, and with `keep` the u_j. `before_local`: y channels last.
        mats = matrices(dims, constants)
        v = x.to(at_least_float32(x.dtype))
        kept: list[Tensor] = []
        for table, A, dim in zip(constants[: len(dims)], mats[:-1], dims, strict=True):
            u = channel_product(A, v)
            v = _filtered(u, circulants(table), dim)
            kept += [u] if keep else []
            del u
        return channel_product(mats[-1], v, channels_last=before_local).to(x.dtype), kept

    def backward(
        self,
        g: Tensor,
        kept: Sequence[Tensor],
        passes: Passes,
        constants: Sequence[Tensor],
        needs_x: bool,
        add: Tensor | None,
        symmetric: bool,
    ) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        dims, gains, bases = passes
        m, mats = len(dims), [None if A is None else A.mT for A in matrices(dims, constants)]
        d_rows: list[Tensor] = []
        d_mats: list[Tensor] = []
        g = g.to(at_least_float32(g.dtype))
        for j in range(m, 0, -1):
            dim, R = dims[j - 1], circulants(constants[j - 1])
            g = channel_product(mats[j], g).contiguous()
            if bases and j == m:  # gy v^T = A g v^T, and g has the better layout
                # The same layout and order as in the sum for A_{j-1}: where theta has no gradient, as at the start, the
                # two cancel to the last bit. Adam takes full steps along whatever rounding would leave.
                d_mats.append(constants[-1][m] @ product_sum(g, _filtered(kept[j - 1], R, dim)))
            if gains:
                d_rows.append(_row_gradient(_filter_gradient(kept[j - 1], g, dim)))
            g = _filtered(g, R.mT, dim)
            if bases:
                d_mats.append(product_sum(g, kept[j - 1]) @ constants[-1][j - 1])
        dx = channel_product(mats[0], g) if needs_x else None
        if dx is not None and add is not None:
            dx = dx.add_(add)
        d_gains = []
        for dim, row, like in zip(dims, reversed(d_rows), gains, strict=False):
            d = impulse_response_adjoint(row, like)
            d_gains.append(d.conj_physical() if d.is_complex() and dim != g.ndim - 1 else d)
        return dx, d_gains, merge_adjoint(d_mats[::-1], bases) if bases else []


# --- steps ----------------------------------------------------------------------------------------


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
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _slices(x: Tensor, dim: int) -> Sequence[Tensor]:
    """x (B, C, *spatial) as matrices: (C, n, after) with axis dim as rows; if it is the last, (C, before, n).

    Image by image: a product that broadcasts would copy the circulants for every image.
    """
    B, C, *spatial = x.shape
    if dim == x.ndim - 1:
        return x.view(B, C, -1, spatial[-1]).unbind()
    if dim == 2:
        return x.view(B, C, spatial[0], -1).unbind()
    images = x.view(B, C, -1, x.shape[dim], x.shape[dim + 1 :].numel())
    return [matrix for image in images.unbind() for matrix in image.unbind(1)]


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
    beta = 0
    for a, b in zip(_slices(u, dim), _slices(g, dim), strict=True):
        first, second = (a.mT, b) if dim == u.ndim - 1 else (b, a.mT)
        torch.baddbmm(G, first, second, beta=beta, out=G)
        beta = 1
    return G


def channel_product(A: Tensor | None, v: Tensor, channels_last: bool = False) -> Tensor:
    """A v, whatever the memory format of v.

    Args:
        A: (C, C), or None for the identity, which returns v itself.
        v: (B, C, *spatial).
        channels_last: whether the result is channels last; else it is contiguous.
    """
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
    G = g.new_empty(g.shape[1], u.shape[1])
    if isinstance(g, FakeTensor):
        return G
    beta = 0
    for a, b in zip(g.flatten(2).unbind(), u.flatten(2).mT.unbind(), strict=True):
        torch.addmm(G, a, b, beta=beta, out=G)
        beta = 1
    return G
