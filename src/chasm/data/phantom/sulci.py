"""The sulci of a drawn brain: curves from the surface and the midline that give way to each other."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chasm.data.phantom.shapes import Array, resample, spline

if TYPE_CHECKING:
    from chasm.data.phantom.head import Level

LEVELS = 8  # spline knots of a sulcus over the height of the head, 16 mm apart
MIN_DISTANCE = 7.8  # mm between sulci: two sheets of cortex


@dataclass(frozen=True)
class Strand:
    """Curves of one kind."""

    points: Array  # (n,T,2)
    alive: Array  # (n,T), True from the start of a curve to its last drawn point
    width: Array  # (n,T), half-width of the fluid


def draw_sulci(rng: np.random.Generator, n: int) -> dict[str, Array]:
    """Draw parameters of n sulci in a row, each drifting over the levels: (n,LEVELS)."""

    def drift(mean: object, sd: float) -> Array:
        noise = 1.6 * sd * rng.standard_normal((n, LEVELS))
        return (np.reshape(np.asarray(mean), (-1, 1)) + noise).astype(np.float32)

    kind = np.arange(n) % 3  # deep, middle and shallow ones take turns
    deep = np.choose(kind, [rng.uniform(19, 30, n), rng.uniform(13, 21, n), rng.uniform(9, 16, n)])
    return {
        "rank": drift((kind + rng.uniform(0, 1, n)) / 3, 0),  # a curve gives way to those of lower rank
        "place": drift((np.arange(n) + 0.5 + rng.uniform(-0.25, 0.25, n)) / n, 0.006),
        "depth": drift(deep, 3),
        "lean": drift(rng.normal(0, 0.15, n), 0.08),
        "curl": drift(rng.normal(0, 0.4, n), 0.2),
        "twig0": drift(rng.uniform(3, 12, n), 2.5),  # lengths of branches; below 3 mm there is none
        "twig1": drift(rng.uniform(-4, 12, n), 2.5),
        "twig2": drift(rng.uniform(-12, 10, n), 2.5),
        "spread": drift(rng.uniform(0.7, 1.3, n), 0.1),
        "hand": drift(rng.choice([-1.0, 1.0], n), 0),
        "width": drift(rng.uniform(0.12, 0.42, n), 0.06),
    }


def _grow(start: Array, heading: Array, length: Array, curl: Array, count: int) -> Array:
    """Return curves from start (n,2) along heading (n,) that turn by curl on their way: (n,count,2)."""
    h = heading[:, None] + curl[:, None] * np.linspace(0, 1, count - 1, dtype=np.float32)
    step = np.stack([np.cos(h), np.sin(h)], -1) * (length / (count - 1))[:, None, None]
    return np.concatenate([start[:, None], start[:, None] + np.cumsum(step, 1)], 1).astype(np.float32)


def _are_close(a: Array, b: Array) -> Array:
    """Return which points of a (n, 2) and b (m, 2) are closer than MIN_DISTANCE, as (n, m) booleans."""
    dx, dy = a[:, :1] - b[:, 0], a[:, 1:] - b[:, 1]
    return dx * dx + dy * dy < MIN_DISTANCE * MIN_DISTANCE


def _give_way(rank: Array, clear: Array, close: Array, need: int) -> Array:
    """Return the part of each curve, from its start, that keeps its distance to curves of lower rank: (n,T).

    `clear` (n,T) marks points at a distance from all earlier curves, and `close` (nT,nT/2) points too close to every
    second point of these curves. A curve that would keep fewer than `need` points is dropped.
    """
    n, count = clear.shape
    alive = np.zeros((n, count), bool)
    for i in np.argsort(rank):
        taken = np.any(close[i * count : (i + 1) * count] & alive[:, ::2].ravel(), axis=1)
        free = clear[i] & (~taken | (np.arange(count) < 2))  # a mouth may be close to another
        life = np.logical_and.accumulate(free)
        alive[i] = life & (life.sum() >= need)
    return alive


def wiggled(level: "Level", p: Array, amount: float = 2.5) -> Array:
    """Return points displaced by a smooth field: neighbours move together, so that curves do not cross.

    Args:
        level: the level, which has the field.
        p: points (..., 2).
        amount: millimetres.
    """
    return p + np.float32(amount) * np.stack([plane.at(p) for plane in level.wiggle], -1)


def hemisphere(level: "Level", side: int, lateral: dict[str, Array], medial: dict[str, Array]) -> list[Strand]:
    """Return the sulci of one hemisphere: Sylvian fissure and insula on the levels that have them, trunks, branches.

    Args:
        level: level of the head.
        side: -1 or 1.
        lateral: parameters of the sulci from the surface, from `draw_sulci`.
        medial: parameters of the sulci from the midline.
    """
    z, (half_x, half_y) = level.z, level.half
    weights = spline(np.array([z - 30], np.float32), 16.0, LEVELS)[0]
    v, u = ({k: a @ weights for k, a in kind.items()} for kind in (lateral, medial))
    low = float(np.clip((24 - z) / 8, 0, 1))  # 1 where the insula is
    # trunks from the surface, towards the core of deep nuclei and ventricles
    t = 0.03 + 0.94 * v["place"]
    p = level.surface(t, side)
    core = np.stack([(12 + 28 * low) * side * np.sin(np.pi * t), 8 * low + (28 + 20 * low) * np.cos(np.pi * t)], -1)
    way = core - p
    gap = np.sqrt((way**2).sum(1))
    depth = np.clip(np.minimum(v["depth"] * (1 + max(z - 30, 0) / 80), 0.85 * gap), 3, None)
    outer = (p - way / gap[:, None] * 3, np.arctan2(way[:, 1], way[:, 0]) + v["lean"], depth + 3)
    # trunks from the midline, sideways
    y = half_y * (0.95 - 1.9 * u["place"])
    free = np.clip((level.arch(y) - 1.12) / 0.12, 0, 1)
    room = np.minimum(0.42 * half_x * np.sqrt(np.clip(1 - (y / half_y) ** 2, 0, 1)), 14)
    depth = np.clip(np.minimum(0.8 * u["depth"], room), 3, None) * free
    heading = (np.pi / 2 - side * np.pi / 2) + 1.5 * u["lean"] + 0.5 * side * np.sin(3 * y / half_y)
    inner = (np.stack([0.5 * side + 0 * y, y], -1), heading, depth)
    start, heading, length = (np.concatenate(a).astype(np.float32) for a in zip(outer, inner, strict=True))
    v = {k: np.concatenate([v[k], u[k]]) for k in v}
    n, count = len(length), 8
    width = np.clip(v["width"], 0.08, 1) * level.sulcus_width

    strands = []
    stand = np.zeros((0, 2), np.float32)
    if z < 26:
        strands.append(_sylvian(level, side))
        stand = strands[0].points.reshape(-1, 2)

    trunk = wiggled(level, _grow(start, heading, length, v["curl"], count))
    flat = trunk.reshape(-1, 2)
    clear = ~_are_close(flat, stand).any(1).reshape(n, count) & (length > 4)[:, None]
    clear[:, 2:] &= side * trunk[:, 2:, 0] > 2.5
    alive = _give_way(v["rank"], clear, _are_close(flat, trunk[:, ::2].reshape(-1, 2)), 3)
    strands.append(Strand(trunk, alive, width[:, None] * np.linspace(1.8, 0.8, count, dtype=np.float32)))

    # branches: one at the end of a trunk, two on its way
    last = np.maximum(alive.sum(1) - 1, 1)
    twigs = []
    for j, share in enumerate((1.0, 0.7, 0.45)):
        node = np.maximum(np.rint(last * share), 1).astype(int)
        at, back = trunk[np.arange(n), node], trunk[np.arange(n), node - 1]
        turn = v["hand"] * (-1 if j == 1 else 1)
        heading = np.arctan2(at[:, 1] - back[:, 1], at[:, 0] - back[:, 0]) + turn * v["spread"]
        size = np.clip(v[f"twig{j}"], 0, 14)
        grown = (size > 3) & alive[:, 3 + j // 2]
        curves = _grow(at, heading, size, -0.7 * turn, 6)
        twigs.append((curves[grown], (v["rank"] + j)[grown], np.flatnonzero(grown), width[grown]))
    twig, rank, own, width = (np.concatenate(a) for a in zip(*twigs, strict=True))
    flat, mine = twig.reshape(-1, 2), np.repeat(own, 6)
    others = _are_close(flat, trunk[alive]) & (mine[:, None] != np.nonzero(alive)[0])
    clear = ~(others.any(1) | _are_close(flat, stand).any(1)).reshape(-1, 6) & (side * twig[..., 0] > 2.5)
    close = _are_close(flat, twig[:, ::2].reshape(-1, 2)) & (mine[:, None] != np.repeat(own, 3))
    live = _give_way(rank, clear, close, 3)
    strands.append(Strand(twig, live, width[:, None] * np.linspace(0.8, 0.6, 6, dtype=np.float32)))
    return strands


def _sylvian(level: "Level", side: int) -> Strand:
    """Return the line of the insula, and the fissure that leads to it."""
    f = min((26 - level.z) / 10, 1)  # shrinks upwards
    m = 8 + 10 * f
    insula = [(33, m + 24 * f), (37, m + 13 * f), (40, m), (39.5, m - 13 * f), (36, m - 24 * f)]
    edge = 1.04 * level.surface(np.array([0.42 + 0.06 * (1 - f)], np.float32), 1)[0]
    entrance = [(40, m - 4), (48, m + 1), (float(edge[0]), float(edge[1]))]
    both = np.stack([resample(insula, 16), resample(entrance, 16)]) * np.array([side, 1], np.float32)
    width = np.full((2, 16), 0.5 * level.sulcus_width, np.float32)
    return Strand(wiggled(level, both, 3.5), np.ones((2, 16), bool), width)
