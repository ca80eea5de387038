"""Brain-like axial MR slices drawn from a seeded description of one head.

`Head(seed, case)` draws the parameters of one subject; `draw(head, z, shape, table)` cuts it at z mm above the plane
of the basal ganglia and paints tissue after tissue, each with its partial-volume coverage, into one channel per
column of `table`; `as_scanned` adds what the scanner adds. Everything lives in millimetres (x to the right, y to the
front, z up), so one subject looks the same at any matrix size, and neighbouring levels resemble each other as in a
real stack.

The cortex follows from its sulci. Points within the half-width of a curve are fluid, the next few millimetres are grey
matter, and the rest is white matter. So the cortex is a folded ribbon, as in anatomy.
"""

import math

import numpy as np

from chasm.data.phantom.shapes import (
    Array,
    Field,
    Knots,
    cover,
    ellipsoid,
    smooth_min,
    smooth_noise,
    splat,
    tube,
)
from chasm.data.phantom.sulci import Strand, draw_sulci, hemisphere, wiggled

CONTRASTS = ("t1", "t1ce", "t2", "flair")
# Signal of each tissue relative to the brightest, in the order of CONTRASTS: typical of spin-echo protocols at 3 T.
SIGNAL: dict[str, tuple[float, float, float, float]] = {
    "skin": (0.34, 0.42, 0.24, 0.26),
    "fat": (1.00, 1.00, 0.72, 0.92),
    "muscle": (0.38, 0.46, 0.15, 0.22),
    "bone": (0.03, 0.03, 0.02, 0.03),
    "marrow": (0.45, 0.48, 0.14, 0.22),
    "dura": (0.25, 0.60, 0.08, 0.12),
    "csf": (0.12, 0.12, 1.00, 0.05),
    "grey": (0.40, 0.42, 0.42, 0.42),
    "white": (0.57, 0.59, 0.26, 0.33),
    "striatum": (0.44, 0.46, 0.34, 0.39),
    "pallidum": (0.53, 0.55, 0.18, 0.30),
    "thalamus": (0.48, 0.50, 0.31, 0.37),
    "artery": (0.10, 0.85, 0.04, 0.06),
    "vein": (0.22, 0.95, 0.08, 0.10),
    "choroid": (0.34, 0.88, 0.60, 0.42),
    "necrosis": (0.22, 0.24, 0.86, 0.34),
    "oedema": (0.36, 0.37, 0.74, 0.78),
    "enhancing": (0.40, 0.98, 0.55, 0.62),
}
TISSUES = tuple(SIGNAL)
LOWEST, HIGHEST = 2.0, 58.0  # levels worth drawing: basal ganglia to the upper convexity
NOISE = 0.008  # standard deviation of the noise, relative to the brightest tissue
FIELD_OF_VIEW = (220.0, 196.0)  # mm that must fit, height and width


def signal_table(*contrasts: str) -> Array:
    """Return the relative signal (tissues, contrasts) of the named contrasts."""
    return np.array(list(SIGNAL.values()), np.float32)[:, [CONTRASTS.index(c) for c in contrasts]]


class Head:
    """One subject: the parameters that all its slices share.

    Args:
        seed: seed of the dataset.
        case: number of the subject.
        tumour: whether the subject has a tumour.
    """

    def __init__(self, seed: int, case: int, tumour: bool = False) -> None:
        rng = np.random.default_rng([seed, case])
        self.width, self.length = 68 * rng.uniform(0.95, 1.05), 84 * rng.uniform(0.95, 1.04)
        self.taper = rng.uniform(0.05, 0.11)  # the forehead is narrower than the back by this fraction
        self.square = rng.uniform(2.05, 2.25)  # exponent of the outline: 2 is an ellipse
        self.roll, self.shift = rng.uniform(-0.1, 0.1), rng.uniform(-3, 3, 2).astype(np.float32)
        self.skull, self.fat = rng.uniform(5, 7.5), rng.uniform(2.5, 4.5)
        self.age = rng.uniform(0, 1) ** 1.5  # widens sulci and ventricles
        self.cortex = rng.uniform(3.6, 4.1)
        self.ventricle = 0.75 + 0.7 * self.age * rng.uniform(0.6, 1.4)
        self.bend = [Field(rng, 60) for _ in range(2)]
        self.wiggle = [Field(rng, 13) for _ in range(2)]
        self.fine, self.rough = Field(rng, 5), Field(rng, 25)
        self.sides = [(draw_sulci(rng, 48), draw_sulci(rng, 21)) for _ in range(2)]
        self.spots = rng.uniform(-1, 1, (14, 2)).astype(np.float32) * np.array([45, 55], np.float32)
        self.beads = rng.uniform(0, 1, 24)
        self.mass: Mass | None = None
        if tumour:
            self.mass = Mass(rng)


class Mass:
    """A tumour: some lobes with a necrotic core, in swollen white matter."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.x = math.copysign(rng.uniform(18, 40), rng.uniform(-1, 1))
        self.y, self.z = rng.uniform(-45, 45), rng.uniform(18, 42)
        self.radius, self.core = rng.uniform(9, 16), rng.uniform(0.55, 0.8)
        self.lobes = rng.normal(0, 0.5, (3, 3)) * self.radius  # their centres
        self.lobes[0] = 0
        self.swelling, self.drift = rng.uniform(8, 20), rng.normal(0, 0.4, 2) * self.radius
        self.push = rng.uniform(0.2, 0.4)  # displacement of nearby tissue


class Level:
    """One level of a head: its outline, and how anatomy and image map onto each other."""

    def __init__(self, head: Head, z: float) -> None:
        self.head, self.z = head, z
        self.sulcus_width = 0.8 + 0.7 * head.age  # factor on the width of sulci
        s = math.sqrt(max(1 - (max(z, 0) / 90) ** 2.4, 0.05))
        self.half = (head.width * s, head.length * s**0.9)  # half-axes of the brain
        self.bend = tuple(f.level(z) for f in head.bend)
        self.wiggle = (head.wiggle[0].level(z), head.wiggle[1].level(z))
        self.fine, self.rough = head.fine.level(z), head.rough.level(z)

    def surface(self, t: Array, side: int) -> Array:
        """Return points of the brain surface at t in (0,1), front to back: (n,2)."""
        c, s = np.cos(np.pi * t), np.sin(np.pi * t)
        c, s = np.sign(c) * np.abs(c) ** (2 / self.head.square), s ** (2 / self.head.square)
        x = side * self.half[0] * (1 - self.head.taper * c) * s
        return np.stack([x, self.half[1] * c], -1).astype(np.float32)

    def arch(self, y: Array) -> Array:
        """Return a value below 1 inside the arch of the corpus callosum, which closes the fissure."""
        return np.sqrt(((y - 12) / 41) ** 2 + (self.z / 32) ** 2)

    def push(self, p: Array) -> Array:
        """Return the displacement of the tissue by a tumour at anatomical points (...,2)."""
        m = self.head.mass
        if m is None:
            return np.zeros_like(p)
        d = p - np.array([m.x, m.y], np.float32)
        fall = np.exp(-((d * d).sum(-1, keepdims=True) + (self.z - m.z) ** 2) / (2.4 * m.radius) ** 2)
        return np.float32(m.push) * d * fall

    def _rotate(self, x: Array, y: Array, sign: int) -> Array:
        c, s = math.cos(self.head.roll), sign * math.sin(self.head.roll)
        return np.stack([c * x + s * y, c * y - s * x], -1).astype(np.float32)

    def to_image(self, p: Array) -> Array:
        """Return the image positions of anatomical points (...,2)."""
        p = p + self.push(p)
        guess = self._rotate(p[..., 0], p[..., 1], -1) + self.head.shift
        p = p - np.stack([plane.at(guess) for plane in self.bend], -1)
        return self._rotate(p[..., 0], p[..., 1], -1) + self.head.shift

    def to_anatomy(self, x: Array, y: Array) -> Array:
        """Return the positions in the head of the pixels of x (W,) and y (H,), without the push: (H,W,2)."""
        rotated = self._rotate(x[None, :] - self.head.shift[0], y[:, None] - self.head.shift[1], 1)
        return rotated + np.stack([plane.grid(x, y) for plane in self.bend], -1)

    def outside(self, X: Array, Y: Array) -> Array:
        """Return roughly the signed distance to the smooth hull of the brain."""
        e = self.head.square
        half_width = self.half[0] * (1 - self.head.taper * np.clip(Y / self.half[1], -1.3, 1.3))
        u, v = np.abs(X / half_width) + 1e-3, np.abs(Y / self.half[1]) + 1e-3
        su, sv = u ** (e - 1), v ** (e - 1)
        n = su * u + sv * v
        f = n ** (1 / e)
        return (f - 1) * n / f / np.sqrt((su / half_width) ** 2 + (sv / self.half[1]) ** 2)


class Canvas:
    """The picture so far: (channels,H,W) on the grid of x (W,) and y (H,)."""

    def __init__(self, shape: tuple[int, int], table: Array) -> None:
        (h, w), self.table = shape, table
        self.pixel = max(FIELD_OF_VIEW[0] / h, FIELD_OF_VIEW[1] / w)
        self.x = ((np.arange(w) - (w - 1) / 2) * self.pixel).astype(np.float32)
        self.y = (((h - 1) / 2 - np.arange(h)) * self.pixel).astype(np.float32)
        self.image = np.zeros((table.shape[1], h, w), np.float32)

    def paint(self, share: Array, tissue: str, view: tuple[slice, slice] = (slice(None), slice(None))) -> None:
        """Mix a tissue into the picture.

        Args:
            share: (H, W), how much of each pixel it covers.
            tissue: a name of TISSUES.
            view: the rows and columns that `share` stands for.
        """
        part = self.image[:, view[0], view[1]]
        part += share * (self.table[TISSUES.index(tissue)][:, None, None] - part)


def draw(head: Head, z: float, shape: tuple[int, int], table: Array, skull: bool = True) -> tuple[Array, Array]:
    """Draw one level of a head.

    Args:
        head: the subject.
        z: millimetres above the plane of the basal ganglia.
        shape: (H, W) of the picture.
        table: (tissues, channels) relative signal, from `signal_table`.
        skull: False for the brain alone.

    Returns:
        The picture (channels, H, W), and tumour classes (H, W): 0 none, 1 necrosis, 2 oedema, 3 enhancing.
    """
    h, w = shape
    # thin structures need a pixel of about a millimetre: draw coarse matrices finer, then average
    k = max(1, int(np.ceil(max(FIELD_OF_VIEW[0] / h, FIELD_OF_VIEW[1] / w) / 1.25)))
    level, canvas = Level(head, z), Canvas((k * h, k * w), table)
    x, y, pixel = canvas.x, canvas.y, canvas.pixel
    where = level.to_anatomy(x, y)
    hull = level.outside(where[..., 0], where[..., 1])
    if skull:
        _coverings(canvas, level, where, hull)
    fine, rough = level.fine.grid(x, y), level.rough.grid(x, y)
    inner = hull - 0.1 - 0.8 * head.age - 0.35 * rough
    canvas.paint(cover(inner, pixel), "csf")

    strands = _strands(level)
    from_sulci, fluid = splat(*_pieces(level, strands), x, y, 6.5)
    brain = cover(-smooth_min(from_sulci + 1.0, -hull, 6.0), pixel)
    canvas.paint(brain, "grey")
    ribbon = smooth_min(from_sulci, -hull, 5.0) - head.cortex - 0.45 * fine - 0.45 * rough
    # the border to white matter is blurred here and there, as where a thick slice cuts it at an angle
    white = cover(-ribbon, 1.2 * pixel + np.clip(1.2 + 0.9 * level.wiggle[0].grid(-x, y), 0.2, 3))
    canvas.paint(white, "white")
    canvas.paint(fluid * (hull < 0), "csf")
    where = where - level.push(where)
    ventricles = _deep_structures(canvas, level, where)
    _vessels(canvas, level, strands, white, cover(hull, pixel), skull)
    grades = _tumour(canvas, level, hull, white * (1 - ventricles))
    image = canvas.image.reshape(-1, h, k, w, k).mean((2, 4))
    share = grades.reshape(3, h, k, w, k).mean((2, 4))  # nested: oedema holds enhancing holds necrosis
    label = np.where(share[2] > 0.5, 1, np.where(share[1] > 0.5, 3, np.where(share[0] > 0.5, 2, 0)))
    return image, label.astype(np.int64)


def _coverings(canvas: Canvas, level: Level, where: Array, hull: Array) -> None:
    """Draw skin, fat, muscle, the three layers of the skull, and the dura."""
    head, z, pixel = level.head, level.z, canvas.pixel
    slope = 1 / math.sqrt(max(1 - (max(z, 0) / 100) ** 2, 0.3))  # layers are cut at an angle near the vertex
    uneven = [plane.grid(canvas.x, canvas.y) for plane in level.bend]
    inner = hull - 0.1 - 0.8 * head.age
    bone = head.skull * slope * (1 + 0.1 * uneven[0])
    front = where[..., 1] / (np.sqrt((where**2).sum(-1)) + 1)  # cosine of the angle to the nose
    temple = np.clip(1 - ((front - 0.4) / 0.6) ** 2, 0, 1) ** 2 * np.clip((34 - z) / 34, 0, 1)
    outer = inner - bone - 5 * temple
    scalp = head.fat * slope * (1 + 0.1 * uneven[1] - 0.25 * front)
    lobules = smooth_noise(np.random.default_rng(0), 1.2, canvas.x, canvas.y)
    canvas.paint(cover(outer - scalp - 1.8, pixel), "skin")
    canvas.paint(cover(outer - scalp, pixel) * np.clip(0.6 + 0.14 * lobules, 0, 1), "fat")
    canvas.paint(cover(outer - 0.7, pixel), "muscle")
    canvas.paint(cover(inner - bone, pixel), "bone")
    fine = level.fine.grid(canvas.x, canvas.y)
    diploe = np.abs(inner - 0.5 * bone) - 0.2 * bone - 0.3 * fine
    canvas.paint(0.9 * cover(diploe, 1.5 * pixel), "marrow")
    canvas.paint(cover(inner - 0.8, pixel), "dura")


def _strands(level: Level) -> list[Strand]:
    """Return the fissure between the hemispheres, open outside the corpus callosum, and all sulci."""
    y = np.linspace(-level.half[1] - 2, level.half[1] + 2, 60, dtype=np.float32)
    arch = level.arch(y)
    line = wiggled(level, np.stack([0 * y, y], -1)[None], 0.8)
    fissure = Strand(line, (arch > 1)[None], (0.35 * level.sulcus_width + 0.3 * np.clip(arch - 1, 0, 1))[None])
    left, right = (hemisphere(level, s, *level.head.sides[s > 0]) for s in (-1, 1))
    return [fissure, *left, *right]


def _pieces(level: Level, strands: list[Strand]) -> tuple[Array, Array, Array]:
    """Return the living line pieces in the image: starts (S,2), ends (S,2), half-widths (S,)."""
    on = [s.alive[:, 1:] & s.alive[:, :-1] for s in strands]
    p = level.to_image(np.concatenate([s.points[:, :-1][a] for s, a in zip(strands, on, strict=True)]))
    q = level.to_image(np.concatenate([s.points[:, 1:][a] for s, a in zip(strands, on, strict=True)]))
    w = np.concatenate([s.width[:, 1:][a] for s, a in zip(strands, on, strict=True)])
    return p, q, (w * np.clip(0.5 + 0.9 * level.fine.at(p), 0, 2)).astype(np.float32)  # fluid comes in beads


def _deep_structures(canvas: Canvas, level: Level, where: Array) -> Array:
    """Draw ventricles and deep grey nuclei, mirrored at the midline; return the ventricles' share of each pixel."""
    z, v, pixel = level.z, level.head.ventricle, canvas.pixel
    share = np.zeros(canvas.image.shape[1:], np.float32)
    if z > 42:  # above all of them
        return share
    rows, cols = np.flatnonzero(np.abs(canvas.y) < 75), np.flatnonzero(np.abs(canvas.x) < 52)
    view = (slice(rows[0], rows[-1] + 1), slice(cols[0], cols[-1] + 1))
    x, y = np.abs(where[view][..., 0]), where[view][..., 1]

    def paint(distance: Array, tissue: str, soft: float = 0.0, strength: float = 1.0) -> None:
        canvas.paint(strength * cover(distance, pixel + soft), tissue, view)

    # horns and atria reach over more levels than they are wide: their heights are shrunk
    flat, mid = 8 + 0.35 * (z - 8), 8 + 0.6 * (z - 8)
    horn = tube(x, y, flat, [(2.5, 18, 8, 0.8), (4.5, 30, 8, 2.2 * v), (9.5, 39, 8, 2.6 * v), (13, 44, 8, 1.0)])
    low, top = (2.5, 34, 19, 1.2 * v), (26, -28, 14, 4.5 * v)
    arc: Knots = [(4.5, 24, 20, 2.3 * v), (7, 10, 22, 2.8 * v), (11, -5, 23, 2.8 * v), (18, -17, 21, 3.2 * v)]
    body = tube(x, y, 22 + 0.65 * (z - 22), [low, *arc, top])
    atrium = tube(
        x, y, mid, [(19, -21, 12, 3 * v), (25, -29, 10, 5.5 * v), (28, -38, 8, 4.2 * v), (25, -55, 5, 1.2 * v)]
    )
    lateral = np.maximum(smooth_min(smooth_min(horn, body, 3), atrium, 3), 0.9 - x)  # the septum stays
    paint(lateral, "csf")
    plexus = tube(x, y, z, [(12, -4, 23, 0.8), (19, -20, 18, 1.2), (24, -28, 11, 2.4), (25, -30, 8, 2)])
    ragged = level.fine.grid(canvas.x[view[1]], canvas.y[view[0]])
    paint(np.maximum(plexus + 0.8 * ragged, lateral + 1), "choroid", strength=0.7)
    caudate = tube(x, y, 5 + 0.35 * (z - 5), [(14, 39, 5, 2.2), (14.5, 32, 5, 5), (15, 23, 5, 2.5)])
    paint(np.minimum(caudate, tube(x, y, z, [(13, 22, 16, 4), (15, 2, 24, 2.8), (23, -15, 20, 1.8)])), "striatum")
    paint(ellipsoid(x, y, z, (27, 20, 3), (5.5, 18, 14), -0.18), "striatum", 0.5)  # putamen
    paint(ellipsoid(x, y, z, (20.5, 15, 0), (4.5, 10.5, 9), -0.45), "pallidum", 1)
    paint(ellipsoid(x, y, z, (11, 0, 6), (8.5, 15, 11), 0.35), "thalamus", 2)
    third = ellipsoid(x, y, z, (0, 6, -4), (1.3 + 0.6 * v, 12, 14))
    cistern = ellipsoid(x, y, z, (0, -19, -4), (8, 6, 9))
    paint(np.minimum(third, cistern), "csf")
    share[view] = cover(np.minimum(np.minimum(lateral, third), cistern), pixel)
    return share


def _vessels(canvas: Canvas, level: Level, strands: list[Strand], white: Array, inside: Array, skull: bool) -> None:
    """Draw perivascular spaces, falx and sagittal sinus, arteries and cortical veins."""
    head, half_y = level.head, level.half[1]

    def lines(p: Array, q: Array, w: Array | float) -> Array:
        w = np.broadcast_to(np.asarray(w, np.float32), len(p))
        return splat(level.to_image(p), level.to_image(q), w, canvas.x, canvas.y, 3.5)[1]

    spots = wiggled(level, head.spots, 8)
    canvas.paint(0.4 * white * lines(spots, spots + 0.5, 0.35), "csf")
    fissure = strands[0].points[0]
    falx = level.arch(fissure[1:, 1]) > 1.25
    canvas.paint(0.7 * inside * lines(fissure[:-1][falx], fissure[1:][falx], 0.3), "dura")
    sinus = np.array([(0, -half_y - 1), (0, -half_y + 1.5), (0, half_y + 0.5)], np.float32)
    ends = np.array([(0, -half_y + 1), (0, -half_y + 5), (0, half_y - 1.5)], np.float32)
    canvas.paint(lines(sinus, ends, np.array([2.6, 1.4, 1.4])) * (1 if skull else inside), "vein")
    trunks = [s for s in strands if s.points.shape[1] == 8]
    veins = [(s.points[:, 2:6], s.alive[:, 5] & (np.arange(len(s.points)) % 4 == 0)) for s in trunks]
    curves = np.concatenate([p[a] for p, a in veins]) + np.array([0.7, 0.5], np.float32)  # beside the fluid
    canvas.paint(inside * lines(curves[:, :-1].reshape(-1, 2), curves[:, 1:].reshape(-1, 2), 0.25), "vein")
    front = fissure[(fissure[:, 1] > 45) & (fissure[:, 1] < 75)]
    dots = [front[:: max(1, len(front) // 2)]] if len(front) else []
    dots += [s.points[0][[3, 9]] for s in strands if s.points.shape[1] == 16 and level.z < 18]
    if dots:
        p = np.concatenate(dots)
        canvas.paint(inside * lines(p, p + 0.1, 0.4 + 0.5 * head.beads[: len(p)]), "artery")


def _tumour(canvas: Canvas, level: Level, hull: Array, white: Array) -> Array:
    """Return the shares (3,H,W) of oedema, enhancing rim and necrotic core, each within the one before."""
    m = level.head.mass
    shares = np.zeros((3, *canvas.image.shape[1:]), np.float32)
    if m is None:
        return shares
    where = level.to_anatomy(canvas.x, canvas.y)
    x, y, z = where[..., 0] - m.x, where[..., 1] - m.y, level.z - m.z
    a, b = (plane.grid(canvas.x, canvas.y) for plane in level.wiggle)
    fine, rough = level.fine.grid(canvas.x, canvas.y), level.rough.grid(canvas.x, canvas.y)
    far = np.full(x.shape, 1e3, np.float32)
    for i, (u, v, w) in enumerate(m.lobes.tolist()):
        lobe = np.sqrt((x - u) ** 2 + (y - v) ** 2 + (z - w) ** 2) + 0.25 * m.radius * (i > 0)
        far = smooth_min(far, lobe, 5)
    rim = np.maximum(far - m.radius + 2 * a + 0.8 * fine, hull + 0.5)
    core = np.maximum(far - m.core * m.radius + 2 * b + 1.2 * fine, rim + 2.5)
    around = np.sqrt((x - m.drift[0]) ** 2 + (y - m.drift[1]) ** 2 + z * z).astype(np.float32)
    swelling = around - m.radius - m.swelling + 3 * b + 5 * rough
    soft = canvas.pixel + 1
    # swelling spreads along white matter and spares the cortex, but always surrounds the rim
    shares[0] = np.maximum(cover(swelling, soft + 2) * white, cover(np.maximum(rim - 1.5, hull), soft))
    shares[1] = np.minimum(cover(rim, soft), shares[0])
    shares[2] = np.minimum(cover(core, soft), shares[1])
    for share, tissue in zip(shares, ("oedema", "enhancing", "necrosis"), strict=True):
        canvas.paint(share, tissue)
    return shares


def as_scanned(rng: np.random.Generator, image: Array) -> Array:
    """Return complex images (channels, H, W) of a picture from `draw`.

    They have what the scanner adds: texture of tissue, coil shading, a smooth phase, noise. `rng` draws all of it.
    """
    canvas = Canvas(image.shape[1:], np.zeros((1, 1), np.float32))
    x, y = canvas.x, canvas.y
    texture = np.ones((len(y), len(x)), np.float32)
    for spacing, amount in ((20.0, 0.025), (7.0, 0.02), (3.0, 0.025), (2 * canvas.pixel, 0.025)):
        texture += amount * smooth_noise(rng, spacing, x, y)
    radius = (x[None, :] / 80) ** 2 + (y[:, None] / 100) ** 2
    shading = np.exp(0.12 * smooth_noise(rng, 70, x, y) + 0.25 * radius - 0.1)
    phase = (
        rng.uniform(-3, 3)
        + rng.normal(0, 0.004) * x
        + rng.normal(0, 0.004) * y[:, None]
        + 0.4 * smooth_noise(rng, 60, x, y)
    )
    grain = rng.standard_normal((2, *image.shape), dtype=np.float32) * np.float32(NOISE)
    signal = image * (texture * shading)
    scanned = np.empty(image.shape, np.complex64)
    scanned.real = signal * np.cos(phase) + grain[0]
    scanned.imag = signal * np.sin(phase) + grain[1]
    return scanned
