"""Write volumes slice by slice as HDF5, NIfTI, NumPy, DICOM or PNG, and a picture of some of their slices."""

import gzip
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from chasm.common.files import unwritable, write_atomic
from chasm.data.records import Geometry
from chasm.reconstruct.dicom import Series, write_series
from chasm.reconstruct.outputs import OutputFiles
from chasm.reconstruct.trust import SliceConsistency


@dataclass
class SliceResult:
    """One reconstructed slice, (H, W) arrays in the units of the data.

    Attributes:
        image: the magnitude.
        zero_filled: magnitude of the zero-filled image.
        target: the image to compare with, if there is one.
        residual: the part of the measured samples that the image does not explain, as an image.
        complex_image: the image before its magnitude is taken; None for several modalities.
        consistency: how well the image explains the measured samples, in numbers.
        uncertainty: expected error of the magnitude, if that was asked for.
        uncertainty_factor: factor of its calibration.
    """

    image: np.ndarray
    zero_filled: np.ndarray
    target: np.ndarray | None
    residual: np.ndarray
    complex_image: np.ndarray | None
    consistency: SliceConsistency
    uncertainty: np.ndarray | None = None
    uncertainty_factor: float | None = None


def write_volume(files: OutputFiles, images: Iterator[np.ndarray], series: Series) -> None:
    """Write the slices of a volume as they come. The files are complete or absent.

    Args:
        files: the names and the format.
        images: slices (H, W) of one shape, float32, or complex64 in the formats that store it.
        series: where the slices lie, for NIfTI and DICOM, and what they are, for DICOM.
    """
    suffix = files.suffix.lower()
    if suffix in (".nii", ".nii.gz"):
        _write_nifti(files, images, series.geometry)
    elif suffix == ".npy":
        _write_npy(files, images)
    elif suffix in (".h5", ".hdf5"):
        _write_h5(files, images)
    else:
        with _naming(files.volume[0]), _nameless(files.folder) as waiting:
            slices = _with_maximum(files, images, waiting)
            if suffix == ".dcm":
                write_series(series, slices)
            else:
                _write_png(slices)


def _write_h5(files: OutputFiles, images: Iterator[np.ndarray]) -> None:
    """Write `reconstruction` (slices, H, W), float32 or complex64, in the units of the input.

    h5py lays the file out, and the slices are written into it as bytes: if the disk is full, an HDF5 file that is open
    in h5py cannot be closed, and the process crashes.
    """

    def write(partial: Path) -> None:
        with open(partial, "rb+") as f:
            for i, image in enumerate(images):
                if i == 0:
                    f.seek(_lay_out(partial, (files.slices, *image.shape), image.dtype))
                f.write(np.ascontiguousarray(image, dtype=_little_endian(image)).tobytes())

    write_atomic(files.volume[0], write)


def _write_npy(files: OutputFiles, images: Iterator[np.ndarray]) -> None:
    """Write an array (slices, H, W)."""

    def write(partial: Path) -> None:
        with open(partial, "wb") as f:
            for i, image in enumerate(images):
                if i == 0:
                    shape = (files.slices, *image.shape)
                    description = {"descr": _little_endian(image), "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(f, description)
                f.write(np.ascontiguousarray(image, dtype=_little_endian(image)).tobytes())

    write_atomic(files.volume[0], write)


def _little_endian(image: np.ndarray) -> str:
    return "<c8" if np.iscomplexobj(image) else "<f4"


def _lay_out(file: Path, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Make an HDF5 file with one contiguous array, not yet filled; return the position of its first value."""
    import h5py

    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)  # the same volume gives the same file, whenever it is written
    try:
        with h5py.File(file, "w") as f:
            space = h5py.h5s.create_simple(shape)
            kind = h5py.h5t.py_create(dtype.newbyteorder("<"))
            return int(h5py.h5d.create(f.id, b"reconstruction", kind, space, layout).get_offset())
    except (RuntimeError, OSError) as e:  # h5py's message has several lines
        number = getattr(e, "errno", None)
        raise OSError(os.strerror(number) if number else " ".join(str(e).split())) from None


def _write_nifti(files: OutputFiles, images: Iterator[np.ndarray], geometry: Geometry) -> None:
    """Write the slices one after another, as the format stores them."""
    import nibabel

    @contextmanager
    def opened(partial: Path) -> Iterator[Any]:
        if files.suffix.lower() == ".nii.gz":
            with open(partial, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as f:
                yield f
        else:
            with open(partial, "wb") as f:
                yield f

    def write(partial: Path) -> None:
        with opened(partial) as f:
            for i, image in enumerate(images):
                if i == 0:
                    header = nibabel.Nifti1Header()
                    header.set_data_dtype(image.dtype)
                    header.set_data_shape((image.shape[1], image.shape[0], files.slices))
                    qform = geometry.affine if geometry.qform is None else geometry.qform
                    qform_code = geometry.code if geometry.qform_code is None else geometry.qform_code
                    header.set_qform(qform, code=qform_code)  # sets the voxel sizes, too
                    header.set_sform(geometry.affine, code=geometry.code)
                    header.set_xyzt_units("mm")
                    header["magic"], header["vox_offset"] = b"n+1", 352
                    f.write(header.binaryblock + b"\0\0\0\0")
                # x runs along a row and y from the last row up, as the reader of NIfTI turns them
                stored = image.dtype.newbyteorder(header.endianness)
                f.write(np.ascontiguousarray(image[::-1]).astype(stored).tobytes())

    write_atomic(files.volume[0], write)


def _with_maximum(
    files: OutputFiles, images: Iterator[np.ndarray], waiting: IO[bytes]
) -> Iterator[tuple[Path, np.ndarray, float]]:
    """Yield the file of every slice, the slice, and the maximum of the volume.

    The maximum is known after the last slice, so the slices wait in a temporary file.
    """
    top = 0.0
    for image in images:
        top = max(top, float(image.max()))
        shape = image.shape
        waiting.write(np.ascontiguousarray(image, dtype=np.float32).tobytes())
    waiting.seek(0)
    for file in files.volume:
        values = np.frombuffer(waiting.read(4 * shape[0] * shape[1]), dtype=np.float32).reshape(shape)
        yield file, values, top


def _write_png(slices: Iterator[tuple[Path, np.ndarray, float]]) -> None:
    """Write 16-bit grey pictures, from 0 to the maximum of the volume."""
    from PIL import Image

    for file, values, top in slices:
        scaled = np.clip(values / (top if top > 0 else 1) * 65535, 0, 65535).round().astype(np.uint16)
        picture = Image.fromarray(scaled)
        write_atomic(file, lambda partial, picture=picture: picture.save(partial, format="PNG"))  # type: ignore[misc]


@contextmanager
def _nameless(folder: Path) -> Iterator[IO[bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        yield file


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Make an error of the system name the file that could not be written."""
    try:
        yield
    except OSError as e:
        if e.errno is None:  # raised by chasm: it already names a file
            raise
        raise unwritable(file, e) from None


def side_by_side(path: Path, case: str, results: dict[int, SliceResult]) -> None:
    """Draw some slices of a case: zero-filled, reconstruction and, if there is a target, target and error.

    Args:
        path: the PNG file to write.
        case: the title.
        results: slice number -> result; one row each.
    """
    from matplotlib.figure import Figure

    first = next(iter(results.values()))
    columns = 2 if first.target is None else 4
    h, w = first.image.shape
    figure = Figure(figsize=(2.8 * columns, 2.8 * len(results) * h / w + 0.5), layout="constrained", facecolor="white")
    for row, (i, r) in zip(figure.subplots(len(results), columns, squeeze=False), results.items(), strict=True):
        shown = r.image if r.target is None else r.target
        low, top = min(0.0, float(shown.min())), float(shown.max())  # signed data may be below zero throughout
        top = top if top > low else low + 1.0
        grey: dict[str, Any] = {"cmap": "gray", "vmin": low, "vmax": top}
        panels = [("zero-filled", r.zero_filled, grey), (f"reconstruction, slice {i}", r.image, grey)]
        if r.target is not None:
            error = np.abs(r.image - r.target)
            panels += [
                ("target", r.target, grey),
                ("error x 5", 5 * error, {"cmap": "inferno", "vmin": 0, "vmax": top - low}),
            ]
        for ax, (title, image, options) in zip(row, panels, strict=True):
            ax.imshow(image, **options)
            ax.set_title(title, fontsize=9)
            ax.set_axis_off()
    figure.suptitle(case, fontsize=10, parse_math=False)  # a $ in a file name is a $
    write_atomic(path, lambda partial: figure.savefig(partial, format="png", dpi=120))
