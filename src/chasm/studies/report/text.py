"""How a report writes metrics, numbers, intervals and options."""

import math
from typing import Any

from chasm.studies import statistics
from chasm.studies.paper import Quote
from chasm.studies.records import Comparison, Environment, Gain, Score
from chasm.studies.worker import COSTS

DECIMALS = statistics.DECIMALS | dict.fromkeys(COSTS, 2)
NAMES = {
    "psnr": "PSNR",
    "ssim": "SSIM",
    "nmse": "NMSE",
    "dice": "Dice",
    "iou": "IoU",
    "gmacs_paper": "GMACs, counted as in the paper",
    "gmacs": "GMACs per image",
    "gmacs_of_weights": "GMACs once per call",
    "core_mparams": "parameters, M (complex once)",
    "core_mparams_real": "real numbers, M",
}
UNITS = {"psnr": "dB"}
UNKNOWN = "–"


def short_name(metric: str) -> str:
    """Return a metric without its unit: "PSNR"."""
    return NAMES.get(metric, metric)


def metric_name(metric: str) -> str:
    """Return a metric with its unit: "PSNR, dB"."""
    return ", ".join(part for part in (short_name(metric), UNITS.get(metric)) if part)


def number(value: float | None, metric: str) -> str:
    """Return a score with the digits of its metric, or a dash if there is none."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if metric in COSTS and 0 < value < 1:  # of a tiny model
        return f"{value:#.3g}"
    return f"{value:.{DECIMALS.get(metric, 3)}f}"


def signed(value: float, metric: str, extra_digits: int = 1) -> str:
    """Return a difference with its sign; zero has none.

    Args:
        value: the difference.
        metric: decides the digits.
        extra_digits: beyond those of the score itself, since differences are small.
    """
    digits = DECIMALS.get(metric, 3) + extra_digits
    value = round(value, digits)
    return f"{value:+.{digits}f}".replace("-", "−") if value else f"{0:.{digits}f}"


def interval(difference: Comparison | Gain | statistics.Interval, metric: str) -> str:
    """Return a mean difference with its interval: "+0.52 dB [+0.41, +0.63]"."""
    unit = f" {UNITS[metric]}" if metric in UNITS else ""
    limits = f"[{signed(difference.low, metric)}, {signed(difference.high, metric)}]"
    return f"{signed(difference.mean, metric)}{unit} {limits}"


def score_text(score: Score, metric: str) -> str:
    """Return the mean with its spread over cases and, after a second ±, over seeds."""
    text = number(score.mean, metric)
    if score.std_cases is not None and len(score.cases) > 1:  # one case has no spread
        text += f" ± {number(score.std_cases, metric)}"
    if score.std_seeds is not None:
        text += f" ± {number(score.std_seeds, metric)}"
    return text


def quote(printed: Quote | None, metric: str) -> str:
    """Return a number of the paper, with its spread where there is one."""
    if printed is None:
        return UNKNOWN
    spread = "" if printed.spread is None else f" ± {number(printed.spread, metric)}"
    return f"{number(printed.mean, metric)}{spread}"


def thousands(n: int | None) -> str:
    """Return an integer with narrow spaces between groups of three digits."""
    return UNKNOWN if n is None else f"{n:,}".replace(",", "\u202f")


def giga(n: float | None) -> str:
    """Return a number in units of 1e9, with three digits.

    >>> giga(3.8e6), giga(28.2e9), giga(119.6e9), giga(0)
    ('0.00380', '28.2', '120', '0')
    """
    return UNKNOWN if n is None else f"{n / 1e9:#.3g}".removesuffix(".") if n else "0"


def duration(seconds: float | None) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds is None:
        return UNKNOWN
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def options_text(options: dict[str, Any]) -> str:
    """Return options as one line: "kind equispaced, acceleration 8"."""
    values = {key: f"({options_text(v)})" if isinstance(v, dict) else v for key, v in options.items()}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items())


def versions(environment: Environment) -> str:
    """Return the versions of Python and of the packages that matter."""
    return ", ".join([f"Python {environment.python}", *(f"{k} {v}" for k, v in environment.versions.items())])


def commit(environment: Environment) -> str:
    """Return the commit of the code, and whether it was changed."""
    if not environment.commit:
        return "unknown"
    return environment.commit[:12] + (" with uncommitted changes" if environment.modified else "")
