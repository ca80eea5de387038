"""Open files, so that a damaged one gives an error of one line, and none stays open by accident."""

import logging
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chasm.data.limits import (
    refuse_links_to_files,
    require_few_slices,
    require_fits,
    require_h5_fits,
    require_regular,
    require_written,
)
from chasm.data.records import DataError, fault

MAX_OPEN_FILES = 8  # HDF5 files of one reader


class _QuietLibraries:
    """Suppress warnings and logs of libraries about a file, since the error says what is wrong.

    The filters of warnings belong to the process, so the first thread sets them and the last one restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._loggers = [logging.getLogger(name) for name in ("tifffile", "pydicom", "nibabel.global", "PIL")]

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._disabled = [logger.disabled for logger in self._loggers]
                self._warnings = warnings.catch_warnings()
                self._warnings.__enter__()
                warnings.simplefilter("ignore")
                for logger in self._loggers:
                    logger.disabled = True

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._warnings.__exit__(None, None, None)
                for logger, disabled in zip(self._loggers, self._disabled, strict=True):
                    logger.disabled = disabled


_quiet_libraries = _QuietLibraries()


@contextmanager
def reading(file: Path, field: str = "file") -> Iterator[None]:
    """Turn any error of a library that reads a part of a file into a one-line DataError. Refuse pipes and devices."""
    require_regular(file, field)
    try:
        with _quiet_libraries:
            yield
    except DataError:
        raise
    except FileNotFoundError:
        raise fault(file, field, "no such file") from None
    except (MemoryError, ImportError):
        raise
    except Exception as e:
        problem = str(e) or type(e).__name__  # all lines: pydicom names the packages it lacks in the last ones
        size = file.stat().st_size if file.is_file() else -1
        raise fault(file, field, "the file is empty" if size == 0 else f"cannot be read ({problem})") from e


def require_folder(path: Path) -> None:
    """Raise a DataError unless the path is a folder."""
    if not path.is_dir():
        raise fault(path, "path", "expected a folder, got a file")


def require_finite(array: np.ndarray, file: Path, field: str, problem: str = "NaN or infinite") -> np.ndarray:
    """Return an array of numbers if all are finite; otherwise raise a DataError with the number of the others.

    Args:
        array: numbers of any type.
        file: their file, for the message.
        field: the part of the file.
        problem: the message's word for values that are not finite.
    """
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        raise fault(file, field, f"{bad} of {array.size} values are {problem}")
    return array


def require_single(array: np.ndarray, file: Path, field: str) -> np.ndarray:
    """Return the array as float32 or complex64; raise a DataError if values are NaN, infinite, or beyond float32.

    Args:
        array: numbers of any type.
        file: their file, for the message.
        field: the part of the file.
    """
    require_finite(array, file, field)
    with np.errstate(over="ignore"):
        single = array.astype(np.complex64 if array.dtype.kind == "c" else np.float32)
    return require_finite(single, file, field, "beyond float32 (3.4e38): scale the data")


def crop_or_pad(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Return (..., H, W) cropped or zero-padded about its centre to a size.

    >>> crop_or_pad(torch.arange(7.0)[None], (1, 4)), crop_or_pad(torch.ones(1, 2), (1, 5))
    (tensor([[1., 2., 3., 4.]]), tensor([[0., 1., 1., 0., 0.]]))
    """
    for axis, n in zip((-2, -1), size, strict=True):
        length = image.shape[axis]
        if length > n:
            image = image.narrow(axis, (length - n) // 2, n)
        elif length < n:
            before = (n - length) // 2
            pad = (before, n - length - before)
            image = torch.nn.functional.pad(image, pad if axis == -1 else (0, 0, *pad))
    return image.contiguous()


def open_npy(file: Path) -> np.ndarray:
    """Open a .npy array memory-mapped: only what is indexed is read. Nothing is unpickled."""
    with reading(file, "header"):
        with open(file, "rb") as f:
            magic = f.read(6)
        if magic and magic != b"\x93NUMPY":
            raise fault(file, "header", "not a .npy file")
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    if array.dtype.kind not in "biufc":
        raise fault(file, "dtype", f"expected numbers, got {array.dtype}")
    require_few_slices(file, "shape", array.shape)
    require_fits(file, "slice", array.shape[-2:] if array.ndim < 3 else array.shape[1:], array.dtype.itemsize)
    require_written(file)
    return array


class H5Files:
    """HDF5 files by path, opened on first use in each process. The end of a `with` statement closes all.

    A handle must not cross a fork or a pickle: after either, the copy starts with none.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._pid = os.getpid()

    def __getitem__(self, file: Path) -> Any:
        import h5py

        if self._pid != os.getpid():
            self._open, self._pid = OrderedDict(), os.getpid()
        if file not in self._open:
            with reading(file):
                handle = h5py.File(file, "r")
                try:
                    refuse_links_to_files(handle, file)
                except Exception:
                    handle.close()
                    raise
            self._open[file] = handle
        self._open.move_to_end(file)
        while len(self._open) > MAX_OPEN_FILES:  # the least recently used one is closed
            self._open.popitem(last=False)[1].close()
        return self._open[file]

    def __enter__(self) -> "H5Files":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()

    def __len__(self) -> int:
        return len(self._open)

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": OrderedDict(), "_pid": -1}

    def __del__(self) -> None:
        if getattr(self, "_pid", -1) == os.getpid():
            self.close()


def h5_field(handle: Any, file: Path, key: str, ndim: tuple[int, ...], complex_: bool = False) -> Any:
    """Return a dataset of an open HDF5 file, not yet read; a DataError if it is missing, empty, or of another kind.

    Args:
        handle: the open file.
        file: its path, for messages.
        key: the name of the dataset.
        ndim: the numbers of dimensions it may have.
        complex_: whether its numbers must be complex, or must be real.
    """
    with reading(file, key):
        item = handle.get(key)
    if item is None:
        raise fault(file, key, f"missing; the file has {', '.join(h5_names(handle, file)) or 'nothing'}")
    shape = getattr(item, "shape", None)
    if shape is not None and 0 in shape:
        raise fault(file, key, f"holds no {'slices' if shape[0] == 0 else 'values'}: shape {shape}")
    if shape is None or len(shape) not in ndim:
        got = "a group" if shape is None else f"shape {shape}"
        raise fault(file, key, f"expected {' or '.join(map(str, ndim))} dimensions, got {got}")
    if (item.dtype.kind == "c") != complex_ or item.dtype.kind not in "iufc":
        raise fault(file, key, f"expected {'complex' if complex_ else 'real'} numbers, got {item.dtype}")
    require_few_slices(file, key, shape)
    with reading(file, key):
        require_h5_fits(file, key, item, shape[1:])
    return item


def h5_names(handle: Any, file: Path) -> list[str]:
    """Return the names in an open HDF5 file or group, in order, also those that are not text."""
    with reading(file, "names"):
        return sorted(name if isinstance(name, str) else repr(name) for name in handle)


def h5_whole(handle: Any, file: Path, key: str) -> Any:
    """Read all of a small HDF5 dataset: a mask, or a text.

    Args:
        handle: the open file.
        file: its path, for messages.
        key: the name of the dataset, which must be there.
    """
    with reading(file, key):
        item = handle[key]
        require_h5_fits(file, key, item, item.shape)
        return item[()]


def h5_xml(handle: Any, file: Path, key: str) -> bytes:
    """Read an XML header from HDF5, with the arguments of `h5_whole`. Refuse one that declares entities to expand."""
    text = h5_whole(handle, file, key)
    with reading(file, key):
        text = text if isinstance(text, bytes | str) else text[0]
        xml = text.encode() if isinstance(text, str) else bytes(text)
    if b"<!DOCTYPE" in xml.replace(b"\0", b""):
        raise fault(file, key, "declares a document type, as no ISMRMRD header does: the file may be a trap")
    return xml


def h5_slice(item: Any, k: int, file: Path, key: str) -> np.ndarray:
    """Read a slice along the first axis of an HDF5 dataset.

    Args:
        item: the dataset, from `h5_field`.
        k: the number of the slice.
        file: the path, for messages.
        key: the name of the dataset, for messages.
    """
    with reading(file, key):
        array = np.asarray(item[k])
    return require_finite(array, file, f"{key} slice {k}")
