"""The form "fft" for real gains in float32 on a GPU: channel products, gains and sums by Triton kernels.

    y = T^-1 [ A_m G_m A_{m-1} ... G_1 A_0 (T x) ]

T is the real FFT over all axes of the chain, A_j are the C x C matrices of `operators.merge`, G_j the pointwise gains.
By Parseval every gradient, of matrices and gains too, is formed in the spectral domain, so the backward keeps one
tensor, T x, and computes the rest again.

Coefficients are stored as real pairs (B, C, N): the channel products are real.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from chasm.common.cost import counted_as
from chasm.ops.forms.base import Form, Passes
from chasm.ops.kernels.launch import is_large_card
from chasm.ops.kernels.layout import contiguous
from chasm.ops.operators import matrices, merge, merge_adjoint

MAX_KERNEL_CHANNELS = 128  # the kernel keeps both halves of a matrix in shared memory
WEIGHT = 2.0  # of the gradients of gains and matrices, see `RealFFT.inverse_adjoint`


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
        """Return the coefficients of x (B, C, *spatial) as real pairs, (B, C, N)."""
        X = torch.fft.rfftn(x.movedim(self.source, self.axes), dim=self.axes)
        return torch.view_as_real(X).flatten(2)

    def inverse(self, X: Tensor) -> Tensor:
        """Return the map (B, C, *spatial) of coefficients (B, C, N)."""
        return self._inverse(self._coefficients(X), "forward" if self.unscaled else "backward")

    def inverse_adjoint(self, g: Tensor) -> Tensor:
        """Return the adjoint of `inverse` as a real linear map, times 1/2.

        A coefficient stands for itself and its mirror image, except DC and Nyquist of the last axis. Adjoints
        therefore weigh coefficients by 2 but those by 1; the common factor 2 is left to the caller (`WEIGHT`).
        """
        g = g.movedim(self.source, self.axes)
        G = torch.fft.rfftn(g, dim=self.axes, norm="backward" if self.unscaled else "forward")
        self._scale_single_coefficients(G, 0.5)
        return torch.view_as_real(G).flatten(2)

    def forward_adjoint(self, G: Tensor) -> Tensor:
        """Return the adjoint of `forward`, for what `inverse_adjoint` produced. Writes to G."""
        coefficients = self._coefficients(G)
        self._scale_single_coefficients(coefficients, 2.0)
        return self._inverse(coefficients, "forward")

    def gain_table(self, gains: Tensor, dim: int) -> Tensor:
        """Return (C, bins): the gains (K, C) of axis `dim` for every bin of that axis in the spectrum."""
        if dim != self.source[-1]:
            gains = torch.cat([gains, gains[1 : (self.sizes[self.source.index(dim)] + 1) // 2].flip(0)])
        return gains.mT.clone(memory_format=torch.contiguous_format)

    def gain_table_adjoint(self, d: Tensor, dim: int) -> Tensor:
        """Return the gradient (K, C) of the gains for the gradient d of their table."""
        d = d.mT
        if dim == self.source[-1]:
            return d
        n = len(d)
        d_gains = d[: n // 2 + 1].clone()
        d_gains[1 : (n + 1) // 2] += d[n // 2 + 1 :].flip(0)
        return d_gains

    def neighbours(self, dim: int) -> int:
        """Return how many numbers of the real pairs, one after the other, have the same gain of axis `dim`."""
        after = len(self.sizes) - 1 - self.source.index(dim)
        return 2 * math.prod(self.shape[len(self.shape) - after :])

    def _coefficients(self, X: Tensor) -> Tensor:
        return torch.view_as_complex(X.view(*self.shape, 2))

    def _inverse(self, Z: Tensor, norm: str) -> Tensor:
        x = torch.fft.irfftn(Z, s=self.sizes, dim=self.axes, norm=norm)
        return x.movedim(self.axes, self.source).contiguous()

    def _scale_single_coefficients(self, X: Tensor, factor: float) -> None:
        X[..., 0] *= factor
        if self.sizes[-1] % 2 == 0:
            X[..., -1] *= factor


# --- the form -------------------------------------------------------------------------------------


class FFTKernels(Form):
    """The FFT of all axes, then channel products and gains on its coefficients, by kernels."""

    def prepare(self, shape: torch.Size, passes: Passes, dtype: torch.dtype, trains: bool) -> list[Tensor]:
        # The gain tables of all axes, then with bases the channel matrices (m + 1, C, C).
        dims, gains, bases = passes
        transform = RealFFT(shape, dims, unscaled=bool(bases))
        tables = [transform.gain_table(g, dim).float() for g, dim in zip(gains, dims, strict=True)]
        if bases:
            mats = merge(bases).float()
            mats[-1] *= transform.scale
            tables.append(mats)
        return tables

    def forward(
        self, x: Tensor, dims: Sequence[int], constants: Sequence[Tensor], save: bool, before_local: bool
    ) -> tuple[Tensor, list[Tensor]]:
        # y, and with `save` the transformed input.
        tables, mats = constants[: len(dims)], matrices(dims, constants)
        transform = RealFFT(x.shape, dims, unscaled=mats[0] is not None)
        X = transform.forward(x.float())
        P = X
        for A, g, dim in zip(mats[:-1], tables, dims, strict=True):
            P = _product_and_gain(A, P, g, transform.neighbours(dim), in_place=P is not X)
        P = _product(mats[-1], P)
        return transform.inverse(P).to(x.dtype), [X] if save else []

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
        from chasm.ops.kernels import spectrum  # imports triton, which is not installed everywhere

        dims, _, bases = passes
        tables, mats, m = constants[: len(dims)], matrices(dims, constants), len(dims)
        transform = RealFFT(g.shape, dims, unscaled=mats[0] is not None)
        G = transform.inverse_adjoint(contiguous(g).float())
        d_tables: list[Tensor] = []
        d_mats: list[Tensor] = []
        for j in range(m, 0, -1):
            A, table, neighbours = mats[j], tables[j - 1], transform.neighbours(dims[j - 1])
            H = _product(None if A is None else A.mT, G, copy=True)
            if saved:
                P = _before_gain(saved[0], j, tables, mats, dims, transform)
                d_tables.append(spectrum.scale_both(P, H, table, neighbours) * WEIGHT)  # writes to P and H
                if bases:
                    d_mats.append(_gram(G, P) * (WEIGHT * transform.scale if j == m else WEIGHT))
            else:
                H = _gain(H, table, neighbours)
            G = H
        if bases:
            d_mats.append(_gram(G, saved[0]) * WEIGHT)
        dx = None
        if needs_x:
            dx = transform.forward_adjoint(_product(None if mats[0] is None else mats[0].mT, G))
        if dx is not None and add is not None:
            dx.add_(add)
        d_gains = [transform.gain_table_adjoint(d, dim) for d, dim in zip(reversed(d_tables), dims, strict=False)]
        return dx, d_gains, merge_adjoint(d_mats[::-1], bases) if bases else []


# --- steps ----------------------------------------------------------------------------------------


def _has_product_kernel(X: Tensor) -> bool:
    """Return True where the kernel beats the library, which multiplies float32 slowly or rounds it to TF32."""
    fits = X.shape[1] <= MAX_KERNEL_CHANNELS and X.shape[1] * X.shape[2] < 2**31  # offsets are 32 bits wide
    return fits and is_large_card(X)


def _product(A: Tensor | None, X: Tensor, copy: bool = False) -> Tensor:
    """Return A X for A (C, C) and X (B, C, N); for the identity X itself, or a copy of it."""
    if A is None:
        return X.clone() if copy else X
    return _product_by_kernel(A, X) if _has_product_kernel(X) else torch.bmm(A.expand(X.shape[0], -1, -1), X)


def _product_and_gain(A: Tensor | None, X: Tensor, table: Tensor, neighbours: int, in_place: bool) -> Tensor:
    """Return A X times the gains of one axis. The identity with `in_place` writes to X."""
    if A is not None and _has_product_kernel(X):
        return _product_by_kernel(A, X, table, neighbours)
    return _gain(_product(A, X, copy=not in_place), table, neighbours)


def _product_by_kernel(A: Tensor, X: Tensor, table: Tensor | None = None, neighbours: int = 1) -> Tensor:
    from chasm.ops.kernels import mixing

    with counted_as("matmul", macs=A.shape[0] * X.numel()):
        return mixing.product(A, X, table, neighbours)


def _gain(X: Tensor, table: Tensor, neighbours: int) -> Tensor:
    """Multiply the coefficients X (B, C, N) by the table (C, bins), in place."""
    X.view(*X.shape[:2], -1, table.shape[1], neighbours).mul_(table[:, None, :, None])
    return X


def _before_gain(
    X: Tensor, j: int, tables: Sequence[Tensor], mats: Sequence[Tensor | None], dims: Sequence[int], transform: RealFFT
) -> Tensor:
    """Return what gain j multiplies, computed again from X: a product costs less than saving one more tensor."""
    P = X
    for A, g, dim in zip(mats[: j - 1], tables[: j - 1], dims[: j - 1], strict=True):
        P = _product_and_gain(A, P, g, transform.neighbours(dim), in_place=P is not X)
    return _product(mats[j - 1], P, copy=P is X)


def _gram(G: Tensor, X: Tensor) -> Tensor:
    """Return the sum over batch and positions of G X^T, (C, C)."""
    from chasm.ops.kernels import products

    with counted_as("matmul", macs=G.shape[1] * X.numel()):
        return products.gram(G, X)
