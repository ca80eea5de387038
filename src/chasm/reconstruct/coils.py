"""Coil sensitivities from the data or from a file, and coil compression."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from chasm.common.files import expanded
from chasm.common.registry import suggest
from chasm.data import fault
from chasm.data.bart import read_cfl
from chasm.data.base import existing
from chasm.data.files import crop_or_pad, open_npy, require_single
from chasm.data.limits import require_fits
from chasm.mri import Mask, compression_matrix, espirit_maps, estimate_maps
from chasm.mri.espirit import MIN_GOOD_COLUMNS

MAP_METHODS = ("lowres", "espirit")
MAX_CALIBRATION = 32  # columns of fully sampled k-space to take coil sensitivities from


class CoilModel:
    """How the coils of a slice are combined.

    Args:
        maps: "lowres" (low-resolution images divided by their root-sum-of-squares), "espirit", or a file: BART's .cfl,
            or .npy with the axes (coils, H, W), (slices, coils, H, W) or (slices, sets, coils, H, W). Maps of a file
            are scaled to a largest root-sum-of-squares of 1, so that images are in the units of the data.
        sets: number of sets of maps that ESPIRiT makes.
        compress: number of virtual coils; None for all coils.

    Raises:
        ValueError: if these options exclude each other.
    """

    def __init__(self, maps: str | Path = MAP_METHODS[0], sets: int = 1, compress: int | None = None) -> None:
        self.method, self.sets, self.compress = str(maps), sets, compress
        self._file: np.ndarray | None = None
        self.path: Path | None = None
        if self.method not in MAP_METHODS:
            path = expanded(maps)
            if path.suffix.lower() not in (".cfl", ".hdr", ".npy"):
                choices = f"{suggest(self.method, MAP_METHODS)}, or give a file that ends in .cfl or .npy"
                raise ValueError(f"--maps {maps}: {choices}")
            self.path = existing(path)
            self._file = _read(self.path)
            self.sets = self._file.shape[1]
        if sets != 1 and self.method != "espirit":
            raise ValueError("--map-sets needs --maps espirit: leave it out, or choose that")
        if compress is not None and self._file is not None:
            raise ValueError("maps from a file are for the measured coils: leave out --compress")

    @property
    def is_default(self) -> bool:
        """True if coils are combined as in training."""
        return self.is_lowres and self.compress is None

    @property
    def is_lowres(self) -> bool:
        """True for the default maps, which a network may replace by maps that it learned."""
        return self.method == MAP_METHODS[0]

    def compressed(self, y: Tensor, mask: Mask) -> Tensor:
        """Return k-space (1, Q, H, W) with virtual coils, if they are asked for."""
        if self.compress is None:
            return y
        first, end = _calibration(mask)
        matrix = compression_matrix(y[0, :, :, first:end], min(self.compress, y.shape[1]))
        return torch.einsum("pq,bqhw->bphw", matrix, y)

    def doubt(self, mask: Mask) -> str:
        """Return one line that says why maps from these measured columns may be poor; "" if they are not."""
        columns = mask.center[1] - mask.center[0]
        if self.method != "espirit" or columns >= MIN_GOOD_COLUMNS:
            return ""
        problem = f"ESPIRiT maps of {columns} centre columns have holes, and {MIN_GOOD_COLUMNS} or more are needed"
        return f"{problem}: --maps lowres is better here"

    def maps(self, y: Tensor, mask: Mask, index: int) -> Tensor:
        """Return the maps (1, Q, H, W), or (1, sets, Q, H, W), of one slice.

        Args:
            y: its k-space (1, Q, H, W).
            mask: the measured columns.
            index: the number of the slice in its volume.
        """
        if self._file is not None:
            return self._from_file(y, index)
        if self.method == "espirit":
            return espirit_maps(y, mask.center, min(self.sets, y.shape[1]))
        return estimate_maps(y, _calibration(mask))

    def _from_file(self, y: Tensor, index: int) -> Tensor:
        assert self._file is not None
        assert self.path is not None
        slices, _, coils, h, w = self._file.shape
        _, Q, H, W = y.shape
        if coils != Q or h < H or w < W:
            raise fault(self.path, "maps", f"{coils} coils of {h} x {w}, and the data has {Q} of {H} x {W}")
        if slices > 1 and index >= slices:
            raise fault(self.path, "maps", f"{slices} slices, and the data has more: give one for each, or one for all")
        chosen = torch.from_numpy(np.array(self._file[index if slices > 1 else 0], dtype=np.complex64)).to(y.device)
        maps = crop_or_pad(chosen, (H, W))[None]
        return maps[:, 0] if maps.shape[1] == 1 else maps


def _read(path: Path) -> np.ndarray:
    """Return maps (slices, sets, coils, H, W)."""
    if path.suffix.lower() == ".npy":
        array = open_npy(path)
        if array.ndim not in (3, 4, 5) or array.dtype.kind != "c":
            shapes = "(coils, H, W), (slices, coils, H, W) or (slices, sets, coils, H, W)"
            raise fault(path, "maps", f"expected complex numbers {shapes}, got {array.dtype} {array.shape}")
        array = array[None] if array.ndim == 3 else array
        array = array[:, None] if array.ndim == 4 else array
    else:
        stored = read_cfl(path)  # read, phase 1, phase 2, coil, map, .., slice
        h, w, partitions, coils, sets, slices = (stored.shape[d] for d in (0, 1, 2, 3, 4, 13))
        if stored.size != h * w * partitions * coils * sets * slices or (partitions > 1 and slices > 1):
            raise fault(path, "Dimensions", "expected read, phase, coil, map and slice")
        array = stored.reshape(h, w, partitions, coils, sets, slices)
        array = array.transpose(2, 5, 4, 3, 0, 1).reshape(partitions * slices, sets, coils, h, w)
    require_fits(path, "maps", array.shape, array.itemsize)
    maps = require_single(np.asarray(array), path, "maps")
    largest = float(np.sqrt(np.square(np.abs(maps), dtype=np.float64).sum(2).max(initial=0)))
    return maps / np.float32(largest) if largest > 0 else maps


def _calibration(mask: Mask) -> tuple[int, int]:
    """Return the columns to take sensitivities from. In fully sampled k-space they are the middle of the centre."""
    first, end = mask.center
    if mask.lines > end - first or end - first <= MAX_CALIBRATION:
        return first, end
    middle = mask.width // 2
    return max(first, middle - MAX_CALIBRATION // 2), min(end, middle + MAX_CALIBRATION // 2)
