"""Siemens raw data (twix, meas_*.dat), through the package twixtools. Only Cartesian data is read."""

import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from chasm.common.text import counted
from chasm.data.files import reading, require_finite
from chasm.data.limits import require_regular
from chasm.data.lines import Encoding, Line, assemble
from chasm.data.records import fault, patient_name
from chasm.data.scan import KSpaceScan, Placement

_OVERSAMPLING = 2  # of the readout, on every Siemens scanner
_CARTESIAN = 1
_INPLACE = 2  # calibration lines that belong to the image
_DIRECTIONS = ("dSag", "dCor", "dTra")  # to the left, to the back, up
_LEFT_OUT = {
    "PHASCOR": "phase correction",
    "RTFEEDBACK": "feedback",
    "HPFEEDBACK": "feedback",
    "REFPHASESTABSCAN": "phase stabilisation",
    "PHASESTABSCAN": "phase stabilisation",
    "noname60": "navigator",
}


def read_twix(file: Path) -> dict[str, KSpaceScan]:
    """Read the volumes of the last measurement of a .dat file; those before it are adjustments.

    Raises:
        DataError: when the file is damaged, or not Cartesian.
    """
    import twixtools

    require_regular(file)
    with reading(file, "measurement"), contextlib.redirect_stdout(io.StringIO()):
        measurements = [m for m in twixtools.read_twix(str(file), verbose=False) if isinstance(m, dict)]
    if not measurements:
        raise fault(file, "measurement", "there is none")
    measurement = measurements[-1]
    with reading(file, "header"):
        protocol, config = measurement["hdr"]["MeasYaps"], measurement["hdr"].get("Meas", {})
        trajectory = protocol["sKSpace"].get("ucTrajectory", _CARTESIAN)
        patient = config.get("PatientID") or config.get("tPatientID") or ""
    if trajectory != _CARTESIAN:
        raise fault(file, "ucTrajectory", f"{trajectory}: only Cartesian data can be read (1)")
    if not str(patient).strip("x "):  # blanked before the file was passed on
        patient = ""
    noise: list[np.ndarray] = []
    left_out: Counter[str] = Counter()
    readouts = [m for m in measurement["mdb"] if not (m.is_flag_set("ACQEND") or m.is_flag_set("SYNCDATA"))]
    images = [m for m in readouts if m.is_image_scan()]
    if not images:
        raise fault(file, "measurement", "no line of an image")
    with reading(file, "header"):
        encoding = _encoding(protocol, images)
        places = _places(protocol, images)
    with reading(file, "data"):
        inside = protocol.get("sPat", {}).get("ucRefScanMode", _INPLACE) == _INPLACE
        lines = _lines(readouts, places, not inside, noise, left_out, file)
        scans = assemble(lines, encoding, file, patient=patient_name(patient))
    samples = np.concatenate(noise, axis=1) if noise else None
    notes = [f"left out: {', '.join(f'{n} {kind} lines' for kind, n in left_out.items())}"] if left_out else []
    if len(measurements) > 1:
        notes.append(f"the last of {counted(len(measurements), 'measurement')} was read")
    for scan in scans.values():
        scan.noise, scan.notes = samples, notes + scan.notes
    return scans


def _lines(
    readouts: list[Any],
    places: dict[int, Placement],
    drop_calibration: bool,
    noise: list[np.ndarray],
    left_out: Counter[str],
    file: Path,
) -> Iterator[Line]:
    """Yield the lines of images; append noise, and count what is left out."""
    for readout in readouts:
        if readout.is_flag_set("NOISEADJSCAN"):
            noise.append(require_finite(np.asarray(readout.data), file, "noise"))
            continue
        kind = next((kind for flag, kind in _LEFT_OUT.items() if readout.is_flag_set(flag)), "")
        calibration = readout.is_flag_set("PATREFSCAN") and not readout.is_flag_set("PATREFANDIMASCAN")
        if kind or (calibration and drop_calibration):
            left_out[kind or "calibration"] += 1
            continue
        data, centre = require_finite(np.asarray(readout.data), file, "data"), int(readout.mdh.CenterCol)
        if readout.is_flag_set("REFLECT"):  # measured from right to left
            data, centre = data[:, ::-1], data.shape[1] - 1 - centre
        volume = (readout.cRep, readout.cEco, readout.cPhs, readout.cSet)
        yield Line(data, centre, readout.cLin, readout.cPar, readout.cSlc, volume, places[readout.cSlc])


def _encoding(protocol: Any, images: list[Any]) -> Encoding:
    space, slices = protocol["sKSpace"], protocol["sSliceArray"]["asSlice"][0]
    samples = _OVERSAMPLING * int(space["lBaseResolution"])
    lines, partitions = int(space["lPhaseEncodingLines"]), 1
    height, width, depth = (float(slices[name]) for name in ("dReadoutFOV", "dPhaseFOV", "dThickness"))
    if max(m.cPar for m in images) > 0:
        partitions = int(space["lPartitions"])
    phase = 1 + float(space.get("dPhaseOversamplingForDialog", 0))
    first = images[0].mdh
    return Encoding(
        (samples, lines, partitions),
        (_OVERSAMPLING * height, phase * width, depth),
        (height, width, depth),
        (int(first.CenterLin), int(first.CenterPar) if partitions > 1 else 0),
    )


def _places(protocol: Any, images: list[Any]) -> dict[int, Placement]:
    """Return where each slice lies, from the rotation and the position that its first line carries."""
    from twixtools.geometry import quat_to_rotmat

    places: dict[int, Placement] = {}
    for readout in images:
        if readout.cSlc in places:
            continue
        data = readout.mdh.SliceData
        turn = quat_to_rotmat(*(float(q) for q in data.Quaternion))  # columns: phase, read, slice
        position = data.SlicePos
        centre = np.array([float(getattr(position, name)) for name in ("Sag", "Cor", "Tra")])
        places[readout.cSlc] = Placement(centre, -turn[:, 1], -turn[:, 0], turn[:, 2])
    return places
