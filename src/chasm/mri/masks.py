"""Cartesian sampling masks: whole columns (the last axis) are kept or dropped, the centre is always kept.

With N columns, acceleration R and centre fraction f, the centre is the n_low = round(N f) columns from
(N - n_low + 1) // 2 on.

- ``equispaced``: every R'-th column, R' = R (n_low - N) / (n_low R - N), so that centre and lines together
  meet the budget N / R; what fastMRI calls the equispaced fraction mask.
- ``equispaced-plain``: every R-th column and the centre on top: keeps more than N / R columns.
- ``random-plain``: each column outside the centre kept with the probability that meets the budget on average.
- ``random``: the same draw, then columns outside the centre dropped or added at random until it has as many
  lines as ``equispaced`` (reading: the paper compares structured and random masks but states no line count).
- ``gaussian``: as many lines as ``equispaced``, drawn by a Gaussian density around the centre, sigma = N / 6.
- ``file``: read from a ``.npy``, or from the text of 0s and 1s of another suffix.

Masks that keep points of the plane, not columns, are in `chasm.mri.plane_masks`.

>>> mask = create_mask("equispaced", 256, acceleration=4)
>>> print(mask)
equispaced mask: 64 of 256 columns, really x4.00 (nominal x4), centre 118-137, offset 0
>>> mask.tensor().shape
torch.Size([1, 1, 1, 256])
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.mri.plane_masks import PLANE_KINDS, PlaneMask, Seed, create_plane_mask, side_lobe

COLUMN_KINDS = ("equispaced", "random", "gaussian", "equispaced-plain", "random-plain", "file")
MASK_KINDS = (*COLUMN_KINDS, *PLANE_KINDS)
DEFAULT_SEED = 4  # seed of the random kinds
MAX_ACCELERATION = 10**6  # beyond that, its products overflow
MAX_FILE_BYTES = 64 * 2**20  # size of a file with a mask


@dataclass(frozen=True, slots=True)
class Mask:
    """The columns that are kept, and how they were chosen."""

    kind: str
    width: int
    columns: tuple[int, ...]  # kept, ascending
    center: tuple[int, int]  # [first, last + 1) of the fully sampled block around N // 2
    nominal: float | None = None  # acceleration that was asked for; None if it is not known
    offset: int | None = None
    seed: Seed | None = None
    file: str | None = None

    @property
    def lines(self) -> int:
        """The number of columns that are kept."""
        return len(self.columns)

    @property
    def acceleration(self) -> float:
        """All columns over kept columns: the acceleration that the mask really has."""
        return self.width / self.lines

    @property
    def coherence(self) -> float:
        """The largest side lobe of the point spread function, 0 to 1: how strongly the mask folds an image onto itself.

        The function is the Fourier transform of the mask, relative to its value at zero. Side lobes lie beyond its
        first minimum. Within it, the main lobe of a fully sampled centre blurs an image but does not fold it.
        """
        mask = np.zeros((1, self.width))
        mask[0, list(self.columns)] = 1
        return side_lobe(mask)

    @property
    def kept(self) -> str:
        """The kept columns, in words."""
        return f"{self.lines} of {self.width} columns"

    def tensor(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
        """Return (1, 1, 1, W) with ones where columns are kept. It is made once and shared: do not write to it."""
        return _tensor(self, torch.device(device), dtype)

    def report(self) -> dict[str, Any]:
        """Return the facts about the mask that belong beside a result."""
        facts = {
            "kind": self.kind,
            "columns": self.width,
            "lines": self.lines,
            "acceleration": round(self.acceleration, 4),
            "coherence": round(self.coherence, 4),
            "nominal": self.nominal,
            "center_lines": self.center[1] - self.center[0],
            "center_first": self.center[0],
            "offset": self.offset,
            "seed": self.seed,
            "file": self.file,
        }
        return {k: v for k, v in facts.items() if v is not None}

    def __str__(self) -> str:
        first, end = self.center
        is_from_data = self.kind == "file" and self.file is None
        parts = [
            self.kept if is_from_data else f"{self.kind} mask: {self.kept}",
            f"really x{self.acceleration:.2f}" + (f" (nominal x{self.nominal:g})" if self.nominal else ""),
            f"centre {first}-{end - 1}" if end > first else "no centre",
        ]
        parts += [f"{k} {v}" for k in ("offset", "seed", "file") if (v := getattr(self, k)) is not None]
        return ", ".join(parts)


@lru_cache(maxsize=64)
def _tensor(mask: Mask, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Out of inference mode: a tensor first made in an evaluation must also serve a later training step.
    with torch.inference_mode(False):
        values = torch.zeros(1, 1, 1, mask.width, dtype=dtype)
        values[..., list(mask.columns)] = 1
        return values.to(device)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The configuration of a mask, for images of any size. `create_mask` explains the fields."""

    kind: str = "equispaced"
    acceleration: float = 4
    center_fraction: float | None = None
    offset: int | None = None
    seed: Seed | None = None
    file: str | None = None

    def mask(self, width: int) -> Mask:
        """Return the mask of whole columns; a ValueError if the kind keeps points of the plane."""
        return _columns(self, width)

    def on(self, height: int, width: int) -> Mask | PlaneMask:
        """Return the mask of images of a size, of whole columns or of points, as the kind is."""
        return _plane(self, height, width) if self.kind in PLANE_KINDS else _columns(self, width)

    def draw(self, height: int, width: int) -> Mask | PlaneMask:
        """Return the same mask as `on` without caching it: for masks that are used once."""
        if self.kind in PLANE_KINDS:
            seed = DEFAULT_SEED if self.seed is None else self.seed
            return create_plane_mask(self.kind, (height, width), self.acceleration, self.center_fraction, seed)
        return create_mask(self.kind, width, self.acceleration, self.center_fraction, self.offset, self.seed, self.file)


@cache
def _columns(s: Sampling, width: int) -> Mask:
    return create_mask(s.kind, width, s.acceleration, s.center_fraction, s.offset, s.seed, s.file)


@lru_cache(maxsize=16)
def _plane(s: Sampling, height: int, width: int) -> Mask | PlaneMask:
    return s.draw(height, width)


def forget_mask_files() -> None:
    """Read mask files again when they are next used; a process reads them once, so that a training keeps its mask."""
    _columns.cache_clear()


def create_mask(
    kind: str,
    n: int,
    acceleration: float = 4,
    center_fraction: float | None = None,
    offset: int | None = None,
    seed: Seed | None = None,
    file: str | Path | None = None,
) -> Mask:
    """Return a mask of whole columns.

    Args:
        kind: one of `COLUMN_KINDS`.
        n: number of columns.
        acceleration: columns per kept column.
        center_fraction: fraction of the columns that are kept in the centre; by default 0.32 / acceleration (0.08 at
            x4, 0.04 at x8).
        offset: first column of the equispaced kinds; by default drawn from the seed, and 0 without a seed. The random
            kinds have as many lines as the equispaced mask of this offset, by default of 0.
        seed: draws the columns of the random kinds, by default 4, and the offset of the equispaced ones.
        file: file of the kind "file".

    Raises:
        ValueError: if no mask has these properties.

    Example:
        >>> print(create_mask("random", 64, acceleration=8, seed=1))
        random mask: 9 of 64 columns, really x7.11 (nominal x8), centre 31-33, seed 1
    """
    if kind in PLANE_KINDS:
        raise ValueError(f"a {kind} mask keeps points and not columns: choose one of {', '.join(COLUMN_KINDS)}")
    if kind not in MASK_KINDS:
        raise ValueError(f"unknown mask kind {kind!r}: {suggest(kind, COLUMN_KINDS)}")
    if kind == "file":
        if file is None:
            raise ValueError("mask kind 'file' needs the file: give file=PATH to a .npy or text of 0s and 1s")
        return mask_from_array(_read(Path(file)), n, nominal=None, file=Path(file).name)
    if n < 1 or not 1 < acceleration <= MAX_ACCELERATION:
        allowed = f"n >= 1 and acceleration > 1, at most {MAX_ACCELERATION}"
        raise ValueError(f"a mask needs {allowed}, got {n} and {acceleration:g}")
    f = 0.32 / acceleration if center_fraction is None else center_fraction
    low = round(n * f)
    if not 0 <= low <= n:
        raise ValueError(f"center_fraction must lie in [0, 1], got {f:g}")
    first = (n - low + 1) // 2
    is_kept = np.zeros(n, dtype=bool)
    is_kept[first : first + low] = True

    if kind == "equispaced-plain":
        step = _whole(acceleration)
        offset = _check_offset(offset, step, seed)
        is_kept[offset::step] = True
    elif low * acceleration >= n:
        budget = f"the x{acceleration:g} budget of {n} columns"
        raise ValueError(f"{low} centre lines leave nothing of {budget}: lower center_fraction or the acceleration")
    elif kind == "equispaced":
        adjusted = acceleration * (low - n) / (low * acceleration - n)
        offset = _check_offset(offset, round(adjusted), seed)
        is_kept[np.around(np.arange(offset, n - 1, adjusted)).astype(int)] = True
    else:
        seed = DEFAULT_SEED if seed is None else seed
        rng = np.random.RandomState(seed)  # as fastMRI does, so that a seed gives the same columns
        if kind != "random-plain":
            target = create_mask("equispaced", n, acceleration, center_fraction, offset or 0).lines
        if kind == "gaussian":
            is_kept[_gaussian_columns(is_kept, target - low, rng)] = True
        else:
            is_kept |= rng.uniform(size=n) < (n / acceleration - low) / (n - low)
        if kind == "random":
            _force_lines(is_kept, target, first, low, rng)
    return Mask(
        kind=kind,
        width=n,
        columns=tuple(np.flatnonzero(is_kept).tolist()),
        center=(first, first + low),
        nominal=acceleration,
        offset=offset if kind.startswith("equispaced") else None,
        seed=seed if kind.startswith(("random", "gaussian")) else None,
    )


def _whole(acceleration: float) -> int:
    if acceleration != int(acceleration):
        raise ValueError(f"equispaced-plain keeps every R-th column: R must be whole, got {acceleration:g}")
    return int(acceleration)


def _check_offset(offset: int | None, offsets: int, seed: Seed | None) -> int:
    """Return the offset, or one drawn from the seed."""
    if offset is None:
        return 0 if seed is None else int(np.random.RandomState(seed).randint(offsets))
    if not 0 <= offset < offsets:
        raise ValueError(f"offset must be one of 0..{offsets - 1} for this mask, got {offset}")
    return offset


def _gaussian_columns(is_kept: np.ndarray, lines: int, rng: np.random.RandomState) -> np.ndarray:
    """Draw columns that are not kept yet, with a density that falls off from the centre."""
    n = len(is_kept)
    density = np.where(is_kept, 0.0, np.exp(-0.5 * ((np.arange(n) - n // 2) / (n / 6)) ** 2))
    return rng.choice(n, size=lines, replace=False, p=density / density.sum())


def _force_lines(is_kept: np.ndarray, target: int, first: int, low: int, rng: np.random.RandomState) -> None:
    """Drop or add random columns outside the centre until `target` are kept."""
    surplus = int(is_kept.sum()) - target
    candidates = np.flatnonzero(is_kept == (surplus > 0))
    candidates = candidates[(candidates < first) | (candidates >= first + low)]
    is_kept[rng.permutation(candidates)[: abs(surplus)]] = surplus < 0


def mask_from_array(
    array: np.ndarray, n: int | None = None, nominal: float | None = None, file: str | None = None
) -> Mask:
    """Return a mask from an array of zeros and ones.

    Args:
        array: (..., W), constant along all axes but the last, as fastMRI files store it.
        n: the number of columns to expect, if known.
        nominal: the acceleration that was asked for, if known.
        file: origin of the array, for messages.

    Raises:
        ValueError: if the array is not such a mask.
    """
    where = file or "the array"
    a = np.asarray(array)
    if a.ndim == 0 or a.size == 0:
        raise ValueError(f"mask from {where}: expected zeros and ones of shape (..., W), got shape {a.shape}")
    if not np.isin(a, (0, 1)).all():
        others = ", ".join(str(v) for v in np.unique(a[~np.isin(a, (0, 1))])[:3])
        raise ValueError(f"mask from {where}: expected zeros and ones, found other values too: {others}")
    rows = a.reshape(-1, a.shape[-1]) != 0
    if not (rows == rows[0]).all():
        raise ValueError(f"mask from {where}: shape {a.shape} varies along rows: expected whole columns (last axis)")
    is_kept = rows[0]
    if not is_kept.any():
        raise ValueError(f"mask from {where}: keeps no column: check that it is a mask of zeros and ones")
    if n is not None and len(is_kept) != n:
        raise ValueError(f"mask from {where}: has {len(is_kept)} columns, the data {n}: use a mask made for {n}")
    first = end = len(is_kept) // 2
    while first > 0 and is_kept[first - 1]:
        first -= 1
    while end < len(is_kept) and is_kept[end]:
        end += 1
    columns = tuple(np.flatnonzero(is_kept).tolist())
    return Mask("file", len(is_kept), columns, (first, end), nominal=nominal, file=file)


def _read(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such mask file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes: a mask has one number for each column")
    try:  # mapped, because a header may claim more than the file holds
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False) if path.suffix == ".npy" else np.loadtxt(path))
    except (ValueError, EOFError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: not a mask of zeros and ones ({' '.join(str(e).split())})") from None
