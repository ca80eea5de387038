"""ISMRMRD raw data (MRD), the format that scanners of all vendors are converted to: HDF5 with a header and readouts.

Noise scans are kept apart for prewhitening. Lines for calibration belong to the image if they were measured with it
(embedded or interleaved) and are left out if not. Navigators, phase correction and dummy scans are left out. Only
Cartesian data is read.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from chasm.common.files import write_atomic
from chasm.common.text import counted
from chasm.data.files import H5Files, h5_xml, reading, require_finite
from chasm.data.limits import max_bytes, require_fits, require_h5_fits
from chasm.data.lines import Encoding, Line, assemble
from chasm.data.records import fault, patient_name
from chasm.data.scan import KSpaceScan, Placement, image_noise

_MIN_CHUNK, _MAX_CHUNK = 16, 1024  # readouts that are in memory at a time
_LEFT_OUT = {
    "ACQ_IS_NAVIGATION_DATA": "navigator",
    "ACQ_IS_PHASECORR_DATA": "phase correction",
    "ACQ_IS_HPFEEDBACK_DATA": "feedback",
    "ACQ_IS_RTFEEDBACK_DATA": "feedback",
    "ACQ_IS_DUMMYSCAN_DATA": "dummy",
    "ACQ_IS_SURFACECOILCORRECTIONSCAN_DATA": "coil correction",
    "ACQ_IS_PHASE_STABILIZATION_REFERENCE": "phase stabilisation",
    "ACQ_IS_PHASE_STABILIZATION": "phase stabilisation",
}


def ismrmrd_group(file: Path) -> str:
    """Return the name of the group of an HDF5 file that holds ISMRMRD data, or ""."""
    with H5Files() as files:
        handle = files[file]
        with reading(file, "groups"):
            groups = [n for n, item in handle.items() if hasattr(item, "keys") and {"xml", "data"} <= set(item)]
    return groups[0] if groups else ""


def header_of_file(file: Path) -> bytes | None:
    """Return the ISMRMRD header of an HDF5 file as XML: of raw data, or of a fastMRI volume; None if it has none."""
    if file.suffix.lower() not in (".h5", ".hdf5", ".mrd"):
        return None
    group = ismrmrd_group(file)
    key = f"{group}/xml" if group else "ismrmrd_header"
    with H5Files() as files:
        handle = files[file]
        with reading(file, key):
            if key not in handle:
                return None
        return h5_xml(handle, file, key)


def read_ismrmrd(file: Path) -> dict[str, KSpaceScan]:
    """Read the Cartesian volumes of an ISMRMRD file, by names such as "repetition2"; "" for the only one."""
    from ismrmrd import xsd
    from xsdata.formats.dataclass.parsers import XmlParser
    from xsdata.formats.dataclass.parsers.handlers import XmlEventHandler

    xml = header_of_file(file)
    with reading(file, "xml"):
        assert xml is not None
        header = XmlParser(handler=XmlEventHandler).from_bytes(xml, xsd.ismrmrdHeader)
        encodings = list(header.encoding)
        if not encodings:
            raise fault(file, "xml", "the header has no encoding")
        encoding = _encoding(encodings[0])
    trajectory = getattr(encodings[0].trajectory, "value", str(encodings[0].trajectory))
    if trajectory != "cartesian":
        raise fault(file, "trajectory", f"{trajectory}: only Cartesian data can be read")
    parallel = encodings[0].parallelImaging
    mode = getattr(getattr(parallel, "calibrationMode", None), "value", "")
    subject = header.subjectInformation
    noise: list[np.ndarray] = []
    left_out: Counter[str] = Counter()
    dwell: dict[str, float] = {}
    lines = _lines(file, mode in ("separate", "external"), noise, left_out, dwell)
    scans = assemble(lines, encoding, file, patient_name(getattr(subject, "patientID", None)))
    samples = np.concatenate(noise, axis=1) if noise else None
    notes = [f"left out: {', '.join(f'{n} {kind} lines' for kind, n in left_out.items())}"] if left_out else []
    if len(encodings) > 1:
        notes.append(f"only the first of {counted(len(encodings), 'encoding')} was read")
    bandwidth = getattr(header.acquisitionSystemInformation, "relativeReceiverNoiseBandwidth", None) or 1.0
    for scan in scans.values():
        scan.noise, scan.notes = samples, notes + scan.notes
        if samples is not None and min(dwell.values()) > 0:
            scan.noise_level = image_noise(samples, dwell["noise"] / dwell["image"] / bandwidth, scan.averages)
    return scans


def _lines(
    file: Path, drop_calibration: bool, noise: list[np.ndarray], left_out: Counter[str], dwell: dict[str, float]
) -> Iterator[Line]:
    """Yield the lines of images; append noise, count what is left out, and set the time of a sample of each."""
    import ismrmrd

    kinds = {getattr(ismrmrd, flag): kind for flag, kind in _LEFT_OUT.items() if hasattr(ismrmrd, flag)}
    with reading(file, "data"), ismrmrd.File(file, "r") as handle:
        acquisitions = handle[ismrmrd_group(file)].acquisitions
        # No readout is larger than the file, but many may share one place in it.
        chunk = min(_MAX_CHUNK, max(_MIN_CHUNK, max_bytes() // file.stat().st_size))
        require_h5_fits(file, "data", acquisitions.data, (min(chunk, len(acquisitions)),))
        for start in range(0, len(acquisitions), chunk):
            for readout in acquisitions[start : start + chunk]:
                head = readout.getHead()
                if readout.is_flag_set(ismrmrd.ACQ_IS_NOISE_MEASUREMENT):
                    dwell["noise"] = float(head.sample_time_us)
                    noise.append(require_finite(np.array(readout.data), file, "noise"))
                    require_fits(file, "noise", (len(noise), *noise[-1].shape), 8)
                    continue
                kind = next((kind for flag, kind in kinds.items() if readout.is_flag_set(flag)), "")
                if head.encoding_space_ref:
                    kind = "other encoding"
                if drop_calibration and readout.is_flag_set(ismrmrd.ACQ_IS_PARALLEL_CALIBRATION):
                    kind = "calibration"
                if kind:
                    left_out[kind] += 1
                    continue
                dwell["image"] = float(head.sample_time_us)
                yield _line(readout, head, file, readout.is_flag_set(ismrmrd.ACQ_IS_REVERSE))


def _line(readout: Any, head: Any, file: Path, reverse: bool) -> Line:
    data = require_finite(np.array(readout.data), file, f"acquisition {head.scan_counter}")
    first, end = head.discard_pre, data.shape[1] - head.discard_post
    centre = head.center_sample
    if reverse:  # measured from right to left
        data, centre = data[:, ::-1], data.shape[1] - 1 - centre
        first, end = data.shape[1] - end, data.shape[1] - first
    place = Placement(*(np.array(v, float) for v in (head.position, head.read_dir, head.phase_dir, head.slice_dir)))
    i = head.idx
    volume = (i.repetition, i.contrast, i.phase, i.set)
    samples = data[:, first:end]
    return Line(samples, centre - first, i.kspace_encode_step_1, i.kspace_encode_step_2, i.slice, volume, place)


def _encoding(encoding: Any) -> Encoding:
    def sizes(of: Any) -> tuple[float, float, float]:
        mm = float(of.x), float(of.y), float(of.z)
        return mm if np.isfinite(mm).all() else (0.0, 0.0, 0.0)

    def centre(n: int, limit: Any) -> int:
        return n // 2 if limit is None else int(limit.center)

    space, image, limits = encoding.encodedSpace, encoding.reconSpace, encoding.encodingLimits
    nx, ny, nz = int(space.matrixSize.x), int(space.matrixSize.y), int(space.matrixSize.z)
    partition = 0 if nz == 1 else centre(nz, limits.kspace_encoding_step_2)
    centres = centre(ny, limits.kspace_encoding_step_1), partition
    return Encoding((nx, ny, nz), sizes(space.fieldOfView_mm), sizes(image.fieldOfView_mm), centres)


def write_ismrmrd(scan: KSpaceScan, file: Path) -> None:
    """Write a volume as ISMRMRD: noise first, then the measured lines of every slice."""
    import ismrmrd

    slices, _, h, _ = scan.kspace.shape
    header = _header(scan)
    readouts = []
    if scan.noise is not None:
        readout = _readout(scan.noise, 0)
        readout.sample_time_us = 0.0  # the noise of the image is not known
        if scan.noise_level is not None:  # longer samples take noise from a narrower band
            readout.sample_time_us = (scan.noise_level / image_noise(scan.noise, 1)) ** 2
        readout.set_flag(ismrmrd.ACQ_IS_NOISE_MEASUREMENT)
        readouts.append(readout)
    columns = np.flatnonzero(scan.columns)
    for k in range(slices):
        for i, column in enumerate(columns):
            readout = _readout(scan.kspace[k, :, :, column], h // 2)
            readout.scan_counter = len(readouts)
            readout.idx.kspace_encode_step_1, readout.idx.slice = int(column), k
            _set_place(readout, scan, k)
            for flag, at in ((ismrmrd.ACQ_FIRST_IN_SLICE, 0), (ismrmrd.ACQ_LAST_IN_SLICE, len(columns) - 1)):
                if i == at:
                    readout.set_flag(flag)
            readouts.append(readout)
    readouts[-1].set_flag(ismrmrd.ACQ_LAST_IN_MEASUREMENT)

    def write(partial: Path) -> None:
        with ismrmrd.File(partial, "w") as handle:
            dataset = handle["dataset"]
            dataset.header, dataset.acquisitions = header, readouts

    write_atomic(file, write)


def _readout(samples: np.ndarray, centre: int) -> Any:
    import ismrmrd

    readout = ismrmrd.Acquisition.from_array(np.ascontiguousarray(samples, np.complex64))
    readout.center_sample, readout.available_channels = centre, len(samples)
    readout.sample_time_us = 1.0
    return readout


def _set_place(readout: Any, scan: KSpaceScan, k: int) -> None:
    """Write the centre of the field of view and the directions of a slice; leave zeros if they are not known."""
    geometry = scan.geometry
    if geometry is None or geometry.note:
        return
    affine = geometry.affine.copy()
    affine[:2] *= -1  # to the left and to the back
    (h, w), (full_h, full_w) = scan.size, scan.kspace.shape[-2:]
    middle = full_h // 2 - (full_h - h) // 2, full_w // 2 - (full_w - w) // 2
    directions = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    readout.position[:] = (affine @ [middle[1], h - 1 - middle[0], k, 1])[:3]
    right, up, normal = directions.T
    readout.read_dir[:], readout.phase_dir[:], readout.slice_dir[:] = -up, right, normal


def header_xml(scan: KSpaceScan) -> str:
    """Return the ISMRMRD header of a volume as XML."""
    from ismrmrd import xsd

    return str(xsd.ToXML(_header(scan)))


def _header(scan: KSpaceScan) -> Any:
    from ismrmrd import xsd

    slices, coils, h, w = scan.kspace.shape
    geometry = scan.geometry
    voxel = np.ones(3) if geometry is None else np.linalg.norm(geometry.affine[:3, :3], axis=0)[[1, 0, 2]]

    def space(rows: int, columns: int) -> Any:
        fov = xsd.fieldOfViewMm(x=float(rows * voxel[0]), y=float(columns * voxel[1]), z=float(voxel[2]))
        return xsd.encodingSpaceType(matrixSize=xsd.matrixSizeType(x=rows, y=columns, z=1), fieldOfView_mm=fov)

    limits = xsd.encodingLimitsType(
        kspace_encoding_step_1=xsd.limitType(minimum=0, maximum=w - 1, center=w // 2),
        slice=xsd.limitType(minimum=0, maximum=slices - 1, center=slices // 2),
    )
    trajectory, image = xsd.trajectoryType("cartesian"), space(*scan.size)
    encoding = xsd.encodingType(
        encodedSpace=space(h, w), reconSpace=image, encodingLimits=limits, trajectory=trajectory
    )
    return xsd.ismrmrdHeader(
        version=1,
        acquisitionSystemInformation=xsd.acquisitionSystemInformationType(receiverChannels=coils),
        experimentalConditions=xsd.experimentalConditionsType(H1resonanceFrequency_Hz=0),
        encoding=[encoding],
    )
