"""The measurement of one slice, in the form that models and methods take."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chasm.data import RawSlice
from chasm.data.filled import is_filled
from chasm.mri import Mask, Operator, fft2c, rss, to_channels, to_complex
from chasm.mri.noise import edge_noise
from chasm.reconstruct.trust import FROM_EDGE, FROM_SCAN
from chasm.tasks import TaskBatch


@dataclass(frozen=True)
class MeasuredSlice:
    """The measurement of one slice, in the scale of the model.

    Attributes:
        input: the zero-filled image, real and imaginary channels (1, 2M, H, W).
        operator: the mask and the coil sensitivities.
        y: the measured k-space (1, Q, H, W).
        low: (1, M, 1, 1): the image in the units of the data is `scale` times this one, plus `low`.
        scale: (1, M, 1, 1).
        noise: noise of one sample, in the units of the data.
        noise_from: source of that number.
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
        """Combine the images of several sets of maps: the magnitude has all signal, the phase is that of the first."""
        if self.operator.maps is None or self.operator.maps.ndim == 4:
            return images
        return torch.polar(rss(images), images[:, :1].angle())

    def in_units(self, image: Tensor) -> Tensor:
        """Return an image in the units of the data."""
        return image * self.scale + self.low

    def with_data(self, operator: Operator, y: Tensor) -> "MeasuredSlice":
        """Return a measurement with other data and other columns, and the same scale and noise."""
        return replace(self, input=to_channels(operator.adjoint(y)), operator=operator, y=y)


def from_batch(batch: TaskBatch, columns: Mask, noise: tuple[float, str] | None = None) -> MeasuredSlice:
    """Return the measurement of a batch.

    Args:
        batch: a batch of one slice.
        columns: the measured columns.
        noise: noise of one sample and its source; without it, it is taken from the edge of the batch's k-space.
    """
    assert batch.mask is not None
    assert batch.low is not None
    assert batch.scale is not None
    # with one coil, the zero-filled image holds everything that was measured
    y = batch.mask * fft2c(to_complex(batch.input)) if batch.measured is None else batch.measured
    operator = Operator(batch.mask, batch.maps)
    level, source = noise or (edge_noise(y * batch.scale), FROM_EDGE)
    return MeasuredSlice(batch.input, operator, y, batch.low, batch.scale, level, source, columns)


def noise_of_raw(raw: RawSlice) -> tuple[float, str] | None:
    """Return the noise of one sample and its source: the noise scan, or the edge of k-space that is padded with zeros.

    Returns None for other k-space. Its noise can be taken after it is cropped to the image. Cropping would blur the
    edge of a readout that is padded with zeros.

    Args:
        raw: the k-space of one slice, as it is in the file.
    """
    if raw.noise is not None:
        return raw.noise, FROM_SCAN
    is_padded = not is_filled(raw.kspace).any(1).all()
    return (edge_noise(raw.kspace[None]), FROM_EDGE) if is_padded else None
