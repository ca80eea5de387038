"""The task of accelerated MRI: reconstruct magnitude images from undersampled k-space, with an L1 loss."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chasm.mri import Operator, Sampling, add_noise, estimate_maps, fft2c, mask_from_array, rss, to_channels, to_complex
from chasm.tasks.base import Task, TaskBatch, register_task
from chasm.tasks.metrics import Rows
from chasm.tasks.protocols import FastMRIProtocol, HeldOutProtocol, get_protocol
from chasm.tasks.sampling import MASK_CHOICES, MEASURED, check_masks, drawn_masks, masks_of
from chasm.tasks.self_supervision import held_out_lines, hold_out, self_supervised_loss


@register_task("reconstruction")
class Reconstruction(Task):
    """Reconstructs magnitude images. The input is the zero-filled image as real and imaginary channels.

    With ``complex=False``, as published for HiFi-Mamba, each slice becomes a magnitude that its minimum and maximum
    scale to [0, 1], and k-space is synthesised from this magnitude. The phase is lost, which makes the task easier
    than measured data. With ``complex=True`` complex images keep their phase and are divided by the maximum of their
    magnitude. Several coils are combined with sensitivities estimated from the calibration centre, and the target is
    their root-sum-of-squares.

    Args:
        sampling: kind of mask, acceleration and seed; its defaults if None.
        complex: keep the phase of complex images.
        protocol: name of the metric protocol, see `chasm.tasks.protocols`. "held-out" needs no truth.
        self_supervised: fraction of the measured lines that training keeps from the network and compares its output
            with, instead of with the target, see `chasm.tasks.self_supervision`; 0.4 is usual. None: supervised.
        splits: number of copies of each slice in a step of self-supervised training, each with other lines held out.
        snr_db: signal-to-noise ratio of the measured samples of a single coil; None adds no noise. The noise follows
            from the slice, so that a slice has the same noise in every epoch and run. The target stays clean.
        masks: "fixed": the one mask of `sampling` for all. "slice": every slice has its own mask, always the same
            one, also in validation and test. "epoch": training draws a new mask for every slice in every epoch, and
            validation and test keep the one of `sampling`. Drawn masks move the offset of equispaced ones.
            "measured": every slice has the columns of its k-space that are not empty, for self-supervised training on
            undersampled data.

    Raises:
        ValueError: if the protocol or `masks` is unknown, `self_supervised` is not between 0 and 1, or these do not go
            together.

    >>> Reconstruction(Sampling(acceleration=8)).channels(modalities=1)
    (2, 2)
    """

    residual = True

    def __init__(
        self,
        sampling: Sampling | None = None,
        *,
        complex: bool = False,
        protocol: str = "hifi",
        self_supervised: float | None = None,
        splits: int = 1,
        snr_db: float | None = None,
        masks: str = "fixed",
    ) -> None:
        self.sampling, self.snr_db = sampling or Sampling(), snr_db
        self.masks = check_masks(masks, self.sampling, (*MASK_CHOICES, MEASURED))
        if masks == "epoch" and self_supervised is not None:
            problem = "masks='epoch' draws lines that were not measured"
            raise ValueError(f"{problem}: self_supervised takes 'slice' or 'fixed'")
        if self_supervised is None and (splits != 1 or masks == MEASURED):
            problem = "splits and masks='measured' belong to self-supervised training"
            raise ValueError(f"{problem}: set self_supervised, to 0.4")
        if splits < 1:
            raise ValueError(f"splits={splits}: expected 1 or more")
        if masks == MEASURED and not complex:
            raise ValueError("masks='measured' looks at the k-space of complex images: set complex=True")
        self.splits, self.complex, self.protocol = splits, complex, get_protocol(protocol)
        if self_supervised is not None and not 0 < self_supervised < 1:
            raise ValueError(f"self_supervised is a fraction of the lines between 0 and 1, got {self_supervised:g}")
        if self_supervised is None and isinstance(self.protocol, HeldOutProtocol):
            raise ValueError("protocol 'held-out' scores the lines that self_supervised holds out: set it, to 0.4")
        self.self_supervised = self_supervised

    def channels(self, modalities: int) -> tuple[int, int]:
        images = 1 if self.complex else modalities
        return 2 * images, 2 * images

    def prepare(self, image: Tensor, label: Tensor | None = None, case: Sequence[str] = ()) -> TaskBatch:
        mask = masks_of(image, self.sampling, self.masks)
        if not self.complex:
            magnitude = rss(image) if image.is_complex() else image  # of all coils; modalities stay apart
            target, low, scale = min_max(magnitude.float())
            return self._undersampled(TaskBatch(target, target, case, low=low, scale=scale, full=target), mask)
        if not image.is_complex():
            advice = "open the dataset with its phase, or set complex=False"
            raise ValueError(f"complex=True needs complex images, got {image.dtype}: {advice}")
        scale = rss(image).amax((-2, -1), keepdim=True)
        scale = torch.where(scale > 0, scale, 1)
        image = image.to(torch.complex64) / scale
        target, low = rss(image), torch.zeros_like(scale)
        if self.snr_db is not None and image.shape[1] > 1:
            raise ValueError(f"snr_db adds noise to one coil, got {image.shape[1]}: measured coils have noise already")
        return self._undersampled(TaskBatch(target, target, case, low=low, scale=scale, full=image), mask)

    def _undersampled(self, batch: TaskBatch, mask: Tensor) -> TaskBatch:
        """Return the batch with the k-space of `full` under a mask. It keeps `full` if training draws masks."""
        image = batch.full
        assert image is not None
        full = image if self.masks == "epoch" else None
        if not self.complex or image.shape[1] == 1:
            return replace(batch, input=to_channels(self._zero_filled(image, mask)), mask=mask, full=full)
        measured = mask * fft2c(image)
        if self.masks == MEASURED:
            centers = [mask_from_array(each.cpu().numpy()).center for each in mask[:, 0, 0]]
            maps = torch.cat([estimate_maps(y[None], c) for y, c in zip(measured, centers, strict=True)])
        else:
            maps = estimate_maps(measured, self.sampling.on(*image.shape[-2:]).center)  # the centre is in every mask
        combined = to_channels(Operator(mask, maps).adjoint(measured))
        return replace(batch, input=combined, mask=mask, maps=maps, measured=measured, full=full)

    def for_training(self, batch: TaskBatch, seeds: Sequence[int]) -> TaskBatch:
        if batch.full is not None:
            drawn = self._undersampled(batch, drawn_masks(batch.full, self.sampling, seeds))
            return replace(drawn, full=None)
        if self.self_supervised is None:
            return batch
        return hold_out(batch, self.self_supervised, seeds, self.splits)

    def for_scoring(self, batch: TaskBatch) -> TaskBatch:
        if self.self_supervised is None or not isinstance(self.protocol, HeldOutProtocol):
            return batch
        return hold_out(batch, self.self_supervised, [0] * len(batch.input))

    def _zero_filled(self, image: Tensor, mask: Tensor) -> Tensor:
        """Return the zero-filled image (B, M, H, W), with noise where the task asks for it."""
        if self.snr_db is None:
            return Operator(mask).normal(image)
        clean = Operator(mask).forward(image)
        masks = mask.expand(len(image), -1, -1, -1)
        noisy = [_noisy(y[None], x, self.snr_db, m[None]) for y, x, m in zip(clean, image, masks, strict=True)]
        return Operator(mask).adjoint(torch.cat(noisy))

    def loss(self, output: Tensor, batch: TaskBatch) -> Tensor:
        if batch.held_out is not None:
            return self_supervised_loss(output, batch)
        return (to_complex(output).abs() - batch.target).abs().mean()

    def scores(self, output: Tensor, batch: TaskBatch) -> Rows:
        if isinstance(self.protocol, HeldOutProtocol) and batch.held_out_kspace is not None:
            return self.protocol.rows(held_out_lines(output, batch), batch.held_out_kspace)
        magnitude, target = to_complex(output).abs(), batch.target
        if isinstance(self.protocol, FastMRIProtocol):  # this protocol measures in the units of the data
            magnitude, target = batch.in_units(magnitude), batch.in_units(target)
        return self.protocol.rows(magnitude, target)

    def reference(self, batch: TaskBatch) -> Tensor:
        """Return the zero-filled image; several coils are combined with their sensitivities."""
        return batch.input

    def report(self, shape: Sequence[int]) -> dict[str, Any]:
        mask = self.sampling.on(*shape[-2:]).report()
        record = {**super().report(shape), "mask": mask, "masks": self.masks, "complex": self.complex}
        splits = self.splits if self.self_supervised is not None else None
        options = {"self_supervised": self.self_supervised, "splits": splits, "snr_db": self.snr_db}
        return record | {name: value for name, value in options.items() if value is not None}


def min_max(image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale each real slice of (B, M, H, W) to [0, 1] by its minimum and maximum. A constant slice becomes zeros.

    Also returns ``low`` and ``scale``, both (B, M, 1, 1), with image = scaled * scale + low.

    >>> [t.flatten().tolist() for t in min_max(torch.tensor([[[[1.0, 3.0]]]]))]
    [[0.0, 1.0], [1.0], [2.0]]
    """
    low, high = (v[..., None, None] for v in image.flatten(-2).aminmax(dim=-1))
    scale = torch.where(high > low, high - low, 1)
    return (image - low) / scale, low, scale


def _noisy(y: Tensor, image: Tensor, snr_db: float, mask: Tensor) -> Tensor:
    """Return the k-space y (1, M, H, W) of an image with noise that follows from the image."""
    seed = zlib.crc32(image.detach().cpu().numpy().tobytes())
    generator = torch.Generator().manual_seed(seed)
    return add_noise(y.cpu(), snr_db, mask.cpu(), generator).to(y.device)
