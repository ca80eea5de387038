"""A chain of axis passes as products of real matrices, in torch: the form for CPUs.

    u_j = A_{j-1} v_{j-1},   v_j = R_j u_j,   y = A_m v_m,   v_0 = x

A_j are the C x C channel matrices of `operators.merge`, R_j one circulant matrix per channel along an axis. Maps lie in
memory as (C, n_1, B, ..), n_1 the length of the first spatial axis. Every product of the whole batch is then one call,
and no operand is copied: A on (C, N), R from the left on (C, n_1, N / n_1), or from the right on (C, N / n, n).

With g the gradient of what stands in its index, H_j = sum g_{v_j} v_j^T after the gains of pass j and G_j = sum g_{u_j}
u_j^T before them, the gradient of its basis is U_j (H_j - G_j), up to U_j S with a symmetric S, which a basis that
stays orthogonal does not follow. The A_j are orthogonal, so H_j = A_j^T G_{j+1} A_j, and only H_m is summed over maps.
Flat gains, as at the start, give H_j = G_j to the last bit: Adam would take full steps along rounding errors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from chasm.ops.forms.base import Form, Passes
from chasm.ops.gains import impulse_response, impulse_response_adjoint
from chasm.ops.operators import at_least_float32, merge


class Circulant(Form):
    """Products with circulant matrices, in torch."""

    def prepare(self, shape: torch.Size, passes: Passes, dtype: torch.dtype, trains: bool) -> list[Tensor]:
        # Circulants (C, n, n) of all axes, then with bases the channel matrices (m + 1, C, C).
        dims, gains, bases = passes
        dtype = at_least_float32(dtype)
        constants = []
        for g, dim in zip(gains, dims, strict=True):
            if g.is_complex() and dim == 2:  # R is made for the right side; on the left it must be transposed
                g = g.conj_physical()
            constants.append(circulants(impulse_response(g, shape[dim]).to(dtype)))
        return [*constants, merge(bases).to(dtype)] if bases else constants

    def forward(
        self, x: Tensor, dims: Sequence[int], constants: Sequence[Tensor], keep: bool, before_local: bool
    ) -> tuple[Tensor, list[Tensor]]:
        # y, and with `keep` the u_j. `before_local`: y channels last.
        m, (B, C, *spatial) = len(dims), x.shape
        mats = constants[m].unbind() if len(constants) > m else ()
        v = x.to(at_least_float32(x.dtype)).movedim(0, 2).contiguous()
        shape = v.shape
        kept: list[Tensor] = []
        if keep and not mats:
            v = v.clone()  # it is kept as u_1, and an operator returns none of its arguments
        for j, dim in enumerate(dims):
            u = torch.mm(mats[j], v.view(C, -1)).view(shape) if mats else v
            v = _filtered(u, constants[j], dim)
            if keep:
                kept.append(u)
            del u
        if before_local and mats:
            rows = torch.mm(v.view(C, -1).t(), mats[m].t()).view(*shape[1:], C)
            y = rows.transpose(0, 1).reshape(-1, C).view(B, *spatial, C).movedim(-1, 1)
        else:
            v = torch.mm(mats[m], v.view(C, -1)).view(shape) if mats else v
            y = v.movedim(2, 0).contiguous()
        return y.to(x.dtype), kept

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
        m, C = len(dims), g.shape[1]
        mats = constants[m].unbind() if len(constants) > m else ()
        g = g.to(at_least_float32(g.dtype))
        if g.is_contiguous() or not mats:
            g = g.movedim(0, 2).contiguous()
        else:  # channels last, as the layers behind leave it: its rows of channels move as they are
            g = g.permute(2, 0, 3, 1).contiguous().permute(3, 0, 1, 2)
        shape = g.shape
        g = g.view(C, -1)
        d_gains: list[Tensor] = []
        d_bases: list[Tensor] = []
        after = None
        for j in range(m - 1, -1, -1):
            R, dim = constants[j], dims[j]
            g = (torch.mm(mats[j + 1].t(), g) if mats else g).view(shape)
            if bases and after is None:
                after = torch.mm(g.view(C, -1), _filtered(kept[j], R, dim).view(C, -1).t())
            if gains:
                row = _row_gradient(_filter_gradient(kept[j], g, dim))
                d = impulse_response_adjoint(row, gains[j])
                d_gains.insert(0, d.conj_physical() if d.is_complex() and dim == 2 else d)
            g = _filtered(g, R.mT, dim).view(C, -1)
            if bases and after is not None:
                before = torch.mm(g, kept[j].view(C, -1).t())
                d_bases.insert(0, torch.mm(bases[j], (after - before).to(bases[j].dtype)))
                after = torch.mm(mats[j].t(), torch.mm(before, mats[j])) if j > 0 else None
        dx = None
        if needs_x:
            dx = (torch.mm(mats[0].t(), g) if mats else g).view(shape).movedim(2, 0)
            dx = dx.contiguous() if add is None else torch.add(add, dx).contiguous()
        return dx, d_gains, d_bases


# --- steps ----------------------------------------------------------------------------------------


def circulants(row: Tensor) -> Tensor:
    """(C, n) -> (C, n, n): R[i, j] = row[j - i], contiguous."""
    return torch.cat([row, row], -1).unfold(-1, row.shape[-1], 1)[:, 1:].flip(1)


def _row_gradient(G: Tensor) -> Tensor:
    """The adjoint of `circulants`: sums of G (C, n, n) along its wrapped diagonals."""
    n, sums = G.shape[1], []
    for part in G.split(16):  # the doubled matrices then fit a cache
        twice = torch.cat([part, part], -1)
        sums.append(twice.as_strided(part.shape, (2 * n * n, 2 * n + 1, 1)).sum(1))
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _filtered(z: Tensor, R: Tensor, dim: int) -> Tensor:
    """R (C, n, n) along dimension `dim` of the features, z (C, n_1, B, ..)."""
    if dim == 2:
        return torch.bmm(R, z.view(*z.shape[:2], -1)).view(z.shape)
    if dim < z.ndim - 1:
        return _filtered(z.transpose(dim, -1).contiguous(), R, z.ndim - 1).transpose(dim, -1).contiguous()
    return torch.bmm(z.view(z.shape[0], -1, z.shape[-1]), R).view(z.shape)


def _filter_gradient(u: Tensor, g: Tensor, dim: int) -> Tensor:
    """The gradient of R in u -> v, for the gradient g of v."""
    C, n = u.shape[:2]
    if dim == 2:
        return torch.bmm(g.view(C, n, -1), u.view(C, n, -1).mT)
    n = u.shape[dim]
    u, g = (t.transpose(dim, -1).reshape(C, -1, n) for t in (u, g))
    return torch.bmm(u.mT, g)
