"""Volumes as HDF5, NIfTI or PNG, written slice by slice, and a picture of some of their slices."""

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
from chasm.data.records import SOMEWHERE, Geometry
from chasm.reconstruct.outputs import OutputFiles
from chasm.reconstruct.trust import SliceConsistency


@dataclass
class SliceResult:
    """One reconstructed slice, (H, W) arrays in the units of the data.

    Attributes:
        image: the magnitude.
        zero_filled: of the zero-filled image.
        target: the image to compare with, if there is one.
        residual: what of the measured samples the image does not explain, as an image.
        consistency: the same in numbers.
    """

    image: np.ndarray
    zero_filled: np.ndarray
    target: np.ndarray | None
    residual: np.ndarray
    consistency: SliceConsistency


def write_volume(files: OutputFiles, images: Iterator[np.ndarray], geometry: Geometry | None = None) -> None:
    """Write the slices of a volume, each as it comes. The files appear complete or not at all.

    Args:
        files: the names and the format.
        images: slices (H, W) of one shape.
        geometry: where the slices lie, for NIfTI. Default: voxels of 1 mm somewhere.
    """
    if files.is_nifti:
        _write_nifti(files, images, geometry or Geometry(np.eye(4), SOMEWHERE))
    else:
        (_write_png if files.suffix.lower() == ".png" else _write_h5)(files, images)


def _write_h5(files: OutputFiles, images: Iterator[np.ndarray]) -> None:
    """`reconstruction` (slices, H, W) float32, in the units of the input.

    h5py lays the file out, and the slices are written into it as bytes: if the disk is full, an HDF5 file that is open
    in h5py cannot be closed, and the process crashes.
    """

    def write(partial: Path) -> None:
        with open(partial, "rb+") as f:
            for i, image in enumerate(images):
                if i == 0:
                    f.seek(_lay_out(partial, (files.slices, *image.shape)))
                f.write(np.ascontiguousarray(image, dtype="<f4").tobytes())

    write_atomic(files.volume[0], write)


def _lay_out(file: Path, shape: tuple[int, ...]) -> int:
    """Make an HDF5 file with one contiguous float32 array, not yet filled; return the position of its first value."""
    import h5py

    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)  # the same volume gives the same file, whenever it is written
    try:
        with h5py.File(file, "w") as f:
            space = h5py.h5s.create_simple(shape)
            return int(h5py.h5d.create(f.id, b"reconstruction", h5py.h5t.IEEE_F32LE, space, layout).get_offset())
    except (RuntimeError, OSError) as e:  # h5py's message has several lines
        number = getattr(e, "errno", None)
        raise OSError(os.strerror(number) if number else " ".join(str(e).split())) from None


def _write_nifti(files: OutputFiles, images: Iterator[np.ndarray], geometry: Geometry) -> None:
    """Slices one after another, as the format stores them."""
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
                    header.set_data_dtype(np.float32)
                    header.set_data_shape((image.shape[1], image.shape[0], files.slices))
                    qform = geometry.affine if geometry.qform is None else geometry.qform
                    qform_code = geometry.code if geometry.qform_code is None else geometry.qform_code
                    header.set_qform(qform, code=qform_code)  # sets the voxel sizes, too
                    header.set_sform(geometry.affine, code=geometry.code)
                    header.set_xyzt_units("mm")
                    header["magic"], header["vox_offset"] = b"n+1", 352
                    f.write(header.binaryblock + b"\0\0\0\0")
                # x runs along a row and y from the last row up, as the reader of NIfTI turns them
                f.write(np.ascontiguousarray(image[::-1]).astype(f"{header.endianness}f4").tobytes())

    write_atomic(files.volume[0], write)


def _write_png(files: OutputFiles, images: Iterator[np.ndarray]) -> None:
    """16-bit grey, from 0 to the maximum of the volume.

    The maximum is known after the last slice, so the slices wait in a temporary file without a name.
    """
    from PIL import Image

    with _naming(files.volume[0]), _nameless(files.folder) as waiting:
        top = 0.0
        for image in images:
            top = max(top, float(image.max()))
            shape = image.shape
            waiting.write(np.ascontiguousarray(image, dtype=np.float32).tobytes())
        waiting.seek(0)
        for file in files.volume:
            values = np.frombuffer(waiting.read(4 * shape[0] * shape[1]), dtype=np.float32).reshape(shape)
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
        top = float((r.image if r.target is None else r.target).max()) or 1.0
        grey: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": top}
        panels = [("zero-filled", r.zero_filled, grey), (f"reconstruction, slice {i}", r.image, grey)]
        if r.target is not None:
            error = np.abs(r.image - r.target)
            panels += [("target", r.target, grey), ("error x 5", 5 * error, {**grey, "cmap": "inferno"})]
        for ax, (title, image, options) in zip(row, panels, strict=True):
            ax.imshow(image, **options)
            ax.set_title(title, fontsize=9)
            ax.set_axis_off()
    figure.suptitle(case, fontsize=10)
    write_atomic(path, lambda partial: figure.savefig(partial, format="png", dpi=120))
