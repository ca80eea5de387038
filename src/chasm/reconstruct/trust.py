"""Measure how well a reconstruction agrees with the measured samples, without ground truth.

An image explains what was measured if the k-space that it would give, A x, differs from the measured samples y by no
more than their noise. The residual is the root-mean-square of A x - y over the measured samples of all coils:

- about 1 x the noise: the image agrees with the measurement as well as it can;
- much more: the image contradicts the measurement, or the model of the coils is wrong;
- much less: the image follows the noise, as a zero-filled image always does.

The residual says nothing about what was not measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan, sqrt
from pathlib import Path

from torch import Tensor

FROM_EDGE = "the edge of k-space"  # an upper bound, where the signal reaches the edge
FROM_SCAN = "the noise scan"


@dataclass(frozen=True)
class SliceConsistency:
    """How well the image of a slice explains its measured samples; root-mean-squares in the units of the data.

    Attributes:
        residual: root-mean-square of the difference.
        signal: root-mean-square of the samples.
        noise: root-mean-square of the noise of one sample.
        noise_from: source of that number.
    """

    residual: float
    signal: float
    noise: float
    noise_from: str

    @classmethod
    def of(cls, misfit: Tensor, y: Tensor, mask: Tensor, noise: float, noise_from: str) -> "SliceConsistency":
        """Measure a slice.

        Args:
            misfit: k-space of the image minus the samples, (1, Q, H, W), zero where nothing was measured.
            y: the samples, of the same shape.
            mask: ones where there are samples, broadcast to that shape.
            noise: noise of one sample.
            noise_from: source of that number.
        """
        samples = float(mask.expand(y.shape).sum())
        return cls(_root_mean_square(misfit, samples), _root_mean_square(y, samples), noise, noise_from)

    @property
    def against_noise(self) -> float:
        """The residual in units of the noise; not a number if there is none."""
        return self.residual / self.noise if self.noise > 0 else nan


def _root_mean_square(k: Tensor, samples: float) -> float:
    """Return the root of the mean of |k|^2, without squares of large values, which overflow float32."""
    top = float(k.abs().max())
    return top * sqrt(float((k.abs() / top).square().sum()) / samples) if top > 0 else 0.0


@dataclass(frozen=True)
class Consistency:
    """How well a volume explains what was measured.

    Attributes:
        residual: residual of the volume as a fraction of the signal; not a number if all samples are zero.
        against_noise: the residual in units of the noise.
        noise: noise of one sample, in the units of the data.
        noise_from: source of that number.
        slices: `against_noise` of every slice.
    """

    residual: float
    against_noise: float
    noise: float
    noise_from: str
    slices: list[float]

    @classmethod
    def of(cls, slices: Sequence[SliceConsistency]) -> "Consistency":
        """Sum up all slices of a volume."""
        residual, signal, noise = (
            sqrt(sum(getattr(s, name) ** 2 for s in slices) / len(slices)) for name in ("residual", "signal", "noise")
        )
        return cls(
            residual / signal if signal > 0 else nan,
            residual / noise if noise > 0 else nan,
            noise,
            slices[0].noise_from,
            [s.against_noise for s in slices],
        )

    def __str__(self) -> str:
        if isnan(self.residual):
            return "all samples are zero, so nothing was measured"
        if not self.noise > 0:
            return f"residual {self.residual:.2g} of the signal (the noise is unknown from {self.noise_from})"
        text = f"residual {self.against_noise:.2g} x the noise, which is {self.noise:.2g} ({self.noise_from})"
        text += f", and {self.residual:.2g} of the signal"
        worst = max(range(len(self.slices)), key=lambda i: (self.slices[i] == self.slices[i], self.slices[i]))
        return text + (f"; largest in slice {worst}: {self.slices[worst]:.2g} x" if len(self.slices) > 1 else "")


@dataclass(frozen=True)
class Uncertainty:
    """The expected error of a volume; the map has that of every pixel.

    Attributes:
        made_of: number of draws or runs of the map, in words.
        factor: factor of the calibration on held-out columns, median over the slices; 1 without a calibration.
        mean: root-mean-square of the map, in the units of the data.
        relative: `mean` as a fraction of the largest value of the image.
        file: the map.
    """

    made_of: str
    factor: float
    mean: float
    relative: float
    file: Path

    @property
    def calibration(self) -> str:
        """The calibration, in words. The factor is exactly 1 if there is none."""
        if self.factor == 1:
            return "not calibrated, because no held-out column shows an error"
        return f"calibrated by {self.factor:.2g} on held-out columns"

    def __str__(self) -> str:
        origin = f"{self.made_of}, {self.calibration}"
        return f"{self.mean:.2g} on average, {self.relative:.1%} of the maximum ({origin}); map {self.file}"
