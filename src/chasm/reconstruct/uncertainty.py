"""Estimate the error of a reconstruction in each pixel, without ground truth. There are two kinds of calibrated maps.

`Bootstrap`, for one run, takes the reconstruction x for the truth. It is turned and mirrored at random, T x, measured
like the scan, with the same columns and the same noise, reconstructed, and turned back. If turned images are as likely
as others, the result differs from x as x differs from the unknown truth (Tachella and Pereyra, AISTATS 2024). The map
is the root-mean-square over draws.

`Disagreement`, for several runs, takes their mean as x and their standard deviation as the map.

Both maps are too small: a reconstruction is smoother than the truth and so easier to reconstruct, and runs share what
they did not learn. The measured data shows by how much. A few measured columns are held out, and the error of the rest
in these columns is compared with the map of the rest. The map is multiplied by that factor.

It does not include errors that the measured columns cannot show: anatomy that networks add or leave out consistently,
wrong coil sensitivities, and motion.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chasm.common.text import counted
from chasm.mri import Operator, to_complex
from chasm.reconstruct.measured_slice import MeasuredSlice

MAX_TURN = math.radians(30)
HELD_OUT = 0.15  # fraction of the measured columns outside the centre
CALIBRATIONS = 3  # sets of columns to hold out, one after the other
MIN_COLUMNS = 4  # measured columns outside the centre that a calibration needs
Model = Callable[[MeasuredSlice], Tensor]  # real and imaginary channels out


class CalibratedMap(ABC):
    """Makes uncertainty maps from images that differ from the reconstruction about as the truth does."""

    @property
    @abstractmethod
    def made_of(self) -> str:
        """The number of draws or runs of a map, in words."""

    @abstractmethod
    def apply(self, m: MeasuredSlice) -> Tensor:
        """Reconstruct: real and imaginary channels (1, 2M, H, W)."""

    @abstractmethod
    def variants(
        self, m: MeasuredSlice, x: Tensor, generator: torch.Generator, few: bool = False
    ) -> tuple[list[Tensor], int]:
        """Return images that differ from x, and the divisor for the sum of their squared differences.

        Args:
            m: the measurement.
            x: its reconstruction, complex (1, M, H, W).
            generator: generator of random numbers.
            few: whether one draw is enough.
        """

    def __call__(self, m: MeasuredSlice, x: Tensor, seed: int) -> tuple[Tensor, float]:
        """Make the map of a slice.

        Args:
            m: the measurement.
            x: its reconstruction, complex (1, M, H, W).
            seed: seed of random numbers.

        Returns:
            The uncertainty of the magnitude, (1, M, H, W), in the scale of the model; the factor of the calibration.
        """
        generator = torch.Generator().manual_seed(seed)
        image = m.combined(x).abs()
        others, count = self.variants(m, x, generator)
        total = torch.stack([(m.combined(other).abs() - image).square() for other in others]).sum(0)
        factor = self._calibrate(m, generator)
        return factor * (total / count).sqrt(), factor

    def _calibrate(self, m: MeasuredSlice, generator: torch.Generator) -> float:
        """Return the factor by which the map is too small in held-out columns; 1 if there are too few columns."""
        first, end = m.columns.center
        outside = [column for column in m.columns.columns if not first <= column < end]
        if len(outside) < MIN_COLUMNS:
            return 1.0
        actual = expected = 0.0
        for _ in range(CALIBRATIONS):
            order = torch.randperm(len(outside), generator=generator).tolist()
            columns = [outside[i] for i in order[: max(2, round(HELD_OUT * len(outside)))]]
            held_out = torch.zeros_like(m.operator.mask)
            held_out[..., columns] = m.operator.mask[..., columns]
            A, B = Operator(m.operator.mask - held_out, m.operator.maps), Operator(held_out, m.operator.maps)
            rest = m.with_data(A, (m.operator.mask - held_out) * m.y)
            x = to_complex(self.apply(rest))
            samples = float(held_out.expand(m.y.shape).sum())
            noise = samples * float((m.noise / m.scale).square().mean())
            actual += max(0.0, _energy(B.forward(x) - held_out * m.y) - noise)
            others, count = self.variants(rest, x, generator, few=True)
            expected += sum(_energy(B.forward(other - x)) for other in others) / count
        return math.sqrt(actual / expected) if actual > 0 and expected > 0 else 1.0


@dataclass(frozen=True)
class Bootstrap(CalibratedMap):
    """Maps of one run, from the differences between reconstructions of turned images.

    Attributes:
        model: the run.
        draws: number of turned images to reconstruct for a map.
    """

    model: Model
    draws: int

    @property
    def made_of(self) -> str:
        return counted(self.draws, "draw")

    def apply(self, m: MeasuredSlice) -> Tensor:
        return self.model(m)

    def variants(
        self, m: MeasuredSlice, x: Tensor, generator: torch.Generator, few: bool = False
    ) -> tuple[list[Tensor], int]:
        draws = 1 if few else self.draws
        return [self._draw(m, x, generator) for _ in range(draws)], draws

    def _draw(self, m: MeasuredSlice, x: Tensor, generator: torch.Generator) -> Tensor:
        """Reconstruct a turned image, and turn the result back."""
        angle = MAX_TURN * (2 * float(torch.rand((), generator=generator)) - 1)
        flips = [axis for axis in (-2, -1) if torch.rand((), generator=generator) < 0.5]
        A = m.operator
        noise = torch.randn(m.y.shape, dtype=m.y.dtype, generator=generator).to(m.y.device)
        y = A.forward(rotate(x.flip(flips), angle)) + m.noise / m.scale * A.mask * noise
        return rotate(to_complex(self.apply(m.with_data(A, y))), angle, back=True).flip(flips)


@dataclass(frozen=True)
class Disagreement(CalibratedMap):
    """Maps of several runs: the standard deviation of their reconstructions.

    Attributes:
        models: the runs.
    """

    models: Sequence[Model]

    @property
    def made_of(self) -> str:
        return counted(len(self.models), "run")

    def apply(self, m: MeasuredSlice) -> Tensor:
        return torch.stack([model(m) for model in self.models]).mean(0)

    def variants(
        self, m: MeasuredSlice, x: Tensor, generator: torch.Generator, few: bool = False
    ) -> tuple[list[Tensor], int]:
        return [to_complex(model(m)) for model in self.models], len(self.models) - 1


def _energy(k: Tensor) -> float:
    return float(k.abs().square().sum())


def rotate(x: Tensor, angle: float, back: bool = False) -> Tensor:
    """Turn images around their centre by three shears, which lose nothing.

    Args:
        x: complex images (..., H, W).
        angle: in radians.
        back: whether to undo such a turn, which is exact.

    Example:
        >>> x = torch.randn(1, 1, 8, 6, dtype=torch.complex64)
        >>> torch.allclose(rotate(rotate(x, 0.3), 0.3, back=True), x, atol=1e-5)
        True
    """
    sign = -1 if back else 1
    slopes = ((-1, -sign * math.tan(angle / 2)), (-2, sign * math.sin(angle)), (-1, -sign * math.tan(angle / 2)))
    for axis, slope in slopes:
        x = _shear(x, slope, axis)
    return x


def _shear(x: Tensor, slope: float, axis: int) -> Tensor:
    """Shift every line along an axis by a multiple of its distance from the middle, through Fourier space."""
    other = -3 - axis
    frequency = torch.fft.fftfreq(x.shape[axis], device=x.device)
    distance = torch.arange(x.shape[other], device=x.device) - x.shape[other] // 2
    turns = distance[:, None] * frequency if axis == -1 else frequency[:, None] * distance
    angle = -2 * math.pi * slope * turns
    return torch.fft.ifft(torch.fft.fft(x, dim=axis) * torch.polar(torch.ones_like(angle), angle), dim=axis)
