"""Read DICOM files, and find the frames of each volume, their order and their position.

A series may hold several volumes: echoes, repetitions, views, magnitude and phase. Each becomes a case of its own.
Frames are taken in the order of their instance numbers if that runs through the volume from one end to the other, and
else in the order of their places. Classic files hold one frame each; Enhanced multi-frame files hold many, each with a
place, an echo time and a scale of its own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, MutableSequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chasm.data.files import reading
from chasm.data.limits import require_fits, require_inflates
from chasm.data.records import SOMEWHERE, DataError, Geometry, fault, patient_name

SAME_DIRECTION = 1e-3  # difference between direction cosines that is rounding
MAX_UNEVEN = 0.1  # largest distance of a slice from its place on the grid, over the distance between slices
FRAME_BYTES = 2**12  # memory that the record of one frame takes, about
MIN_GAP = 1.5  # a slice is missing if two are this many times the usual distance apart


@dataclass(frozen=True)
class Frame:
    """One image of a DICOM file, without its pixels."""

    file: Path
    number: int  # the number of the frame within its file
    instance: int  # the number of the frame within the series
    rows: int  # the height of the image
    echo: float  # echo time in ms, or the number of the echo; 0 if unknown
    component: str  # "m", "p", "r" or "i" for magnitude, phase, real or imaginary part; "" if unknown
    time: int  # the number of the repetition; 0 if unknown
    position: np.ndarray | None  # the centre of the first pixel in mm, to the left, to the back and up
    orientation: np.ndarray | None  # the directions in which columns and rows count up, (2, 3)
    spacing: np.ndarray | None  # between rows and between columns, in mm
    thickness: float | None  # between slices, in mm, if the file says


@dataclass(frozen=True)
class SeriesFile:
    """The header of a DICOM file."""

    series: str  # the UID that the files of a series share
    patient: str  # a name for the patient that hides the PatientID, or ""
    frames: list[Frame]  # the images in the file; none in reports and directories


def read_header(file: Path) -> SeriesFile:
    """Read the header of a DICOM file."""
    data = _open(file, pixels=False)
    with reading(file, "header"):
        frames = []
        if "Rows" in data:
            _require_fits(file, data)
            frames = [_frame(file, data, i) for i in range(int(data.get("NumberOfFrames") or 1))]
    patient = patient_name(data.get("PatientID") or data.get("ClinicalTrialSubjectID"))
    return SeriesFile(str(data.get("SeriesInstanceUID") or ""), patient, frames)


def header_or_none(file: Path) -> SeriesFile | None:
    """Read a header; None if it cannot be read, which reading the file reports."""
    try:
        return read_header(file)
    except DataError:
        return None


def read_pixels(file: Path) -> np.ndarray:
    """Read the frames of a DICOM file, (frames, H, W) float32, in the units that its rescale slopes give."""
    data = _open(file, pixels=True)
    with reading(file, "PixelData"):
        _require_fits(file, data)
        pixels = data.pixel_array.astype(np.float32)
    if data.get("SamplesPerPixel", 1) != 1:
        raise fault(file, "SamplesPerPixel", f"expected 1 (grey), got {data.SamplesPerPixel}")
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    with reading(file, "RescaleSlope"):
        for i, frame in enumerate(pixels):
            get = _value_finder(data, i)
            slope, intercept = (get("PixelValueTransformationSequence", f"Rescale{n}") for n in ("Slope", "Intercept"))
            frame *= 1 if slope is None else float(slope)
            frame += 0 if intercept is None else float(intercept)
    inverted = data.get("PhotometricInterpretation") == "MONOCHROME1"  # small values are shown bright
    return pixels.max() - pixels if inverted else pixels


def split_volumes(frames: Iterable[Frame]) -> dict[str, list[Frame]]:
    """Sort the frames of a series into volumes, each in the order of its slices.

    The names of the volumes say how they differ: "echo2", "p", "time1", "view3"; "" for the only one.
    """
    volumes: dict[tuple[Any, ...], list[Frame]] = {}
    views: list[np.ndarray | None] = []
    repeats: Counter[Any] = Counter()  # frames at each place
    for frame in sorted(frames, key=lambda f: (f.instance, f.number)):
        view = next((i for i, v in enumerate(views) if _same_view(v, frame.orientation)), len(views))
        if view == len(views):
            views.append(frame.orientation)
        kind = (frame.echo, frame.component, frame.time, view)
        place = None if frame.position is None else tuple(frame.position.round(2))
        repeat = 0 if place is None else repeats[kind, place]
        repeats[kind, place] += 1
        volumes.setdefault((*kind, repeat), []).append(frame)
    several = [len({key[i] for key in volumes}) > 1 for i in range(5)]
    echoes, times = (sorted({key[i] for key in volumes}) for i in (0, 2))

    def name(key: tuple[Any, ...]) -> str:
        echo, component, time, view, repeat = key
        words = (
            f"echo{echoes.index(echo) + 1}",
            component or "other",
            f"time{times.index(time) + 1}",
            f"view{view + 1}",
            f"time{repeat + 1}" if not several[2] else f"repeat{repeat + 1}",
        )
        return "-".join(word for word, needed in zip(words, several, strict=True) if needed)

    return {name(key): _in_slice_order(volumes[key]) for key in sorted(volumes)}


def geometry_of_frames(frames: list[Frame]) -> Geometry | None:
    """Return where the frames of one volume lie, in their order; None if not even the pixel size is known.

    Raises a DataError if a slice is missing, or they are not evenly spaced.
    """
    first = frames[0]
    if first.spacing is None:
        return None
    between_rows, between_columns = first.spacing
    if first.orientation is None or any(frame.position is None for frame in frames):
        missing = "ImageOrientationPatient" if all(f.position is not None for f in frames) else "ImagePositionPatient"
        sizes = np.diag([between_columns, between_rows, first.thickness or 1, 1])
        return Geometry(sizes, SOMEWHERE, note=f"{missing} is missing: only the voxel sizes are written")
    columns, rows = first.orientation
    places = np.array([frame.position for frame in frames])
    normal = np.cross(columns, rows)
    step = normal * (first.thickness or 1) if len(frames) == 1 else _step(frames, places, normal)
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1], affine[:3, 2] = columns * between_columns, -rows * between_rows, step
    affine[:3, 3] = places[0] + (first.rows - 1) * between_rows * rows  # the lowest row
    affine[:2] *= -1  # DICOM counts x to the left and y to the back
    return Geometry(affine)


def _step(frames: list[Frame], places: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Return the vector from one slice to the next; refuse gaps."""
    distances = np.linalg.norm(np.diff(places, axis=0), axis=1)
    usual = np.sort(distances)[(len(distances) - 1) // 2]
    gaps = np.flatnonzero(distances > MIN_GAP * usual)
    if len(gaps):
        i = int(gaps[0])
        a, b = (f"{places[k] @ normal:.4g}" for k in (i, i + 1))
        problem = f"a slice is missing between {a} and {b} mm: the others are {usual:.4g} mm apart"
        raise fault(frames[i + 1].file, "ImagePositionPatient", problem)
    step: np.ndarray = (places[-1] - places[0]) / (len(frames) - 1)
    off = np.linalg.norm(places - places[0] - np.arange(len(frames))[:, None] * step, axis=1)
    if off.max() > MAX_UNEVEN * usual:
        k = int(off.argmax())
        problem = f"this one is {off[k]:.3g} mm from its place (they are {usual:.4g} apart)"
        raise fault(frames[k].file, "ImagePositionPatient", f"slices are not evenly spaced: {problem}")
    return step


def _in_slice_order(frames: list[Frame]) -> list[Frame]:
    """Sort frames by instance number if their places then run one way, and else by place."""
    if any(frame.position is None or frame.orientation is None for frame in frames) or len(frames) == 1:
        return frames
    normal = np.cross(*frames[0].orientation)  # type: ignore[misc]
    along = np.array([frame.position @ normal for frame in frames])
    steps = np.diff(along)
    if (steps > 0).all() or (steps < 0).all():
        return frames
    return [frames[i] for i in np.argsort(along, kind="stable")]


def _same_view(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(np.abs(one - other).max() < SAME_DIRECTION)


def _open(file: Path, pixels: bool) -> Any:
    import pydicom

    with reading(file, "header"):
        _require_inflates(file)
        return pydicom.dcmread(file, stop_before_pixels=not pixels)


def _require_inflates(file: Path) -> None:
    """Refuse a file whose data set is deflated and inflates to more than memory may take."""
    import pydicom

    with open(file, "rb") as f:
        if f.read(132)[128:] != b"DICM":
            return
        meta = pydicom.filereader.read_file_meta_info(file)
        if meta.get("TransferSyntaxUID") == pydicom.uid.DeflatedExplicitVRLittleEndian:
            f.seek(144 + meta.FileMetaInformationGroupLength)  # preamble, "DICM", and the element with that length
            require_inflates(file, "header", f.read())


def _require_fits(file: Path, data: Any) -> None:
    shape = [int(data.get(name) or 1) for name in ("NumberOfFrames", "Rows", "Columns", "SamplesPerPixel")]
    require_fits(file, "PixelData", shape, max(4, int(data.get("BitsAllocated") or 0) // 8))  # read as float32
    require_fits(file, "NumberOfFrames", shape[:1], FRAME_BYTES)


def _value_finder(data: Any, number: int) -> Callable[[str, str], Any]:
    """Return a function that looks up a value of a frame: in its functional group, the shared one, or the file."""
    groups = []
    for sequence, i in (("PerFrameFunctionalGroupsSequence", number), ("SharedFunctionalGroupsSequence", 0)):
        items = data.get(sequence)
        if items is not None and len(items) > i:
            groups.append(items[i])

    def get(group: str, name: str) -> Any:
        for item in groups:
            if group in item and len(item[group].value) and name in item[group][0]:
                return item[group][0].get(name)
        return data.get(name)

    return get


def _frame(file: Path, data: Any, number: int) -> Frame:
    get = _value_finder(data, number)

    def floats(group: str, name: str, length: int) -> np.ndarray | None:
        value = get(group, name)
        if not isinstance(value, MutableSequence) or len(value) != length:
            return None
        numbers = np.array([float(v) for v in value])
        return numbers if np.isfinite(numbers).all() else None

    spacing = floats("PixelMeasuresSequence", "PixelSpacing", 2)
    if spacing is not None and not (spacing > 0).all():
        spacing = None  # a distance of zero says nothing
    orientation = floats("PlaneOrientationSequence", "ImageOrientationPatient", 6)
    if orientation is not None and not np.cross(*orientation.reshape(2, 3)).any():
        orientation = None  # both directions are the same
    position = floats("PlanePositionSequence", "ImagePositionPatient", 3)
    if int(data.get("NumberOfFrames") or 1) > 1 and "PerFrameFunctionalGroupsSequence" not in data:
        position = None  # the file has one position, that of the first frame
    kind = get("MRImageFrameTypeSequence", "ComplexImageComponent")
    if kind is None:
        types = data.get("ImageType") or []
        kind = types[2] if len(types) > 2 and str(types[2]).upper() in ("M", "P", "R", "I") else ""
    echo = get("MREchoSequence", "EffectiveEchoTime")
    echo = data.get("EchoTime") or data.get("EchoNumbers") if echo is None else echo
    time = get("FrameContentSequence", "TemporalPositionIndex") or data.get("TemporalPositionIdentifier")
    thickness = data.get("SpacingBetweenSlices") or get("PixelMeasuresSequence", "SliceThickness")
    return Frame(
        file,
        number,
        int(data.get("InstanceNumber") or 0),
        int(data.Rows),
        float(echo or 0),
        str(kind or "")[:1].lower(),
        int(time or 0),
        position,
        None if orientation is None else orientation.reshape(2, 3),
        spacing,
        None if thickness is None else float(thickness),
    )
