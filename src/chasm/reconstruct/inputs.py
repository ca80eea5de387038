"""What a file or folder given to `chasm reconstruct` holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.common.text import counted
from chasm.data import CC359, Case, FastMRI, FileDataset, Folder, KSpaceDataset, RawSlice, Slice, fault, open_dataset
from chasm.data.fastmri import STORED, column_mask
from chasm.data.files import H5Files, h5_field, h5_slice, open_npy
from chasm.data.formats import FORMATS, is_readable
from chasm.mri import Mask, ifft2c, mask_from_array
from chasm.mri.fft import exchange_image_halves
from chasm.reconstruct.columns import (
    between,
    has_exchanged_halves,
    is_filled,
    is_undersampled,
    looks_like_kspace,
    measured_columns,
)

KINDS = ("kspace", "image")
MIN_SCORED = 7  # pixels each way: the window of SSIM
ONE_COIL = (
    "the run was trained on magnitudes: one coil is simulated from the root-sum-of-squares image, and the measured "
    "coils are not used (a run with task.options.complex=true uses them)"
)
_HDF5 = (".h5", ".hdf5")


@dataclass
class Scan:
    """Slices to reconstruct.

    Attributes:
        data: the reader.
        read_as: what the input was taken for, in words.
        measured: the columns that were measured, for undersampled k-space; None for fully sampled data.
        scored: whether there is a target to score against.
        notes: lines that the user should see.
        guessed: whether `measured` are the columns of the middle slice that hold anything.
    """

    data: FileDataset
    read_as: str
    measured: Mask | None = None
    scored: bool = True
    notes: list[str] = field(default_factory=list)
    guessed: bool = False

    def raw(self, row: int) -> RawSlice:
        """Read the k-space of one slice of undersampled data.

        Raises:
            DataError: unless it holds the columns that are taken as measured.
        """
        assert isinstance(self.data, KSpaceDataset)
        assert self.measured is not None
        raw = self.data.raw_slice(row)
        columns = np.asarray(is_filled(raw.kspace).any(0))
        inside = between(columns)  # the rest is zero-padding
        kept = np.isin(np.arange(len(columns)), self.measured.columns)
        wrong = kept & inside & ~columns | (columns & ~kept if self.guessed else False)
        if wrong.any():
            which = f"{counted(int(wrong.sum()), 'column')}, first {int(wrong.argmax())}"
            advice = "give slices of another mask in a file of their own" if self.guessed else "check the mask"
            file = self.data.locate(row)[0].files[0]
            raise fault(file, f"kspace slice {raw.index}", f"does not hold what the mask keeps ({which}): {advice}")
        return raw


class KSpaceFolder(Folder, KSpaceDataset):
    """Complex arrays of k-space, (H, W) or (slices, H, W), in the files of a folder.

    The zero frequency may be in the middle or in the corner, and so may the centre of the image. Both are put where
    most of the energy is in the middle.
    """

    arrays: ClassVar[tuple[str, ...]] = ("kspace", *Folder.arrays)

    def __init__(self, path: Path) -> None:
        super().__init__(path, "all")
        self.exchange_kspace = self.exchange_image = False
        self.fully_sampled = False  # set after the middle slice was seen: every slice must then be
        if len(self):
            middle = len(self) // 2
            self.exchange_kspace = has_exchanged_halves(self.raw_slice(middle).kspace)
            self.exchange_image = has_exchanged_halves(self[middle].image)

    def raw_slice(self, i: int) -> RawSlice:
        case, k = self.locate(i)
        kspace = self._kspace(case, k)
        return RawSlice(kspace, None, (kspace.shape[-2], kspace.shape[-1]), case.name, k)

    def read(self, case: Case, k: int) -> Slice:
        kspace = self._kspace(case, k)
        if self.fully_sampled and is_undersampled(is_filled(kspace)):
            problem = "undersampled, and the middle of all slices is not: give the files, not the folder"
            raise fault(case.files[0], f"kspace slice {k}", problem)
        return Slice(ifft2c(kspace), None, case.name, k, "k-space array")

    def _kspace(self, case: Case, k: int) -> Tensor:
        values = super().read(case, k).image
        if not values.is_complex():
            raise fault(case.files[0], "dtype", f"k-space is complex, got {values.dtype}: is it an image? (--as image)")
        if self.exchange_kspace:
            values = torch.fft.fftshift(values, dim=(-2, -1))
        return exchange_image_halves(values) if self.exchange_image else values


def open_scan(
    path: Path,
    *,
    phase: bool,
    target: str,
    kind: str | None = None,
    mask: Path | None = None,
    options: Mapping[str, Any] | None = None,
    images: Mapping[str, Any] | None = None,
) -> Scan:
    """Open a file or folder for reconstruction.

    Args:
        path: a fastMRI .h5, a CC359 .npy or .h5, or a file or folder of images or k-space arrays.
        phase: whether the model takes complex images; they are read if there are any.
        target: the stored reconstruction to prefer, "rss" or "esc".
        kind: what complex arrays are, "image" (default) or "kspace".
        mask: a file with the mask that undersampled k-space was measured with.
        options: of the reader, as the user gave them.
        images: options of the reader of images, where `options` does not give others.
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"--as {kind}: {suggest(kind, KINDS)}")
    form = _format(path)
    if form != "folder" and kind == "image":
        raise ValueError(f"{path}: holds k-space, not images: leave out --as image")
    options = dict(options or {})
    if options and form != "folder":
        raise ValueError(f"{path}: this format takes no option {next(iter(options))!r}: leave it out")
    if form == "fastmri":
        scan = _open_fastmri(path, phase, target, mask)
    elif form == "cc359":
        scan = _open_cc359(path, phase, mask)
    else:
        scan = _open_folder(path, kind, mask, {**(images or {}), **options})
    h, w = scan.data[len(scan.data) // 2].image.shape[-2:]
    if scan.scored and min(h, w) < MIN_SCORED:
        raise fault(path, "image", f"slices of {h} x {w} cannot be scored: SSIM needs {MIN_SCORED} x {MIN_SCORED}")
    cases = len(scan.data.cases)
    several = f"{cases} cases, " if cases > 1 else ""
    scan.read_as += f" ({several}{counted(len(scan.data), 'slice')}, {h} x {w})"
    return scan


def _format(path: Path) -> str:
    if path.is_file() and path.suffix.lower() in _HDF5:
        files = H5Files()
        handle = files[path]
        if "kspace" not in handle:
            raise fault(path, "kspace", f"missing; the file has {', '.join(sorted(handle)) or 'nothing'}")
        kind = "cc359" if getattr(handle["kspace"], "dtype", np.dtype("c8")).kind == "f" else "fastmri"
        files.close()
        return kind
    if path.is_file() and path.suffix.lower() == ".npy":
        array = open_npy(path)
        return "cc359" if array.ndim == 4 and array.shape[-1] == 2 else "folder"
    return "folder"


def _open_cc359(path: Path, phase: bool, mask: Path | None) -> Scan:
    data = CC359(path, "all", skip=0, combine="coils")
    notes: list[str] = []
    measured = measured_columns(data.raw_slice(len(data) // 2).kspace, path, mask, notes)
    if measured is None:
        several = len(data.raw_slice(0).kspace) > 1
        notes += [ONE_COIL] if several and not phase else []
        return Scan(CC359(path, "all", skip=0, combine="coils" if phase else "rss"), "CC359 k-space", notes=notes)
    return Scan(data, "CC359 k-space, as measured", measured, False, notes, mask is None)


def _open_fastmri(path: Path, phase: bool, target: str, mask: Path | None) -> Scan:
    files = H5Files()
    handle = files[path]
    kspace = h5_field(handle, path, "kspace", (3, 4), complex_=True)
    notes: list[str] = []
    if "mask" not in handle:
        middle = torch.from_numpy(h5_slice(kspace, len(kspace) // 2, path, "kspace"))
        measured = measured_columns(middle, path, mask, notes)
    elif mask is None:
        measured = mask_from_array(column_mask(handle, path, kspace.shape[-1]))
    else:
        raise ValueError(f"{path}: holds undersampled k-space with its own mask: leave out --mask")
    targets = ("rss", "esc") if kspace.ndim == 3 else ("rss",)  # esc belongs to one coil
    stored = next((t for t in (target, *targets) if t in targets and STORED[t] in handle), "kspace")
    if measured is None and (phase or target == "kspace"):
        stored = "kspace"
    if stored in STORED:
        slices = len(h5_field(handle, path, STORED[stored], (3,)))
        if slices != len(kspace):
            problem = f"{counted(slices, 'slice')}, but kspace has {len(kspace)}"
            raise fault(path, STORED[stored], f"{problem}: which belong together is not known")
    data = FastMRI(path, "all", target=stored, acquisition=None, slices=None, header=False)
    if "ismrmrd_header" not in handle and (measured is not None or stored == "kspace"):
        h, w = data.header_of(data.locate(0)[0]).recon
        notes.append(f"no ismrmrd_header: the image is {h} x {w}, as {STORED.get(stored, 'the k-space')} is")
    coils = f"fastMRI {'single' if kspace.ndim == 3 else 'multi'}-coil"
    if measured is None:
        read_as = f"{coils} {STORED.get(stored, 'k-space')}, fully sampled"
        notes += [ONE_COIL] if kspace.ndim == 4 and not phase else []
    else:
        read_as = f"{coils} k-space, as measured" + (f", scored by {STORED[stored]}" if stored in STORED else "")
    guessed = "mask" not in handle and mask is None
    files.close()
    return Scan(data, read_as, measured, measured is None or stored in STORED, notes, guessed)


def _open_folder(path: Path, kind: str | None, mask: Path | None, options: dict[str, Any]) -> Scan:
    notes: list[str] = []
    if path.is_dir():
        volumes = sum(file.suffix.lower() in _HDF5 for file in path.rglob("*"))
        if not any(map(is_readable, path.rglob("*"))):
            advice = f"{counted(volumes, '.h5 file')}: give the files, {path}/*.h5"
            raise fault(path, "folder", advice if volumes else f"no file that is read ({FORMATS})")
        if volumes:
            notes.append(f"left out of the folder: {counted(volumes, '.h5 file')}: give those as files")
    data: Folder = (
        KSpaceFolder(path) if kind == "kspace" else open_dataset("folder", path, split="all", stack=True, **options)
    )
    if not len(data):
        raise fault(path, "slices", "there is none")
    if isinstance(data, KSpaceFolder):
        return _as_kspace(data, path, mask, notes)
    image = data[len(data) // 2].image
    if kind is None and image.is_complex() and looks_like_kspace(image):
        notes.append("taken for images, but its energy is in few values, as in k-space: is it? then --as kspace")
    how = data.how_cut(len(data) // 2)
    read_as = f"{'complex' if image.is_complex() else 'magnitude'} images" + (f", {how}" if how else "")
    return Scan(data, read_as, notes=notes)


def _as_kspace(data: KSpaceFolder, path: Path, mask: Path | None, notes: list[str]) -> Scan:
    measured = measured_columns(data.raw_slice(len(data) // 2).kspace, path, mask, notes)
    data.fully_sampled = measured is None
    if measured is not None and len(data.cases) > 1:
        raise ValueError(
            f"{path}: several undersampled arrays, which may differ in mask: give the files, not the folder"
        )
    read_as = f"k-space, {'fully sampled' if measured is None else 'as measured'}"
    return Scan(data, read_as, measured, measured is None, notes, mask is None)
