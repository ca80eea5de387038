"""The charts and pictures of a report, each as one `<img>` source: a data URI that needs no other file."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from chasm.studies.records import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHASM_COLOUR, INK, GREY = "#7a3e9d", "#1f2733", "#8a94a3"
VERDICTS = {"win": "#2e7d32", "loss": "#b3261e", "level": GREY, "too few cases": "#c5ccd6"}
_PALETTE = (
    "#1f77b4",
    "#d1662b",
    "#1b8a9e",
    "#c2a11c",
    "#5a9e3a",
    "#c0508a",
    "#7d5a3c",
    "#3b4cc0",
    "#008c6e",
    "#a04000",
)
_CLASS_COLOURS = ("#4477aa", "#66aa55", "#dd4433", "#ddaa33", "#aa3377")  # of a segmentation, from class 1 on
MAX_STRIP_LENGTH = 7  # pictures side by side


def colours(arms: Sequence[str]) -> dict[str, str]:
    """Return a colour for each of the methods of a report, the same in every chart."""
    fixed = {"baseline": "#3c4654", "wrapper": GREY, "chasm": CHASM_COLOUR}
    others = [a for a in arms if a not in fixed]
    return {a: fixed.get(a) or _PALETTE[others.index(a) % len(_PALETTE)] for a in arms}


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "chasm"  # the same numbers give the same file
    rcParams["axes.formatter.useoffset"] = False  # 12.915, not 0.005 with +1.291e1 in a corner
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def source(figure: "Figure", kind: str = "svg") -> str:
    """Return the figure as a data URI: charts as vectors, pictures as PNG."""
    return data_uri(encoded(figure, kind), kind)


def data_uri(content: bytes, kind: str) -> str:
    """Return the data URI of an SVG or PNG file."""
    return f"data:image/{'svg+xml' if kind == 'svg' else kind};base64,{base64.b64encode(content).decode()}"


def encoded(figure: "Figure", kind: str) -> bytes:
    """Return the content of an SVG, PDF or PNG file. The same numbers give the same bytes."""
    show_dollars(figure)
    buffer = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(buffer, format=kind, dpi=150, metadata=undated.get(kind))
    return buffer.getvalue()


def show_dollars(figure: "Figure") -> None:
    """Turn off math in every text that is no formula, because the name of a method or case may have a $ in it."""
    from matplotlib.mathtext import MathTextParser
    from matplotlib.text import Text

    parser = MathTextParser("path")
    for text in figure.findobj(Text):
        if "$" in text.get_text():
            try:
                for line in text.get_text().splitlines():
                    parser.parse(line)
            except ValueError:
                text.set_parse_math(False)


def axis_style(ax: Any, grid: Literal["x", "y", "both"] = "y") -> None:
    """Give a plot the look of the report: no frame, thin grid lines along `grid`."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(colors=INK, labelsize=9)
    ax.grid(axis=grid, color="#e6eaf0", lw=0.8)
    ax.set_axisbelow(True)


# --- charts -------------------------------------------------------------------------------------------------------


def forest(comparisons: Sequence[Comparison], labels: dict[str, str], unit: str) -> "Figure":
    """Draw paired differences with their intervals, one line each; filled where the interval excludes zero."""
    figure = new_figure(8.2, 0.95 + 0.30 * len(comparisons))
    ax = figure.add_subplot()
    for y, c in enumerate(reversed(comparisons)):
        colour = VERDICTS[c.verdict]
        decided = c.verdict in ("win", "loss")
        ax.plot((c.low, c.high), (y, y), color=colour, lw=2.2, solid_capstyle="round")
        ax.plot(c.mean, y, "o", ms=7, mfc=colour if decided else "white", mec=colour, mew=1.8)
        if c.paper is not None:
            ax.plot(c.paper, y, "D", ms=5, mfc="none", mec="#c2a11c", mew=1.4)
    if any(c.paper is not None for c in comparisons):
        ax.plot([], [], "D", ms=5, mfc="none", mec="#c2a11c", mew=1.4, label="printed in the paper")
        _legend(figure, 1)
    ax.axvline(0, color=INK, lw=1)
    ax.set_yticks(range(len(comparisons)), [labels[c.against] for c in reversed(comparisons)])
    ax.set_ylim(-0.6, len(comparisons) - 0.4)
    focus = labels[comparisons[0].arm]
    ax.set_xlabel(f"{focus} minus the other, {unit} (95 % interval)", fontsize=9.5)
    axis_style(ax, "x")
    return figure


def _legend(figure: "Figure", entries: int) -> None:
    figure.legend(loc="outside lower center", ncols=min(entries, 5), fontsize=8.5, frameon=False)


@dataclass
class Curve:
    """The losses and validation scores that a run logged."""

    arm: str
    seed: int
    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    val_steps: list[int] = field(default_factory=list)
    val: list[float] = field(default_factory=list)


def learning(curves: Sequence[Curve], labels: dict[str, str], metric: str) -> str:
    """Draw validation score and training loss over steps; seeds of a method share its colour, set by its label."""
    arms = list(dict.fromkeys(c.arm for c in curves))
    tints = colours(list(labels))
    figure = new_figure(9.2, 3.7)
    left, right = figure.subplots(1, 2)
    for curve in curves:
        style = {"color": tints[curve.arm], "lw": 2.2 if curve.arm == "chasm" else 1.3}
        first = curve is next(c for c in curves if c.arm == curve.arm)
        left.plot(curve.val_steps, curve.val, **style, label=labels[curve.arm] if first else None)
        right.plot(curve.steps, _smooth(curve.loss), **style)
    values = [v for c in curves for v in c.val[len(c.val) // 5 :]]  # the first steps would squeeze all that follows
    if values:
        pad = 0.08 * (max(values) - min(values)) or 0.1
        left.set_ylim(min(values) - pad, max(values) + pad)
    left.set_ylabel(f"validation {metric}", fontsize=9.5)
    right.set_ylabel("training loss", fontsize=9.5)
    losses = [v for c in curves for v in c.loss if v > 0]
    if losses and max(losses) > 10 * min(losses):
        right.set_yscale("log")
    for ax in (left, right):
        ax.set_xlabel("step", fontsize=9.5)
        axis_style(ax)
    _legend(figure, len(arms))
    return source(figure)


def _smooth(values: Sequence[float]) -> np.ndarray:
    """Return the running mean over about a twentieth of the run."""
    x, n = np.asarray(values, dtype=float), max(len(values) // 20, 1)
    if n == 1:
        return x
    total = np.cumsum(np.insert(x, 0, 0.0))
    first = np.maximum(np.arange(len(x)) - n + 1, 0)
    return np.asarray((total[1:] - total[first]) / (np.arange(len(x)) - first + 1))


# --- pictures -----------------------------------------------------------------------------------------------------


def panel(
    target: np.ndarray, reference: tuple[str, np.ndarray], outputs: dict[str, np.ndarray], notes: dict[str, str]
) -> tuple[str, bool]:
    """Draw target, reference and each method, with a zoomed box and the error below.

    Images are (H, W) or (3, H, W) in [0, 1]. A target of integers is a label map, which is shown over the reference.
    The box is where the reference errs most, so that no method's output decides its place.

    Returns:
        The picture as a data URI, and whether it shows labels.
    """
    labelled = target.dtype.kind in "ui"
    name, plain = reference[0], as_image(reference[1])
    if labelled:
        truth, shown = target, {"target": _overlay(plain, target)}
        errors = {label: (y != truth).astype(float) for label, y in outputs.items()}
        shown |= {name: plain} | {label: _overlay(plain, y) for label, y in outputs.items()}
        where, top = truth > 0, 1.0
    else:
        image = as_image(target)
        shown = {"target": image, name: plain} | {label: as_image(y) for label, y in outputs.items()}
        errors = {label: error_map(y, image) for label, y in shown.items() if label != "target"}
        own = [np.percentile(errors[label], 99.7) for label in outputs] or [np.percentile(errors[name], 99.7)]
        where, top = errors[name], max(float(max(own)), 1e-3)
    box = find_box(np.asarray(where, dtype=float))
    per_strip = max(
        6, math.ceil(len(shown) / math.ceil(len(shown) / MAX_STRIP_LENGTH))
    )  # strips of nearly equal length
    strips = [list(shown)[i : i + per_strip] for i in range(0, len(shown), per_strip)]
    h, w = plain.shape[:2]
    cell = 9.3 / per_strip
    titles = {label: fill(label, max(int(cell / 0.075), 8)) for label in shown}  # about 0.075 inches a letter
    lines = sum(max(titles[label].count("\n") for label in members) for members in strips)  # beyond the first
    figure = new_figure(9.4, len(strips) * cell * (2 * h / w + 1 + 0.30) + 0.16 * lines)
    parts: Any = figure.subfigures(len(strips), 1, squeeze=False)[:, 0]
    for part, members in zip(parts, strips, strict=True):
        axes = part.subplots(3, per_strip, squeeze=False, height_ratios=[h / w, 1, h / w])
        for column, label in zip(axes.T, [*members, *[None] * (per_strip - len(members))], strict=True):
            for ax in column:
                ax.set_axis_off()
            if label is not None:
                _column(column, shown[label], errors.get(label), box, top)
                if label == "target" and labelled:
                    _class_legend(column[2], max(int(m.max()) for m in (target, *outputs.values())))
                elif label == "target":
                    _scale(column[2], top)
                weight = "bold" if label in ("target", "CHASM") else "normal"
                column[0].set_title(
                    f"{titles[label]}\n{notes.get(label, '')}", fontsize=8.5, weight=weight, color=INK, linespacing=1.3
                )
    return source(figure, "png"), labelled


def _column(axes: Any, image: np.ndarray, error: np.ndarray | None, box: tuple[int, int, int], top: float) -> None:
    from matplotlib.patches import Rectangle

    y, x, n = box
    grey: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    axes[0].imshow(image, **grey)
    axes[0].add_patch(Rectangle((x - 0.5, y - 0.5), n, n, fill=False, ec="#ffd400", lw=1.1))
    axes[1].imshow(image[y : y + n, x : x + n], **grey)
    axes[1].add_patch(Rectangle((-0.5, -0.5), n, n, fill=False, ec="#ffd400", lw=2.2))
    if error is not None:
        axes[2].imshow(error, cmap="inferno", vmin=0, vmax=top, interpolation="nearest")


def _scale(ax: Any, top: float) -> None:
    """Draw the colours of the error, in the place that the target leaves empty."""
    bar = ax.inset_axes((0.1, 0.45, 0.8, 0.1))
    bar.imshow(np.linspace(0, 1, 128)[None], cmap="inferno", aspect="auto", extent=(0, top, 0, 1))
    bar.set_yticks([])
    bar.set_xticks([0, top], ["0", f"{top:.2g}"], fontsize=8)
    bar.set_title("absolute error", fontsize=8, color=INK)


def _class_legend(ax: Any, classes: int) -> None:
    """Draw the colours of the classes, in the place that the target leaves empty."""
    from matplotlib.patches import Patch

    names = [(f"class {value}", _class_colour(value)) for value in range(1, classes + 1)]
    handles = [Patch(color=colour, label=name) for name, colour in names]
    ax.legend(handles=handles, loc="center", fontsize=8, frameon=False, labelcolor=INK)


def _class_colour(value: int) -> str:
    return _CLASS_COLOURS[(value - 1) % len(_CLASS_COLOURS)]


def as_image(x: np.ndarray) -> np.ndarray:
    """Return an image (H, W) or (3, H, W) as imshow takes it, in [0, 1]."""
    x = np.clip(np.asarray(x, dtype=np.float32), 0, 1)
    return np.asarray(x.transpose(1, 2, 0)) if x.ndim == 3 else x


def error_map(image: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the absolute error of each pixel, mean over colours."""
    error = np.abs(image - target)
    return np.asarray(error.mean(-1) if error.ndim == 3 else error)


def _overlay(image: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return a grey image with the classes in colour over it."""
    from matplotlib.colors import to_rgb

    rgb = np.repeat(image[..., None], 3, axis=-1) if image.ndim == 2 else image.copy()
    for value in range(1, int(labels.max()) + 1):
        inside = labels == value
        rgb[inside] = 0.45 * rgb[inside] + 0.55 * np.array(to_rgb(_class_colour(value)))
    return rgb


def find_box(weight: np.ndarray) -> tuple[int, int, int]:
    """Return top, left and side of the square, 3/10 of the image, that holds the most weight."""
    n = max(int(0.3 * min(weight.shape)), 1)
    total = np.pad(weight, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    sums = total[n:, n:] - total[:-n, n:] - total[n:, :-n] + total[:-n, :-n]
    y, x = np.unravel_index(int(sums.argmax()), sums.shape)
    return int(y), int(x), n
