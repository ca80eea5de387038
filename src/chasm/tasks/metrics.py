"""Image and overlap metrics, and the named protocols that fix what they mean.

A PSNR says little without its data range and its unit: the same images differ by decibels between a slice's
maximum, a volume's maximum and 1. So a number here belongs to a `Protocol` and prints with its name:

- ``hifi``: per slice, magnitude clamped to [0, 1], range = maximum of the target slice (which the task
  has scaled to [0, 1]).
- ``fastmri``: per volume, in the units of the data: range = maximum of the target volume, PSNR and NMSE of
  the whole volume, SSIM the mean over its slices.
- ``unit``: per image, clamped to [0, 1], range 1.
- ``brats``: Dice and IoU of the regions of a whole case, a region empty in both counted as 1.

A slice gives a row of tensors (`Protocol.rows`), the rows of a case give its scores (`Protocol.case`), and
`Meter` turns them into mean and standard deviation over cases. A slice whose target is zero everywhere has no PSNR and
no NMSE: `hifi` and `unit` leave it out, `fastmri` leaves out a volume of such slices, and `Summary.blank` counts them.
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
BLANK = "blank"  # in rows, (B,) bool: True for slices that are counted, not scored


def _exact(x: Tensor) -> Tensor:
    """Sums of squares cancel in single precision; Apple's GPUs have no double."""
    return x.float() if x.device.type == "mps" else x.double()


def _pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if output.shape != target.shape or output.ndim != 4:
        raise ValueError(
            f"expected output and target of one shape (B, C, H, W), got {tuple(output.shape)} and {tuple(target.shape)}"
        )
    return _exact(output), _exact(target)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each of (B, C, H, W): (B,)."""
    a, b = _pair(output, target)
    return (a - b).square().mean((1, 2, 3))


def psnr(output: Tensor, target: Tensor, data_range: Tensor | float) -> Tensor:
    """10 log10(range^2 / MSE) of each of (B, C, H, W): (B,). Infinite for equal images."""
    error = mse(output, target)
    return 10 * torch.log10(torch.as_tensor(data_range, device=error.device).to(error.dtype) ** 2 / error)


def nmse(output: Tensor, target: Tensor) -> Tensor:
    """|output - target|^2 / |target|^2 of each of (B, C, H, W): (B,)."""
    a, b = _pair(output, target)
    return (a - b).square().sum((1, 2, 3)) / b.square().sum((1, 2, 3))


def ssim(output: Tensor, target: Tensor, data_range: Tensor | float) -> Tensor:
    """Structural similarity of each of (B, C, H, W): (B,), channels averaged.

    7x7 uniform window, sample covariance, K1 = 0.01, K2 = 0.03, windows inside the image only: scikit-image's
    default. `data_range` is a number or (B,).
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
    """Label maps (B, H, W) -> for each region (B, 3): pixels in both, in the output, in the target."""
    rows = {}
    for name, classes in regions.items():
        members = torch.as_tensor(classes, device=output.device)
        a, b = torch.isin(output, members), torch.isin(target, members)
        rows[name] = torch.stack([(x.flatten(1).sum(1)) for x in (a & b, a, b)], dim=1)
    return rows


def dice_iou(counts: Tensor) -> tuple[float, float]:
    """Dice and IoU from (3,) counts in both, in the output, in the target; empty in both is 1."""
    both, a, b = (float(c) for c in counts)
    if a + b == 0:
        return 1.0, 1.0
    return 2 * both / (a + b), both / (a + b - both)


class Protocol:
    """What a reported number means: its unit, its data range, its clamping."""

    name: ClassVar[str]
    better: ClassVar[str]  # the score that selects a checkpoint: higher is better
    meaning: ClassVar[str]

    def rows(self, output: Tensor, target: Tensor) -> Rows:
        """What one batch contributes, slice by slice."""
        raise NotImplementedError

    def case(self, rows: Rows) -> dict[str, float]:
        """Return the scores of a case from the rows of its slices (here, their mean), or {} if there is none."""
        return {k: v.mean().item() for k, v in rows.items()}


class Unit(Protocol):
    name: ClassVar[str] = "unit"
    better: ClassVar[str] = "psnr"
    meaning: ClassVar[str] = "per image, clamped to [0, 1], data range 1"

    def data_range(self, target: Tensor) -> Tensor:
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
    name: ClassVar[str] = "hifi"
    meaning: ClassVar[str] = "per slice scaled to [0, 1], clamped, data range = maximum of the target slice"

    def data_range(self, target: Tensor) -> Tensor:
        peak = target.amax((1, 2, 3))
        return torch.where(peak > 0, peak, 1)  # a constant slice has been scaled to all zeros


class FastMRI(Protocol):
    name: ClassVar[str] = "fastmri"
    better: ClassVar[str] = "psnr"
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
    """Rows are pixel counts, summed over a case before any ratio is taken."""

    name: ClassVar[str] = "brats"
    better: ClassVar[str] = "dice"
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


PROTOCOLS: dict[str, type[Protocol]] = {p.name: p for p in (HiFi, FastMRI, Unit)}  # those of images


def get_protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise ValueError(f"unknown metric protocol {name!r}: {suggest(name, PROTOCOLS)}")
    return PROTOCOLS[name]()


@dataclass(frozen=True, slots=True)
class Stat:
    """Mean and (population) standard deviation over cases; prints with the protocol it was measured by."""

    mean: float
    std: float
    cases: int
    protocol: str

    def __str__(self) -> str:
        return f"{self.mean:#.4g} ± {self.std:#.2g} ({self.protocol}, {counted(self.cases, 'case')})"


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of an evaluation: scores of every case, their statistics, and the number of blank slices left out."""

    protocol: str
    meaning: str
    per_case: dict[str, dict[str, float]]
    blank: int = 0

    @property
    def stats(self) -> dict[str, Stat]:
        """Every score, by name."""
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
    """Scores of cases -> their mean and standard deviation, under the protocol's name."""
    if not per_case:
        raise ValueError(f"no case to summarise: {'every slice is blank' if blank else 'the split is empty'}")
    return Summary(protocol.name, protocol.meaning, dict(per_case), blank)


class Meter:
    """Collects rows slice by slice and closes a case when the next one begins.

    The slices of a case must come one after another, as an unshuffled dataset gives them, so that only one
    volume is held at a time.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.blank = 0  # slices that were not scored
        self._scores: dict[str, dict[str, float]] = {}
        self._case: str | None = None
        self._rows: list[Rows] = []

    def add(self, rows: Rows, cases: Sequence[str]) -> None:
        """The rows of a batch and the case of each."""
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
        """Return the scores of all cases and their statistics."""
        return aggregate(self.per_case(), self.protocol, self.blank)
