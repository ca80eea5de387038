"""How far a reconstruction may be off, pixel by pixel, without ground truth: a calibrated equivariant bootstrap.

The reconstruction x is taken for the truth. It is turned and mirrored at random, T x, measured as the scan was, with
the same columns and the same noise, reconstructed, and turned back. What comes back differs from x as x differs from
the unknown truth, as far as turned images are as likely as others (Tachella and Pereyra, AISTATS 2024). The
root-mean-square over draws is the map.

A reconstruction is smoother than the truth and thus easier to reconstruct: the map alone is too small, by about 2 for
total variation. The measured data tells by how much. A few measured columns are held out, and the error that the rest
makes there is compared with what the bootstrap of the rest says. The map is multiplied by that factor.

It knows nothing of errors that the measured columns do not show: anatomy that a network adds or leaves out
consistently, wrong coil sensitivities, motion.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from chasm.mri import Operator, to_complex
from chasm.reconstruct.measurement import Measurement

MAX_TURN = math.radians(30)
HELD_OUT = 0.15  # of the measured columns outside the centre
CALIBRATIONS = 3  # sets of columns that are held out, one after the other
MIN_COLUMNS = 4  # outside the centre, for a calibration


@dataclass(frozen=True)
class Bootstrap:
    """Makes uncertainty maps.

    Attributes:
        apply: the model: a measurement in, real and imaginary channels out.
        draws: how many turned images are reconstructed for a map.
    """

    apply: Callable[[Measurement], Tensor]
    draws: int

    def __call__(self, m: Measurement, x: Tensor, seed: int) -> tuple[Tensor, float]:
        """Make the map of a slice.

        Args:
            m: what was measured.
            x: the reconstruction, complex (1, M, H, W).
            seed: of the draws.

        Returns:
            The uncertainty of the magnitude, (1, M, H, W), in the scale of the model; the factor of the calibration.
        """
        generator = torch.Generator().manual_seed(seed)
        image = m.combined(x).abs()
        total = torch.zeros_like(image)
        for _ in range(self.draws):
            total += (m.combined(self._draw(m, x, generator)).abs() - image).square()
        factor = self._calibrate(m, generator)
        return factor * (total / self.draws).sqrt(), factor

    def _draw(self, m: Measurement, x: Tensor, generator: torch.Generator) -> Tensor:
        """Reconstruct a turned image, and turn the result back."""
        angle = MAX_TURN * (2 * float(torch.rand((), generator=generator)) - 1)
        flips = [axis for axis in (-2, -1) if torch.rand((), generator=generator) < 0.5]
        A = m.operator
        noise = torch.randn(m.y.shape, dtype=m.y.dtype, generator=generator).to(m.y.device)
        y = A.forward(rotate(x.flip(flips), angle)) + m.noise / m.scale * A.mask * noise
        return rotate(to_complex(self.apply(m.with_data(A, y))), angle, back=True).flip(flips)

    def _calibrate(self, m: Measurement, generator: torch.Generator) -> float:
        """Return by how much the bootstrap is too small where columns are held out; 1 if there are too few."""
        first, end = m.columns.center
        outside = [column for column in m.columns.columns if not first <= column < end]
        if len(outside) < MIN_COLUMNS:
            return 1.0
        found = expected = 0.0
        for _ in range(CALIBRATIONS):
            order = torch.randperm(len(outside), generator=generator).tolist()
            columns = [outside[i] for i in order[: max(2, round(HELD_OUT * len(outside)))]]
            held = torch.zeros_like(m.operator.mask)
            held[..., columns] = m.operator.mask[..., columns]
            A, B = Operator(m.operator.mask - held, m.operator.maps), Operator(held, m.operator.maps)
            rest = m.with_data(A, (m.operator.mask - held) * m.y)
            x = to_complex(self.apply(rest))
            samples = float(held.expand(m.y.shape).sum())
            noise = samples * float((m.noise / m.scale).square().mean())
            found += max(0.0, _energy(B.forward(x) - held * m.y) - noise)
            expected += _energy(B.forward(self._draw(rest, x, generator) - x))
        return math.sqrt(found / expected) if found > 0 and expected > 0 else 1.0


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
