"""Measure how time grows with H = W at fixed C, with C at fixed size, and with the batch; fit slopes, draw a picture.

The sweep of a mixer ends when memory runs out, or when one call would take over a second. Each row is compared with
float64 before it is timed. If the float64 oracle does not fit, the row names the largest size that was compared.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch

from chasm.bench import subjects, table
from chasm.bench.report import Row, titles
from chasm.bench.subjects import LITERAL, Shape
from chasm.common.files import write_atomic

SWEEPS = ("size", "channels", "batch")
PLOT_TITLE = "chasm bench scaling"  # in every picture: which may be replaced by the next
TITLES = titles("sweep", "dtype", "mode", "mixer", "n", "shape", "form", "layout", "time_ms", "peak_mib", "error")
COLUMNS = (*TITLES, "grad_error", "worst_gradient", "note")
MAX_CALL_MS = 1000.0
MAX_TWO_LAYOUTS_MS = 20.0  # longer calls run only in the layout that was faster at the size before
MAX_ORACLE_ELEMENTS = 2**24  # for a larger map the float64 oracle takes longer than everything else


def shapes(sweep: str, gpu: bool) -> list[tuple[int, Shape]]:
    """Return the points of a sweep, in growing order: the number that grows, and the shape.

    The numbers are powers of two; "size" has a few others, too.
    """
    if sweep == "size":
        sizes = [16, 32, 63, 64, 90, 128, 218, 256, 320, 512, 1024, 2048, 4096, 8192] if gpu else [8, 15, 16, 32, 64]
        return [(n, (2, 96, n, n) if gpu else (1, 32, n, n)) for n in sizes]
    if sweep == "channels":
        widths = [32, 64, 96, *(2**i for i in range(7, 18))] if gpu else [16, 32, 64]  # until memory runs out
        return [(n, (8, n, 64, 64) if gpu else (1, n, 16, 16)) for n in widths]
    numbers = [2**i for i in range(14)] if gpu else [1, 2, 4]  # until memory runs out
    return [(n, (n, 96, 128, 128) if gpu else (n, 32, 16, 16)) for n in numbers]


def names(config: table.BenchConfig) -> list[str]:
    """Return the mixers of a sweep, the paper-literal block last."""
    return [*(m for m in config.mixers if m != "identity"), LITERAL]


def run(
    config: table.BenchConfig, sweeps: Sequence[str], tick: Callable[[str], None] = lambda _: None
) -> Iterator[list[Row]]:
    """Yield the rows of all mixers, point by point, so that an interrupted sweep still compares them all.

    CHASM runs in the form that it chooses itself.

    Args:
        config: mixers, dtypes and modes to measure.
        sweeps: sweeps from `SWEEPS`.
        tick: called with the name of each row before it is measured.
    """
    for sweep in sweeps:
        lines = [_line(config, sweep, name, tick) for name in names(config)]
        for point in zip(*lines, strict=True):
            yield [row for rows in point for row in rows]


def total(config: table.BenchConfig, sweeps: Sequence[str]) -> int:
    """Return the number of rows, for a progress bar."""
    lines = len(names(config)) * len(config.dtypes) * len(config.modes)
    return lines * sum(len(shapes(sweep, config.device.type == "cuda")) for sweep in sweeps)


def _line(config: table.BenchConfig, sweep: str, name: str, tick: Callable[[str], None]) -> Iterator[list[Row]]:
    """Yield the rows of one mixer, point by point."""
    finished: set[tuple[str, str]] = set()  # (dtype, mode) that ran out of memory or time
    last: dict[tuple[str, str], tuple[int, float, str]] = {}
    compared: dict[tuple[str, str], Shape] = {}
    for n, shape in shapes(sweep, config.device.type == "cuda"):
        rows: list[Row] = []
        form = {"chasm": "auto", LITERAL: "eager"}.get(name, "-")
        make = partial(subjects.create, name, form, shape, config.device)
        kinds = list(dict.fromkeys(table.MODES[mode][0] for mode in config.modes))
        exact: dict[str, Any] = {}
        if torch.Size(shape).numel() <= MAX_ORACLE_ELEMENTS:
            literal = partial(subjects.create, LITERAL, "eager", shape, config.device)
            found = table.exact_or_reason(literal if name == "chasm" else make, kinds, shape, config.device)
            exact = {kind: values for kind, values in found.items() if not isinstance(values, str)}
            del found
        for dtype in config.dtypes:
            for mode in config.modes:
                tick(f"{sweep} {n} {dtype} {mode} {name}")
                kind, graph = table.MODES[mode]
                if (dtype, mode) in finished or (graph and name == LITERAL):
                    continue
                row: Row = {"sweep": sweep, "n": n, "shape": shape, "dtype": dtype, "mode": mode, "mixer": name}
                if not exact and (dtype, mode) not in compared:
                    rows.append(row | {"note": "never compared with float64"})
                    continue
                layouts: Iterable[str] = subjects.LAYOUTS
                if (dtype, mode) in last:
                    before, time_ms, layout = last[dtype, mode]
                    expected = expected_ms(sweep, n, before, time_ms)
                    if expected > MAX_CALL_MS:
                        finished.add((dtype, mode))
                        rows.append(row | {"note": "not run: a call would take over a second"})
                        continue
                    if expected > MAX_TWO_LAYOUTS_MS:
                        layouts = [layout]
                row |= table.measure(make, shape, dtype, mode, exact.get(kind, {}), config, layouts)
                if row.get("note") == "out of memory":
                    finished.add((dtype, mode))
                elif exact and "time_ms" in row:
                    compared[dtype, mode] = shape
                elif "time_ms" in row:
                    row["note"] = f"float64 compared at {'x'.join(map(str, compared[dtype, mode]))}"
                if "time_ms" in row:
                    last[dtype, mode] = n, row["time_ms"], row["layout"]
                rows.append(row)
        del exact  # free their memory for the other mixers
        table.free(config.device)
        yield rows


def expected_ms(sweep: str, n: int, before: int, time_ms: float) -> float:
    """Return an estimate of the time of a call, which grows with the pixels, with C, or with the batch.

    >>> expected_ms("size", 64, before=32, time_ms=10.0)
    40.0
    """
    return time_ms * (n / before) ** (2 if sweep == "size" else 1)


# --- slopes -----------------------------------------------------------------------------------------

SLOPES = titles("sweep", "dtype", "mode", "mixer", "slope", "range", "largest")


def slopes(rows: Sequence[Row]) -> list[Row]:
    """Fit the exponent p of time ~ n^p for each mixer, dtype and mode.

    Returns:
        One row per fit. It uses the larger half of the powers of two, and at least three of them.
    """
    fits = []
    for key in dict.fromkeys(_key(r) for r in rows):
        points = sorted((r["n"], r["time_ms"]) for r in rows if _key(r) == key and r.get("time_ms") is not None)
        doublings = [(n, t) for n, t in points if n & (n - 1) == 0]
        used = doublings[-max(3, len(doublings) // 2) :]
        if len(used) < 3:
            continue
        p = linear_regression([math.log(n) for n, _ in used], [math.log(t) for _, t in used]).slope
        row = dict(zip(("sweep", "dtype", "mode", "mixer"), key, strict=True))
        fits.append(row | {"slope": p, "range": f"{used[0][0]} to {used[-1][0]}", "largest": points[-1][0]})
    return fits


def _key(row: Row) -> tuple[str, str, str, str]:
    return row["sweep"], row["dtype"], row["mode"], row["mixer"]


# --- picture ----------------------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file that `chasm bench scaling` wrote.

    Raises:
        ValueError: if a column is missing.
    """
    with open(path, newline="") as f:
        reader = csv.DictReader(f)
        missing = {"sweep", "dtype", "mode", "mixer", "n", "time_ms"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: no column {sorted(missing)[0]!r}: give the CSV that `chasm bench scaling` wrote")
        return [
            {**row, "n": int(row["n"]), "time_ms": float(row["time_ms"]) if row["time_ms"] else None} for row in reader
        ]


def plot(rows: Sequence[Row], path: Path, where: str = "") -> None:
    """Draw time against size: a panel for each mode and dtype, a line for each mixer.

    Args:
        rows: rows of the sweep over sizes; others are ignored.
        path: picture to write; its suffix chooses the format.
        where: line below the picture that says where it was measured.

    Raises:
        ValueError: if no row of the sweep over sizes has a time.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [r for r in rows if r["sweep"] == "size" and r.get("time_ms") is not None]
    panels = list(dict.fromkeys((r["mode"], r["dtype"]) for r in drawn))
    if not panels:
        raise ValueError("nothing to draw: no row of the sweep over sizes has a time")
    figure = Figure(figsize=(5.2 * len(panels) + 1.8, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    mixers = sorted({r["mixer"] for r in drawn}, key=lambda m: (m != "chasm", m != LITERAL, m))
    markers = "os^vDPX*<"
    for axis, (mode, dtype) in zip(axes, panels, strict=True):
        for i, mixer in enumerate(mixers):
            mine = [r for r in drawn if (r["mixer"], r["mode"], r["dtype"]) == (mixer, mode, dtype)]
            points = sorted((r["n"], r["time_ms"]) for r in mine)
            if not points:
                continue
            label = {"chasm": "CHASM", LITERAL: "CHASM, paper-literal"}.get(mixer, mixer)
            style: dict[str, Any] = {"linewidth": 1.3, "markersize": 4, "alpha": 0.85, "zorder": 2}
            if mixer == "chasm":
                style = {"linewidth": 3.2, "markersize": 7, "color": "#c1121f", "zorder": 5}
            elif mixer == LITERAL:
                style |= {"color": "#c1121f", "linestyle": "--"}
            else:
                style |= {"color": f"C{i}" if i != 3 else "C8"}  # C3 is red, the colour of CHASM
            style |= {"label": label, "marker": markers[i % len(markers)]}
            axis.plot([n for n, _ in points], [t for _, t in points], **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = [n for n in sorted({r["n"] for r in drawn}) if n & (n - 1) == 0]
        axis.set_xticks(ticks, [str(n) for n in ticks])
        axis.minorticks_off()
        axis.set_xlabel("H = W")
        axis.set_title(f"{MODE_TITLES.get(mode, mode)}, {dtype}", fontsize=11)
        axis.grid(True, color="0.9")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylabel("ms per call")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=10)
    if where:
        figure.supxlabel(where, fontsize=8, color="0.4")
    write_atomic(path, lambda p: figure.savefig(p, format=path.suffix[1:] or "png", metadata={"Title": PLOT_TITLE}))


MODE_TITLES = {
    "core": "core forward",
    "core-graph": "core forward in a CUDA graph",
    "eval": "forward",
    "step": "forward + backward",
    "graph": "forward + backward in a CUDA graph",
}
