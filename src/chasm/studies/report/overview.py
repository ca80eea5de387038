"""The overview figure of the method, drawn from the mathematics.

(a) Every Fourier bin has its own channel operator, which turns the unit circle into an ellipse with other axes.
(b) All bins share one basis U and differ in their positive gains: the axes stay, and only their lengths change.
(c) The mixer block: height pass, width pass, local refinement, 1x1 fusion, residual.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = ("k = 0", "k = 1", "k = 2", "k = K–1")
COLOURS = ("#3b4cc0", "#1b8a9e", "#5a9e3a", "#d1662b")  # low to high frequency
INK, SOFT, FAINT, PANEL, ACCENT = "#1f2733", "#5d6775", "#c5ccd6", "#f5f7fa", "#7a3e9d"
WIDTH, HEIGHT = 120.0, 70.0  # drawing units; 10 of them are an inch


def overview_figure() -> "Figure":
    """Return the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 10, HEIGHT / 10), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
    ax.set_axis_off()
    _independent(ax)
    _shared(ax)
    _block(ax)
    return figure


# --- (a) and (b): operators over frequency ----------------------------------------------------------------------


def _independent(ax: Any) -> None:
    _panel(ax, 1, 33, 44.5, 36, "a", "An operator per frequency")
    rng = np.random.default_rng(5)
    for i, (name, colour) in enumerate(zip(BINS, COLOURS, strict=True)):
        x = 7.2 + 10.7 * i
        _ellipse(ax, x, 57.6, np.deg2rad((12, 68, 112, 155)[i]), (4.4, 2.0), colour)
        root = rng.normal(size=(6, 6))
        _matrix(ax, x - 4.2, 42.7, 8.4, root @ root.T, colour)
        _text(ax, x, 40.3, name, 12.5, colour, weight="bold")
    _text(ax, 23.2, 36, "$M(k)$ has its own directions at every $k$", 14)


def _shared(ax: Any) -> None:
    _panel(ax, 47.5, 33, 71.5, 36, "b", "CHASM: one basis, a gain per direction and frequency")
    basis, gains = _rotation(6, seed=11), _gains(6)
    radii = ((4.5, 1.5), (4.1, 2.9), (2.4, 4.0), (1.4, 4.5))
    for i, (name, colour) in enumerate(zip(BINS, COLOURS, strict=True)):
        x = 67.3 + 10.7 * i
        _ellipse(ax, x, 57.6, np.deg2rad(32), radii[i], colour, shared=True)
        _bars(ax, x - 4.2, 42.7, 8.4, gains[i], colour)
        _text(ax, x, 40.3, name, 12.5, colour, weight="bold")
    for x, values, name in ((50.0, basis, "$U$"), (107.8, basis.T, r"$U^{\mathsf{T}}$")):
        _matrix(ax, x, 42.7, 8.4, values, ACCENT, signed=True)
        _text(ax, x + 4.2, 40.2, name, 15, ACCENT)
    ax.plot((61.0, 105.2), (46.9, 46.9), "o", color=INK, ms=4)
    _text(ax, 54.2, 57.6, "the same\ndirections\nat every $k$", 12.5, ACCENT)
    _text(ax, 112, 57.6, "only their\ngains\n$\\lambda_k$ differ", 12.5, SOFT)
    formula = (
        r"$M(k) \;=\; U\,\mathrm{diag}(\lambda_k)\,U^{\mathsf{T}}, \qquad U^{\mathsf{T}}U = I, \qquad \lambda_k > 0$"
    )
    _text(ax, 83.2, 36, formula, 15)


def _ellipse(
    ax: Any, x: float, y: float, angle: float, radii: tuple[float, float], colour: str, shared: bool = False
) -> None:
    """The image of the unit circle (dashed) under a symmetric operator with these eigenvectors and eigenvalues."""
    from matplotlib.patches import Circle, Ellipse

    size = {"width": 2 * radii[0], "height": 2 * radii[1], "angle": np.rad2deg(angle)}
    ax.add_patch(Circle((x, y), 2.6, fill=False, ec=FAINT, lw=1.3, ls=(0, (3, 2))))
    ax.add_patch(Ellipse((x, y), **size, fc=colour, alpha=0.18, ec="none"))
    ax.add_patch(Ellipse((x, y), **size, fill=False, ec=colour, lw=1.8))
    for direction, radius in ((angle, radii[0]), (angle + np.pi / 2, radii[1])):
        step = np.array([np.cos(direction), np.sin(direction)])
        if shared:  # the directions run through every picture at the same angle
            ax.plot(*zip((x, y) - 5.1 * step, (x, y) + 5.1 * step, strict=True), color=ACCENT, lw=1.2, ls=(0, (4, 2)))
        _arrow(ax, (x, y), (x, y) + radius * step, colour, 2.0, 0.22)


def _matrix(ax: Any, x: float, y: float, side: float, values: np.ndarray, colour: str, signed: bool = False) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    shades = LinearSegmentedColormap.from_list("shades", ["#f2b134", "white", colour] if signed else ["white", colour])
    top, cell = float(np.abs(values).max()), side / len(values)
    for (r, c), v in np.ndenumerate(values):
        shade = shades((v / top + 1) / 2 if signed else abs(v) / top)
        ax.add_patch(Rectangle((x + c * cell, y + side - (r + 1) * cell), cell, cell, fc=shade, ec="white", lw=1.0))
    ax.add_patch(Rectangle((x, y), side, side, fill=False, ec=colour, lw=1.6))


def _bars(ax: Any, x: float, y: float, side: float, gains: np.ndarray, colour: str) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), side, side, fc="white", ec=colour, lw=1.6))
    step = side / (len(gains) + 0.6)
    for j, gain in enumerate(gains):
        ax.add_patch(Rectangle((x + step * (j + 0.5), y), step * 0.68, 0.88 * side * gain, fc=colour, ec="none"))


def _rotation(n: int, seed: int) -> np.ndarray:
    """A random orthogonal matrix, not far from the identity: the Cayley transform of a skew-symmetric one."""
    A = np.tril(np.random.default_rng(seed).normal(size=(n, n)) * 0.35, -1)
    A = A - A.T
    return np.asarray(np.linalg.solve(np.eye(n) - A, np.eye(n) + A))


def _gains(channels: int) -> np.ndarray:
    """(bins, channels) in (0, 1]: some directions pass low frequencies, some high ones, some a band."""
    k = np.linspace(0, 1, len(BINS))[:, None]
    centre = np.array([0.0, 0.95, 0.35, 1.1, 0.05, 0.65])[:channels]
    return np.asarray(0.14 + 0.82 * np.exp(-(((k - centre) / 0.45) ** 2)))


# --- (c): the block -----------------------------------------------------------------------------------------------

STAGES = (  # what it sees of the map, name, formula, left edge, width, fill, edge
    (
        "column",
        "Height pass",
        r"rFFT$_H \rightarrow M^{\,CH} \rightarrow$ rFFT$_H^{-1}$",
        16.4,
        23.0,
        "#f1e9f6",
        ACCENT,
    ),
    ("row", "Width pass", r"rFFT$_W \rightarrow M^{\,CW} \rightarrow$ rFFT$_W^{-1}$", 42.0, 23.0, "#f1e9f6", ACCENT),
    ("patch", "Local refinement", "depthwise 3×3, GELU", 68.8, 20.6, "white", SOFT),
    ("pixel", "Fusion", "1×1 convolution", 91.6, 16.0, "white", SOFT),
)


def _block(ax: Any) -> None:
    from matplotlib.patches import Circle

    _panel(ax, 1, 1, 118, 30.2, "c", "The mixer block: a drop-in for any (B, C, H, W)")
    y, plus, tap = 15.0, 111.6, 13.4
    _frame(ax, 15.4, 5.8, 50.6, 19.6, "none", ACCENT, dashed=True)
    _text(
        ax,
        40.7,
        25.4,
        r" spectral core $\Phi_{CW} \circ \Phi_{CH}$ ",
        13,
        ACCENT,
        bbox={"fc": PANEL, "ec": "none", "pad": 1},
    )
    _cube(ax, 3.4, y - 3.6, "all", SOFT)
    _text(ax, 2.4, y - 0.7, "$H$", 12, SOFT)
    _text(ax, 6.3, y - 5.0, "$W$", 12, SOFT)
    _text(ax, 11.2, y - 3.6, "$C$", 12, SOFT)
    _text(ax, 6.3, y - 0.7, "$X$", 17)
    _arrow(ax, (11.9, y), (16.7, y))
    ends = [*(left + 0.2 for *_, left, _, _, _ in STAGES[1:]), plus - 1.55]
    for (icon, name, formula, left, width, fill, edge), end in zip(STAGES, ends, strict=True):
        _frame(ax, left, 7.2, width, 16.4, fill, edge)
        _cube(ax, left + width / 2 - 4.2, y - 0.3, icon, edge)
        _text(ax, left + width / 2, y - 3.0, name, 13.5, weight="bold")
        _text(ax, left + width / 2, y - 5.8, formula, 12)
        _arrow(ax, (left + width, y), (end, y))
    ax.add_patch(Circle((plus, y), 1.5, fc="white", ec=INK, lw=1.8))
    ax.plot((plus - 0.8, plus + 0.8), (y, y), color=INK, lw=1.8)
    ax.plot((plus, plus), (y - 0.8, y + 0.8), color=INK, lw=1.8)
    _arrow(ax, (plus + 1.5, y), (plus + 4.0, y))
    _text(ax, plus + 5.4, y, "$Y$", 17)
    ax.plot((tap, tap, plus), (y, 3.4, 3.4), color=INK, lw=1.8, solid_joinstyle="round")  # the residual
    _arrow(ax, (plus, 3.4), (plus, y - 1.55))
    formula = r"  $Y \;=\; X + P_{\mathrm{fuse}}\,(\mathcal{L}\,(\Phi_{CW}\,(\Phi_{CH}\,(X))))$  "
    _text(ax, (tap + plus) / 2, 3.4, formula, 14.5, bbox={"fc": PANEL, "ec": "none", "pad": 1.5})


def _cube(ax: Any, x: float, y: float, part: str, colour: str) -> None:
    """A feature map as a box, height up, width to the right, channels into the depth; and the part a stage mixes."""
    from matplotlib.patches import Polygon

    side, depth = 5.8, np.array([2.6, 1.9])

    def at(u: float, v: float, d: float) -> np.ndarray:
        return np.array([x + side * u, y + side * v]) + depth * d

    def face(corners: list[tuple[float, float, float]], fc: str, ec: str, lw: float, alpha: float = 1) -> None:
        ax.add_patch(Polygon([at(*c) for c in corners], fc=fc, ec=ec, lw=lw, alpha=alpha, joinstyle="round"))

    def box(u0: float, u1: float, v0: float, v1: float, fc: str, ec: str, lw: float, shade: float = 1) -> None:
        """Right, top and front face of the pixels u0..u1, v0..v1 over all channels."""
        face([(u1, v0, 0), (u1, v0, 1), (u1, v1, 1), (u1, v1, 0)], fc, ec, lw, shade)
        face([(u0, v1, 0), (u1, v1, 0), (u1, v1, 1), (u0, v1, 1)], fc, ec, lw, shade)
        face([(u0, v0, 0), (u1, v0, 0), (u1, v1, 0), (u0, v1, 0)], fc, ec, lw)

    box(0, 1, 0, 1, "white", "none", 0)
    for corner in ((1, 0, 1), (0, 1, 1), (0, 0, 0)):  # hidden edges meet at the far corner
        ax.plot(*zip(at(0, 0, 1), at(*corner), strict=True), color=FAINT, lw=1, ls=(0, (2, 1.5)))
    if part == "column":
        box(0.40, 0.60, 0, 1, colour, "white", 0.8, 0.65)
    elif part == "row":
        box(0, 1, 0.40, 0.60, colour, "white", 0.8, 0.65)
    elif part == "patch":
        for u, v in np.ndindex(3, 3):
            u0, v0 = 0.2 + 0.2 * u, 0.2 + 0.2 * v
            face([(u0, v0, 0), (u0 + 0.2, v0, 0), (u0 + 0.2, v0 + 0.2, 0), (u0, v0 + 0.2, 0)], colour, "white", 1)
    elif part == "pixel":
        box(0.40, 0.60, 0.40, 0.60, colour, "white", 0.8, 0.65)
    for *edge, last in (  # visible edges over everything
        ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 0)),
        ((0, 1, 0), (0, 1, 1), (1, 1, 1), (1, 0, 1), (1, 0, 0)),
        ((1, 1, 0), (1, 1, 1)),
    ):
        ax.plot(*zip(*(at(*c) for c in (*edge, last)), strict=True), color=SOFT, lw=1.3, solid_joinstyle="round")


# --- shared pieces ------------------------------------------------------------------------------------------------


def _text(ax: Any, x: float, y: float, text: str, size: float, colour: str = INK, **options: Any) -> None:
    ax.text(x, y, text, ha="center", va="center", fontsize=size, color=colour, linespacing=1.25, **options)


def _frame(
    ax: Any, x: float, y: float, width: float, height: float, fill: str, edge: str, dashed: bool = False
) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=1.3"
    line = (0, (4, 3)) if dashed else "-"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=fill, ec=edge, lw=1.4, ls=line))


def _panel(ax: Any, x: float, y: float, width: float, height: float, letter: str, title: str) -> None:
    _frame(ax, x, y, width, height, PANEL, "#e1e6ed")
    ax.text(x + 1.6, y + height - 2.9, f"({letter})", va="center", fontsize=15, weight="bold", color=SOFT)
    ax.text(x + 5.8, y + height - 2.9, title, va="center", fontsize=15, weight="bold", color=INK)


def _arrow(ax: Any, start: Any, end: Any, colour: str = INK, width: float = 1.8, head: float = 0.3) -> None:
    style = f"-|>,head_width={head},head_length={1.7 * head}"
    ax.annotate(
        "", end, start, arrowprops={"arrowstyle": style, "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0}
    )
