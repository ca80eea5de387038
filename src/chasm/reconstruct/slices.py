"""What a trained run makes of one slice of a scan."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from chasm.common.precision import tf32
from chasm.data.files import crop_or_pad
from chasm.mri import Operator, estimate_maps, fft2c, ifft2c, to_channels, to_complex
from chasm.reconstruct.inputs import Scan
from chasm.reconstruct.volumes import SliceResult
from chasm.tasks import Meter
from chasm.tasks.metrics import FastMRI, Rows
from chasm.tasks.reconstruction import min_max
from chasm.train import Run


class Reconstructor:
    """A scan, and a run that reconstructs its slices.

    Args:
        scan: the slices.
        run: the model, its task and its config.
        device: where the model is.

    Attributes:
        sampling: the columns that are used, in words.
    """

    def __init__(self, scan: Scan, run: Run, device: torch.device) -> None:
        self.scan, self.run, self.device = scan, run, device
        if scan.measured is not None:
            self.sampling = f"as measured: {scan.sampling}"
        else:
            self.sampling = str(run.task.sampling.mask(scan.data[0].image.shape[-1]))  # type: ignore[attr-defined]

    @torch.no_grad()
    def result(self, row: int, meters: tuple[Meter, Meter]) -> SliceResult:
        """Reconstruct one slice.

        Args:
            row: of the scan's data.
            meters: get the scores of the reconstruction and of the zero-filled image, if there is a target.
        """
        return self._simulated(row, meters) if self.scan.measured is None else self._measured(row, meters)

    def _simulated(self, row: int, meters: tuple[Meter, Meter]) -> SliceResult:
        """Fully sampled data: undersampled, prepared and scored as in training."""
        task, s = self.run.task, self.scan.data[row]
        batch = task.prepare(s.image[None].to(self.device), None, [s.case])
        with tf32(self.run.config.train.tf32):
            output = self.run.model(batch.input, **batch.physics).float()
        meters[0].add(task.scores(output, batch), [s.case])
        meters[1].add(task.scores(batch.input, batch), [s.case])
        image, zero_filled = (batch.in_units(to_complex(x).abs()) for x in (output, batch.input))
        return SliceResult(_array(image), _array(zero_filled), _array(batch.in_units(batch.target)))

    def _measured(self, row: int, meters: tuple[Meter, Meter]) -> SliceResult:
        """Undersampled data: only the measured columns are available.

        The readout is cropped to the image first, which the mask allows because it is the same in every row.
        """
        raw, chosen = self.scan.raw(row)
        H, W = (min(a, b) for a, b in zip(raw.size, raw.kspace.shape[-2:], strict=True))
        mask = chosen.tensor(self.device)
        coils = crop_or_pad(ifft2c(raw.kspace[None].to(self.device)), (H, raw.kspace.shape[-1]))
        y = mask * fft2c(coils)
        maps = estimate_maps(y, chosen.center) if y.shape[1] > 1 else None
        plain = Operator(mask, maps).adjoint(y)
        scale = plain.abs().amax()
        scale = torch.where(scale > 0, scale, 1)
        measured = None if maps is None else y / scale
        with tf32(self.run.config.train.tf32):
            output = self.run.model(to_channels(plain / scale), mask=mask, maps=maps, measured=measured).float()
        image, plain = (crop_or_pad(x, (H, W)) for x in (to_complex(output).abs() * scale, plain.abs()))
        result = SliceResult(_array(image), _array(plain))
        if not self.scan.scored:
            return result
        target = self.scan.data[row].image[None].to(self.device)
        for meter, x in zip(meters, (image, plain), strict=True):
            meter.add(self._scores(x, target), [raw.case])
        return replace(result, target=_array(crop_or_pad(target, (H, W))))

    def _scores(self, image: Tensor, target: Tensor) -> Rows:
        """Scores of an image (1, 1, H, W) against a stored one, where they overlap, scaled as the protocol asks."""
        size = (min(image.shape[-2], target.shape[-2]), min(image.shape[-1], target.shape[-1]))
        image, target = crop_or_pad(image, size), crop_or_pad(target, size)
        task = self.run.task
        if not isinstance(task.protocol, FastMRI):  # that one scores in the units of the data
            _, low, scale = min_max(target)
            if task.complex:  # type: ignore[attr-defined]
                low, scale = torch.zeros_like(low), low + scale  # from zero to the maximum
            image, target = (image - low) / scale, (target - low) / scale
        return task.protocol.rows(image, target)


def _array(x: Tensor) -> np.ndarray:
    """(1, M, H, W) -> (H, W), the modalities combined by root-sum-of-squares."""
    x = x[0].float()
    return np.asarray((x[0] if len(x) == 1 else x.square().sum(0).sqrt()).cpu().numpy())
