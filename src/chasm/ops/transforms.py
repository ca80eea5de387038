"""Real orthogonal-type transforms of the spatial axes, in which every CHASM gain is a diagonal.

The channel matrices commute with any spatial transform, and a gain that depends on |k| alone is diagonal in the
Fourier basis of its axis. So a chain of axis passes is: one transform of all its axes, channel products and
pointwise gains, one inverse. Two transforms do this:

* ``FourierTransform``: the real FFT; the last axis keeps its half spectrum, as pairs of real numbers. Takes complex
  gains too (a filter that is not even, but real).
* ``DenseTransform``: the same basis as an orthogonal n x n matrix Q of cosines and sines per axis. No complex dtype,
  runs in bfloat16, and is a large matrix product, which is what accelerators are best at.

Both work on (B, C, s_1, .., s_d) with the transformed axes last, and return real (B, C, N).
"""

import math

import torch
from torch import Tensor

from chasm.ops.constants import constant


def mirrored(gains: Tensor, n: int) -> Tensor:
    """(K, C) -> (n, C): the gain of every bin of a full FFT, lambda[|k|], conjugate for k < 0."""
    i = torch.arange(n, device=gains.device)
    full = gains.index_select(0, torch.minimum(i, n - i))  # no empty slice at n = 1, 2: exports with n free
    return torch.where((2 * i > n)[:, None], full.conj(), full) if gains.is_complex() else full


def _broadcastable(gains: Tensor, axis: int, ndim: int) -> Tensor:
    """(bins, C) -> (C, 1, .., bins, .., 1) with the bins at spatial axis `axis` of `ndim`."""
    return gains.mT.reshape(gains.shape[1], *[1] * (ndim + axis), -1, *[1] * (-axis - 1))


def dense_basis(device: torch.device, n: int, dtype: torch.dtype) -> Tensor:
    """The real DFT basis Q (n, n): rows are cosines k = 0..n//2, then sines k = 1..(n-1)//2; Q Q^T = I."""
    home = torch.device("cpu") if device.type == "mps" else device  # float64 does not exist there
    k = torch.arange(n // 2 + 1, device=home)
    i = torch.arange(n, device=home)
    # Reduce k*i modulo n in integers first: the angle is then as exact for n = 1000 as for n = 4.
    angle = torch.deg2rad((k[:, None] * i % n).to(torch.float64) * (360 / n))  # no pi: see `weight` below
    scale = (2 - ((k == 0) | (2 * k == n)).to(torch.float64)).div(n).sqrt()[:, None]
    cosines, sines = angle.cos() * scale, angle.sin() * scale
    return torch.cat([cosines, sines[1 : n - n // 2]]).to(device, dtype)


class FourierTransform:
    """rFFT over the last ``axes`` dimensions.

    `unscaled`: `inverse` and its adjoint leave out the division by all sizes, which is `scale`. A GPU's library makes
    another pass over the spectrum for it.
    """

    def __init__(self, sizes: tuple[int, ...], unscaled: bool = False) -> None:
        self.sizes = sizes
        self.dims = tuple(range(-len(sizes), 0))
        self.unscaled = unscaled

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.rfftn(x, dim=self.dims)).flatten(2)

    def inverse(self, X: Tensor, shape: torch.Size) -> Tensor:
        return self._inverse([X], shape, "forward" if self.unscaled else "backward")

    def inverse_adjoint(self, g: Tensor) -> Tensor:
        """Adjoint of `inverse` as a real linear map, times 1/2 (see `weight`)."""
        G = torch.fft.rfftn(g, dim=self.dims, norm="backward" if self.unscaled else "forward")
        self._scale_real_bins(G, 0.5)
        return torch.view_as_real(G).flatten(2)

    def forward_adjoint(self, G: Tensor, shape: torch.Size) -> Tensor:
        """Adjoint of `forward`, for what `inverse_adjoint` produced."""
        self._scale_real_bins(self.bins(G, shape), 2.0)
        owned = [G]
        del G
        return self._inverse(owned, shape, "forward")

    def _inverse(self, owned: list[Tensor], shape: torch.Size, norm: str) -> Tensor:
        Z = self.bins(owned.pop(), shape)  # taken out of the list so that the next stage can free it
        if Z.is_cuda:  # in one plan, a third faster there; on a CPU stage by stage needs less memory
            return torch.fft.irfftn(Z, s=self.sizes, dim=self.dims, norm=norm)
        if len(self.dims) > 1:
            Z = torch.fft.ifftn(Z, dim=self.dims[:-1], norm=norm)
        return torch.fft.irfft(Z, n=self.sizes[-1], norm=norm)

    # A bin of the half spectrum stands for itself and its mirror image, except DC and Nyquist of the last
    # axis. Adjoints therefore weigh bins 2, 2, .. but 1 at those; the common factor 2 is taken out.
    # A function, as a number that is looked up becomes an input to a compiled graph, and one in two backwards fails.
    @property
    def weight(self) -> float:
        return 2.0

    @property
    def scale(self) -> float:
        return 1 / math.prod(self.sizes) if self.unscaled else 1.0

    def _scale_real_bins(self, X: Tensor, factor: float) -> None:
        X[..., 0] *= factor
        if self.sizes[-1] % 2 == 0:
            X[..., -1] *= factor

    def gains(self, gains: Tensor, axis: int, ndim: int) -> Tensor:
        """(K, C) of transformed axis `axis` (-1 is the last) of `ndim` -> broadcastable against `bins`."""
        return _broadcastable(gains if axis == -1 else mirrored(gains, self.sizes[axis]), axis, ndim)

    def bins(self, X: Tensor, shape: torch.Size) -> Tensor:
        """The flat coefficients as (B, C, .., bins of each axis)."""
        return torch.view_as_complex(X.view(*shape[:-1], self.sizes[-1] // 2 + 1, 2))


class DenseTransform:
    """Products with Q along the last axes. Orthogonal, so every adjoint is the inverse."""

    @property
    def weight(self) -> float:
        return 1.0

    @property
    def scale(self) -> float:
        return 1.0

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def _apply(self, x: Tensor, transpose: bool) -> Tensor:
        for axis in range(-len(self.sizes), 0):
            Q = constant(dense_basis, x, self.sizes[axis], x.dtype)
            Q = Q.mT if transpose else Q
            if axis == -1:
                x = x @ Q.mT
            else:  # a batched product, for the reason given in chain.mix
                z = x.reshape(-1, x.shape[axis], x.shape[axis + 1 :].numel())
                x = torch.bmm(Q.expand(z.shape[0], -1, -1), z).view(x.shape)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self._apply(x, transpose=False).flatten(2)

    def inverse(self, X: Tensor, shape: torch.Size) -> Tensor:
        return self._apply(X.view(shape), transpose=True)

    def inverse_adjoint(self, g: Tensor) -> Tensor:
        return self.forward(g)

    def forward_adjoint(self, G: Tensor, shape: torch.Size) -> Tensor:
        return self.inverse(G, shape)

    def gains(self, gains: Tensor, axis: int, ndim: int) -> Tensor:
        n = self.sizes[axis]
        return _broadcastable(torch.cat([gains, gains[1 : n - n // 2]]), axis, ndim)  # cosine rows, then sine rows

    def bins(self, X: Tensor, shape: torch.Size) -> Tensor:
        return X.view(shape)


Transform = FourierTransform | DenseTransform
