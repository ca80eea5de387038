"""BART's pairs of files: NAME.hdr with the dimensions, NAME.cfl with complex numbers, first dimension fastest.

Of its 16 dimensions, k-space uses read, phase 1, phase 2 and coil (0 to 3), slice (13) and average (14). The others
(echo, time and so on) make volumes of their own. Both programs centre the zero frequency and preserve norms, so the
numbers need no change. Dimension names: https://mrirecon.github.io/bart
"""

import math
from pathlib import Path

import numpy as np

from chasm.common.files import write_bytes, write_text
from chasm.data.files import reading, require_finite
from chasm.data.limits import require_fits, require_regular, require_written
from chasm.data.lines import refuse_gaps_along_partitions
from chasm.data.records import fault
from chasm.data.scan import KSpaceScan, ifft_along

DIMENSIONS = 16
MAX_HEADER_CHARACTERS = 2**16  # the dimensions come first; BART adds the command that made the file
_READ, _PHASE_1, _PHASE_2, _COIL, _SLICE, _AVERAGE = 0, 1, 2, 3, 13, 14
_NAMES = {4: "map", 5: "echo", 6: "coeff", 7: "coeff2", 8: "iter", 9: "cshift", 10: "time", 11: "time2", 12: "level"}


def read_cfl(file: Path) -> np.ndarray:
    """Map the array of a .cfl (or .hdr) file, with all of its 16 dimensions, into memory."""
    header, data = file.with_suffix(".hdr"), file.with_suffix(".cfl")
    for part in (header, data):
        require_regular(part)
    with reading(header, "header"):
        with open(header, encoding="utf-8") as f:
            lines = f.read(MAX_HEADER_CHARACTERS).splitlines()
        words = [line for line in lines if line.strip() and not line.startswith("#")]
        sizes = [int(word) for word in words[0].split()]
    sizes += [1] * (DIMENSIONS - len(sizes))
    if len(sizes) != DIMENSIONS or min(sizes) < 1:
        raise fault(header, "Dimensions", f"expected up to {DIMENSIONS} positive numbers, got {words[0]!r:.200}")
    if not data.is_file():
        raise fault(data, "file", f"missing beside {header.name}")
    expected = 8 * math.prod(sizes)
    if data.stat().st_size != expected:
        raise fault(data, "file", f"{data.stat().st_size} bytes, but {header.name} asks for {expected}")
    require_written(data)
    return np.memmap(data, np.complex64, "r", shape=tuple(sizes), order="F")


def write_cfl(array: np.ndarray, file: Path) -> None:
    """Write an array as NAME.cfl and NAME.hdr; missing dimensions have length 1."""
    sizes = (*array.shape, *[1] * (DIMENSIONS - array.ndim))
    write_bytes(file.with_suffix(".cfl"), np.asarray(array, np.complex64).tobytes(order="F"))
    write_text(file.with_suffix(".hdr"), "# Dimensions\n" + " ".join(map(str, sizes)) + "\n")


def read_bart(file: Path) -> dict[str, KSpaceScan]:
    """Read Cartesian k-space that BART wrote: volumes by names such as "echo2"; "" for the only one."""
    array = read_cfl(file)
    if array.shape[_READ] == 1:
        problem = "the first is 1, as of samples along a trajectory: only Cartesian data can be read"
        raise fault(file, "Dimensions", problem)
    require_fits(file, "data", array.shape, array.itemsize)
    require_finite(array, file, "data")
    notes = []
    if array.shape[_AVERAGE] > 1:
        notes.append(f"{array.shape[_AVERAGE]} averages were averaged")
    is_measured = (array != 0).any((_READ, _COIL), keepdims=True)  # a line may be missing from some averages
    count = np.maximum(is_measured.sum(_AVERAGE, keepdims=True), 1).astype(np.float32)
    averaged = np.asarray(array).sum(_AVERAGE, keepdims=True, dtype=np.complex64) / count
    several = [d for d in _NAMES if array.shape[d] > 1]
    if array.shape[15] > 1:
        raise fault(file, "Dimensions", "the last is used: expected k-space with at most 15 dimensions")
    scans = {}
    for index in np.ndindex(*(array.shape[d] for d in several)):
        chosen = averaged
        for dimension, i in zip(several, index, strict=True):
            chosen = chosen.take([i], axis=dimension)
        name = "-".join(f"{_NAMES[d]}{i + 1}" for d, i in zip(several, index, strict=True))
        scans[name] = _scan(chosen, file, notes)
    return scans


def _scan(array: np.ndarray, file: Path, notes: list[str]) -> KSpaceScan:
    partitions, slices = array.shape[_PHASE_2], array.shape[_SLICE]
    if partitions > 1 and slices > 1:
        raise fault(file, "Dimensions", "both phase 2 and slice are used: give one slab at a time")
    # (read, phase 1, phase 2, coil, slice)
    kspace = array.reshape([array.shape[d] for d in (_READ, _PHASE_1, _PHASE_2, _COIL, _SLICE)])
    if partitions > 1:
        measured = (kspace != 0).any((0, 3, 4))  # (phase 1, phase 2)
        kspace = ifft_along(kspace, 2) * measured.any(1)[:, None, None, None]
        refuse_gaps_along_partitions(measured, file, "data")
    kspace = kspace.transpose(2, 4, 3, 0, 1).reshape(partitions * slices, -1, *array.shape[:2])
    return KSpaceScan(np.ascontiguousarray(kspace, np.complex64), array.shape[:2], notes=list(notes))


def write_bart(scan: KSpaceScan, file: Path) -> None:
    """Write a volume as BART k-space: read, phase 1, 1, coil, and slices as the 14th dimension."""
    array = scan.kspace.transpose(2, 3, 1, 0)  # (H, W, coils, slices)
    h, w, coils, slices = array.shape
    write_cfl(array.reshape(h, w, 1, coils, *[1] * 9, slices), file)
