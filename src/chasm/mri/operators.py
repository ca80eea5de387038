"""The measurement A = P F S: coil sensitivities S, centred Fourier transform F, sampling mask P.

>>> from chasm.mri import create_mask
>>> A = Operator(create_mask("equispaced", 32).tensor())
>>> x = torch.randn(2, 1, 32, 32, dtype=torch.complex64)
>>> y = A.forward(x)
>>> torch.allclose(A.adjoint(y), A.normal(x), atol=1e-5)
True
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from chasm.common.precision import full_precision
from chasm.mri.fft import as_complex, fft2c, ifft2c


@dataclass(frozen=True, slots=True)
class Operator:
    """A = P F S on batches. Without maps, S = 1: each image of (B, M, H, W) is measured by one coil.

    With maps (B, Q, H, W) an image (B, 1, H, W) becomes k-space (B, Q, H, W). With several sets of maps,
    (B, S, Q, H, W), each set has its own image, (B, S, H, W), and their coil images add up. The norm of A is at
    most 1 if the squared maps of a set sum to at most 1, as those of `estimate_maps` and `espirit_maps` do.
    """

    mask: Tensor  # zeros and ones, broadcast against (B, Q, H, W); `Mask.tensor()` gives (1, 1, 1, W)
    maps: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the measured k-space of an image, zero where nothing was measured."""
        return self.mask * fft2c(self._coils(x))

    def adjoint(self, y: Tensor) -> Tensor:
        """Return the image of k-space: zero-filled for one coil, weighted by the sensitivities for many."""
        return self._combine(ifft2c(self.mask * y))

    def normal(self, x: Tensor) -> Tensor:
        """Return A^H A x. The centring shifts cancel, so only the mask is shifted."""
        mask = torch.fft.ifftshift(self.mask, dim=(-2, -1))
        with full_precision(x):
            return self._combine(torch.fft.ifft2(mask * torch.fft.fft2(as_complex(self._coils(x)))))

    def _coils(self, x: Tensor) -> Tensor:
        """Return the image of every coil."""
        if self.maps is None:
            return x
        return self.maps * x if self.maps.ndim == 4 else (self.maps * x[:, :, None]).sum(1)

    def _combine(self, coils: Tensor) -> Tensor:
        """Return the adjoint of `_coils`."""
        if self.maps is None:
            return coils
        if self.maps.ndim == 4:
            return (self.maps.conj() * coils).sum(1, keepdim=True)
        return (self.maps.conj() * coils[:, None]).sum(2)


def zero_filled(y: Tensor, mask: Tensor) -> Tensor:
    """Return the image of each coil with the unmeasured k-space at zero: complex (B, Q, H, W)."""
    return Operator(mask).adjoint(y)


def add_noise(y: Tensor, snr_db: float, mask: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
    """Return k-space with complex Gaussian noise on its measured samples.

    Args:
        y: k-space (B, Q, H, W).
        snr_db: mean of `|y|^2` over the measured samples of a slice (all coils), over the noise variance, in dB. Real
            and imaginary part share the variance.
        mask: ones where k-space was measured. None: everywhere.
        generator: generator of the noise, on the device of y.
    """
    where = torch.ones_like(y.real) if mask is None else mask.expand(y.shape).to(y.real.dtype)
    dims = tuple(range(1, y.ndim))
    power = (where * y.abs().square()).sum(dims, keepdim=True) / where.sum(dims, keepdim=True)
    sigma = (power * 10 ** (-snr_db / 10)).sqrt()
    noise = torch.randn(y.shape, dtype=y.dtype, device=y.device, generator=generator)  # E |n|^2 = 1
    return y + where * sigma * noise
