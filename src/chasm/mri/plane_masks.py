"""Sampling masks that keep single points of a plane, as a 3-D scan does across its readout.

With H x W points and acceleration R every kind keeps the round(H W / R) points of its budget: first a block of
round(H f) x round(W f) points in the centre, f = 0.32 / R unless given, then

- ``poisson-2d``: points drawn at random, no two of them outside the centre nearer than a distance, which is the largest
  that leaves room for the budget (Poisson disc).
- ``gaussian-2d``: points drawn by a Gaussian density around the centre, sigma = H / 6 and W / 6.
- ``radial-2d``: the points nearest to lines through the centre, each turned by the golden angle against the one before.
  The seed draws the first angle, and lines are added while the budget lasts.

>>> mask = create_plane_mask("poisson-2d", (64, 48), acceleration=4)
>>> print(mask)
poisson-2d mask: 768 of 64 x 48 points, really x4.00 (nominal x4), centre 5 x 4, seed 4
>>> mask.tensor().shape
torch.Size([1, 1, 64, 48])
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chasm.common.registry import suggest

PLANE_KINDS = ("poisson-2d", "gaussian-2d", "radial-2d")
GOLDEN_ANGLE = math.pi * (math.sqrt(5) - 1) / 2  # golden angle of lines, which look the same after half a turn
Seed = int | tuple[int, ...]  # a tuple: fastMRI seeds with the character codes of the file name


@dataclass(frozen=True, slots=True, eq=False)
class PlaneMask:
    """The points that are kept, and how they were chosen."""

    kind: str
    array: np.ndarray = field(repr=False)  # (H, W) bool
    block: tuple[int, int]  # rows and columns of the fully sampled centre
    nominal: float
    seed: Seed

    @property
    def points(self) -> int:
        """The number of kept points."""
        return int(self.array.sum())

    @property
    def acceleration(self) -> float:
        """The acceleration that the mask really has."""
        return self.array.size / self.points

    @property
    def coherence(self) -> float:
        """The largest side lobe of the point spread function, as `Mask.coherence`: 0 to 1."""
        return side_lobe(self.array)

    @property
    def center(self) -> tuple[int, int]:
        """First column, and column after the last, of the largest fully sampled square in the centre."""
        side, width = min(self.block), self.array.shape[1]
        first = (width - side + 1) // 2
        return first, first + side

    @property
    def kept(self) -> str:
        """The kept points, in words."""
        height, width = self.array.shape
        return f"{self.points} of {height} x {width} points"

    def tensor(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
        """Return (1, 1, H, W), ones where kept."""
        return torch.from_numpy(self.array).to(device, dtype)[None, None]

    def report(self) -> dict[str, Any]:
        """Return the facts about the mask that belong beside a result."""
        return {
            "kind": self.kind,
            "size": list(self.array.shape),
            "points": self.points,
            "acceleration": round(self.acceleration, 4),
            "coherence": round(self.coherence, 4),
            "nominal": self.nominal,
            "center_size": list(self.block),
            "seed": self.seed,
        }

    def __str__(self) -> str:
        kept = f"{self.kept}, really x{self.acceleration:.2f} (nominal x{self.nominal:g})"
        return f"{self.kind} mask: {kept}, centre {self.block[0]} x {self.block[1]}, seed {self.seed}"


def side_lobe(mask: np.ndarray) -> float:
    """Return the largest side lobe of the point spread function of a mask (H, W), relative to its main lobe.

    The main lobe ends at the first minimum along each axis.
    """
    spread = np.abs(np.fft.fft2(mask))
    spread = spread[: len(spread) // 2 + 1] / spread[0, 0]  # the rest mirrors it
    height, width = (_first_minimum(profile) for profile in (spread[:, 0], spread[0, : mask.shape[1] // 2 + 1]))
    spread[:height, :width] = 0
    spread[:height, mask.shape[1] - width + 1 :] = 0
    return float(spread.max())


def _first_minimum(profile: np.ndarray) -> int:
    """Return the position where a profile first rises again, or its length if it never does."""
    rising = np.flatnonzero(np.diff(profile) > 0)
    return int(rising[0]) if len(rising) else len(profile)


def create_plane_mask(
    kind: str,
    size: tuple[int, int],
    acceleration: float = 4,
    center_fraction: float | None = None,
    seed: Seed = 4,
) -> PlaneMask:
    """Return a mask of points.

    Args:
        kind: one of `PLANE_KINDS`.
        size: height and width.
        acceleration: points per kept point.
        center_fraction: fraction of the rows, and of the columns, of the fully sampled centre; by default
            0.32 / acceleration.
        seed: seed of the drawn points or the first angle.

    Raises:
        ValueError: if the kind is unknown, or its numbers fit no mask.
    """
    if kind not in PLANE_KINDS:
        raise ValueError(f"unknown kind of a mask of points {kind!r}: {suggest(kind, PLANE_KINDS)}")
    if min(size) < 1 or acceleration <= 1:
        raise ValueError(f"a mask needs a positive size and acceleration > 1, got {size} and {acceleration:g}")
    f = 0.32 / acceleration if center_fraction is None else center_fraction
    if not 0 <= f <= 1:
        raise ValueError(f"center_fraction must lie in [0, 1], got {f:g}")
    rows, columns = (round(n * f) for n in size)
    top, left = ((n - m + 1) // 2 for n, m in zip(size, (rows, columns), strict=True))
    is_kept = np.zeros(size, dtype=bool)
    is_kept[top : top + rows, left : left + columns] = True
    budget = round(is_kept.size / acceleration) - int(is_kept.sum())
    if budget < 1:
        problem = f"leaves nothing of the x{acceleration:g} budget of {is_kept.size} points"
        raise ValueError(f"a centre of {rows} x {columns} {problem}: lower center_fraction or the acceleration")
    draw = {"poisson-2d": _poisson, "gaussian-2d": _gaussian, "radial-2d": _radial}[kind]
    is_kept |= draw(is_kept, budget, np.random.default_rng(seed))
    return PlaneMask(kind, is_kept, (rows, columns), acceleration, seed)


def _poisson(is_kept: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Draw points outside the centre that keep the largest distance the budget leaves room for."""
    priority = np.where(is_kept, 0.0, 1 - rng.uniform(size=is_kept.shape))  # the highest is drawn first
    distances = sorted({i * i + j * j for i in range(16) for j in range(16)} - {0}, reverse=True)
    roomy = 1.2 * (~is_kept).sum() / budget  # square of a distance at which not even a regular grid has room
    for squared in (d for d in distances if d <= max(roomy, 1)):
        drawn = _draw_with_distance(priority, squared)
        if drawn.sum() >= budget:
            break
    last = np.sort(priority[drawn])[-budget]
    return np.asarray(drawn & (priority >= last))


def _draw_with_distance(priority: np.ndarray, squared: int) -> np.ndarray:
    """Draw points by priority, each unless one with a smaller squared distance was drawn before.

    All points that have the highest priority among the free ones near them are drawn at once, which gives the same
    points as one after the other.
    """
    reach = math.isqrt(squared)
    span = range(-reach, reach + 1)
    offsets = [(i, j) for i in span for j in span if 0 < i * i + j * j < squared]
    free, drawn = priority.copy(), np.zeros(priority.shape, dtype=bool)
    while free.any():
        top = (free > 0) & (free > _largest(free, offsets))
        drawn |= top
        free[top | (_largest(top, offsets) > 0)] = 0
    return drawn


def _largest(values: np.ndarray, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Return for every point the largest value at these offsets from it, 0 outside of the plane."""
    (H, W), largest = values.shape, np.zeros_like(values)
    for i, j in offsets:
        here = largest[max(i, 0) : H + min(i, 0), max(j, 0) : W + min(j, 0)]
        there = values[max(-i, 0) : H + min(-i, 0), max(-j, 0) : W + min(-j, 0)]
        np.maximum(here, there, out=here)
    return largest


def _gaussian(is_kept: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Draw points outside the centre without replacement, by a density that falls off from the middle."""
    y, x = (((np.arange(n) - n // 2) / (n / 6)) ** 2 for n in is_kept.shape)
    # The points with the largest log-density plus Gumbel noise are a draw without replacement.
    key = -0.5 * (y[:, None] + x) + rng.gumbel(size=is_kept.shape)
    key[is_kept] = -np.inf
    return np.asarray(key >= np.partition(key, -budget, axis=None)[-budget])


def _radial(is_kept: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Keep lines through the middle until no whole one fits into the budget."""
    (H, W), mask = is_kept.shape, is_kept.copy()
    along = np.arange(-2 * max(H, W), 2 * max(H, W) + 1) / (2 * max(H, W))  # of half a diagonal
    allowed, angle = int(is_kept.sum()) + budget, rng.uniform(0, math.pi)
    while True:
        line = mask.copy()
        y = np.rint(H // 2 + along * H * math.sin(angle) / math.sqrt(2)).astype(int)
        x = np.rint(W // 2 + along * W * math.cos(angle) / math.sqrt(2)).astype(int)
        inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
        line[y[inside], x[inside]] = True
        if line.sum() > allowed:
            return mask
        mask, angle = line, angle + GOLDEN_ANGLE
