"""What a report is made of, and the words it uses: tables, pictures, sections, names and numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chasm.studies import statistics
from chasm.studies.worker import COSTS

Results = dict[str, Any]
DECIMALS = statistics.DECIMALS | dict.fromkeys(COSTS, 2)
NAMES = {"psnr": "PSNR", "ssim": "SSIM", "nmse": "NMSE", "dice": "Dice", "iou": "IoU"}
NAMES |= {"gmacs_paper": "GMACs, counted as in the paper", "gmacs": "GMACs, all counted"}
NAMES |= {"core_mparams": "parameters, M (complex once)", "core_mparams_real": "real numbers, M"}
UNITS = {"psnr": "dB"}
FOCUS, BASE = "chasm", "baseline"


@dataclass(frozen=True)
class Cell:
    text: str
    kind: str = ""  # best, paper, win or loss


@dataclass(frozen=True)
class Row:
    cells: list[Cell]
    kind: str = ""  # focus or reference


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[Row]
    note: str = ""
    words: bool = False  # text rather than numbers: everything to the left


@dataclass(frozen=True)
class Picture:
    source: str
    alt: str
    caption: str
    files: dict[str, bytes] = field(default_factory=dict)  # also written beside the page, by name


@dataclass
class Section:
    title: str
    text: list[str] = field(default_factory=list)
    points: list[str] = field(default_factory=list)
    items: list[Table | Picture] = field(default_factory=list)


def places(results: Results) -> list[tuple[str, str]]:
    """(setting, host) with at least one finished run."""
    return list(dict.fromkeys((r["setting"], r["host"]) for r in results["rows"]))


def data_word(results: Results, setting: str | None = None) -> str:
    """What kind of data the numbers are on, where it is not the dataset the setting is named after."""
    sources = {
        str(c["metrics"].get("source", ""))
        for c in results["cells"]
        if c["metrics"] and setting in (None, c["setting"]) and "cases" in c["metrics"]
    }
    if any("proxy" in s for s in sources):
        return "proxy data"
    return "embedded data" if any(s.startswith("embedded") for s in sources) else ""


def rows_of(results: Results, setting: str, host: str) -> list[dict[str, Any]]:
    return [r for r in results["rows"] if (r["setting"], r["host"]) == (setting, host)]


def cells_of(results: Results, rows: Sequence[dict[str, Any]], first_seed: bool = False) -> list[dict[str, Any]]:
    by_key = {c["key"]: c for c in results["cells"]}
    return [by_key[k] for r in rows for k in (r["cells"][:1] if first_seed else r["cells"])]


def comparisons_of(results: Results, setting: str, host: str, metric: str) -> list[dict[str, Any]]:
    return [c for c in results["comparisons"] if (c["setting"], c["host"], c["metric"]) == (setting, host, metric)]


def metrics_of(results: Results, setting: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    wanted = results["settings"][setting]["metrics"] if results["study"]["kind"] == "train" else []
    return [m for m in wanted if m in rows[0]["scores"]] or list(rows[0]["scores"])


def place_name(results: Results, setting: str, host: str) -> str:
    word = data_word(results, setting)
    title, kind = results["settings"][setting]["title"], word.partition(" ")[0]
    parts = (title, word if kind not in title else "", results["hosts"][host])
    return ", ".join(p for p in parts if p)


def label(results: Results, row: dict[str, Any]) -> str:
    return str(results["arms"][row["arm"]]["label"])


def number(value: float | None, metric: str) -> str:
    if value is None:
        return "–"
    if metric in COSTS and 0 < value < 1:  # of a tiny model
        return f"{value:#.3g}"
    return f"{value:.{DECIMALS.get(metric, 3)}f}"


def with_unit(value: float | None, metric: str) -> str:
    return f"{number(value, metric)} {UNITS.get(metric, '')}".rstrip()


def signed(value: float, metric: str, more: int = 1) -> str:
    """With the digits of the score itself and one more, since differences are small; zero has no sign."""
    digits = DECIMALS.get(metric, 3) + more
    value = round(value, digits)
    return f"{value:+.{digits}f}".replace("-", "−") if value else f"{0:.{digits}f}"


def interval(c: dict[str, Any], metric: str, unit: bool = True) -> str:
    of = f" {UNITS[metric]}" if unit and metric in UNITS else ""
    return f"{signed(c['mean'], metric)}{of} [{signed(c['low'], metric)}, {signed(c['high'], metric)}]"


def score_text(score: dict[str, Any], metric: str) -> str:
    text = number(score["mean"], metric)
    if score.get("std_cases") is not None and len(score["cases"]) > 1:  # one case has no spread
        text += f" ± {number(score['std_cases'], metric)}"
    if score.get("std_seeds") is not None:
        text += f" ± {score['std_seeds']:.{DECIMALS.get(metric, 3)}f}"
    return text


def quote(quote: dict[str, Any] | None, metric: str) -> str:
    if quote is None:
        return "–"
    spread = "" if quote["spread"] is None else f" ± {number(quote['spread'], metric)}"
    return f"{number(quote['mean'], metric)}{spread}"


def gain(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def thousands(n: int | None) -> str:
    return "–" if n is None else f"{n:,}".replace(",", "\u202f")


def giga(n: float | None) -> str:
    return "–" if n is None else f"{n / 1e9:.3g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def options_text(options: dict[str, Any]) -> str:
    words = []
    for key, value in options.items():
        inner = f"({options_text(value)})" if isinstance(value, dict) else value
        words.append(f"{key.replace('_', ' ')} {inner}")
    return ", ".join(words)


def versions(environment: dict[str, Any]) -> str:
    return ", ".join([f"Python {environment['python']}", *(f"{k} {v}" for k, v in environment["versions"].items())])


def commit(environment: dict[str, Any]) -> str:
    if not environment.get("commit"):
        return "unknown"
    return environment["commit"][:12] + (" with uncommitted changes" if environment.get("modified") else "")
