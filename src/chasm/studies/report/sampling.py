"""The section about sampling: CHASM's gain over the strongest rival against the coherence of the mask."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from chasm.studies.comparisons import FOCUS
from chasm.studies.factors import RIVALS
from chasm.studies.records import Comparison, Results
from chasm.studies.report import figures, text
from chasm.studies.report.elements import Picture, Section, Table, table_row, verdict_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, str, Comparison]  # coherence, setting, and CHASM's gain
MIN_MASKS = 3  # fewer do not show a trend


def sampling_section(results: Results) -> Section | None:
    """Return CHASM's gain for every mask of a host, the most coherent one first; None with too few masks."""
    if results.is_cost:
        return None
    section, rows = Section("Gain against coherence"), []
    for host, label in results.hosts.items():
        here = [p for s, h in results.places() if h == host and (p := _point(results, s, host)) is not None]
        here.sort(key=lambda point: -point[0])
        if len({coherence for coherence, *_ in here}) < MIN_MASKS:
            continue
        section.text.append(_trend(here, label))
        caption = f"{label}: CHASM's gain over the strongest rival, with its 95 % interval, for every mask."
        section.items.append(Picture(figures.source(scatter(results, here)), "gain against coherence", caption))
        for coherence, setting, gain in here:
            names = [results.place_name(setting, host), f"{coherence:.3f}", results.arms[gain.against].label]
            difference = verdict_cell(f"{text.interval(gain, gain.metric)} {gain.verdict}", gain.verdict)
            rows.append(table_row(*names, difference))
    if not rows:
        return None
    note = (
        "The coherence is the largest side lobe of the mask's point spread function, from 0 to 1. The gain is over the "
        "rival with the highest test mean under that mask. The paper claims that CHASM gains most under coherent masks."
    )
    columns = ["setting", "coherence", "strongest rival", "CHASM's gain"]
    section.items.append(Table("", columns, rows, note))
    return section


def _trend(points: Sequence[Point], label: str) -> str:
    """Say whether the gain rises with the coherence, by the correlation of their ranks."""
    value = rank_correlation([c for c, *_ in points], [gain.mean for *_, gain in points])
    return (
        f"{label}: the rank correlation of gain and coherence over {len(points)} masks is {value:+.2f}. It is 1 if the "
        "gain rises with the coherence from mask to mask, as the paper claims, 0 if the two are unrelated, and -1 if "
        "the gain falls."
    )


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's correlation; equal values share their mean rank. 0 if all values of one list are equal.

    >>> rank_correlation([0.1, 0.2, 0.7], [3, 4, 5])
    1.0
    """
    x, y = (np.unique(v, return_inverse=True, return_counts=True) for v in (a, b))
    ranks = [(counts.cumsum() - (counts + 1) / 2)[inverse] for _, inverse, counts in (x, y)]
    centred = [rank - rank.mean() for rank in ranks]
    size = float(np.linalg.norm(centred[0]) * np.linalg.norm(centred[1]))
    return round(float(centred[0] @ centred[1]) / size, 12) if size else 0.0


def scatter(results: Results, points: Sequence[Point]) -> "Figure":
    """Draw gains with their intervals over the coherence of the masks."""
    figure = figures.new_figure(8.2, 3.6)
    ax = figure.add_subplot()
    common = results.settings[points[0][1]].title.partition(",")[0]
    for coherence, setting, gain in points:
        ax.plot((coherence, coherence), (gain.low, gain.high), color=figures.CHASM_COLOUR, lw=1.6)
        ax.plot(coherence, gain.mean, "o", color=figures.CHASM_COLOUR, ms=6)
        name = results.settings[setting].title.removeprefix(common).strip(", ") or results.settings[setting].mask
        ax.annotate(
            str(name), (coherence, gain.mean), xytext=(5, 3), textcoords="offset points", fontsize=7.5, rotation=30
        )
    ax.axhline(0, color=figures.INK, lw=1)
    ax.set_xlabel("coherence of the mask", fontsize=9.5)
    ax.set_ylabel(f"gain, {text.metric_name(points[0][2].metric)}", fontsize=9.5)
    figures.axis_style(ax, "both")
    return figure


def _point(results: Results, setting: str, host: str) -> Point | None:
    """Return the coherence of a mask and CHASM's gain over the strongest rival; None if either is not known."""
    rows = results.rows_of(setting, host)
    mask = results.runs_of(rows[0])[0].result.task.get("mask") or {}
    rivals = [row for row in rows if row.arm in RIVALS]
    if not rivals or mask.get("coherence") is None:
        return None
    metric = results.metrics_of(setting, rivals)[0]
    strongest = max(rivals, key=lambda row: row.scores[metric].mean)
    pairs = results.comparisons_of(setting, host, metric)
    gain = next((c for c in pairs if (c.arm, c.against) == (FOCUS, strongest.arm)), None)
    return None if gain is None else (mask["coherence"], setting, gain)
