"""Plain arrays of k-space in .npy, .npz or HDF5 files. They do not say what their axes are.

The axes are given as letters, one for each dimension: S slices, C coils, H rows (the readout), W columns (the lines).
"SCHW" is what chasm writes. The zero frequency may be in the middle or in the corner, and so may the centre of the
image: both are put where most of the energy is in the middle.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from chasm.common.files import write_atomic
from chasm.data.files import H5Files, h5_names, h5_whole, open_npy, reading, require_single
from chasm.data.filled import is_centred_image, is_centred_kspace
from chasm.data.limits import read_npz, require_fits
from chasm.data.records import fault
from chasm.data.scan import KSpaceScan
from chasm.mri.fft import exchange_image_halves, ifft2c

AXES = "SCHW"
KEYS = ("kspace", "data", "arr_0")  # the names that k-space may have in a file, first choice first


def check_axes(axes: str) -> str:
    """Return axes in capitals; raise a ValueError unless they are some of S and C, and H and W, each once."""
    upper = str(axes).upper()
    if sorted(set(upper)) != sorted(upper) or not set("HW") <= set(upper) <= set(AXES):
        expected = "one letter for each dimension, H and W and perhaps S (slices), C (coils)"
        raise ValueError(f"axes {axes!r}: expected {expected}")
    return upper


def read_arrays(file: Path, axes: str | None = None) -> dict[str, KSpaceScan]:
    """Read an array of complex k-space from .npy, .npz or HDF5. Two dimensions need no axes."""
    array = _load(file)
    order = check_axes(axes) if axes is not None else ("HW" if array.ndim == 2 else "")
    if not order:
        say = "say what they are: -O axes=CHW (coils) or axes=SHW (slices)" if array.ndim == 3 else "say -O axes=SCHW"
        raise fault(file, "axes", f"{array.ndim} dimensions {array.shape}: {say}")
    if array.ndim != len(order):
        raise fault(file, "axes", f"{order!r} names {len(order)} dimensions, but the array has {array.shape}")
    if 0 in array.shape:
        raise fault(file, "slices", f"there is none: shape {array.shape}")
    if array.dtype.kind != "c":
        raise fault(file, "dtype", f"k-space is complex, got {array.dtype}: is it an image? (--as image)")
    kspace = require_single(np.asarray(array), file, "kspace").transpose([order.index(a) for a in AXES if a in order])
    for axis, letter in enumerate("SC"):
        kspace = kspace if letter in order else np.expand_dims(kspace, axis)
    centred = _centred(torch.from_numpy(np.array(kspace, order="C"))).numpy()
    return {"": KSpaceScan(centred, (centred.shape[2], centred.shape[3]))}


def write_arrays(scan: KSpaceScan, file: Path) -> None:
    """Write k-space as a .npy or .npz file with axes SCHW."""

    def write(partial: Path) -> None:
        with open(partial, "wb") as f:
            if file.suffix.lower() == ".npy":
                np.save(f, scan.kspace)
            else:
                np.savez(f, kspace=scan.kspace)

    write_atomic(file, write)


def _load(file: Path) -> Any:
    suffix = file.suffix.lower()
    if suffix == ".npy":
        array = open_npy(file)
        require_fits(file, "array", array.shape, array.itemsize)
        return array
    if suffix == ".npz":
        with reading(file, "archive"), np.load(file, allow_pickle=False) as archive:
            return read_npz(file, archive, _key(file, archive.files))
    with H5Files() as files:
        handle = files[file]
        return h5_whole(handle, file, _key(file, h5_names(handle, file)))


def _key(file: Path, names: list[str]) -> str:
    key = next((key for key in KEYS if key in names), names[0] if len(names) == 1 else None)
    if key is None:
        raise fault(file, KEYS[0], f"missing; the file has {', '.join(sorted(names)) or 'nothing'}")
    return key


def _centred(kspace: torch.Tensor) -> torch.Tensor:
    """Put the zero frequency, and then the image, into the middle, as the middle slice shows."""
    middle = kspace[len(kspace) // 2]
    if not is_centred_kspace(middle):
        kspace = torch.fft.fftshift(kspace, dim=(-2, -1))
        middle = kspace[len(kspace) // 2]
    return kspace if is_centred_image(ifft2c(middle)) else exchange_image_halves(kspace)
