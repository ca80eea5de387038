"""A chain of axis passes as matrix products by Triton kernels; half precision on a GPU.

    y = A_m T_m A_{m-1} ... T_1 A_0 x,   A_0 = U_1^T,  A_j = U_{j+1}^T U_j,  A_m = U_m

T_j are the gains of pass j as one circulant matrix per channel. Nothing is transformed: five products in all for two
axes, each one pass over memory.

What the mean gain mu of a pass does is the same in every basis, so it has no part in the gradient of U. Rounded maps
know nothing of that: their errors are in proportion to mu, and the gradient to how far gains differ from it. So a pass
that trains writes two maps, T z and (T - mu) z. With z_j before and v_j after pass j, and their gradients q_j and g_j,

    dU_j = U_{j-1} sum v_{j-1} [(T_j - mu)^T g_j]^T + U_{j+1} sum q_{j+1} [(T_j - mu) z_j]^T,   U_0 = U_{m+1} = 1

up to U S with a symmetric S, which a basis that stays orthogonal does not follow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chasm.common.cost import counted_as
from chasm.ops.forms.base import Form, Passes
from chasm.ops.gains import impulse_response, impulse_response_adjoint
from chasm.ops.kernels.layout import contiguous
from chasm.ops.operators import exact_product, merge


class Circulants(NamedTuple):
    """One circulant per channel, mean * 1 + scale * matrix. The largest number in each matrix is 1.

    Without a mean that number stands for the mean gain of the channel, which must not be rounded like its neighbours.
    """

    matrix: Tensor  # (C, n, n'), rows filled up to whole 16-byte words
    scale: Tensor  # (C,) float32
    mean: Tensor | None = None  # () float32, of all channels


class Triton(Form):
    """Products with circulant matrices, by Triton kernels."""

    def prepare(self, shape: torch.Size, passes: Passes, dtype: torch.dtype, trains: bool) -> list[Tensor]:
        # The circulants of all axes, flat; then with bases the channel matrices (m + 1, C, C). The mean gain is
        # split from the circulants while bases train.
        dims, gains, bases = passes
        constants: list[Tensor] = []
        for g, dim in zip(gains, dims, strict=True):
            T = make_circulants(impulse_response(g, shape[dim]), dtype, split_mean=trains and bool(bases))
            constants += [t for t in T if t is not None]
        return [*constants, merge(bases).to(dtype)] if bases else constants

    def forward(
        self, x: Tensor, dims: Sequence[int], constants: Sequence[Tensor], save: bool, before_local: bool
    ) -> tuple[Tensor, list[Tensor]]:
        # y, and with `save` x, the maps that left a pass but the last, those without mean gain, those that entered.
        T, mats = _unpack(dims, constants)
        z = x
        left, without_mean, entered = [x], [], []
        for A, Tj, dim in zip(mats[:-1], T, dims, strict=True):
            z = channel_product(A, z)
            if A is not None:  # else z is what left the pass before
                entered.append(z)
            z, e = circulant_pass(Tj, z, dim)
            left.append(z)
            if e is not None:
                without_mean.append(e)
        return channel_product(mats[-1], z), [*left[:-1], *without_mean, *entered] if save else []

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
        from chasm.ops.kernels import circulant  # imports triton, which is not installed everywhere
        from chasm.ops.kernels.products import gram

        m, (T, mats) = len(dims), _unpack(dims, constants)
        count = m if T[0].mean is not None else 0
        left, without_mean = saved[:m], saved[m : m + count]
        entered = saved[m + count :] or left  # the identity changes nothing between two passes
        around = [None, *bases, None]  # U_0 .. U_{m+1}
        d_gains: list[Tensor] = []
        d_bases: list[Tensor] = []
        q = contiguous(g)
        for j in range(m, 0, -1):
            if bases:
                g, after = _product_and_gram(mats[j], q, without_mean[j - 1])
                after = _times(around[j + 1], after)
            else:
                g = channel_product(mats[j], q, transpose=True)
            if gains:
                column = circulant.column_gradient(g, entered[j - 1], dims[j - 1] == 2)
                d_gains.append(impulse_response_adjoint(column, gains[j - 1]))
            q, p = circulant_pass(T[j - 1] if symmetric else _transposed(T[j - 1]), g, dims[j - 1])
            if bases:
                assert p is not None
                d_bases.append(after + _times(around[j - 1], gram(left[j - 1], p)))
        dx = channel_product(mats[0], q, transpose=True, add=add) if needs_x else None
        return dx, d_gains[::-1], d_bases[::-1]


# --- steps ----------------------------------------------------------------------------------------


def _unpack(dims: Sequence[int], constants: Sequence[Tensor]) -> tuple[list[Circulants], Sequence[Tensor | None]]:
    """Return the circulants of each pass, and A_0 .. A_m, or as many times None for the identity."""
    m = len(dims)
    mats = constants[-1].unbind() if len(constants) > 2 * m else [None] * (m + 1)
    each = 3 if len(constants) == 3 * m + 1 else 2
    return [Circulants(*constants[each * j : each * (j + 1)]) for j in range(m)], mats


def make_circulants(column: Tensor, dtype: torch.dtype, split_mean: bool = False) -> Circulants:
    """Return the circulants that belong to first columns.

    Args:
        column: (C, n).
        dtype: of the matrices.
        split_mean: whether to take the mean gain out of the matrices.
    """
    from chasm.ops.kernels import circulant

    return Circulants(*circulant.matrices(column, dtype, split_mean))


def _transposed(T: Circulants) -> Circulants:
    """Return T^T, for gains that are not real."""
    n = T.matrix.shape[1]
    matrix = torch.zeros_like(T.matrix)
    matrix[..., :n] = T.matrix[..., :n].mT
    return T._replace(matrix=matrix)


def _times(U: Tensor | None, G: Tensor) -> Tensor:
    """Return U G; None is the identity."""
    return G if U is None else exact_product(U, G)


def circulant_pass(T: Circulants, x: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
    """Return T x, and if the mean gain is split from T also T x - mean x.

    Args:
        T: one circulant per channel.
        x: contiguous (B, C, H, W).
        dim: the axis, 2 or 3.
    """
    from chasm.ops.kernels import circulant

    with counted_as("matmul", macs=x.numel() * x.shape[dim]):
        return circulant.circulant_pass(*T, x, dim == 2)


def channel_product(A: Tensor | None, x: Tensor, transpose: bool = False, add: Tensor | None = None) -> Tensor:
    """Return A x + add, in x's dtype.

    Args:
        A: (C, C) on the channels, or None for the identity.
        x: contiguous (B, C, H, W).
        transpose: whether to multiply by A^T instead.
        add: a map like x, or None.
    """
    if A is None:
        return x if add is None else x + add
    A = A.mT if transpose else A
    with counted_as("matmul", macs=A.shape[0] * x.numel()):
        if add is None and x.shape[2:].numel() % 8 == 0:
            return torch.bmm(A.expand(len(x), -1, -1), x.flatten(2)).view(x.shape)
        # A library copies what it adds to, and wants rows that are aligned.
        from chasm.ops.kernels import products

        return products.product(A, x, x=None if add is None else contiguous(add.to(x.dtype)))


def _product_and_gram(A: Tensor | None, q: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Return A^T q, and the sum of q e^T over batch and positions."""
    from chasm.ops.kernels import products

    both = None if A is None else products.product_and_gram(A.mT, q, e)
    return both or (channel_product(A, q, transpose=True), products.gram(q, e))
