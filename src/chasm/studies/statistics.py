"""Spread over cases and seeds, and paired differences with bootstrap intervals.

Two mixers are compared case by case, so that the difficulty of a case cancels. With several seeds both cases and seeds
are resampled, so that the interval covers new cases and new runs. Where one table makes many comparisons, Holm's
correction keeps the chance of even one false win or loss in it at 5 %.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
# Digits of a printed score. A difference has one digit more, and counts as zero if it prints as zero.
DECIMALS = {"psnr": 2, "ssim": 3, "nmse": 4, "dice": 3, "iou": 3}
SIGNIFICANCE = 0.05  # chance of a false win or loss, in one comparison or (after Holm's correction) in a whole table
MIN_CASES = 6  # for a verdict: fewer cases all point one way by chance more than once in 20


@dataclass(frozen=True)
class Interval:
    """A mean difference, and the limits of the central 95 % of its resampled values."""

    mean: float
    low: float
    high: float
    cases: int
    seeds: int
    digits: int | None = None  # digits after the point when printed; None for all
    p: float = float("nan")  # two-sided, by the share of resampled means on the other side of zero

    @property
    def verdict(self) -> str:
        """ "win" or "loss" if the interval excludes zero and the printed mean is not zero, otherwise "level".

        With fewer than `MIN_CASES` cases it is "too few cases".
        """
        if self.cases < MIN_CASES:
            return "too few cases"
        if self.digits is not None and round(self.mean, self.digits) == 0:
            return "level"
        return "win" if self.low > 0 else "loss" if self.high < 0 else "level"


def spread(values: Sequence[float], *, sample: bool = False) -> tuple[float, float]:
    """Return mean and standard deviation; with `sample`, that of the population that the values were drawn from.

    >>> spread([1.0, 3.0]), spread([1.0, 3.0], sample=True)
    ((2.0, 1.0), (2.0, 1.4142135623730951))
    """
    x = np.asarray(values, dtype=float)
    if sample and x.size < 2:
        return float(x.mean()), float("nan")
    return float(x.mean()), float(x.std(ddof=int(sample)))


def difference(
    ours: Sequence[Mapping[str, float]],
    theirs: Sequence[Mapping[str, float]],
    metric: str | None = None,
    *,
    draws: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the mean of our scores minus theirs, case by case, with its interval. Both come by case for each seed.

    With the name of the metric, a difference that prints as zero is "level".
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
    return mean_difference(d, metric, draws=draws, seed=seed)


def mean_difference(d: np.ndarray, metric: str | None = None, *, draws: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the mean of paired differences, (seeds, cases) or (masks, seeds, cases), with its interval."""
    means = resampled(d, draws=draws, seed=seed)
    digits = None if metric is None else DECIMALS.get(metric, 3) + 1
    return Interval(float(d.mean()), *central_interval(means), d.shape[-1], d.shape[-2], digits, two_sided(means))


def two_sided(means: np.ndarray) -> float:
    """Return the p-value of a difference: twice the share of resampled means on the rarer side of zero.

    It is never zero: with n draws at least 2 / (n + 1).

    >>> two_sided(np.array([1.0, 2.0, 3.0])), two_sided(np.array([-1.0, 1.0]))
    (0.5, 1.0)
    """
    rarer = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return min(1.0, 2 * (rarer + 1) / (means.size + 1))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method, in the order given.

    The smallest of n is multiplied by n, the next by n - 1 and so on; none may become smaller than one before it.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p, kind="stable")
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def resampled(d: np.ndarray, *, draws: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Return the mean of each bootstrap draw. Seeds, cases and masks, if any, are drawn with replacement.

    The draws of seeds and cases do not depend on the number of masks.

    Args:
        d: differences, (seeds, cases) or (masks, seeds, cases).
        draws: number of draws.
        seed: seed of the draws.
    """
    d = d[None] if d.ndim == 2 else d
    rng, mask_rng = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    m, s, c = d.shape
    means = []
    for n in _blocks(draws, c):
        weights = _shares(rng, s, n)  # (n, seeds)
        per_case = np.einsum("nm,ns,msc->nc", _shares(mask_rng, m, n), weights, d)  # (n, cases)
        drawn = np.take_along_axis(per_case, rng.integers(c, size=(n, c)), axis=1)
        means.append(drawn.mean(1))
    return np.concatenate(means)


def _shares(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """Return how often each of `count` things is drawn when `count` are drawn with replacement, (n, count), sum 1."""
    shares: np.ndarray = rng.multinomial(count, np.full(count, 1 / count), size=n) / count
    return shares


def _blocks(draws: int, cases: int) -> list[int]:
    """Split the draws into blocks of at most a million numbers, for test sets of many thousand cases."""
    size = max(1, min(draws, 1_000_000 // cases))
    return [size] * (draws // size) + [draws % size] * bool(draws % size)


def central_interval(means: np.ndarray) -> tuple[float, float]:
    """Return the limits of the central 95 % of resampled values."""
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def drop(structured: np.ndarray, random: np.ndarray, *, digits: int = 6) -> tuple[float, float, float]:
    """Return 1 - random gain / structured gain in per cent, and the limits of its interval.

    The gains are (seeds, cases), and the random ones may have a first dimension of masks. Both use the same draws of
    cases and seeds. The interval is infinite if the structured gain may be zero. The drop is NaN if the mean structured
    gain is not positive when printed with `digits`, since it would divide by a loss, or by next to nothing.
    """
    is_gain = round(float(structured.mean()), digits) > 0
    value = 100 * (1 - float(random.mean() / structured.mean())) if is_gain else float("nan")
    below, above = resampled(structured), resampled(random)
    if central_interval(below)[0] <= 0:
        return value, -float("inf"), float("inf")
    return value, *central_interval(100 * (1 - above / below))
