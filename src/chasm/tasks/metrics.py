"""Image and overlap metrics, and the named protocols that fix what they mean.

A PSNR means little without its data range: the maximum of the slice, the maximum of the volume and 1 give values
that differ by decibels for the same images. Every number therefore belongs to a `Protocol` and prints with its name:

- ``hifi``: per slice, magnitude clamped to [0, 1], range = maximum of the target slice (which the task
  has scaled to [0, 1]).
- ``fastmri``: per volume, in the units of the data: range = maximum of the target volume, PSNR and NMSE of
  the whole volume, SSIM the mean over its slices.
- ``unit``: per image, clamped to [0, 1], range 1.
- ``held-out``: per slice, SNR of measured k-space lines that the model did not see. It needs no truth.
- ``brats``: Dice and IoU of the regions of a whole case. A region that is empty in output and target scores 1.

`Protocol.rows` turns each slice into a row of tensors, `Protocol.case` turns the rows of a case into its scores, and
`Meter` computes mean and standard deviation over cases. A slice whose target is zero everywhere has no PSNR and no
NMSE: `hifi` and `unit` leave it out, `fastmri` leaves out a volume in which all slices are blank, and `Summary.blank`
counts the slices that were left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from chasm.common.registry import suggest
from chasm.common.text import counted

Rows = dict[str, Tensor]  # each (B, ...): one row per slice
BLANK = "blank"  # key in Rows, (B,) bool: True for slices that are counted but not scored


def _exact(x: Tensor) -> Tensor:
    """Convert to float64, in which sums of squares do not cancel; to float32 on Apple GPUs, which have no float64."""
    return x.float() if x.device.type == "mps" else x.double()


def _pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if output.shape != target.shape or output.ndim != 4:
        raise ValueError(
            f"expected output and target of one shape (B, C, H, W), got {tuple(output.shape)} and {tuple(target.shape)}"
        )
    return _exact(output), _exact(target)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each image.

    Args:
        output: images, (B, C, H, W).
        target: images of the same shape.

    Returns:
        One number per image, (B,).

    Raises:
        ValueError: if the shapes differ or are not (B, C, H, W).
    """
    a, b = _pair(output, target)
    return (a - b).square().mean((1, 2, 3))


def psnr(output: Tensor, target: Tensor, data_range: Tensor | float) -> Tensor:
    """Peak signal-to-noise ratio of each image: 10 log10(range^2 / MSE), infinite for equal images.

    Args:
        output: images, (B, C, H, W).
        target: images of the same shape.
        data_range: a number, or one per image, (B,).

    Returns:
        Decibels, (B,).

    Raises:
        ValueError: if the shapes differ or are not (B, C, H, W).

    >>> target = torch.ones(1, 1, 8, 8)
    >>> psnr(target - 0.1, target, data_range=1).item()  # doctest: +ELLIPSIS
    19.99...
    """
    error = mse(output, target)
    return 10 * torch.log10(torch.as_tensor(data_range, device=error.device).to(error.dtype) ** 2 / error)


def nmse(output: Tensor, target: Tensor) -> Tensor:
    """Normalised squared error of each image: |output - target|^2 / |target|^2.

    Args:
        output: images, (B, C, H, W).
        target: images of the same shape.

    Returns:
        One number per image, (B,).

    Raises:
        ValueError: if the shapes differ or are not (B, C, H, W).
    """
    a, b = _pair(output, target)
    return (a - b).square().sum((1, 2, 3)) / b.square().sum((1, 2, 3))


def ssim(output: Tensor, target: Tensor, data_range: Tensor | float) -> Tensor:
    """Structural similarity of each image, averaged over channels.

    As scikit-image computes it by default: 7x7 uniform window, sample covariance, K1 = 0.01, K2 = 0.03, and only
    windows that lie inside the image.

    Args:
        output: images, (B, C, H, W).
        target: images of the same shape.
        data_range: a number, or one per image, (B,).

    Returns:
        One number per image, (B,).

    Raises:
        ValueError: if the shapes differ or are not (B, C, H, W), or the images are smaller than the window.
    """
    a, b = _pair(output, target)
    window = 7
    if min(a.shape[-2:]) < window:
        raise ValueError(f"SSIM needs images of {window}x{window} or more, got {tuple(a.shape[-2:])}")
    r = torch.as_tensor(data_range, device=a.device).to(a.dtype).reshape(-1, 1, 1, 1)
    c1, c2 = (0.01 * r) ** 2, (0.03 * r) ** 2

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, window, stride=1)

    unbias = window**2 / (window**2 - 1)
    ma, mb = mean(a), mean(b)
    va, vb, cov = (unbias * (mean(p) - q) for p, q in ((a * a, ma * ma), (b * b, mb * mb), (a * b, ma * mb)))
    similarity = (2 * ma * mb + c1) * (2 * cov + c2) / ((ma * ma + mb * mb + c1) * (va + vb + c2))
    return similarity.mean((1, 2, 3))


def overlap_counts(output: Tensor, target: Tensor, regions: Mapping[str, Sequence[int]]) -> Rows:
    """Count the pixels of each region.

    Args:
        output: label maps, (B, H, W).
        target: label maps of the same shape.
        regions: the classes of each region, by its name.

    Returns:
        For each region the pixels in both maps, in the output and in the target, (B, 3).
    """
    rows = {}
    for name, classes in regions.items():
        members = torch.as_tensor(classes, device=output.device)
        a, b = torch.isin(output, members), torch.isin(target, members)
        rows[name] = torch.stack([(x.flatten(1).sum(1)) for x in (a & b, a, b)], dim=1)
    return rows


def dice_iou(counts: Tensor) -> tuple[float, float]:
    """Compute Dice and IoU of a region. A region that is empty in output and target scores 1.

    Args:
        counts: pixels in both maps, in the output and in the target, (3,).

    Returns:
        Dice and IoU.

    >>> dice_iou(torch.tensor([1, 2, 2]))
    (0.5, 0.3333333333333333)
    """
    both, a, b = (float(c) for c in counts)
    if a + b == 0:
        return 1.0, 1.0
    return 2 * both / (a + b), both / (a + b - both)


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
        """Compute what each slice of a batch contributes to its case.

        Args:
            output: output of a model, on the scale that the protocol asks for.
            target: target of the same shape.

        Returns:
            Tensors by name, each with one row per slice.
        """
        raise NotImplementedError

    def case(self, rows: Rows) -> dict[str, float]:
        """Compute the scores of a case; by default the mean over its slices.

        Args:
            rows: the rows of all its slices that are not blank.

        Returns:
            Scores by name, or {} if the case has none.
        """
        return {k: v.mean().item() for k, v in rows.items()}


class Unit(Protocol):
    """Each image on its own, clamped to [0, 1], with data range 1."""

    name: ClassVar[str] = "unit"
    selection_metric: ClassVar[str] = "psnr"
    meaning: ClassVar[str] = "per image, clamped to [0, 1], data range 1"

    def data_range(self, target: Tensor) -> Tensor:
        """Return the data range of each image, (B,).

        Args:
            target: images, (B, C, H, W).
        """
        return torch.ones(len(target), device=target.device, dtype=target.dtype)

    def rows(self, output: Tensor, target: Tensor) -> Rows:
        output, r = output.clamp(0, 1), self.data_range(target)
        return {
            "psnr": psnr(output, target, r),
            "ssim": ssim(output, target, r),
            "nmse": nmse(output, target),
            BLANK: target.amax((1, 2, 3)) == 0,
        }


class HiFi(Unit):
    """Each slice on its own, scaled to [0, 1] by the task, with the maximum of the target slice as data range."""

    name: ClassVar[str] = "hifi"
    meaning: ClassVar[str] = "per slice scaled to [0, 1], clamped, data range = maximum of the target slice"

    def data_range(self, target: Tensor) -> Tensor:
        peak = target.amax((1, 2, 3))
        return torch.where(peak > 0, peak, 1)  # a constant slice has been scaled to all zeros


class FastMRI(Protocol):
    """Each volume in the units of the data, with the maximum of the target volume as data range."""

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
        scores = {
            metric: sum(pair[i] for pair in each.values()) / len(each) for i, metric in enumerate(("dice", "iou"))
        }
        for name, (dice, iou) in each.items():
            scores |= {f"dice_{name}": dice, f"iou_{name}": iou}
        return scores


class HeldOut(Protocol):
    """Signal-to-noise ratio of measured k-space that the model did not see, for data without any truth."""

    name: ClassVar[str] = "held-out"
    selection_metric: ClassVar[str] = "snr"
    meaning: ClassVar[str] = "per slice, power of the k-space lines kept from the input over that of their error, in dB"

    def rows(self, output: Tensor, target: Tensor) -> Rows:
        power, error = (x.abs().square().flatten(1).sum(1).double() for x in (target, output - target))
        return {"snr": 10 * torch.log10(power / error), BLANK: power == 0}


PROTOCOLS: dict[str, type[Protocol]] = {p.name: p for p in (HiFi, FastMRI, Unit, HeldOut)}  # by name


def get_protocol(name: str) -> Protocol:
    """Return an image protocol.

    Args:
        name: "hifi", "fastmri", "unit" or "held-out".

    Raises:
        ValueError: if the name is unknown; the message suggests near ones.

    >>> get_protocol("hifi").meaning
    'per slice scaled to [0, 1], clamped, data range = maximum of the target slice'
    """
    if name not in PROTOCOLS:
        raise ValueError(f"unknown metric protocol {name!r}: {suggest(name, PROTOCOLS)}")
    return PROTOCOLS[name]()


@dataclass(frozen=True, slots=True)
class Stat:
    """Mean and population standard deviation over cases. Prints with the protocol it was measured by.

    >>> print(Stat(mean=31.25, std=1.5, cases=4, protocol="hifi"))
    31.25 ± 1.5 (hifi, 4 cases)
    """

    mean: float
    std: float
    cases: int
    protocol: str

    def __str__(self) -> str:
        return f"{self.mean:#.4g} ± {self.std:#.2g} ({self.protocol}, {counted(self.cases, 'case')})"


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of an evaluation: ``summary["psnr"]`` is the `Stat` of a score.

    Attributes:
        protocol: name of the protocol.
        meaning: what the protocol measures, in one line.
        per_case: scores of each case, by name.
        blank: number of blank slices that were left out.
    """

    protocol: str
    meaning: str
    per_case: dict[str, dict[str, float]]
    blank: int = 0

    @property
    def stats(self) -> dict[str, Stat]:
        """The `Stat` of every score, by name."""
        return {k: self[k] for k in next(iter(self.per_case.values()))}

    def __getitem__(self, metric: str) -> Stat:
        first = next(iter(self.per_case.values()))
        if metric not in first:
            raise ValueError(f"no score {metric!r} under protocol {self.protocol}: {suggest(metric, first)}")
        values = [scores[metric] for scores in self.per_case.values()]
        n = len(values)
        mean = sum(values) / n
        std = math.sqrt(sum((v - mean) ** 2 for v in values) / n)
        return Stat(mean, std, n, self.protocol)

    def __str__(self) -> str:
        return "\n".join(f"{name} {stat}" for name, stat in self.stats.items())


def aggregate(per_case: Mapping[str, dict[str, float]], protocol: Protocol, blank: int = 0) -> Summary:
    """Summarise the scores of cases.

    Args:
        per_case: scores of each case, by name.
        protocol: protocol that measured them.
        blank: number of blank slices that were left out.

    Returns:
        The scores with their statistics.

    Raises:
        ValueError: if there is no case.
    """
    if not per_case:
        raise ValueError(f"no case to summarise: {'every slice is blank' if blank else 'the split is empty'}")
    return Summary(protocol.name, protocol.meaning, dict(per_case), blank)


class Meter:
    """Collects rows slice by slice and scores a case when the next one begins.

    The slices of a case must come one after another, in the order of an unshuffled dataset, so that the meter holds
    only one volume at a time.

    Args:
        protocol: defines the scores.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.blank = 0  # slices that were not scored
        self._scores: dict[str, dict[str, float]] = {}
        self._case: str | None = None
        self._rows: list[Rows] = []

    def add(self, rows: Rows, cases: Sequence[str]) -> None:
        """Add the rows of a batch.

        Args:
            rows: from `Protocol.rows`.
            cases: name of the case of each row.

        Raises:
            ValueError: if slices of a case come after those of another case.
        """
        blank = rows[BLANK].tolist() if BLANK in rows else [False] * len(cases)
        for i, case in enumerate(cases):
            if case != self._case:
                self._close()
                if case in self._scores:
                    raise ValueError(f"slices of case {case!r} came in two places: evaluate in dataset order")
                self._case = case
            if blank[i]:
                self.blank += 1
            else:
                self._rows.append({k: v[i] for k, v in rows.items() if k != BLANK})

    def _close(self) -> None:
        if self._case is not None:
            stacked = {k: torch.stack([row[k] for row in self._rows]) for k in self._rows[0]} if self._rows else {}
            self._scores[self._case] = self.protocol.case(stacked) if stacked else {}
            self.blank += 0 if self._scores[self._case] else len(self._rows)
        self._case, self._rows = None, []

    def per_case(self) -> dict[str, dict[str, float]]:
        """Return the scores of every case so far that is not blank."""
        self._close()
        return {case: scores for case, scores in self._scores.items() if scores}

    def summary(self) -> Summary:
        """Return the scores of all cases and their statistics.

        Raises:
            ValueError: if no slice was scored.
        """
        return aggregate(self.per_case(), self.protocol, self.blank)
