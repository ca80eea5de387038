"""A chain of axis passes in the spectral domain; runs everywhere and takes any gain.

    u_1 = F A_0 x,   v_j = lambda_j u_j,   u_{j+1} = A_j v_j,   y = A_m F^-1 v_m

F is the real FFT over all axes of the chain. U acts on channels only, so it commutes with F: A_j are the C x C matrices
of `operators.merge`, and the products are real, on coefficients stored as real pairs (B, C, .., 2).

With g the gradient of what stands in its index, H_j = sum g_{v_j} v_j^T after the gains of pass j and G_j = sum g_{u_j}
u_j^T before them, the gradient of its basis is U_j (H_j - G_j), up to U_j S with a symmetric S, which a basis that
stays orthogonal does not follow. The A_j are orthogonal, so H_j = A_j^T G_{j+1} A_j, and only H_m is summed over maps.
Gains of one, as at the start, give H_j = G_j to the last bit: Adam would take full steps along rounding errors.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from chasm.common.precision import upcast
from chasm.ops.forms.base import Form, Passes
from chasm.ops.operators import AxisOperator, channel_operators, matrices, merge


class FFT(Form):
    """Channel products and gains on the coefficients of an FFT of all axes."""

    def prepare(self, shape: torch.Size, passes: Passes, dtype: torch.dtype, trains: bool) -> list[Tensor]:
        # What multiplies the coefficients in each pass, then with bases the channel matrices (m + 1, C, C).
        dims, gains, bases = passes
        dtype = torch.promote_types(dtype, torch.float32)
        constants = []
        for g, dim in zip(gains, dims, strict=True):
            constants.append(_gain_table(g, shape, dim, dims, dtype))
        return [*constants, merge(bases).to(dtype)] if bases else constants

    def forward(
        self, x: Tensor, dims: Sequence[int], constants: Sequence[Tensor], save: bool, before_local: bool
    ) -> tuple[Tensor, list[Tensor]]:
        # y, and with `save` the u_j. `before_local`: y channels last.
        mats, saved = matrices(dims, constants), []
        v = _transform(_product(mats[0], upcast(x)), dims)
        for j, table in enumerate(constants[: len(dims)]):
            u = _product(mats[j], v) if j else v
            v = _scaled(u, table, in_place=not save)
            if save:
                saved.append(u)
        z = _inverse(v, x.shape, dims)
        if before_local and mats[-1] is not None:
            B, C, *spatial = x.shape
            rows = torch.bmm(z.flatten(2).mT, mats[-1].mT.expand(B, C, C))
            y = rows.view(B, *spatial, C).movedim(-1, 1)
        else:
            y = _product(mats[-1], z)
        return y.to(x.dtype), saved

    def backward(
        self,
        g: Tensor,
        saved: Sequence[Tensor],
        passes: Passes,
        constants: Sequence[Tensor],
        needs_x: bool,
        add: Tensor | None,
        symmetric: bool,
    ) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        dims, gains, bases = passes
        adjoints = [None if A is None else A.mT for A in matrices(dims, constants)]
        # By Parseval a sum over positions is one over coefficients. Each of them but the edges of the last axis stands
        # for two: edges count half here, and sums twice.
        weight = 2 / math.prod(g.shape[d] for d in dims)
        G = _transform(_product(adjoints[-1], upcast(g)), dims)
        _edges(G, g.shape, dims).mul_(0.5)
        d_gains: list[Tensor] = []
        d_bases: list[Tensor] = []
        after = None  # H_j
        for j in range(len(dims) - 1, -1, -1):
            table = constants[j]
            if gains:
                d_gains.insert(0, _gain_gradient(saved[j], G, table, gains[j]) * weight)
            if bases and after is None:
                after = _gram(G, _scaled(saved[j], table))
            G = _scaled(G, table.conj(), in_place=True)
            if bases and after is not None:
                before = _gram(G, saved[j])
                d_bases.insert(0, torch.mm(bases[j], (after - before).to(bases[j].dtype)) * weight)
                A = adjoints[j]
                after = A @ before @ A.mT if j and A is not None else None
            if j:
                G = _product(adjoints[j], G)
        if not needs_x:
            return None, d_gains, d_bases
        _edges(G, g.shape, dims).mul_(2.0)
        return _product(adjoints[0], _inverse(G, g.shape, dims), add), d_gains, d_bases


# --- steps ----------------------------------------------------------------------------------------


def _transform(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the coefficients of x as real pairs (B, C, .., 2); the last of the axes keeps n // 2 + 1."""
    return torch.view_as_real(torch.fft.rfftn(x, dim=sorted(dims))).contiguous()


def _inverse(X: Tensor, shape: torch.Size, dims: Sequence[int]) -> Tensor:
    """Return the inverse of `_transform`, for maps of a shape. On a CPU two calls take half as long as `irfftn`."""
    *others, half = sorted(dims)
    Z = torch.view_as_complex(X)
    Z = torch.fft.ifftn(Z, dim=others) if others else Z
    return torch.fft.irfft(Z, n=shape[half], dim=half).contiguous()


def _edges(X: Tensor, shape: torch.Size, dims: Sequence[int]) -> Tensor:
    """Return a view of the coefficients without a mirror image: DC and (even length) Nyquist of the last axis."""
    half = max(dims)
    n = shape[half]
    return X.transpose(0, half)[:: n if n % 2 else n // 2]


def _product(A: Tensor | None, X: Tensor, add: Tensor | None = None) -> Tensor:
    """Return A X + add on the channels of X (B, C, ..); None is the identity.

    As a batched product: `matmul` would fold the batch into the rows, at the price of two transposed copies.
    """
    if A is None:
        return X.contiguous() if add is None else X + add
    A, flat = A.expand(len(X), -1, -1), X.flatten(2)
    Y = torch.bmm(A, flat) if add is None else torch.baddbmm(add.flatten(2), A, flat)
    return Y.view(X.shape)


def _scaled(X: Tensor, table: Tensor, in_place: bool = False) -> Tensor:
    """Return coefficients times gains."""
    Z = torch.view_as_complex(X) if table.is_complex() else X
    Z = Z.mul_(table) if in_place else Z * table
    return torch.view_as_real(Z) if table.is_complex() else Z


def _gram(G: Tensor, X: Tensor) -> Tensor:
    """Return the sum over batch and coefficients of G X^T, (C, C)."""
    return torch.bmm(G.flatten(2), X.flatten(2).mT).sum(0)


def _gain_table(gains: Tensor, shape: torch.Size, dim: int, dims: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return what multiplies the coefficients of an axis: (C, 1, .., bins, .., 1, 1), or complex (C, .., 1)."""
    K, half = len(gains), max(dims)
    if dim != half:  # a whole spectrum: the mirror images of all but DC and Nyquist follow
        gains = torch.cat([gains, gains[1 : shape[dim] - K + 1].flip(0).conj()])
    dtype = torch.promote_types(dtype, torch.complex64) if gains.is_complex() else dtype
    gains = gains.to(dtype).mT.clone(memory_format=torch.contiguous_format)
    ones = [1] * len(shape)
    if gains.is_complex():
        return gains.view(-1, *ones[2:dim], gains.shape[1], *ones[dim + 1 :])
    if dim == len(shape) - 1:  # for both numbers of a pair: an inner loop over two of the same would be slow
        return gains[..., None].expand(-1, -1, 2).reshape(-1, *ones[2:dim], gains.shape[1], 2)
    return gains.view(-1, *ones[2:dim], gains.shape[1], *ones[dim:])


def _gain_gradient(X: Tensor, G: Tensor, table: Tensor, gains: Tensor) -> Tensor:
    """Return the gradient of the gains (K, C), for the gradient G of the coefficients X times the table."""
    K, C = gains.shape
    if table.is_complex():
        d = (torch.view_as_complex(X).conj() * torch.view_as_complex(G)).sum_to_size(table.shape).view(C, -1)
    else:
        d = (X * G).sum_to_size(table.shape)
        d = (d.sum(-1) if table.shape[-1] == 2 else d).view(C, -1)
    if d.shape[1] == K:
        return d.mT
    d, mirrored = d[:, :K].clone(), d[:, K:]
    d[:, 1 : mirrored.shape[1] + 1] += mirrored.flip(1).conj()
    return d.mT


# --- a basis per frequency -------------------------------------------------------------------------


def frequency_product(x: Tensor, op: AxisOperator) -> Tensor:
    """Apply one pass with a basis per frequency, by plain torch operations that record gradients."""
    return matrix_per_frequency(x, channel_operators(op), op.dim)


def matrix_per_frequency(x: Tensor, M: Tensor, dim: int) -> Tensor:
    """Apply a matrix to the channels at every frequency of an axis.

    Args:
        x: (B, C, *spatial) in float32 or float64.
        M: (K, C, C), real; or complex, and real at DC and Nyquist.
        dim: the axis of x.
    """
    X = torch.fft.rfft(x.movedim(dim, -1))
    if M.is_complex():
        Z = torch.einsum("kcd,bd...k->bc...k", M.to(X.dtype), X)
    else:
        pairs = torch.einsum("kcd,bd...kr->bc...kr", M.to(x.dtype), torch.view_as_real(X))
        Z = torch.view_as_complex(pairs.contiguous())
    # Never a view: torch's compiler cannot lay out one whose size is free where a convolution reads it.
    return torch.fft.irfft(Z, n=x.shape[dim]).movedim(-1, dim).contiguous()
