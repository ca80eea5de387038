"""A chain of axis passes in the spectral domain; runs everywhere and takes any gain.

    y = T^-1 [ A_m G_m A_{m-1} ... G_1 A_0 (T x) ]

T is the real FFT over all axes of the chain. U acts on channels only, so it commutes with T: A_j are the C x C matrices
of `operators.merge`, G_j the pointwise gains. By Parseval every gradient, of matrices and gains too, is formed in the
spectral domain, so the backward keeps one tensor, T x, and computes the rest again.

Coefficients are stored as real pairs (B, C, N): the channel products are real.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from chasm.common.cost import counted_as
from chasm.ops.forms.base import Form, Passes, matrices
from chasm.ops.kernels import has_triton
from chasm.ops.kernels.launch import is_large_card
from chasm.ops.kernels.layout import contiguous
from chasm.ops.operators import AxisOperator, at_least_float32, channel_operators, merge, merge_adjoint

MAX_KERNEL_CHANNELS = 128  # the kernel keeps both halves of a matrix in shared memory


class RealFFT:
    """The real FFT over some axes of (B, C, *spatial), with its inverse and the adjoints of both.

    The transformed axes go last, in the order they stand; the last of them keeps its half spectrum.

    Args:
        shape: of the features.
        dims: the axes to transform.
        unscaled: whether the inverse leaves out the division by all sizes, which is `scale`. A GPU's library makes
            another pass over the spectrum for it.
    """

    def __init__(self, shape: torch.Size, dims: Sequence[int], unscaled: bool) -> None:
        self.source = sorted(dims)
        self.axes = list(range(-len(dims), 0))
        self.sizes = [shape[d] for d in self.source]
        others = [n for d, n in enumerate(shape) if d not in self.source]
        self.shape = (*others, *self.sizes[:-1], self.sizes[-1] // 2 + 1)
        self.scale = 1 / math.prod(self.sizes) if unscaled else 1.0
        self.unscaled = unscaled

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, *spatial) -> (B, C, N): the coefficients as real pairs."""
        X = torch.fft.rfftn(x.movedim(self.source, self.axes), dim=self.axes)
        return torch.view_as_real(X).flatten(2)

    def inverse(self, X: Tensor) -> Tensor:
        """(B, C, N) -> (B, C, *spatial)."""
        return self._inverse(self.coefficients(X), "forward" if self.unscaled else "backward")

    def inverse_adjoint(self, g: Tensor) -> Tensor:
        """The adjoint of `inverse` as a real linear map, times 1/2.

        A coefficient stands for itself and its mirror image, except DC and Nyquist of the last axis. Adjoints
        therefore weigh coefficients by 2 but those by 1; the common factor 2 is left to the caller (`WEIGHT`).
        """
        g = g.movedim(self.source, self.axes)
        G = torch.fft.rfftn(g, dim=self.axes, norm="backward" if self.unscaled else "forward")
        self._scale_single_coefficients(G, 0.5)
        return torch.view_as_real(G).flatten(2)

    def forward_adjoint(self, G: Tensor) -> Tensor:
        """The adjoint of `forward`, for what `inverse_adjoint` produced. Writes to G."""
        coefficients = self.coefficients(G)
        self._scale_single_coefficients(coefficients, 2.0)
        return self._inverse(coefficients, "forward")

    def coefficients(self, X: Tensor) -> Tensor:
        """The real pairs as complex coefficients, an axis for each axis."""
        return torch.view_as_complex(X.view(*self.shape, 2))

    def gain_table(self, gains: Tensor, dim: int) -> Tensor:
        """Gains (K, C) of axis `dim` -> (C, 1, .., bins, .., 1), which multiplies `coefficients`."""
        place = self.source.index(dim)
        if place < len(self.sizes) - 1:
            gains = mirrored(gains, self.sizes[place])
        after = [1] * (len(self.sizes) - 1 - place)
        return gains.mT.reshape(gains.shape[1], *[1] * (len(self.shape) - 3 - len(after)), -1, *after)

    def neighbours(self, dim: int) -> int:
        """How many numbers of the real pairs, one after the other, have the same gain of axis `dim`."""
        after = len(self.sizes) - 1 - self.source.index(dim)
        return 2 * math.prod(self.shape[len(self.shape) - after :])

    def gain_table_adjoint(self, d: Tensor, dim: int) -> Tensor:
        """The gradient (K, C) of the gains for the gradient d of their table."""
        place = self.source.index(dim)
        d = d.flatten(1).mT
        return mirrored_adjoint(d) if place < len(self.sizes) - 1 else d

    def _inverse(self, Z: Tensor, norm: str) -> Tensor:
        if Z.is_cuda:  # one plan for all axes is a third faster there; on a CPU axis by axis needs less memory
            x = torch.fft.irfftn(Z, s=self.sizes, dim=self.axes, norm=norm)
        else:
            if len(self.axes) > 1:
                Z = torch.fft.ifftn(Z, dim=self.axes[:-1], norm=norm)
            x = torch.fft.irfft(Z, n=self.sizes[-1], norm=norm)
        return x.movedim(self.axes, self.source).contiguous()

    def _scale_single_coefficients(self, X: Tensor, factor: float) -> None:
        X[..., 0] *= factor
        if self.sizes[-1] % 2 == 0:
            X[..., -1] *= factor


WEIGHT = 2.0  # of the gradients of gains and matrices, see `RealFFT.inverse_adjoint`


def mirrored(gains: Tensor, n: int) -> Tensor:
    """(K, C) -> (n, C): the gain of every bin of a full FFT, lambda[|k|], conjugate for k < 0."""
    negative = gains[1 : (n + 1) // 2].flip(0)
    return torch.cat([gains, negative.conj_physical() if gains.is_complex() else negative])


def mirrored_adjoint(d: Tensor) -> Tensor:
    """(n, C) -> (K, C)."""
    n = len(d)
    found = d[: n // 2 + 1].clone()
    negative = d[n // 2 + 1 :].flip(0)
    found[1 : (n + 1) // 2] += negative.conj_physical() if d.is_complex() else negative
    return found


# --- the form -------------------------------------------------------------------------------------


class FFT(Form):
    """The FFT of all axes, then channel products and gains on its coefficients."""

    def prepare(self, shape: torch.Size, passes: Passes, dtype: torch.dtype, trains: bool) -> list[Tensor]:
        # The gain tables of all axes, then with bases the channel matrices (m + 1, C, C).
        dims, gains, bases = passes
        dtype = at_least_float32(dtype)
        transform = RealFFT(shape, dims, unscaled=gains[0].is_cuda and bool(bases))
        wide = torch.promote_types(dtype, torch.complex64)
        tables = [transform.gain_table(g, dim) for g, dim in zip(gains, dims, strict=True)]
        constants = [t.to(wide if t.is_complex() else dtype, copy=True) for t in tables]
        if bases:
            mats = merge(bases).to(dtype)
            mats[-1] *= transform.scale
            constants.append(mats)
        return constants

    def forward(
        self, x: Tensor, dims: Sequence[int], constants: Sequence[Tensor], keep: bool, before_local: bool
    ) -> tuple[Tensor, list[Tensor]]:
        # y, and with `keep` the transformed input.
        tables, mats = constants[: len(dims)], matrices(dims, constants)
        transform = RealFFT(x.shape, dims, unscaled=x.is_cuda and mats[0] is not None)
        X = transform.forward(x.to(at_least_float32(x.dtype)))
        P = X
        for A, g, dim in zip(mats[:-1], tables, dims, strict=True):
            P = _product_and_gain(A, P, g, dim, transform, in_place=P is not X)
        P = _product(mats[-1], P)
        return transform.inverse(P).to(x.dtype), [X] if keep else []

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
        dims, _, bases = passes
        tables, mats, m = constants[: len(dims)], matrices(dims, constants), len(dims)
        transform = RealFFT(g.shape, dims, unscaled=g.is_cuda and mats[0] is not None)
        G = transform.inverse_adjoint(contiguous(g).to(at_least_float32(g.dtype)))
        d_tables: list[Tensor] = []
        d_mats: list[Tensor] = []
        for j in range(m, 0, -1):
            A, table, dim = mats[j], tables[j - 1], dims[j - 1]
            H = _product(None if A is None else A.mT, G, copy=True)
            if kept:
                P = _before_gain(kept[0], j, tables, mats, dims, transform)
                P, H, d = _gain_gradient(P, H, table, dim, transform)
                d_tables.append(d * WEIGHT)
                if bases:
                    d_mats.append(_gram(G, P) * (WEIGHT * transform.scale if j == m else WEIGHT))
            else:
                H = _gain(H, table.conj_physical(), transform)
            G = H
        if bases:
            d_mats.append(_gram(G, kept[0]) * WEIGHT)
        dx = None
        if needs_x:
            dx = transform.forward_adjoint(_product(None if mats[0] is None else mats[0].mT, G))
        if dx is not None and add is not None:
            dx.add_(add)
        d_gains = [transform.gain_table_adjoint(d, dim) for d, dim in zip(reversed(d_tables), dims, strict=False)]
        return dx, d_gains, merge_adjoint(d_mats[::-1], bases) if bases else []


def frequency_product(x: Tensor, op: AxisOperator) -> Tensor:
    """One pass with a basis per frequency: M(k) for each, applied in plain torch operations that record gradients."""
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


# --- its steps, by kernels for float32 on a GPU ----------------------------------------------------


def _has_kernels(X: Tensor) -> bool:
    return X.is_cuda and X.dtype == torch.float32 and has_triton()


def _has_product_kernel(X: Tensor) -> bool:
    """True where the kernel beats the library, which multiplies float32 slowly or rounds it to TF32."""
    fits = X.shape[1] <= MAX_KERNEL_CHANNELS and X.shape[1] * X.shape[2] < 2**31  # offsets are 32 bits wide
    return fits and _has_kernels(X) and is_large_card(X)


def _product(A: Tensor | None, X: Tensor, copy: bool = False) -> Tensor:
    """A (C, C) on X (B, C, N); X itself for the identity, or a copy of it.

    As a batched product: `matmul` would fold the batch into the rows, at the price of two transposed copies.
    """
    if A is None:
        return X.clone() if copy else X
    if _has_product_kernel(X):
        return _product_by_kernel(A, X)
    return torch.bmm(A.expand(X.shape[0], -1, -1), X)


def _product_and_gain(
    A: Tensor | None, X: Tensor, table: Tensor, dim: int, transform: RealFFT, in_place: bool
) -> Tensor:
    """A X, then the gains of one axis; the identity with `in_place` writes to X."""
    if A is not None and not table.is_complex() and _has_product_kernel(X):
        return _product_by_kernel(A, X, table.flatten(1), transform.neighbours(dim))
    return _gain(_product(A, X, copy=not in_place), table, transform)


def _product_by_kernel(A: Tensor, X: Tensor, gain: Tensor | None = None, neighbours: int = 1) -> Tensor:
    from chasm.ops.kernels import mixing  # imports triton, which is not installed everywhere

    with counted_as("matmul", macs=A.shape[0] * X.numel()):
        return mixing.product(A, X, gain, neighbours)


def _gain(X: Tensor, table: Tensor, transform: RealFFT) -> Tensor:
    """X with its coefficients multiplied by the table, in place."""
    transform.coefficients(X).mul_(table)
    return X


def _before_gain(
    X: Tensor, j: int, tables: Sequence[Tensor], mats: Sequence[Tensor | None], dims: Sequence[int], transform: RealFFT
) -> Tensor:
    """What gain j multiplies, computed again from X: an extra product is cheaper than one more tensor kept."""
    P = X
    for A, g, dim in zip(mats[: j - 1], tables[: j - 1], dims[: j - 1], strict=True):
        P = _product_and_gain(A, P, g, dim, transform, in_place=P is not X)
    return _product(mats[j - 1], P, copy=P is X)


def _gain_gradient(P: Tensor, H: Tensor, table: Tensor, dim: int, transform: RealFFT) -> tuple[Tensor, Tensor, Tensor]:
    """g P, conj(g) H and the gradient of the table g, for the gradient H of g P. Writes to P and H."""
    if not table.is_complex() and _has_kernels(P):
        from chasm.ops.kernels import spectrum

        return P, H, spectrum.scale_both(P, H, table.flatten(1), transform.neighbours(dim)).view(table.shape)
    p, h, parts = transform.coefficients(P), transform.coefficients(H), []
    for a, b, like in zip(p.chunk(4, 1), h.chunk(4, 1), table.chunk(4, 0), strict=True):  # a quarter-size temporary
        if table.is_complex():
            parts.append((a.conj_physical() * b).sum_to_size(1, *like.shape)[0])
        else:  # Re(conj(a) b), as products of real pairs
            product = torch.view_as_real(a) * torch.view_as_real(b)
            parts.append(product.sum_to_size(1, *like.shape, 1)[0, ..., 0])
    return _gain(P, table, transform), _gain(H, table.conj_physical(), transform), torch.cat(parts)


def _gram(G: Tensor, X: Tensor) -> Tensor:
    """The sum over batch and positions of G X^T, (C, C)."""
    if not _has_kernels(X):
        return torch.bmm(G, X.mT).sum(0)
    from chasm.ops.kernels import products

    with counted_as("matmul", macs=G.shape[1] * X.numel()):
        return products.gram(G, X)
