"""Limits on the memory of a file and on its links, checked before memory is taken or anything is opened.

A file of a few bytes can declare, or inflate to, more than any memory holds. An HDF5 file can point at other files. A
picture can hold a program for Ghostscript. Readers call the checks here first.
"""

import lzma
import math
import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from chasm.data.records import fault

LIMIT_VARIABLE = "CHASM_MAX_GIB"
DEFAULT_MAX_GIB = 1.0
PICTURE_FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "WEBP")  # none of them runs a program, as EPS does
MAX_SLICES = 100_000  # slices of one file
MAX_NIFTI_HEADER = 64 * 2**20  # bytes before the voxels, with all extensions
MAX_DEFLATE_RATIO = 1032  # zlib cannot pack more bytes than this into one
MAX_UNWRITTEN_BYTES = 2**20  # unwritten bytes of an HDF5 dataset; fewer take no time to read
_TIFF_CODECS: dict[int, Any] = {8: zlib.decompressobj, 32946: zlib.decompressobj, 34925: lzma.LZMADecompressor}


def max_bytes() -> int:
    """Return how much memory the content of one file, or one slice of a file read by slices, may take.

    The environment variable CHASM_MAX_GIB raises or lowers it.
    """
    text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_MAX_GIB)
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise ValueError(f"{LIMIT_VARIABLE}={text}: expected a number of GiB above 0")
    return int(limit * 2**30)


def require_fits(file: Path, field: str, shape: Sequence[int], itemsize: int) -> None:
    """Raise a DataError if an array would take more memory than `max_bytes`.

    Args:
        file: the file that declares it.
        field: the part of the file.
        shape: shape of the array.
        itemsize: bytes of one value.
    """
    size = math.prod(int(n) for n in shape) * itemsize
    if size > max_bytes():
        limit = f"{max_bytes() / 2**30:.3g} GiB"
        needed = math.ceil(size / 2**30)
        what = "x".join(map(str, shape))
        problem = f"{what} values take {size / 2**30:.3g} GiB, above the limit of {limit}"
        raise fault(file, field, f"{problem}: if the file is sound, set {LIMIT_VARIABLE}={needed}")


def require_few_slices(file: Path, field: str, shape: Sequence[int]) -> None:
    """Raise a DataError if an array has more slices (its first axis) than any scan, whose list would take memory.

    Args:
        file: the file that declares it.
        field: the part of the file.
        shape: shape of the array.
    """
    if len(shape) > 2 and shape[0] > MAX_SLICES:
        raise fault(file, field, f"{shape[0]} slices: expected at most {MAX_SLICES}")


def require_regular(file: Path, field: str = "file") -> None:
    """Raise a DataError for a folder, a pipe, a device or a loop of links: opening one may wait for ever.

    A missing file is not an error here.
    """
    try:
        mode = os.stat(file).st_mode
    except FileNotFoundError:
        return
    except OSError as e:
        raise fault(file, field, f"cannot be opened ({e.strerror})") from None
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise fault(file, field, f"expected a file, got {kinds.get(stat.S_IFMT(mode), 'a device')}")


def require_written(file: Path) -> None:
    """Raise a DataError for a long file with hardly anything on disk, which would take hours to read or hash."""
    require_regular(file)
    facts = os.stat(file)
    stored = 512 * getattr(facts, "st_blocks", facts.st_size)  # Windows does not say
    if facts.st_size <= max(MAX_DEFLATE_RATIO * stored, max_bytes()):
        return
    with open(file, "rb") as f:  # some file systems do not count blocks: they know of no holes, either
        has_holes = os.lseek(f.fileno(), 0, os.SEEK_HOLE) < facts.st_size
    if has_holes:
        size = f"{facts.st_size / 2**30:,.3f} GiB"
        raise fault(file, "file", f"{size} long, and {stored} bytes of it are on disk: an unfinished copy, or a trap")


def open_picture(source: Path | IO[bytes], file: Path) -> Any:
    """Open a file, or its bytes, with Pillow, if the format is only for pictures and the picture fits into memory."""
    from PIL import Image

    picture = Image.open(source, formats=PICTURE_FORMATS)
    try:
        require_fits(file, "image", (*picture.size[::-1], len(picture.getbands())), 4)
    except Exception:
        picture.close()
        raise
    return picture


def read_tiff(file: Path) -> np.ndarray:
    """Read all images of a TIFF file, if the declared size and the compressed strips stay within the limit."""
    import tifffile

    with tifffile.TiffFile(file) as tiff:
        offsets: set[int] = set()
        for page in tiff.pages:  # tifffile would follow a circle for ever
            if page.offset in offsets:
                raise fault(file, "pages", "they lead back to an earlier one: damaged")
            offsets.add(page.offset)
        series = tiff.series[0]
        require_fits(file, "image", series.shape, series.dtype.itemsize)
        for page in series.pages:
            codec = _TIFF_CODECS.get(int(page.compression)) if page is not None else None
            if codec is not None:
                whole = math.prod(page.shape) * page.dtype.itemsize
                for offset, length in zip(page.dataoffsets, page.databytecounts, strict=True):
                    tiff.filehandle.seek(offset)
                    _require_inflates_within(file, tiff.filehandle.read(length), codec, max(2 * whole, 2**20))
        return np.asarray(series.asarray())


def require_inflates(file: Path, field: str, packed: bytes) -> None:
    """Raise a DataError if raw deflated bytes inflate to more than `max_bytes`.

    Args:
        file: the file, for messages.
        field: the part of the file.
        packed: the deflated bytes, without a zlib header.
    """
    if len(packed) * MAX_DEFLATE_RATIO <= max_bytes():
        return
    inflated, inflate = 0, zlib.decompressobj(-zlib.MAX_WBITS)
    while packed and not inflate.eof:
        inflated += len(inflate.decompress(packed, max_length=2**24))
        packed = inflate.unconsumed_tail
        require_fits(file, field, (inflated,), 1)


def _require_inflates_within(file: Path, packed: bytes, codec: Any, limit: int) -> None:
    """Raise a DataError if compressed bytes hold more than `limit`. Short zlib streams cannot and are skipped."""
    if codec is zlib.decompressobj and len(packed) * MAX_DEFLATE_RATIO <= limit:
        return
    if len(codec().decompress(packed, max_length=limit + 1)) > limit:
        raise fault(file, "image", "a strip inflates to more than the picture holds: the file is damaged or a trap")


def read_npz(file: Path, archive: Any, key: str) -> np.ndarray:
    """Read an array of an open .npz archive, if its header says that it fits into memory.

    Args:
        file: the archive, for messages.
        archive: the archive that np.load returned.
        key: the name of the array.
    """
    name = key if key in archive.zip.namelist() else f"{key}.npy"
    with archive.zip.open(name) as member:
        version = np.lib.format.read_magic(member)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, dtype = readers.get(version, np.lib.format.read_array_header_2_0)(member)
    require_fits(file, key, shape, dtype.itemsize)
    return np.asarray(archive[key])


def open_nifti_file(file: Path, whole: bool = True) -> Any:
    """Open a .nii or .nii.gz file with nibabel, if its header and the part that will be read fit into memory.

    That part is the whole file, or one volume at a time. No voxel is read yet.
    """
    import gzip

    import nibabel

    opener: Any = gzip.open if file.name.lower().endswith(".gz") else open
    with opener(file, "rb") as f:
        offset = _voxel_offset(f.read(540))
    if not offset <= MAX_NIFTI_HEADER:
        raise fault(file, "header", f"the voxels begin at byte {offset:g}: the file is damaged")
    image = nibabel.load(file)
    scaled = getattr(image.dataobj, "slope", 1) != 1 or getattr(image.dataobj, "inter", 0) != 0
    itemsize = max(8, image.get_data_dtype().itemsize) if scaled else image.get_data_dtype().itemsize
    require_fits(file, "volume", image.shape if whole else image.shape[:3], itemsize)
    return image


def _voxel_offset(start: bytes) -> float:
    """Return the position of the first voxel from the first bytes of a NIfTI-1 or NIfTI-2 file; 0 if it is neither."""
    for order in "<>":
        size = int(np.frombuffer(start[:4], f"{order}i4")[0]) if len(start) >= 4 else 0
        if size == 348 and len(start) >= 348:
            return float(np.frombuffer(start, f"{order}f4", 1, 108)[0])
        if size == 540 and len(start) >= 540:
            return float(np.frombuffer(start, f"{order}i8", 1, 168)[0])
    return 0.0


def refuse_links_to_files(handle: Any, file: Path) -> None:
    """Raise a DataError if anything in an open HDF5 file leads to another file.

    That is an external link, a dataset with external storage, or a virtual dataset. Links within the file are allowed.
    """
    import h5py

    # h5py ends a visit at the first value that is returned; raising inside one is not safe
    def link(name: bytes, info: Any) -> tuple[str, str] | None:
        inside = info.type in (h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT)
        return None if inside else (name.decode(errors="replace"), "a link to another file")

    def item(name: str, value: Any) -> tuple[str, str] | None:
        if isinstance(value, h5py.Dataset) and value.is_virtual:
            return name, "a virtual dataset"
        if isinstance(value, h5py.Dataset) and value.external:
            return name, "its values are in another file"
        return None

    leads_away = handle.id.links.visit(link, info=True) or handle.visititems(item)
    if leads_away is not None:
        name, what = leads_away
        raise fault(file, name, f"{what}: not followed: store the values in the file itself")


def require_h5_fits(file: Path, key: str, item: Any, shape: Sequence[int]) -> None:
    """Raise a DataError if a part of an HDF5 dataset, or a chunk, is too large for memory, or hardly any is written.

    Data that was never written reads as zeros, so a file of 2 kB can hold a billion slices.

    Args:
        file: the file, for messages.
        key: the name of the dataset.
        item: the dataset.
        shape: shape of the part that is read at once.
    """
    require_fits(file, key, shape, item.dtype.itemsize)
    size, stored = math.prod(item.shape) * item.dtype.itemsize, item.id.get_storage_size()
    if size > max(MAX_DEFLATE_RATIO * stored, MAX_UNWRITTEN_BYTES):
        raise fault(file, key, f"{size / 2**30:,.3f} GiB, of which {stored} bytes were written: damaged or a trap")
    if item.chunks:
        require_fits(file, f"{key} chunk", item.chunks, item.dtype.itemsize)
