"""Reconstruct one case of a scan, and write its volume, picture, page and record."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import chasm
from chasm.common.files import write_json
from chasm.common.text import counted
from chasm.data.identity import dicom_attributes
from chasm.data.records import SOMEWHERE, Geometry
from chasm.reconstruct.dicom import Series
from chasm.reconstruct.outputs import OutputFiles
from chasm.reconstruct.page import Page
from chasm.reconstruct.slices import Reconstructor
from chasm.reconstruct.trust import Consistency, SliceConsistency, Uncertainty
from chasm.reconstruct.volumes import SliceResult, side_by_side, write_volume
from chasm.tasks import Meter

UNKNOWN_VOXELS = "voxel sizes are unknown: 1 mm written"
PICTURED_SLICES = 3  # slices of a volume in the side-by-side picture


@dataclass
class WrittenVolume:
    """What was written for one case.

    Attributes:
        case: name of the case.
        files: the file of the volume, or one for each slice (PNG, DICOM).
        picture: the side-by-side picture.
        page: the page for a browser, if one was asked for.
        slices: number of slices.
        replaced: whether an earlier file of this name was replaced.
        consistency: how well the volume explains what was measured.
        uncertainty: the expected error, if that was asked for.
        scores: metric -> value of the reconstruction; empty if there is no target.
        reference: metric -> value of the zero-filled image.
    """

    case: str
    files: list[Path]
    picture: Path
    page: Path | None
    slices: int
    replaced: bool
    consistency: Consistency
    uncertainty: Uncertainty | None
    scores: dict[str, float] = field(default_factory=dict)
    reference: dict[str, float] = field(default_factory=dict)


def write_case(
    work: Reconstructor,
    case: str,
    rows: list[int],
    files: OutputFiles,
    on_slice: Callable[[int], None],
    complex_: bool = False,
) -> WrittenVolume:
    """Reconstruct the slices of a case and write its files.

    Args:
        work: reconstructs slices.
        case: name of the case.
        rows: its slices.
        files: the files to write.
        on_slice: called after every slice with the number of slices done.
        complex_: whether the volume is complex and not a magnitude.
    """
    scan, protocol = work.scan, work.run.task.protocol
    meters = (Meter(protocol), Meter(protocol))
    pictured_rows = {rows[int(i)] for i in np.linspace(0, len(rows) - 1, PICTURED_SLICES + 2)[1:-1].round()}
    pictured: dict[int, SliceResult] = {}
    consistencies: list[SliceConsistency] = []
    spreads: list[np.ndarray] = []
    factors: list[float] = []
    top = 0.0
    page = None if files.page is None else Page(len(rows))
    shape: tuple[int, ...] = ()

    def images() -> Iterator[np.ndarray]:
        nonlocal shape, top
        for i, row in enumerate(rows):
            result = work.result(row, meters)
            shape = shape or result.image.shape
            if not np.isfinite(result.image).all():
                problem = (
                    "the reconstruction is not finite, so nothing is written: the values of the data are too large"
                )
                raise ValueError(f"{case} slice {i}: {problem} for float32: scale the data")
            if result.image.shape != shape:
                differs = f"{case} slice {i}: {result.image.shape} differs from {shape}"
                raise ValueError(f"{differs}: a volume has one shape: give such files one at a time")
            consistencies.append(result.consistency)
            top = max(top, float(result.image.max()))
            if result.uncertainty is not None and result.uncertainty_factor is not None:
                spreads.append(result.uncertainty)
                factors.append(result.uncertainty_factor)
            if page is not None:
                page.add(result)
            if row in pictured_rows:
                pictured[i] = result
            on_slice(i + 1)
            if not complex_:
                yield result.image
            elif result.complex_image is None:
                raise ValueError(f"{case}: several modalities have no complex image: leave out --complex")
            else:
                yield result.complex_image.astype(np.complex64)

    replaced = any(file.exists() for file in files.volume)
    geometry = scan.data.geometry(case) if files.has_geometry or page is not None else None
    series = _series(work, case, rows, files, geometry)
    scan.notes += [note for note in _made_up(files, geometry, series) if note and note not in scan.notes]
    write_volume(files, images(), series)
    scores, reference = {}, {}
    if scan.scored:
        scores, reference = (m.per_case().get(case, {}) for m in meters)
        if meters[0].blank:
            scan.notes.append(f"{case}: {counted(meters[0].blank, 'blank slice')} not scored")
    consistency = Consistency.of(consistencies)
    uncertainty = None
    if spreads:
        write_volume(files.uncertainty, iter(spreads), series)
        mean = float(np.sqrt(np.mean([np.square(spread).mean() for spread in spreads])))
        relative = mean / top if top > 0 else 0.0
        map_file = files.uncertainty.volume[0]
        uncertainty = Uncertainty(work.map_made_of, float(np.median(factors)), mean, relative, map_file)
    side_by_side(files.picture, case, pictured)
    if page is not None and files.page is not None:
        page.write(
            files.page,
            case=case,
            subtitle=f"{work.run.name} · {scan.read_as}",
            consistency=consistency,
            uncertainty=uncertainty,
            scores=scores,
            reference=reference,
            facts=[
                ("Run", work.run.name),
                ("Read as", scan.read_as),
                ("Sampling", work.sampling),
                *([("Scores", f"{protocol.name}: {protocol.meaning}")] if scores else []),
                ("Volume", files.volume[0].name + (" .." if len(files.volume) > 1 else "")),
            ],
            notes=scan.notes,
            geometry=geometry,
        )
    record = {
        "case": case,
        "slices": len(rows),
        "run": work.run.name,
        "read as": scan.read_as,
        "sampling": work.sampling,
        "protocol": protocol.name,
        "meaning": protocol.meaning,
        "scores": scores or None,
        "zero-filled": reference or None,
        "data consistency": asdict(consistency),
        "uncertainty": None if uncertainty is None else {**asdict(uncertainty), "file": uncertainty.file.name},
        "notes": scan.notes,
        "files": [file.name for file in files.all],
    }
    write_json(files.record, record)
    return WrittenVolume(
        case, files.volume, files.picture, files.page, len(rows), replaced, consistency, uncertainty, scores, reference
    )


def _series(work: Reconstructor, case: str, rows: list[int], files: OutputFiles, geometry: Geometry | None) -> Series:
    name = work.run.name
    description = f"Reconstructed by chasm {chasm.__version__}, {name}, from {work.scan.read_as}; {work.sampling}"
    source = dicom_attributes(work.scan.data.locate(rows[0])[0].files[0]) if files.is_dicom else {}
    return Series(case, f"chasm {name}", description, source, geometry or Geometry(np.eye(4), SOMEWHERE))


def _made_up(files: OutputFiles, geometry: Geometry | None, series: Series) -> list[str]:
    """Return one line for each entry of the files whose value is not known and was filled in."""
    notes = [UNKNOWN_VOXELS if geometry is None else geometry.note] if files.has_geometry else []
    return notes + (series.notes if files.is_dicom else [])
