"""The task of accelerated 3-D MRI: reconstruct the magnitude of a volume from undersampled k-space, with an L1 loss.

A volume (D, H, W) is measured line by line along H, the readout. Its lines lie in the plane of the other two axes, of
which the mask keeps a part:

    zero-filled = F^-1 (P F x),   F: Fourier transform along D and W;  that along H cancels

P keeps points of the plane (``poisson-2d``, ``gaussian-2d``, ``radial-2d``), or whole columns of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chasm.common.precision import full_precision
from chasm.mri import Sampling, to_channels, to_complex
from chasm.tasks.base import Task, TaskBatch, register_task
from chasm.tasks.metrics import Rows
from chasm.tasks.protocols import get_protocol

_PLANE = (-3, -1)


@register_task("volume")
class VolumeReconstruction(Task):
    """Reconstructs the magnitude of volumes. The slices of a volume stand where other tasks have modalities.

    The input is the zero-filled volume, with real and imaginary part of every slice in turn, for a host with three
    axes as `chasm.backbones.UNet3D`. Each volume is scaled to [0, 1] by its minimum and maximum, and k-space is made
    from this magnitude.

    Args:
        sampling: kind of mask, acceleration and seed; Poisson disc at x4 if None.
        protocol: name of the metric protocol, see `chasm.tasks.protocols`: "unit" or "hifi".

    >>> VolumeReconstruction().prepare(torch.rand(2, 8, 16, 16)).input.shape
    torch.Size([2, 16, 16, 16])
    """

    residual = True

    def __init__(self, sampling: Sampling | None = None, *, protocol: str = "unit") -> None:
        if protocol not in ("unit", "hifi"):
            raise ValueError(f"volumes are scored by the protocol unit or hifi, got {protocol!r}")
        self.sampling = sampling or Sampling("poisson-2d")
        self.protocol = get_protocol(protocol)

    def channels(self, modalities: int) -> tuple[int, int]:
        return 2 * modalities, 2 * modalities

    def prepare(self, image: Tensor, label: Tensor | None = None, case: Sequence[str] = ()) -> TaskBatch:
        magnitude = image.abs().float()
        low, high = (edge(magnitude, (1, 2, 3), keepdim=True) for edge in (torch.amin, torch.amax))
        scale = torch.where(high > low, high - low, 1)
        target = (magnitude - low) / scale
        mask = self.sampling.on(image.shape[1], image.shape[-1]).tensor(image.device)
        mask = mask.transpose(1, 2)  # (1, D or 1, 1, W)
        with full_precision(target):
            k = torch.fft.fftn(target, dim=_PLANE)
            zero_filled = torch.fft.ifftn(torch.fft.ifftshift(mask, dim=_PLANE) * k, dim=_PLANE)
        return TaskBatch(to_channels(zero_filled), target, case, mask, low=low, scale=scale)

    def loss(self, output: Tensor, batch: TaskBatch) -> Tensor:
        return (to_complex(output).abs() - batch.target).abs().mean()

    def scores(self, output: Tensor, batch: TaskBatch) -> Rows:
        return self.protocol.rows(to_complex(output).abs(), batch.target)

    def report(self, shape: Sequence[int]) -> dict[str, Any]:
        return {**super().report(shape), "mask": self.sampling.on(shape[0], shape[-1]).report()}

    def reference(self, batch: TaskBatch) -> Tensor:
        """Return the zero-filled volume."""
        return batch.input
