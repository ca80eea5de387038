"""Named protocols that define what a metric means.

A PSNR means little without its data range: the maximum of the slice, the maximum of the volume and 1 give values
that differ by decibels for the same images. Every number therefore belongs to a `Protocol` and prints with its name:
``hifi``, ``fastmri``, ``unit``, ``held-out`` or ``brats``.

`Protocol.rows` turns each slice into a row of tensors, `Protocol.case` turns the rows of a case into its scores, and
`Meter` computes mean and standard deviation over cases. A slice whose target is zero everywhere has no PSNR and no
NMSE: `hifi` and `unit` leave it out, `fastmri` leaves out a volume in which all slices are blank, and `Summary.blank`
counts the slices that were left out.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.tasks.metrics import Rows, _pair, dice_iou, nmse, overlap_counts, psnr, ssim

BLANK = "blank"  # key in Rows, (B,) bool: True for slices that are counted but not scored


class Protocol:
    """Defines what a reported number means: its unit, its data range, its clamping.

    Attributes:
        name: name that prints with every number.
        selection_metric: score that selects the best checkpoint; higher is better.
        meaning: one line for reports.
    """

    name: ClassVar[str]
    selection_metric: ClassVar[str]
    meaning: ClassVar[str]

    def rows(self, output: Tensor, target: Tensor) -> Rows:
        """Return what each slice of a batch adds to the scores of its case: tensors by name, one row per slice.

        Output and target have one shape, and the scale that the protocol asks for.
        """
        raise NotImplementedError

    def case(self, rows: Rows) -> dict[str, float]:
        """Return the scores of a case by name, {} if it has none; by default the mean over its slices.

        The rows of blank slices are not among `rows`.
        """
        return {k: v.mean().item() for k, v in rows.items()}


class UnitProtocol(Protocol):
    """Each image on its own, clamped to [0, 1], with data range 1."""

    name: ClassVar[str] = "unit"
    selection_metric: ClassVar[str] = "psnr"
    meaning: ClassVar[str] = "per image, clamped to [0, 1], data range 1"

    def data_range(self, target: Tensor) -> Tensor:
        """Return the data range of each image of (B, C, H, W): (B,)."""
        return torch.ones(len(target), device=target.device, dtype=target.dtype)

    def rows(self, output: Tensor, target: Tensor) -> Rows:
        output, r = output.clamp(0, 1), self.data_range(target)
        return {
            "psnr": psnr(output, target, r),
            "ssim": ssim(output, target, r),
            "nmse": nmse(output, target),
            BLANK: target.amax((1, 2, 3)) == 0,
        }


class HiFiProtocol(UnitProtocol):
    """Each slice on its own, scaled to [0, 1] by the task. The data range is the maximum of the target slice."""

    name: ClassVar[str] = "hifi"
    meaning: ClassVar[str] = "per slice scaled to [0, 1], clamped, data range = maximum of the target slice"

    def data_range(self, target: Tensor) -> Tensor:
        peak = target.amax((1, 2, 3))
        return torch.where(peak > 0, peak, 1)  # a constant slice has been scaled to all zeros


class FastMRIProtocol(Protocol):
    """Each volume in the units of the data, with the maximum of the target volume as data range.

    PSNR and NMSE are those of the whole volume, and SSIM is the mean over its slices.
    """

    name: ClassVar[str] = "fastmri"
    selection_metric: ClassVar[str] = "psnr"
    meaning: ClassVar[str] = "per volume in the units of the data, data range = maximum of the target volume"

    def rows(self, output: Tensor, target: Tensor) -> Rows:
        # SSIM needs the maximum of the volume, so the images themselves are kept until the case is complete.
        return {"output": output.float(), "target": target.float()}

    def case(self, rows: Rows) -> dict[str, float]:
        output, target = _pair(rows["output"], rows["target"])
        peak, error = target.amax(), (output - target).square()
        if peak == 0:
            return {}
        return {
            "psnr": (10 * torch.log10(peak**2 / error.mean())).item(),
            "ssim": ssim(output, target, peak).mean().item(),
            "nmse": (error.sum() / target.square().sum()).item(),
        }


BRATS_REGIONS: dict[str, tuple[int, ...]] = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}


class Overlap(Protocol):
    """Dice and IoU of regions. Pixel counts are summed over a case before any ratio is taken.

    A region that is empty in output and target scores 1.

    Args:
        regions: the classes of each region, by its name; WT, TC and ET of BraTS by default.
    """

    name: ClassVar[str] = "brats"
    selection_metric: ClassVar[str] = "dice"
    meaning: ClassVar[str] = "regions of a whole case from hard labels, empty in both = 1, mean over regions"

    def __init__(self, regions: Mapping[str, Sequence[int]] | None = None) -> None:
        self.regions = dict(regions or BRATS_REGIONS)

    def rows(self, output: Tensor, target: Tensor) -> Rows:
        return overlap_counts(output, target, self.regions)

    def case(self, rows: Rows) -> dict[str, float]:
        each = {name: dice_iou(counts.sum(0)) for name, counts in rows.items()}
        dice_mean, iou_mean = (sum(values) / len(each) for values in zip(*each.values(), strict=True))
        scores = {"dice": dice_mean, "iou": iou_mean}
        for name, (dice, iou) in each.items():
            scores |= {f"dice_{name}": dice, f"iou_{name}": iou}
        return scores


class HeldOutProtocol(Protocol):
    """Signal-to-noise ratio of measured k-space lines that the model did not see. It needs no truth."""

    name: ClassVar[str] = "held-out"
    selection_metric: ClassVar[str] = "snr"
    meaning: ClassVar[str] = "per slice, power of the k-space lines kept from the input over that of their error, in dB"

    def rows(self, output: Tensor, target: Tensor) -> Rows:
        power, error = (x.abs().square().flatten(1).sum(1).double() for x in (target, output - target))
        return {"snr": 10 * torch.log10(power / error), BLANK: power == 0}


PROTOCOLS: dict[str, type[Protocol]] = {
    p.name: p for p in (HiFiProtocol, FastMRIProtocol, UnitProtocol, HeldOutProtocol)
}  # by name


def get_protocol(name: str) -> Protocol:
    """Return an image protocol: "hifi", "fastmri", "unit" or "held-out".

    >>> get_protocol("hifi").meaning
    'per slice scaled to [0, 1], clamped, data range = maximum of the target slice'
    """
    if name not in PROTOCOLS:
        raise ValueError(f"unknown metric protocol {name!r}: {suggest(name, PROTOCOLS)}")
    return PROTOCOLS[name]()
