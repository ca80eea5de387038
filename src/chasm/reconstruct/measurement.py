"""What was measured of one slice, in the form that models and methods take."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chasm.mri import Mask, Operator, fft2c, rss, to_channels, to_complex
from chasm.mri.noise import edge_noise
from chasm.reconstruct.trust import FROM_EDGE, FROM_SCAN
from chasm.tasks import TaskBatch


@dataclass(frozen=True)
class Measurement:
    """What was measured of one slice, scaled as the model takes it.

    Attributes:
        input: the zero-filled image, real and imaginary channels (1, 2M, H, W).
        operator: the mask and the coil sensitivities.
        y: the measured k-space (1, Q, H, W).
        low: (1, M, 1, 1): the image in the units of the data is `scale` times this one, plus `low`.
        scale: (1, M, 1, 1).
        noise: of one sample, in the units of the data.
        noise_from: where that is known from.
        columns: the measured columns.
    """

    input: Tensor
    operator: Operator
    y: Tensor
    low: Tensor
    scale: Tensor
    noise: float
    noise_from: str
    columns: Mask

    @property
    def physics(self) -> dict[str, Tensor | None]:
        """The keywords that every model takes."""
        several = self.operator.maps is not None
        return {"mask": self.operator.mask, "maps": self.operator.maps, "measured": self.y if several else None}

    def combined(self, images: Tensor) -> Tensor:
        """Return one complex image of those that several sets of maps give: all signal, with the phase of the first."""
        if self.operator.maps is None or self.operator.maps.ndim == 4:
            return images
        return torch.polar(rss(images), images[:, :1].angle())

    def in_units(self, image: Tensor) -> Tensor:
        """Return an image in the units of the data."""
        return image * self.scale + self.low

    def with_data(self, operator: Operator, y: Tensor) -> "Measurement":
        """Return the measurement of other data with other columns, of the same scale and noise."""
        return replace(self, input=to_channels(operator.adjoint(y)), operator=operator, y=y)


def from_batch(batch: TaskBatch, columns: Mask, noise: float | None = None) -> Measurement:
    """Return what a batch says was measured.

    Args:
        batch: of one slice.
        columns: the measured columns.
        noise: of one sample, if a noise scan tells it; else it is taken from the edge of k-space.
    """
    assert batch.mask is not None
    assert batch.low is not None
    assert batch.scale is not None
    # of one coil the zero-filled image holds all that was measured
    y = batch.mask * fft2c(to_complex(batch.input)) if batch.measured is None else batch.measured
    operator = Operator(batch.mask, batch.maps)
    found, source = (edge_noise(y * batch.scale), FROM_EDGE) if noise is None else (noise, FROM_SCAN)
    return Measurement(batch.input, operator, y, batch.low, batch.scale, found, source, columns)
