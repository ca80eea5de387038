"""Spread over cases and seeds, and paired differences with bootstrap intervals.

Two mixers are compared on the same cases: the difference of each case is what varies, not the case's difficulty. With
several seeds, cases and seeds are both resampled: the interval is about new cases and new runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 4000
# Digits a score is printed with; a difference has one more, and one that is zero in those is no win or loss.
DECIMALS = {"psnr": 2, "ssim": 3, "nmse": 4, "dice": 3, "iou": 3}
FEWEST = 6  # cases for a verdict: with fewer, all of them pointing one way is no rarer than 1 in 20 by chance


@dataclass(frozen=True)
class Interval:
    """A mean difference, and where 95 % of its resampled values lie."""

    mean: float
    low: float
    high: float
    cases: int
    seeds: int
    digits: int | None = None  # after the point, as printed; None: all

    @property
    def verdict(self) -> str:
        """ "win" or "loss" when the interval excludes zero and the printed mean is not zero, else "level".

        No verdict on too few cases.
        """
        if self.cases < FEWEST:
            return "too few cases"
        if self.digits is not None and round(self.mean, self.digits) == 0:
            return "level"
        return "win" if self.low > 0 else "loss" if self.high < 0 else "level"


def spread(values: Sequence[float], *, sample: bool = False) -> tuple[float, float]:
    """Mean and standard deviation: of these values, or (`sample`) of what they were drawn from."""
    x = np.asarray(values, dtype=float)
    if sample and x.size < 2:
        return float(x.mean()), float("nan")
    return float(x.mean()), float(x.std(ddof=int(sample)))


def printed_digits(metric: str) -> int:
    """Of a difference in this metric."""
    return DECIMALS.get(metric, 3) + 1


def difference(
    ours: Sequence[Mapping[str, float]],
    theirs: Sequence[Mapping[str, float]],
    metric: str | None = None,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Ours minus theirs, paired by case; one mapping of case -> score per seed, in the same order of seeds.

    With a metric, the verdict is about what is printed of it.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"a paired difference needs the same seeds on both sides, got {len(ours)} and {len(theirs)}")
    cases = sorted(ours[0])
    for scores in (*ours, *theirs):
        if sorted(scores) != cases:
            odd = set(scores) ^ set(cases)
            raise ValueError(f"a paired difference needs the same cases on both sides: {sorted(odd)[0]!r} is missing")
    d = np.array(
        [[a[c] - b[c] for c in cases] for a, b in zip(ours, theirs, strict=True)], dtype=float
    )  # (seeds, cases)
    low, high = interval(resampled(d, draws=draws, seed=seed))
    digits = None if metric is None else printed_digits(metric)
    return Interval(float(d.mean()), low, high, len(cases), len(d), digits)


def resampled(d: np.ndarray, *, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Means of (seeds, cases) with both axes drawn again with replacement: (draws,)."""
    rng = np.random.default_rng(seed)
    s, c = d.shape
    means = []
    for n in _blocks(draws, c):
        weights = rng.multinomial(s, np.full(s, 1 / s), size=n) / s  # (n, seeds)
        drawn = np.take_along_axis(weights @ d, rng.integers(c, size=(n, c)), axis=1)  # (n, cases)
        means.append(drawn.mean(1))
    return np.concatenate(means)


def _blocks(draws: int, cases: int) -> list[int]:
    """Draws in pieces of at most a million numbers: a test set may have many thousand cases."""
    size = max(1, min(draws, 1_000_000 // cases))
    return [size] * (draws // size) + [draws % size] * bool(draws % size)


def interval(means: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The central part of the resampled values."""
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def drop(
    structured: np.ndarray, random: np.ndarray, *, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float, float]:
    """1 - random gain / structured gain, in per cent, and its interval; gains are (seeds, cases) on the same cases.

    The same cases and seeds are drawn for both gains. The interval is infinite where the structured gain may be zero;
    where there is none the drop has no meaning (a loss divided by a loss) and is nan.
    """
    value = 100 * (1 - float(random.mean() / structured.mean())) if structured.mean() > 0 else float("nan")
    below = resampled(structured, draws=draws, seed=seed)
    above = resampled(random, draws=draws, seed=seed)
    if interval(below)[0] <= 0:
        return value, -float("inf"), float("inf")
    return value, *interval(100 * (1 - above / below))
