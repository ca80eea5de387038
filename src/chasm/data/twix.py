"""Siemens raw data (twix, meas_*.dat), through the package twixtools. Only Cartesian data is read."""

import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chasm.common.text import counted
from chasm.data.files import reading, require_finite
from chasm.data.lines import Encoding, Line, assemble
from chasm.data.records import fault, patient_name
from chasm.data.scan import KSpaceScan, Placement, image_noise
from chasm.data.twix_lengths import require_sound_lengths

_OVERSAMPLING = 2  # oversampling of the readout, on every Siemens scanner
_CARTESIAN = 1
_INPLACE = 2  # calibration lines that belong to the image
_NOISE_BANDWIDTH = 130  # bandwidth of a noise scan, in Hz per pixel
_NOISE_TIMES = {"AdjCoilSens": 5.0, "AdjQuietCoilSens": 4.0}  # us per noise sample of these adjustments, which differ
_RECEIVER_BAND = 0.793  # the part of the band that the receiver lets noise through
_LEFT_OUT = {
    "PHASCOR": "phase correction",
    "RTFEEDBACK": "feedback",
    "HPFEEDBACK": "feedback",
    "REFPHASESTABSCAN": "phase stabilisation",
    "PHASESTABSCAN": "phase stabilisation",
    "noname60": "navigator",
}


def read_twix(file: Path) -> dict[str, KSpaceScan]:
    """Read the Cartesian volumes of the last measurement of a .dat file; those before it are adjustments."""
    import twixtools

    with reading(file, "measurement"), contextlib.redirect_stdout(io.StringIO()):
        require_sound_lengths(file)
        options = {"verbose": False, "parse_pmu": False, "parse_geometry": False}
        measurements = [m for m in twixtools.read_twix(str(file), **options) if isinstance(m, dict)]
    if not measurements:
        raise fault(file, "measurement", "there is none")
    measurement = measurements[-1]
    if "MeasYaps" not in measurement["hdr"]:
        raise fault(file, "measurement", "no protocol (MeasYaps): no Siemens raw data, or damaged")
    with reading(file, "header"):
        protocol, config = measurement["hdr"]["MeasYaps"], measurement["hdr"].get("Meas", {})
        trajectory = protocol["sKSpace"].get("ucTrajectory", _CARTESIAN)
        patient = config.get("PatientID") or config.get("tPatientID") or ""
    if trajectory != _CARTESIAN:
        raise fault(file, "ucTrajectory", f"{trajectory}: only Cartesian data can be read (1)")
    if not str(patient).strip("x "):  # blanked before the file was passed on
        patient = ""
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
        lines = _lines(readouts, places, not inside, left_out, file)
        scans = assemble(lines, encoding, file, patient_name(patient))
        noise = _noise(measurements, images[0], file)
        times = _sample_times(protocol, images)
    notes = [f"left out: {', '.join(f'{n} {kind} lines' for kind, n in left_out.items())}"] if left_out else []
    if len(measurements) > 1:
        notes.append(f"the last of {counted(len(measurements), 'measurement')} was read")
    for scan in scans.values():
        scan.notes = notes + scan.notes
        if noise is not None:
            scan.noise = noise.samples
            if len(times) == 1:  # echoes of different bandwidths have different noise
                scan.noise_level = image_noise(noise.samples, noise.time / (times[0] * _RECEIVER_BAND), scan.averages)
    return scans


@dataclass(frozen=True)
class _Noise:
    samples: np.ndarray  # (coils, samples)
    time: float  # time of one sample, in us


def _noise(measurements: list[Any], image: Any, file: Path) -> _Noise | None:
    """Return the noise scan of the coils of an image, from its measurement or the last one before that has it."""
    for measurement in reversed(measurements):
        readouts = [m for m in measurement["mdb"] if m.is_flag_set("NOISEADJSCAN")]
        rows = _rows_of_coils(readouts[0], image) if readouts else []
        if not rows:
            continue
        noise = [require_finite(np.asarray(m.data)[rows], file, "noise") for m in readouts]
        name = str(measurement["hdr"].get("MeasYaps", {}).get("tProtocolName", ""))
        time = _NOISE_TIMES.get(name, 1e6 / (_NOISE_BANDWIDTH * noise[0].shape[1]))
        return _Noise(np.concatenate(noise, axis=1), time)
    return None


def _rows_of_coils(noise: Any, image: Any) -> list[int]:
    """Return the rows of a noise readout that belong to the coils of an image readout; none if coils are missing."""
    there, wanted = ([h.ChannelId for h in m.channel_hdr or []] for m in (noise, image))
    if len(set(there)) == len(there) > 0 and set(wanted) <= set(there):
        return [there.index(coil) for coil in wanted]
    coils = noise.mdh.UsedChannels
    return list(range(coils)) if not there and coils == image.mdh.UsedChannels else []


def _sample_times(protocol: Any, images: list[Any]) -> list[float]:
    """Return the time of a sample of the images in us: one time, several if echoes differ, or [] if unknown."""
    known = protocol.get("sRXSPEC", {}).get("alDwellTime", [])
    times = {known[m.cEco] / 1e3 for m in images if m.cEco < len(known) and isinstance(known[m.cEco], int)}
    return sorted(time for time in times if time > 0)


def _lines(
    readouts: list[Any], places: dict[int, Placement], drop_calibration: bool, left_out: Counter[str], file: Path
) -> Iterator[Line]:
    """Yield the lines of images, and count what is left out."""
    for readout in readouts:
        if readout.is_flag_set("NOISEADJSCAN"):
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
