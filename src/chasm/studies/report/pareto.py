"""Score against cost with the Pareto front: the methods that no other beats in one without losing in the other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from chasm.studies.report.figures import GREY, INK, axis_style, colours, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A label goes to the first free place this many points away from its marker, in one of these directions.
DISTANCES = (9, 16, 26, 38, 52, 68, 86, 106, 130)
DIRECTIONS = ((1, 0), (-1, 0), (0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7), (0, 1), (0, -1))
MAX_DEPTH = 4  # scores further below the best than 4 times the median's distance are drawn at the lower edge


@dataclass(frozen=True)
class Point:
    """One method."""

    arm: str
    score: float
    slot_numbers: float | None  # real numbers in the slots
    step_seconds: float | None  # of a training step


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return which of some (cost, score) are on the Pareto front, by rising cost.

    A point is on it if every other point costs more or scores less. Of equal points only the first is on it.

    >>> pareto_front([(2, 30.0), (1, 29.0), (3, 29.5), (0, 28.0)])
    [3, 1, 0]
    """
    front: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front


def pareto_figure(points: Sequence[Point], labels: dict[str, str], metric: str) -> "Figure":
    """Draw score against the real numbers in the slots, and against the time of a training step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = new_figure(9.2, 4.6)
    FigureCanvasAgg(figure)  # knows how large a text is
    axes = figure.subplots(1, 2, sharey=True)
    scored = [p for p in points if math.isfinite(p.score)]
    floor = _floor([p.score for p in scored])
    for ax, cost, scale, title in (
        (axes[0], "slot_numbers", 1e3, "real numbers in the slots, thousands"),
        (axes[1], "step_seconds", 1e-3, "time of a training step, ms"),
    ):
        here = [(p, getattr(p, cost) / scale) for p in scored if getattr(p, cost) is not None]
        _panel(ax, here, labels, floor)
        ax.set_xlabel(title, fontsize=9.5)
    axes[0].set_ylabel(metric, fontsize=9.5)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # labels must not move what they were placed around
    for ax in axes:
        _place_labels(ax)
    return figure


def _floor(scores: Sequence[float]) -> float:
    """Return the score below which methods are drawn at the lower edge, to leave room for the others."""
    best, median = max(scores, default=0.0), sorted(scores)[len(scores) // 2] if scores else 0.0
    floor = best - MAX_DEPTH * (best - median)
    return floor if best > median else -math.inf


def _panel(ax: Any, points: Sequence[tuple[Point, float]], labels: dict[str, str], floor: float) -> None:
    tints = colours(list(labels))
    front = pareto_front([(cost, p.score) for p, cost in points])
    if front:
        x, y = [points[i][1] for i in front], [max(points[i][0].score, floor) for i in front]
        x, y = [*x, max(cost for _, cost in points)], [*y, y[-1]]
        ax.plot(x, y, drawstyle="steps-post", color=GREY, lw=1.4, zorder=1.5, label="Pareto front")
    for i, (p, cost) in enumerate(points):
        marker, size = ("*", 15) if p.arm == "chasm" else ("osD^PX<>hp"[list(labels).index(p.arm) % 10], 8)
        low = p.score < floor
        ax.plot(
            cost,
            floor if low else p.score,
            "v" if low else marker,
            color=tints[p.arm],
            ms=size,
            mec=INK if i in front else "white",
            mew=0.8,
            zorder=3 if p.arm == "chasm" else 2,
            label=f"{labels[p.arm]} {p.score:.1f}" if low else labels[p.arm],
        )
    _logarithmic(ax, [cost for _, cost in points])
    ax.margins(x=0.10, y=0.14)
    axis_style(ax, "both")


def _logarithmic(ax: Any, costs: Sequence[float]) -> None:
    """Make the cost axis logarithmic where costs spread widely; a cost of zero keeps a place at its left end."""
    some = [cost for cost in costs if cost > 0]
    if not some or max(some) <= 30 * min(some):
        return
    ax.set_xscale("symlog", linthresh=min(some), linscale=0.5)
    decades = range(math.floor(math.log10(min(some))), math.ceil(math.log10(max(some))) + 1)
    steps = (1,) if len(decades) > 4 else (1, 3)
    ticks = [step * 10.0**d for d in decades for step in steps if min(some) <= step * 10.0**d <= max(some)]
    ticks = [0.0] * (min(costs) == 0) + ticks
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()


def _place_labels(ax: Any) -> None:
    """Write the name of each marker where it covers neither a marker nor another name."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    renderer = ax.figure.canvas.get_renderer()
    markers = [line for line in ax.get_lines() if line.get_drawstyle() == "default"]
    markers.sort(key=lambda line: line.get_marker() != "*")  # CHASM gets the first place
    front = [box for line in ax.get_lines() if line not in markers for box in _along(ax, line)]
    at = [ax.transData.transform(line.get_xydata()[0]) for line in markers]
    pixels = ax.figure.dpi / 72
    radii = [line.get_markersize() * pixels / 2 for line in markers]
    occupied = [Bbox([[x - r, y - r], [x + r, y + r]]) for (x, y), r in zip(at, radii, strict=True)]
    inside = ax.get_window_extent(renderer)
    for line, (x, y) in zip(markers, at, strict=True):
        text = ax.annotate(
            line.get_label(),
            line.get_xydata()[0],
            (0, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
            weight="bold" if line.get_marker() == "*" else "normal",
            in_layout=False,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            parse_math=False,
        )
        best = math.inf
        for distance, (right, up) in product(DISTANCES, DIRECTIONS):
            align = "left" if right > 0 else "right" if right < 0 else "center"
            text.set(ha=align, position=(distance * right, distance * up))
            box = text.get_window_extent(renderer)
            outside = not (inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1))
            covered = 100 * outside + sum(box.overlaps(other) for other in occupied)
            covered += 0.1 * (distance < DISTANCES[2] and any(box.overlaps(other) for other in front))
            if covered < best:
                best, chosen = covered, (align, text.get_position(), box)
            if covered == 0:
                break
        align, offset, box = chosen
        text.set(ha=align, position=offset)
        occupied.append(box)
        if math.hypot(*offset) > DISTANCES[1]:
            _leader(ax, (x, y), box)


def _along(ax: Any, line: Any) -> list[Any]:
    """Return thin boxes that cover a line of steps."""
    from matplotlib.transforms import Bbox

    corners = ax.transData.transform(line.get_xydata())
    boxes = []
    for (x0, y0), (x1, y1) in pairwise(corners):
        boxes += [Bbox([[x0, y0 - 1], [x1, y0 + 1]]), Bbox([[x1 - 1, min(y0, y1)], [x1 + 1, max(y0, y1)]])]
    return boxes


def _leader(ax: Any, marker: tuple[float, float], box: Any) -> None:
    """Draw a line from a marker to a name that is far away."""
    near = (min(max(marker[0], box.x0), box.x1), min(max(marker[1], box.y0), box.y1))
    ends = ax.transData.inverted().transform([marker, near])
    style = {"arrowstyle": "-", "color": GREY, "lw": 0.6, "shrinkA": 0, "shrinkB": 4}
    ax.annotate("", *ends, zorder=1.2, arrowprops=style)
