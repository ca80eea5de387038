"""Reconstruct one slice of a scan with a run or a method without training."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from chasm.common.precision import tf32
from chasm.data import KSpaceDataset
from chasm.data.files import crop_or_pad
from chasm.mri import Mask, Operator, fft2c, ifft2c, to_channels, to_complex
from chasm.mri.noise import edge_noise
from chasm.reconstruct.coils import CoilModel
from chasm.reconstruct.ensemble import Ensemble
from chasm.reconstruct.inputs import Scan
from chasm.reconstruct.measured_slice import MeasuredSlice, from_batch, noise_of_raw
from chasm.reconstruct.trust import FROM_EDGE, SliceConsistency
from chasm.reconstruct.uncertainty import Bootstrap, CalibratedMap, Disagreement
from chasm.reconstruct.volumes import SliceResult
from chasm.tasks import Meter, TaskBatch
from chasm.tasks.metrics import Rows
from chasm.tasks.protocols import FastMRIProtocol
from chasm.tasks.reconstruction import min_max
from chasm.train import Run

COIL_OPTIONS_REFUSED = "--maps, --map-sets and --compress need several coils, and this data has one: leave them out"


class Reconstructor:
    """A scan, and a run that reconstructs its slices.

    Args:
        scan: the slices.
        run: the model, its task and its config.
        device: where the model is.
        coils: how coils are combined. Default: as in training.
        draws: number of draws of the uncertainty map of one run; 0 for no map. An ensemble always has a map.

    Attributes:
        sampling: the columns that are used, in words.
    """

    def __init__(
        self, scan: Scan, run: Run, device: torch.device, coils: CoilModel | None = None, draws: int = 0
    ) -> None:
        self.scan, self.run, self.device, self.coils = scan, run, device, coils or CoilModel()
        # residual and uncertainty refer to the image of these sensitivities
        self._learns_maps = self.coils.is_lowres and getattr(run.model, "sensitivity_net", None) is not None
        self._uncertainty: CalibratedMap | None = Bootstrap(self._apply, draws) if draws else None
        if isinstance(run.model, Ensemble):
            self._uncertainty = Disagreement([partial(self._apply, model=member) for member in run.model.members])
        if scan.measured is not None:
            self.sampling = f"as measured: {scan.sampling}"
        else:
            self.sampling = str(run.task.sampling.mask(scan.data[0].image.shape[-1]))  # type: ignore[attr-defined]

    @property
    def map_made_of(self) -> str:
        """The number of draws or runs of the uncertainty map, in words; "" without a map."""
        return self._uncertainty.made_of if self._uncertainty is not None else ""

    @torch.no_grad()
    def result(self, row: int, meters: tuple[Meter, Meter]) -> SliceResult:
        """Reconstruct one slice.

        Args:
            row: number of the slice in the scan.
            meters: receive the scores of the reconstruction and of the zero-filled image, if there is a target.
        """
        return self._simulated(row, meters) if self.scan.measured is None else self._measured(row, meters)

    def _simulated(self, row: int, meters: tuple[Meter, Meter]) -> SliceResult:
        """Reconstruct fully sampled data, which is undersampled, prepared and scored as in training."""
        task, s = self.run.task, self.scan.data[row]
        image = s.image[None].to(self.device)
        if task.complex:  # type: ignore[attr-defined]
            image = image.to(torch.complex64)
        batch = task.prepare(image, None, [s.case])
        if not self.coils.is_default or (batch.measured is not None and self._learns_maps):
            batch = self._with_coils(batch, s.index)
        noise = None
        if task.complex and isinstance(self.scan.data, KSpaceDataset):  # type: ignore[attr-defined]
            noise = noise_of_raw(self.scan.data.raw_slice(row))
        measurement = from_batch(batch, task.sampling.mask(image.shape[-1]), noise)  # type: ignore[attr-defined]
        output = self._apply(measurement)
        for meter, x in zip(meters, (output, batch.input), strict=True):
            meter.add(task.scores(to_channels(measurement.combined(to_complex(x))), batch), [s.case])
        return self._finish(measurement, output, row, batch.in_units(batch.target))

    def _with_coils(self, batch: TaskBatch, index: int) -> TaskBatch:
        """Return the batch with the sensitivities that are asked for."""
        if batch.measured is None:
            raise ValueError(COIL_OPTIONS_REFUSED)
        mask = self.run.task.sampling.mask(batch.input.shape[-1])  # type: ignore[attr-defined]
        y = self.coils.compressed(batch.measured, mask)
        A = Operator(mask.tensor(self.device), self._maps(y, mask, index))
        return replace(batch, input=to_channels(A.adjoint(y)), maps=A.maps, measured=y)

    def _maps(self, y: Tensor, mask: Mask, index: int) -> Tensor:
        """Return the sensitivities of one slice, and note doubts about them once."""
        doubt = self.coils.doubt(mask)
        if doubt and doubt not in self.scan.notes:
            self.scan.notes.append(doubt)
        if self._learns_maps:
            learned: Tensor = self.run.model.learned_maps(y, mask.tensor(self.device))  # type: ignore[operator]
            return learned
        return self.coils.maps(y, mask, index)

    def _measured(self, row: int, meters: tuple[Meter, Meter]) -> SliceResult:
        """Reconstruct data as it was measured.

        The readout is first cropped to the image, which is possible because the mask is the same in every row.
        """
        raw, chosen = self.scan.raw(row)
        H, W = (min(a, b) for a, b in zip(raw.size, raw.kspace.shape[-2:], strict=True))
        mask = chosen.tensor(self.device)
        coils = crop_or_pad(ifft2c(raw.kspace[None].to(self.device)), (H, raw.kspace.shape[-1]))
        y = mask * fft2c(coils)
        if y.shape[1] > 1:
            y = self.coils.compressed(y, chosen)
            A = Operator(mask, self._maps(y, chosen, raw.index))
        elif self.coils.is_default:
            A = Operator(mask)
        else:
            raise ValueError(COIL_OPTIONS_REFUSED)
        plain = A.adjoint(y)
        scale = plain.abs().amax((1, 2, 3), keepdim=True)
        scale = torch.where(scale > 0, scale, 1)
        noise, noise_from = noise_of_raw(raw) or (edge_noise(y), FROM_EDGE)
        low = torch.zeros_like(scale)
        measurement = MeasuredSlice(to_channels(plain / scale), A, y / scale, low, scale, noise, noise_from, chosen)
        output = self._apply(measurement)
        if not self.scan.scored:
            return self._finish(measurement, output, row, size=(H, W))
        target = self.scan.data[row].image[None].to(self.device)
        for meter, x in zip(meters, (output, measurement.input), strict=True):
            image = crop_or_pad(measurement.combined(to_complex(x)).abs() * scale, (H, W))
            meter.add(self._scores(image, target), [raw.case])
        return self._finish(measurement, output, row, target, (H, W))

    def _apply(self, measurement: MeasuredSlice, model: nn.Module | None = None) -> Tensor:
        """Return the output of the run's model, or of another one: real and imaginary channels (1, 2M, H, W)."""
        with tf32(self.run.config.train.tf32):
            output: Tensor = (model or self.run.model)(measurement.input, **measurement.physics).float()
        return output

    def _finish(
        self,
        m: MeasuredSlice,
        output: Tensor,
        row: int,
        target: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> SliceResult:
        """Return arrays of `size` in the units of the data, and how well the image explains the measured samples."""
        x = to_complex(output)
        misfit = (m.operator.forward(x) - m.y) * m.scale
        H, W = size or (x.shape[-2], x.shape[-1])

        def array(image: Tensor) -> np.ndarray:
            return _array(crop_or_pad(image, (H, W)))

        image, spread, factor = m.combined(x), None, None
        if self._uncertainty is not None:
            error, factor = self._uncertainty(m, x, seed=row)
            spread = array(error * m.scale)
        return SliceResult(
            array(m.in_units(image.abs())),
            array(m.in_units(m.combined(to_complex(m.input)).abs())),
            None if target is None else array(target),
            array(m.combined(m.operator.adjoint(misfit)).abs()),
            crop_or_pad(m.in_units(image), (H, W))[0, 0].cpu().numpy() if image.shape[1] == 1 else None,
            SliceConsistency.of(misfit, m.y * m.scale, m.operator.mask, m.noise, m.noise_from),
            spread,
            factor,
        )

    def _scores(self, image: Tensor, target: Tensor) -> Rows:
        """Score an image (1, 1, H, W) against a stored one where they overlap, in the scale of the protocol."""
        size = (min(image.shape[-2], target.shape[-2]), min(image.shape[-1], target.shape[-1]))
        image, target = crop_or_pad(image, size), crop_or_pad(target, size)
        task = self.run.task
        if not isinstance(task.protocol, FastMRIProtocol):  # that one scores in the units of the data
            _, low, scale = min_max(target)
            if task.complex:  # type: ignore[attr-defined]
                low, scale = torch.zeros_like(low), low + scale  # from zero to the maximum
            image, target = (image - low) / scale, (target - low) / scale
        return task.protocol.rows(image, target)


def _array(x: Tensor) -> np.ndarray:
    """Return (1, M, H, W) as (H, W), with the modalities combined by root-sum-of-squares."""
    x = x[0].float()
    return np.asarray((x[0] if len(x) == 1 else x.square().sum(0).sqrt()).cpu().numpy())
