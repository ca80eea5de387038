"""Put the lines that a scanner measured into volumes of k-space.

Scanners write one readout after another, each with counters that say where it belongs. Repeated lines (averages) are
averaged. Repetitions, echoes, cardiac phases and sets are separate volumes. A partial Fourier scan leaves zeros on
one side. 3-D scans are transformed along their partitions, so that they become slices.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from chasm.common.text import counted
from chasm.data.filled import between
from chasm.data.limits import require_fits
from chasm.data.records import fault
from chasm.data.scan import KSpaceScan, Placement, ifft_along, slice_geometry

# the counters that tell volumes apart, with the word for each
COUNTERS = ("repetition", "echo", "phase", "set")


@dataclass(frozen=True)
class Encoding:
    """The grid that lines belong to."""

    matrix: tuple[int, int, int]  # samples, lines and partitions of the full k-space
    fov: tuple[float, float, float]  # field of view of that k-space in mm; zeros if unknown
    image_fov: tuple[float, float, float]  # field of view of the image in mm; zeros if unknown
    centre: tuple[int, int]  # the line and the partition that hold the zero frequency

    def pixels(self, axis: int) -> int:
        """Return how many pixels the image has along an axis: all but the oversampling."""
        n, fov, wanted = self.matrix[axis], self.fov[axis], self.image_fov[axis]
        return n if min(fov, wanted) <= 0 else max(1, min(n, round(n * wanted / fov)))

    @property
    def voxel(self) -> tuple[float, float, float] | None:
        """mm along the axes, if they are known."""
        x, y, z = (fov / n for fov, n in zip(self.fov, self.matrix, strict=True))
        return (x, y, z) if min(x, y, z) > 0 else None


@dataclass(frozen=True)
class Line:
    """One readout."""

    samples: np.ndarray  # (coils, samples) complex
    centre: int  # the sample that holds the zero frequency
    line: int  # the number of the readout among the phase-encoded lines
    partition: int  # the number of the readout along the third axis of a 3-D scan
    slice: int  # the number of the slice
    volume: tuple[int, int, int, int]  # the numbers of repetition, echo, phase and set
    place: Placement  # position of the slice


@dataclass
class _Volume:
    total: dict[int, np.ndarray] = field(default_factory=dict)  # slice -> (coils, samples, lines, partitions)
    count: dict[int, np.ndarray] = field(default_factory=dict)  # slice -> (lines, partitions)
    places: dict[int, Placement] = field(default_factory=dict)


def assemble(lines: Iterable[Line], encoding: Encoding, file: Path, patient: str) -> dict[str, KSpaceScan]:
    """Put lines into volumes. Their names say how they differ, such as "repetition2-echo1"; "" for the only one.

    Args:
        lines: the lines, in the order they were measured.
        encoding: the grid of the lines.
        file: their file, for messages.
        patient: a name for the patient, "" if unknown.

    Raises:
        DataError: if a line lies outside the grid, or missing lines are not whole columns.
    """
    volumes: dict[tuple[int, ...], _Volume] = {}
    three_d = encoding.matrix[2] > 1
    stacks = 0  # slices of all volumes; of 3-D scans, slabs
    for line in lines:
        key = (*line.volume, line.slice if three_d else 0)
        volume, where = volumes.setdefault(key, _Volume()), 0 if three_d else line.slice
        if where not in volume.total:
            stacks += 1
            require_fits(file, "encodedSpace", (stacks, len(line.samples), *encoding.matrix), 8)
        _add_line(line, encoding, file, volume, where)
    if not volumes:
        raise fault(file, "acquisitions", "no line of an image")
    several = [len({key[i] for key in volumes}) > 1 for i in range(len(COUNTERS) + 1)]

    def name(key: tuple[int, ...]) -> str:
        words = zip((*COUNTERS, "slab"), key, several, strict=True)
        return "-".join(f"{word}{n + 1}" for word, n, needed in words if needed)

    return {name(key): _as_scan(volumes[key], encoding, file, patient) for key in sorted(volumes)}


def _add_line(line: Line, encoding: Encoding, file: Path, volume: _Volume, where: int) -> None:
    nx, ny, nz = encoding.matrix
    coils, n = line.samples.shape
    if not coils or not n:
        raise fault(file, "acquisitions", f"line {line.line} has {counted(coils, 'coil')} and {counted(n, 'sample')}")
    first = nx // 2 - line.centre
    y, z = line.line - encoding.centre[0] + ny // 2, line.partition - encoding.centre[1] + nz // 2
    if first < 0 or first + n > nx:
        problem = f"a readout of {n} samples around sample {line.centre} does not fit into {nx} encoded samples"
        raise fault(file, "encodedSpace", problem)
    if not (0 <= y < ny and 0 <= z < nz):
        problem = f"line {line.line}, partition {line.partition} lies outside of {ny} x {nz} encoded lines"
        raise fault(file, "encodedSpace", problem)
    if where not in volume.total:
        volume.total[where] = np.zeros((coils, nx, ny, nz), np.complex64)
        volume.count[where] = np.zeros((ny, nz), np.int32)
        volume.places[where] = line.place
    total = volume.total[where]
    if coils != len(total):
        raise fault(file, "acquisitions", f"lines of {coils} and of {counted(len(total), 'coil')}")
    total[:, first : first + n, y, z] += line.samples
    volume.count[where][y, z] += 1


def _as_scan(volume: _Volume, encoding: Encoding, file: Path, patient: str) -> KSpaceScan:
    order = sorted(volume.total)
    notes = []
    averages = max(int(count.max()) for count in volume.count.values())
    if averages > 1:
        notes.append(f"{averages} averages of a line were averaged")
    stack = []
    for k in order:
        count = volume.count[k]
        refuse_gaps_along_partitions(count > 0, file, "acquisitions")
        stack.append(volume.total[k] / np.maximum(count, 1).astype(np.float32))
    columns = [(volume.count[k] > 0).any(1) for k in order]
    mask = np.any(columns, axis=0)
    partial = _partial_fourier(mask)
    notes += [partial] if partial else []
    kspace = np.stack(stack)  # (slices, coils, samples, lines, partitions)
    nz = encoding.matrix[2]
    partitions = encoding.pixels(2)
    if nz > 1:
        start = (nz - partitions) // 2
        kspace = np.moveaxis(ifft_along(kspace, -1)[0], -1, 0)[start : start + partitions]
        kspace[..., ~columns[0]] = 0  # the transform of zeros is not always exactly zero
    else:
        kspace = kspace[..., 0]
    size = encoding.pixels(0), encoding.pixels(1)
    middle = tuple(n // 2 - (n - m) // 2 for n, m in zip(encoding.matrix[:2], size, strict=True))
    places = [volume.places[k] for k in order]
    voxel = encoding.voxel
    geometry = None if voxel is None else slice_geometry(places, voxel, size, (middle[0], middle[1]), partitions)
    repeats = float(np.mean([volume.count[k][volume.count[k] > 0].mean() for k in order]))
    filled = np.ascontiguousarray(kspace, np.complex64)
    return KSpaceScan(filled, size, geometry, patient, mask=mask, notes=notes, averages=repeats)


def refuse_gaps_along_partitions(measured: np.ndarray, file: Path, field: str) -> None:
    """Raise a DataError if partitions of a measured line are missing between others.

    At the ends they may be missing, as in partial Fourier and elliptical scanning.

    Args:
        measured: True for the measured (lines, partitions).
        file: the file, for messages.
        field: the part of the file.
    """
    if (between(measured, 1) & ~measured).any():
        raise fault(file, field, "undersampled along the partitions too, which is not supported: only along lines")


def _partial_fourier(columns: np.ndarray) -> str:
    """Return a note if far more lines lack on one side of the zero frequency than on the other."""
    n = len(columns)
    first, last = int(columns.argmax()), n - 1 - int(columns[::-1].argmax())
    before, after = n // 2 - first, last - (n - 1) // 2
    if abs(before - after) <= max(2, n // 16):
        return ""
    return f"partial Fourier: lines {first} to {last} of {n} were measured, and the others are taken as zero"
