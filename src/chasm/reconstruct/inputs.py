"""What a file or folder given to `chasm reconstruct` holds, and which columns of its k-space were measured.

The columns are those of the file's `mask`; without one, those of a mask file, or those that hold anything, when columns
are empty between others. (Empty columns at the edges alone are the zero-padding of fully sampled data.) They are read
off the middle slice, and must be those of every other. K-space that lacks other things than whole columns is refused.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.common.words import counted
from chasm.data.base import Case, DataError, FileDataset, Slice, fault
from chasm.data.cc359 import CC359, _raw, _volume
from chasm.data.fastmri import FastMRI, Header, RawSlice, column_mask
from chasm.data.files import H5Files, h5_field, h5_slice, open_npy
from chasm.data.folder import FORMATS, Folder, affine, ordered, readable, single_image
from chasm.mri import Mask, create_mask, fft2c, ifft2c, mask_from_array

KINDS = ("kspace", "image")
_VOLUMES = (".h5", ".hdf5")
_STORED = {"rss": "reconstruction_rss", "esc": "reconstruction_esc"}


class _FastMRIFile(FastMRI):
    @classmethod
    def find(cls, path: Path, seed: int = 0) -> tuple[list[Case], str]:
        return [Case(path.stem, "test", (path,))], "one file"

    def _header(self, handle: Any, file: Path) -> Header:
        if "ismrmrd_header" in handle:
            return super()._header(handle, file)
        size = handle["kspace"].shape[-2:]
        recon = next((handle[key].shape[-2:] for key in _STORED.values() if key in handle), size)
        return Header(size, recon, (0, size[1]))


class _CC359File(CC359):
    @classmethod
    def find(cls, path: Path, seed: int = 0) -> tuple[list[Case], str]:
        return [Case(path.stem, "test", (path,))], "one file"

    def stored(self, i: int) -> np.ndarray:
        """(coils, H, W) with the zero frequency in the middle."""
        case, k = self._rows[i]
        file = self._cases[case].files[0]
        pairs = _raw(_volume(file, self._h5), int(k), file)  # (H, W, 2 * coils)
        return np.fft.fftshift(pairs.view(np.complex64).transpose(2, 0, 1), axes=(-2, -1))

    def raw(self, i: int) -> RawSlice:
        return _transformed(self[i])


class _Images(Folder):
    """As for training; but PNG and TIFF slices right in the folder that was given are one volume."""

    @classmethod
    def find(cls, path: Path, splits: str | Path | None = None, seed: int = 0) -> tuple[list[Case], str]:
        cases, how = super().find(path, splits, seed)
        loose = [case for case in cases if case.files[0].parent == path and single_image(case.files[0])]
        if len(loose) < 2:
            return cases, how
        volume = Case(path.resolve().name, "train", tuple(ordered([case.files[0] for case in loose])))
        return [volume, *(case for case in cases if case not in loose)], how


class _Arrays(Folder):
    """Complex arrays that are k-space, (H,W) or (slices,H,W).

    They may have been shifted or not in either domain: both are put such that most of the energy is in the middle.
    """

    arrays: ClassVar[tuple[str, ...]] = ("kspace", *Folder.arrays)

    def __init__(self, path: Path) -> None:
        super().__init__(path, "all")
        self.shift_k = self.shift_image = False
        self.full = False  # said to be fully sampled
        if len(self):
            middle = len(self) // 2
            self.shift_k = _outside(torch.from_numpy(self.stored(middle)))
            self.shift_image = _outside(self[middle].image)

    def stored(self, i: int) -> np.ndarray:
        """(1, H, W) with the zero frequency in the middle."""
        case, k = self._rows[i]
        return self._stored(self._cases[case], int(k)).numpy()

    def _stored(self, case: Case, k: int) -> Tensor:
        values = super().read(case, k).image
        if not values.is_complex():
            raise fault(case.files[0], "dtype", f"k-space is complex, got {values.dtype}: is it an image? (--as image)")
        return torch.fft.fftshift(values, dim=(-2, -1)) if self.shift_k else values

    def read(self, case: Case, k: int) -> Slice:
        stored = self._stored(case, k)
        if self.full and _lacks(_there(stored.numpy())):
            what = "undersampled, and the middle of all slices is not: give the files, not the folder"
            raise fault(case.files[0], f"kspace slice {k}", what)
        image = ifft2c(stored)
        if self.shift_image:
            image = torch.fft.ifftshift(image, dim=(-2, -1))
        return Slice(image, None, case.name, k, "k-space array")

    def raw(self, i: int) -> RawSlice:
        return _transformed(self[i])


def _transformed(s: Slice) -> RawSlice:
    size = (s.image.shape[-2], s.image.shape[-1])
    return RawSlice(fft2c(s.image), None, Header(size, size, (0, size[1])), s.case, s.index)


@dataclass
class Scan:
    """Slices to reconstruct. With `measured`, `raw` gives k-space; without, the data is full and gives images."""

    data: FileDataset
    read_as: str
    measured: Mask | None = None
    scored: bool = True  # is there a target
    notes: list[str] = field(default_factory=list)
    guessed: bool = False  # is `measured` what the middle slice holds, and nobody said it

    @property
    def cases(self) -> dict[str, list[int]]:
        """The rows of every case, known without reading a slice."""
        rows: dict[str, list[int]] = {}
        for row, (case, _) in enumerate(self.data._rows):
            rows.setdefault(self.data._cases[case].name, []).append(row)
        return rows

    @property
    def files(self) -> list[Path]:
        return [file for case in self.data._cases for file in case.files]

    def raw(self, row: int) -> RawSlice:
        """K-space of one slice; an error unless it holds the columns that are taken as measured."""
        assert isinstance(self.data, _FastMRIFile | _CC359File | _Arrays)
        assert self.measured is not None
        raw = self.data.raw(row)
        stored = raw.kspace.numpy() if isinstance(self.data, _FastMRIFile) else self.data.stored(row)
        filled = np.asarray(_there(stored).any(0))
        inside = _between(filled, 0)  # beyond is zero-padding
        kept = np.isin(np.arange(len(filled)), self.measured.columns)
        wrong = kept & inside & ~filled | (filled & ~kept if self.guessed else False)
        if wrong.any():
            columns = f"{counted(int(wrong.sum()), 'column')}, first {int(wrong.argmax())}"
            advice = "give slices of another mask in a file of their own" if self.guessed else "check the mask"
            file = self.data._cases[self.data._rows[row][0]].files[0]
            raise fault(file, f"kspace slice {raw.index}", f"does not hold what the mask keeps ({columns}): {advice}")
        return raw

    def affine(self, name: str) -> np.ndarray | None:
        """From voxels (column, row from below, slice) of a case to millimetres; None where its files do not say."""
        files = next(case.files for case in self.data._cases if case.name == name)
        if isinstance(self.data, FastMRI):
            try:
                voxel = self.data._header(self.data._h5[files[0]], files[0]).voxel
            except DataError:  # not needed for anything else
                return None
            return None if voxel is None else np.diag([voxel[1], voxel[0], voxel[2], 1.0])
        return affine(files) if isinstance(self.data, Folder) else None


def open_scan(path: Path, *, phase: bool, target: str, kind: str | None = None, mask: Path | None = None) -> Scan:
    """`phase`: complex images where there are any; `target`: the stored reconstruction to prefer, rss or esc."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"--as {kind}: {suggest(kind, KINDS)}")
    form = _format(path)
    if form != "folder" and kind == "image":
        raise ValueError(f"{path}: holds k-space, not images: leave out --as image")
    if form == "fastmri":
        scan = _fastmri(path, phase, target, mask)
    elif form == "cc359":
        scan = _cc359(path, phase, mask)
    else:
        scan = _folder(path, kind, mask)
    shape = scan.data[len(scan.data) // 2].image.shape
    if scan.scored and min(shape[-2:]) < 7:
        raise fault(path, "image", f"slices of {shape[-2]} x {shape[-1]} cannot be scored: SSIM needs 7 x 7 or more")
    cases = len(scan.cases)
    many = f"{cases} cases, " if cases > 1 else ""
    scan.read_as += f" ({many}{counted(len(scan.data), 'slice')}, {shape[-2]} x {shape[-1]})"
    return scan


def _format(path: Path) -> str:
    if path.is_file() and path.suffix.lower() in _VOLUMES:
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


def _cc359(path: Path, phase: bool, mask: Path | None) -> Scan:
    data = _CC359File(path, "all", skip=0, combine="coils")
    notes: list[str] = []
    measured = _columns(data.stored(len(data) // 2), path, mask, notes)
    if measured is None:
        return Scan(_CC359File(path, "all", skip=0, combine="coils" if phase else "rss"), "CC359 k-space")
    return Scan(data, "CC359 k-space, as measured", measured, False, notes, mask is None)


def _fastmri(path: Path, phase: bool, target: str, mask: Path | None) -> Scan:
    files = H5Files()
    handle = files[path]
    kspace = h5_field(handle, path, "kspace", (3, 4), complex_=True)
    middle = h5_slice(kspace, len(kspace) // 2, path, "kspace")
    notes: list[str] = []
    if "mask" not in handle:
        measured = _columns(middle, path, mask, notes)
    elif mask is None:
        measured = mask_from_array(column_mask(handle, path, kspace.shape[-1]))
    else:
        raise ValueError(f"{path}: holds undersampled k-space with its own mask: leave out --mask")
    known = ("rss", "esc") if kspace.ndim == 3 else ("rss",)  # esc is one coil's
    stored = next((t for t in (target, *known) if t in known and _STORED[t] in handle), "kspace")
    if measured is None and (phase or target == "kspace"):
        stored = "kspace"
    if stored in _STORED:
        slices = len(h5_field(handle, path, _STORED[stored], (3,)))
        if slices != len(kspace):
            have = f"{counted(slices, 'slice')}, but kspace has {len(kspace)}"
            raise fault(path, _STORED[stored], f"{have}: which belong together is not known")
    data = _FastMRIFile(path, "all", target=stored, acquisition=None, slices=None)
    if "ismrmrd_header" not in handle and (measured is not None or stored == "kspace"):
        h, w = data._header(handle, path).recon
        notes.append(f"no ismrmrd_header: the image is {h} x {w}, as {_STORED.get(stored, 'the k-space')} is")
    coils = f"fastMRI {'single' if kspace.ndim == 3 else 'multi'}-coil"
    if measured is None:
        read_as = f"{coils} {_STORED.get(stored, 'k-space')}, fully sampled"
    else:
        read_as = f"{coils} k-space, as measured" + (f", scored by {_STORED[stored]}" if stored in _STORED else "")
    guessed = "mask" not in handle and mask is None
    files.close()
    return Scan(data, read_as, measured, measured is None or stored in _STORED, notes, guessed)


def _folder(path: Path, kind: str | None, mask: Path | None) -> Scan:
    notes: list[str] = []
    if path.is_dir():
        volumes = sum(file.suffix.lower() in _VOLUMES for file in path.rglob("*"))
        if not any(map(readable, path.rglob("*"))):
            give = f"{counted(volumes, '.h5 file')}: give the files, {path}/*.h5"
            raise fault(path, "folder", give if volumes else f"no file that is read ({FORMATS})")
        if volumes:
            notes.append(f"left out of the folder: {counted(volumes, '.h5 file')}: give those as files")
    data = _Arrays(path) if kind == "kspace" else _Images(path, "all")
    if not len(data):
        raise fault(path, "slices", "there is none")
    middle = len(data) // 2
    if isinstance(data, _Arrays):
        measured = _columns(data.stored(middle), path, mask, notes)
        data.full = measured is None
        if measured is not None and len(data.cases) > 1:
            raise ValueError(
                f"{path}: several undersampled arrays, which may differ in mask: give the files, not the folder"
            )
        read_as = f"k-space, {'fully sampled' if measured is None else 'as measured'}"
        return Scan(data, read_as, measured, measured is None, notes, mask is None)
    image = data[middle].image
    scan = Scan(data, f"{'complex' if image.is_complex() else 'magnitude'} images", notes=notes)
    if kind is None and image.is_complex() and looks_like_kspace(image):
        scan.notes.append("taken for images, but its energy is in few values, as in k-space: is it? then --as kspace")
    return scan


def _columns(kspace: np.ndarray, path: Path, mask: Path | None, notes: list[str]) -> Mask | None:
    """The measured columns of the middle slice (.., H, W) of k-space that has no mask stored; None: all of them."""
    there = _there(kspace)
    filled, rows = np.asarray(there.any(0)), np.asarray(there.any(1))
    inside = _between(filled, 0)  # beyond is zero-padding
    if not filled.any():
        raise fault(path, "kspace", "every value of the middle slice is zero")
    if (filled == inside).all():
        if _lacks(there):
            what = "undersampled, but not in whole columns (the last axis), which is all that is known here"
            turn = ": rows are empty, turn the arrays by 90 degrees" if (_between(rows, 0) & ~rows).any() else ""
            raise fault(path, "kspace", what + turn)
        return None
    if mask is None:
        notes.append("no mask in the file: the columns that hold anything are taken as measured")
        return mask_from_array(filled)
    chosen = create_mask("file", len(filled), file=mask)
    empty = [c for c in chosen.columns if inside[c] and not filled[c]]
    if empty:
        raise ValueError(f"{mask}: keeps columns that are empty in the data ({len(empty)}, first {empty[0]})")
    return chosen


def _there(kspace: np.ndarray) -> np.ndarray:
    """(.., H, W) -> (H, W): is anything there, in any coil."""
    there: np.ndarray = (kspace != 0).reshape(-1, *kspace.shape[-2:]).any(0)
    return there


def _between(there: np.ndarray, axis: int) -> np.ndarray:
    """Is something there at, or both before and after, each place along the axis?"""
    before = np.logical_or.accumulate(there, axis)
    after = np.flip(np.logical_or.accumulate(np.flip(there, axis), axis), axis)
    both: np.ndarray = before & after
    return both


def _lacks(there: np.ndarray) -> bool:
    """Is much of (H, W) empty between others, along either axis? Of a padded or a round k-space next to nothing is."""
    hull = _between(there, 0) | _between(there, 1)
    return bool(there.sum() < 0.9 * hull.sum())


def looks_like_kspace(values: Tensor) -> bool:
    """Complex (..., H, W): k-space has its energy in few values, and an image in few values of its transform."""

    def held(x: Tensor) -> float:
        energy = x.abs().square().flatten()
        return energy.topk(max(1, len(energy) // 64)).values.sum().item()

    return held(values) > held(fft2c(values))


def _outside(values: Tensor) -> bool:
    """Is there less energy in the middle half of (1, H, W), both ways, than with the halves exchanged?"""

    def middle(x: Tensor) -> float:
        h, w = x.shape[-2:]
        return x[..., h // 4 : h - h // 4, w // 4 : w - w // 4].abs().square().sum().item()

    return middle(torch.fft.fftshift(values, dim=(-2, -1))) > middle(values)
