"""The measurement of the scanner, and data consistency with it.

    expand(image) = F(S image);  reduce(K) = sum_coils conj(S) F^-1(K)
    enforce(image) = reduce(measured where the mask is set, else expand(image))

F is the centred Fourier transform and S are the coil sensitivities, 1 for a single coil. All of it runs in float32,
under autocast too.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from chasm.common.precision import full_precision
from chasm.mri.fft import fft2c, ifft2c, to_channels, to_complex
from chasm.mri.real import complex_product, dft2c

NEEDS_MASK = "data consistency needs to know what was measured: pass the sampling mask as mask=..."
PLANE = (-3, -1)  # slices and columns of a volume


class Measurement(NamedTuple):
    """What the scanner measured, with the zero frequency in the middle of k-space. M coils, 1 without maps."""

    mask: Tensor  # bool, broadcastable to (B, M, H, W)
    kspace: Tensor  # complex (B, M, H, W); only entries under the mask count
    maps: Tensor | None  # complex (B, M, H, W)
    size: tuple[int, int]

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None, maps: Tensor | None, measured: Tensor | None) -> "Measurement":
        """Return the measurement that the arguments of a host describe.

        Args:
            x: the zero-filled image (B, 2, H, W). Without `measured`, its k-space is taken as measured.
            mask: nonzero where k-space was measured, broadcastable to (B, 1, H, W).
            maps: coil sensitivities, complex (B, M, H, W).
            measured: k-space of every coil, complex (B, M, H, W).

        Raises:
            ValueError: if the mask is missing or a shape does not fit.
        """
        B, _, H, W = x.shape
        if mask is None:
            raise ValueError(NEEDS_MASK)
        if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(mask.shape[::-1], (W, H, 1, B), strict=False)):
            raise ValueError(f"mask must broadcast to ({B}, 1, {H}, {W}), got {tuple(mask.shape)}")
        if maps is not None and measured is None:
            raise ValueError("coil maps need the k-space of every coil: pass measured=..., shaped as maps")
        coils = 1 if maps is None else maps.shape[1]
        for name, value in (("maps", maps), ("measured", measured)):
            if value is not None and (not value.is_complex() or value.shape != (B, coils, H, W)):
                raise ValueError(
                    f"{name} must be complex ({B}, {coils}, {H}, {W}), got {value.dtype} {tuple(value.shape)}"
                )
        kspace = fft2c(to_complex(x)) if measured is None else measured
        return cls(mask > 0, kspace, maps, (H, W))

    def expand(self, image: Tensor) -> Tensor:
        """Return the complex k-space of every coil (B, M, H, W) of an image (B, 2, H, W)."""
        im = to_complex(image)
        return fft2c(im if self.maps is None else self.maps * im)

    def reduce(self, k: Tensor) -> Tensor:
        """Return the image (B, 2, H, W) of the k-space of every coil, combined by the sensitivities."""
        im = ifft2c(k)
        return to_channels(im if self.maps is None else (self.maps.conj() * im).sum(1, keepdim=True))

    def enforce(self, image: Tensor) -> Tensor:
        """Return the image (B, 2, H, W) with its k-space replaced where it was measured."""
        return self.reduce(torch.where(self.mask, self.kspace, self.expand(image)))

    def coil_images(self, columns: Tensor) -> Tensor:
        """Return the images (B, M, 2, H, W) of the measured k-space of every coil in some columns only.

        Args:
            columns: True for the columns to use, broadcastable to the mask.
        """
        return torch.view_as_real(ifft2c(torch.where(columns & self.mask, self.kspace, 0))).movedim(-1, 2)

    def with_maps(self, maps: Tensor) -> "Measurement":
        """Return the measurement with other sensitivities, real (B, M, 2, H, W)."""
        return self._replace(maps=torch.complex(maps[:, :, 0], maps[:, :, 1]))

    def turned(self, cos: Tensor, sin: Tensor) -> "Measurement":
        """Return the measurement with a phase added to its k-space, by its cosine and sine (B, 1, 1, 1)."""
        return self._replace(kspace=self.kspace * torch.complex(cos, sin))

    def rephased(self, image: Tensor, own: "Measurement") -> Tensor:
        """Return an image (B, 2, H, W) that belongs to other sensitivities, with the phase that belongs to these.

        Both explain the same coil images: S x = S' x', so that x has the phase of sum_coils conj(S) S' x'.
        """
        assert self.maps is not None
        assert own.maps is not None
        turn = (self.maps.conj() * own.maps).sum(1, keepdim=True)
        return to_channels(to_complex(image) * torch.where(turn == 0, 1, turn / _or_one(turn.abs())))


class VolumeMeasurement(Measurement):
    """What was measured of a volume, whose slices are pairs of channels (B, 2 D, H, W).

    Lines run along H, and the mask keeps a part of the plane of slices and columns, so that k-space (B, D, H, W) is the
    transform along D and W only. One coil.
    """

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None, maps: Tensor | None, measured: Tensor | None) -> Self:
        """Return the measurement that the arguments of a host describe.

        Args:
            x: the zero-filled volume (B, 2 D, H, W). Without `measured`, its k-space is taken as measured.
            mask: nonzero where k-space was measured, broadcastable to (B, D, H, W).
            maps: None, since volumes have one coil.
            measured: k-space, complex (B, D, H, W).

        Raises:
            ValueError: if the mask is missing, there are maps, or a shape does not fit.
        """
        B, channels, H, W = x.shape
        shape = (B, channels // 2, H, W)
        if mask is None:
            raise ValueError(NEEDS_MASK)
        if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(mask.shape[::-1], shape[::-1], strict=False)):
            raise ValueError(f"mask must broadcast to {shape}, got {tuple(mask.shape)}")
        if maps is not None:
            raise ValueError("volumes have one coil: leave maps out, and combine the coils first")
        if measured is not None and (not measured.is_complex() or measured.shape != shape):
            raise ValueError(f"measured must be complex {shape}, got {measured.dtype} {tuple(measured.shape)}")
        kspace = _transform(to_complex(x), torch.fft.fftn) if measured is None else measured
        return cls(mask > 0, kspace, None, (H, W))

    def expand(self, image: Tensor) -> Tensor:
        return _transform(to_complex(image), torch.fft.fftn)

    def reduce(self, k: Tensor) -> Tensor:
        return to_channels(_transform(k, torch.fft.ifftn))


def _transform(x: Tensor, transform: Callable[..., Tensor]) -> Tensor:
    """Apply a centred orthonormal transform along D and W of complex (B, D, H, W)."""
    with full_precision(x):
        return torch.fft.fftshift(transform(torch.fft.ifftshift(x, PLANE), dim=PLANE, norm="ortho"), PLANE)


class RealMeasurement(Measurement):
    """A `Measurement` in real numbers, for runtimes without complex numbers and FFTs.

    k-space and maps are (B, M, 2, H, W), where the axis of two holds real and imaginary part.

    Fourier transforms are products with matrices that are made for the size at hand.
    """

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None, maps: Tensor | None, measured: Tensor | None) -> "RealMeasurement":
        """Return the measurement that the arguments of a host describe, without checks.

        Args:
            x: the zero-filled image (B, 2, H, W).
            mask: nonzero where k-space was measured.
            maps: coil sensitivities, real (B, M, 2, H, W).
            measured: k-space of every coil, real (B, M, 2, H, W).
        """
        assert mask is not None
        kspace = dft2c(x.unflatten(1, (-1, 2))) if measured is None else measured
        return cls(mask > 0, kspace, maps, (x.shape[-2], x.shape[-1]))

    def expand(self, image: Tensor) -> Tensor:
        im = image.unflatten(1, (-1, 2))
        return dft2c(im if self.maps is None else complex_product(self.maps, im))

    def reduce(self, k: Tensor) -> Tensor:
        im = dft2c(k, inverse=True)
        if self.maps is not None:
            im = complex_product(self.maps, im, conjugate=True).sum(1, keepdim=True)
        return im.flatten(1, 2)

    def coil_images(self, columns: Tensor) -> Tensor:
        return dft2c(self.kspace * (columns & self.mask).unsqueeze(2), inverse=True)

    def with_maps(self, maps: Tensor) -> "RealMeasurement":
        return self._replace(maps=maps)

    def turned(self, cos: Tensor, sin: Tensor) -> "RealMeasurement":
        return self._replace(kspace=complex_product(torch.stack([cos, sin], 2), self.kspace))

    def rephased(self, image: Tensor, own: Measurement) -> Tensor:
        assert self.maps is not None
        assert own.maps is not None
        turn = complex_product(self.maps, own.maps, conjugate=True).sum(1, keepdim=True)
        size = turn.square().sum(2, keepdim=True).sqrt()
        one = torch.stack([torch.ones_like(size[:, :, 0]), torch.zeros_like(size[:, :, 0])], 2)
        phase = torch.where(size == 0, one, turn / _or_one(size))
        return complex_product(phase, image.unflatten(1, (-1, 2))).flatten(1, 2)


def _or_one(size: Tensor) -> Tensor:
    """Return magnitudes with ones in place of zeros, to divide by."""
    return torch.where(size == 0, 1, size)
