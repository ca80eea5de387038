"""Geometry for drawn anatomy, in millimetres: smooth random fields, distances to shapes, coverage of pixels."""

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np

Array = np.ndarray  # float32 unless noted
Knots = list[tuple[float, float, float, float]]

REACH = 126.0  # mm from the middle that fields cover
_LATTICE = np.arange(-REACH, REACH + 1, 3, dtype=np.float32)


def spline(x: Array, spacing: float, count: int) -> Array:
    """Return cubic B-spline weights, (..., count).

    Args:
        x: coordinates, 0 in the middle.
        spacing: distance between knots.
        count: the number of knots.
    """
    t = np.abs(x[..., None] / np.float32(spacing) - (np.arange(count, dtype=np.float32) - (count - 1) / 2))
    return np.where(t < 1, 2 / 3 - t * t * (1 - t / 2), np.maximum(2 - t, 0) ** 3 / 6).astype(np.float32)


@lru_cache(maxsize=64)
def _axis(first: float, last: float, length: int, spacing: float, count: int) -> tuple[Array, Array]:
    """Return the first of the four knots of each of `length` coordinates, (L,), and their weights, (4,L)."""
    x = np.linspace(first, last, length)
    start = np.clip(np.floor(x / spacing + (count - 1) / 2).astype(int) - 1, 0, count - 4)
    weights = np.take_along_axis(spline(x, spacing, count), start[:, None] + np.arange(4), 1)
    return start, weights.T.astype(np.float32)


def _on_grid(knots: Array, spacing: float, x: Array, y: Array) -> Array:
    """Return the spline surface on the grid of x (W,) and y (H,), without matrix products, whose threads cost time."""
    (row, wy), (col, wx) = (_axis(float(a[0]), float(a[-1]), len(a), spacing, len(knots)) for a in (y, x))
    rows = sum(wy[k][:, None] * knots[row + k] for k in range(4))  # (H,n)
    columns = np.ascontiguousarray(rows.T)
    return np.ascontiguousarray(sum(wx[k][:, None] * columns[col + k] for k in range(4)).T)


def smooth_noise(rng: np.random.Generator, spacing: float, x: Array, y: Array) -> Array:
    """Return a smooth random field of about unit variance, (H, W).

    Args:
        rng: draws the knots.
        spacing: spacing of the knots, which is about the size of the bumps.
        x: (W,) coordinates of the grid.
        y: (H,) coordinates of the grid.
    """
    n = 2 * int(np.ceil(REACH / spacing)) + 3
    knots = 2 * rng.standard_normal((n, n), dtype=np.float32)
    return _on_grid(knots, spacing, x, y)


class Plane:
    """One level of a `Field`."""

    def __init__(self, knots: Array, spacing: float) -> None:
        self.knots, self.spacing = knots, spacing
        self.lattice = _on_grid(knots, spacing, _LATTICE, _LATTICE)
        self._last: tuple[Array, Array, Array] | None = None

    def grid(self, x: Array, y: Array) -> Array:
        """Return values on the grid of x (W,) and y (H,): (H,W). The last grid is kept, for the next tissue."""
        if self._last is None or self._last[0] is not x or self._last[1] is not y:
            self._last = (x, y, _on_grid(self.knots, self.spacing, x, y))
        return self._last[2]

    def at(self, p: Array) -> Array:
        """Return values at points (...,2), interpolated between the nodes of a 3 mm lattice."""
        q = np.clip((p + REACH) / 3, 0, len(_LATTICE) - 1.001)
        i = q.astype(np.int32)
        c, r, fx, fy = i[..., 0], i[..., 1], (q - i)[..., 0], (q - i)[..., 1]
        near = self.lattice[r, c] * (1 - fx) + self.lattice[r, c + 1] * fx
        return near * (1 - fy) + (self.lattice[r + 1, c] * (1 - fx) + self.lattice[r + 1, c + 1] * fx) * fy


class Field:
    """A smooth random field in 3-D, about unit variance: B-splines on random knots `spacing` apart."""

    def __init__(self, rng: np.random.Generator, spacing: float) -> None:
        self.spacing, self.step = spacing, max(spacing, 12.0)  # slower from level to level than within one
        n = 2 * int(np.ceil(REACH / spacing)) + 3
        self.knots = rng.standard_normal((int(90 / self.step) + 4, n, n), dtype=np.float32)

    def level(self, z: float) -> Plane:
        """Return the field at height z."""
        w = spline(np.array([z - 30], np.float32), self.step, len(self.knots))[0]
        return Plane(np.einsum("k,kij", 2 * w / np.sqrt((w * w).sum()), self.knots), self.spacing)


def cover(distance: Array, pixel: float | Array) -> Array:
    """Return how much of a pixel lies where the signed distance is negative."""
    return np.clip(0.5 - distance / pixel, 0, 1)


def smooth_min(a: Array, b: Array, k: float) -> Array:
    """Return the minimum of two distances, with a rounded corner.

    Args:
        a: one distance.
        b: the other distance.
        k: the size of the corner in mm.
    """
    h = np.clip(0.5 + 0.5 / k * (b - a), 0, 1)
    return b + (a - b) * h - k * h * (1 - h)


def tube(x: Array, y: Array, z: float, knots: Knots) -> Array:
    """Return the signed distance to a tapering tube, cut at one level.

    Args:
        x: coordinates of the pixels.
        y: coordinates of the pixels.
        z: the level.
        knots: (x, y, z, radius) along the tube.
    """
    best = np.full(x.shape, 1e3, np.float32)
    for (ax, ay, az, ar), (bx, by, bz, br) in pairwise(knots):
        dx, dy, dz = bx - ax, by - ay, bz - az
        t = np.clip(((x - ax) * dx + (y - ay) * dy + (z - az) * dz) / (dx * dx + dy * dy + dz * dz), 0, 1)
        gap = (x - ax - t * dx) ** 2 + (y - ay - t * dy) ** 2 + (z - az - t * dz) ** 2
        best = np.minimum(best, np.sqrt(gap) - ar - t * (br - ar))
    return best


def ellipsoid(
    x: Array,
    y: Array,
    z: float,
    centre: tuple[float, float, float],
    half: tuple[float, float, float],
    turn: float = 0.0,
) -> Array:
    """Return about the signed distance to an ellipsoid, cut at one level.

    Args:
        x: coordinates of the pixels.
        y: coordinates of the pixels.
        z: the level.
        centre: centre of the ellipsoid.
        half: its half-axes.
        turn: radians by which it is turned in the plane.
    """
    cos, sin = math.cos(turn), math.sin(turn)
    u = ((x - centre[0]) * cos + (y - centre[1]) * sin) / half[0]
    v = ((y - centre[1]) * cos - (x - centre[0]) * sin) / half[1]
    n = np.sqrt(u * u + v * v + ((z - centre[2]) / half[2]) ** 2)
    return n * (n - 1) / np.sqrt((u / half[0]) ** 2 + (v / half[1]) ** 2 + 1e-3)


def resample(knots: list[tuple[float, float]], n: int) -> Array:
    """Return n points at equal steps along a polyline: (n,2)."""
    p = np.array(knots, np.float32)
    s = np.concatenate([[0], np.cumsum(np.sqrt((np.diff(p, axis=0) ** 2).sum(1)))])
    u = np.linspace(0, s[-1], n)
    return np.stack([np.interp(u, s, p[:, i]) for i in range(2)], -1).astype(np.float32)


def splat(p: Array, q: Array, w: Array, x: Array, y: Array, reach: float) -> tuple[Array, Array]:
    """Return the distance of each pixel to line pieces, and the share of it that they cover: (H, W) each.

    Only a window around each piece is computed, (S, K, K), so a thousand pieces cost a few milliseconds.

    Args:
        p: (S, 2) starts of the pieces.
        q: (S, 2) ends of the pieces.
        w: (S,) half-widths.
        x: (W,) coordinates of the grid.
        y: (H,) coordinates of the grid.
        reach: the largest distance that is computed.
    """
    pixel = np.float32(x[1] - x[0])
    r = int(np.ceil(reach / pixel)) + 1
    frame = 2 * r  # windows over the edge of the picture write into a frame, which is cut off at the end
    width, height = len(x) + 2 * frame, len(y) + 2 * frame
    span = np.arange(-r, r + 1, dtype=np.int32) + frame
    mid = 0.5 * (p + q)
    col = np.clip(np.rint((mid[:, 0] - x[0]) / pixel).astype(np.int32)[:, None] + span, 0, width - 1)
    row = np.clip(np.rint((y[0] - mid[:, 1]) / pixel).astype(np.int32)[:, None] + span, 0, height - 1)
    px = x[0] + (col - frame).astype(np.float32) * pixel - p[:, :1]  # (S,K) pixel centres from the piece's start
    py = y[0] - (row - frame).astype(np.float32) * pixel - p[:, 1:]
    d = q - p
    n = 1 / ((d * d).sum(1, keepdims=True) + 1e-6)
    t = np.clip((px * d[:, :1] * n)[:, None, :] + (py * d[:, 1:] * n)[:, :, None], 0, 1)
    gap = (px[:, None, :] - t * d[:, :1, None]) ** 2 + (py[:, :, None] - t * d[:, 1:, None]) ** 2
    gap = np.sqrt(gap)
    share = np.clip((w[:, None, None] - gap) / pixel + 0.5, 0, 1)
    share -= np.clip((-w[:, None, None] - gap) / pixel + 0.5, 0, 1)
    index = (row[:, :, None] * width + col[:, None, :]).ravel()
    distance, covered = np.full(height * width, reach, np.float32), np.zeros(height * width, np.float32)
    np.minimum.at(distance, index, gap.ravel())
    np.maximum.at(covered, index, share.ravel())
    inside = (slice(frame, frame + len(y)), slice(frame, frame + len(x)))
    return distance.reshape(height, width)[inside], covered.reshape(height, width)[inside]
