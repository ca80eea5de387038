"""Open a file or folder given to `chasm reconstruct`, and tell what it holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chasm.common.text import counted
from chasm.data import CC359, FastMRI, FileDataset, Folder, KSpace, KSpaceDataset, RawSlice, fault, open_dataset
from chasm.data.fastmri import STORED, column_mask
from chasm.data.files import H5Files, h5_field, h5_names, h5_slice
from chasm.data.filled import between, is_filled, looks_like_kspace
from chasm.data.formats import FORMATS, is_readable
from chasm.data.guess import guess_dataset
from chasm.data.kspace import HDF5, kspace_format
from chasm.mri import Mask, mask_from_array
from chasm.reconstruct.columns import filled_columns, measured_columns
from chasm.train import Run

MIN_SCORED = 7  # height and width of the window of SSIM
ONE_COIL = (
    "the run was trained on magnitudes: one coil is simulated from the root-sum-of-squares image, and the measured "
    "coils are not used (a run with task.options.complex=true uses them)"
)


@dataclass
class Scan:
    """Slices to reconstruct.

    Attributes:
        data: the reader.
        read_as: the kind of input, in words.
        measured: the columns that were measured, for undersampled k-space; None for fully sampled data.
        scored: whether there is a target to score against.
        notes: lines for the user.
        guessed: whether `measured` are the columns of the middle slice that are not empty.
        masks: the measured columns of each case, where they may differ.
    """

    data: FileDataset
    read_as: str
    measured: Mask | None = None
    scored: bool = True
    notes: list[str] = field(default_factory=list)
    guessed: bool = False
    masks: dict[str, Mask] = field(default_factory=dict)

    @property
    def sampling(self) -> str:
        """The measured columns, in words."""
        assert self.measured is not None
        masks = list(self.masks.values()) or [self.measured]
        chosen = sorted({f"all {m.width} columns" if m.lines == m.width else str(m) for m in masks})
        return chosen[0] if len(chosen) == 1 else f"{chosen[0]}; other columns in other volumes"

    def raw(self, row: int) -> tuple[RawSlice, Mask]:
        """Read the k-space of one slice of undersampled data, and its measured columns.

        Raises:
            DataError: if it lacks a column that is taken as measured.
        """
        assert isinstance(self.data, KSpaceDataset)
        assert self.measured is not None
        raw = self.data.raw_slice(row)
        measured = self.masks.get(raw.case, self.measured)
        columns = np.asarray(is_filled(raw.kspace).any(0))
        inside = between(columns)  # the rest is zero-padding
        is_kept = np.isin(np.arange(len(columns)), measured.columns)
        wrong = is_kept & inside & ~columns | (columns & ~is_kept if self.guessed else False)
        if wrong.any():
            which = f"{counted(int(wrong.sum()), 'column')}, first {int(wrong.argmax())}"
            advice = "give slices of another mask in a file of their own" if self.guessed else "check the mask"
            file = self.data.locate(row)[0].files[0]
            raise fault(file, f"kspace slice {raw.index}", f"does not hold what the mask keeps ({which}): {advice}")
        return raw, measured


def open_scan(
    path: Path,
    *,
    phase: bool,
    target: str,
    kind: str | None = None,
    mask: Path | None = None,
    options: Mapping[str, Any] | None = None,
    images: Mapping[str, Any] | None = None,
    whole: bool = False,
) -> Scan:
    """Open a file or folder for reconstruction.

    Args:
        path: a fastMRI .h5, a CC359 .npy or .h5, or a file or folder of images or k-space arrays.
        phase: whether the model takes complex images; they are read if there are any.
        target: the stored reconstruction to prefer, "rss" or "esc".
        kind: what complex arrays hold, "image" (default) or "kspace".
        mask: a file with the mask of undersampled k-space.
        options: options of the reader, as the user gave them.
        images: options of the reader of images, where `options` does not give others.
        whole: whether fully sampled k-space is reconstructed as it was measured, and not undersampled first.
    """
    options = dict(options or {})
    kind = "kspace" if kind is None and "axes" in options else kind
    form = _format(path, kind)
    if form != "folder" and kind == "image":
        raise ValueError(f"{path}: holds k-space, not images: leave out --as image")
    if options and form not in ("folder", "kspace"):
        raise ValueError(f"{path}: this format takes no option {next(iter(options))!r}: leave it out")
    if form == "fastmri":
        scan = _open_fastmri(path, phase, target, mask, whole)
    elif form == "cc359":
        scan = _open_cc359(path, phase, mask, whole)
    elif form == "kspace" or kind == "kspace":  # a folder of arrays, too
        scan = _open_kspace(path, phase, mask, options, whole)
    else:
        scan = _open_folder(path, kind, {**(images or {}), **options})
    h, w = scan.data[len(scan.data) // 2].image.shape[-2:]
    if scan.scored and min(h, w) < MIN_SCORED:
        raise fault(path, "image", f"slices of {h} x {w} cannot be scored: SSIM needs {MIN_SCORED} x {MIN_SCORED}")
    cases = len(scan.data.cases)
    several = f"{cases} cases, " if cases > 1 else ""
    scan.read_as += f" ({several}{counted(len(scan.data), 'slice')}, {h} x {w})"
    return scan


def reader_options(run: Run) -> dict[str, Any]:
    """Return the data options of a run with which a scan is read; None for those that the run does not have.

    Args:
        run: a trained run, or a method without training.
    """
    data = run.config.data
    cut = ("plane", "volume") if data.name == "folder" else ()
    return {
        "target": data.options.get("target", "rss"),
        "phase": bool(data.options.get("phase")),
        **{name: data.options.get(name) if name in cut else None for name in ("plane", "volume")},
    }


def _format(path: Path, kind: str | None) -> str:
    """Return "fastmri", "cc359" or "kspace" for k-space in a format that names itself, else "folder"."""
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file()]
        raw = any(file.suffix.lower() in (".cfl", ".dat", ".mrd") for file in files)
        return "kspace" if raw and not any(map(is_readable, files)) else "folder"
    name = kspace_format(path)
    if name == "array" and path.suffix.lower() in HDF5:
        if kind == "kspace":
            return "kspace"
        with H5Files() as files_:
            names = ", ".join(h5_names(files_[path], path)) or "nothing"
        raise fault(path, "kspace", f"missing; the file has {names} (name the axes of an array: -O axes=SCHW)")
    forms = {"fastMRI": "fastmri", "CC359": "cc359", "ISMRMRD": "kspace", "BART": "kspace", "Siemens twix": "kspace"}
    return forms.get(name, "folder")


def _open_cc359(path: Path, phase: bool, mask: Path | None, whole: bool) -> Scan:
    data = CC359(path, "all", skip=0, combine="coils")
    notes: list[str] = []
    middle = data.raw_slice(len(data) // 2).kspace
    measured = measured_columns(middle, path, mask, notes)
    if measured is None and whole:
        return Scan(data, "CC359 k-space, fully sampled", filled_columns(middle), False, notes)
    if measured is None:
        several = len(data.raw_slice(0).kspace) > 1
        notes += [ONE_COIL] if several and not phase else []
        return Scan(CC359(path, "all", skip=0, combine="coils" if phase else "rss"), "CC359 k-space", notes=notes)
    return Scan(data, "CC359 k-space, as measured", measured, False, notes, mask is None)


def _open_fastmri(path: Path, phase: bool, target: str, mask: Path | None, whole: bool) -> Scan:
    with H5Files() as files:
        handle = files[path]
        kspace = h5_field(handle, path, "kspace", (3, 4), complex_=True)
        notes: list[str] = []
        complete = False
        if "mask" not in handle:
            middle = torch.from_numpy(h5_slice(kspace, len(kspace) // 2, path, "kspace"))
            measured = measured_columns(middle, path, mask, notes)
            if measured is None and whole:
                complete, measured = True, filled_columns(middle)
        elif mask is None:
            measured = mask_from_array(column_mask(handle, path, kspace.shape[-1]))
        else:
            raise ValueError(f"{path}: stores the mask of its undersampled k-space: leave out --mask")
        targets = ("rss", "esc") if kspace.ndim == 3 else ("rss",)  # esc belongs to one coil
        stored = next((t for t in (target, *targets) if t in targets and STORED[t] in handle), "kspace")
        if measured is None and (phase or target == "kspace"):
            stored = "kspace"
        if stored in STORED:
            slices = len(h5_field(handle, path, STORED[stored], (3,)))
            if slices != len(kspace):
                problem = f"{counted(slices, 'slice')}, but kspace has {len(kspace)}"
                raise fault(path, STORED[stored], f"{problem}, so it is unknown which belong together")
        data = FastMRI(path, "all", target=stored, acquisition=None, slices=None, header=False)
        if "ismrmrd_header" not in handle and (measured is not None or stored == "kspace"):
            h, w = data.header_of(data.locate(0)[0]).recon
            notes.append(f"no ismrmrd_header: the image is {h} x {w}, as {STORED.get(stored, 'the k-space')} is")
        coils = f"fastMRI {'single' if kspace.ndim == 3 else 'multi'}-coil"
        if measured is None:
            read_as = f"{coils} {STORED.get(stored, 'k-space')}, fully sampled"
            notes += [ONE_COIL] if kspace.ndim == 4 and not phase else []
        else:
            how = "fully sampled" if complete else "as measured"
            read_as = f"{coils} k-space, {how}" + (f", scored by {STORED[stored]}" if stored in STORED else "")
        guessed = "mask" not in handle and mask is None and not complete
    return Scan(data, read_as, measured, measured is None or stored in STORED, notes, guessed)


def _open_folder(path: Path, kind: str | None, options: dict[str, Any]) -> Scan:
    notes: list[str] = []
    axes = "-O axes=SHW (slices), axes=CHW (coils) or axes=SCHW, or --as image"
    kspace = fault(path, "image", f"looks like k-space: say --as kspace {axes}")
    if path.is_file() and not is_readable(path):
        raise fault(path, "format", f"expected k-space (ISMRMRD, fastMRI, CC359, BART, Siemens twix) or {FORMATS}")
    inside = filter(is_readable, path.rglob("*")) if path.is_dir() else [path]
    arrays = [file for file in inside if file.suffix.lower() in (".npy", ".npz")]
    if kind is None and arrays and guess_dataset(min(arrays)) == "kspace":
        raise kspace
    if path.is_dir():
        volumes = sum(file.suffix.lower() in HDF5 for file in path.rglob("*"))
        if not any(map(is_readable, path.rglob("*"))):
            advice = f"{counted(volumes, '.h5 file')}: give the files, {path}/*.h5"
            raise fault(path, "folder", advice if volumes else f"no file that is read ({FORMATS})")
        if volumes:
            notes.append(f"left out of the folder: {counted(volumes, '.h5 file')}: give those as files")
    data: Folder = open_dataset("folder", path, split="all", stack=True, **options)
    if not len(data):
        raise fault(path, "slices", "there is none")
    image = data[len(data) // 2].image
    if kind is None and image.is_complex() and looks_like_kspace(image):
        raise kspace
    how = data.how_cut(len(data) // 2)
    read_as = f"{'complex' if image.is_complex() else 'magnitude'} images" + (f", {how}" if how else "")
    return Scan(data, read_as, notes=notes)


def _open_kspace(path: Path, phase: bool, mask: Path | None, options: dict[str, Any], whole: bool) -> Scan:
    """Open k-space in a format of `chasm.data.kspace`. Every volume has its own mask."""
    data: KSpace = open_dataset("kspace", path, split="all", undersampled=True, **options)
    notes: list[str] = []
    masks: dict[str, Mask | None] = {}
    complete: dict[str, Mask] = {}
    guessed = False
    for case, rows in data.rows_by_case().items():
        raw = data.raw_slice(rows[len(rows) // 2])
        file = data.locate(rows[0])[0].files[0]
        if raw.mask is None:
            masks[case] = measured_columns(raw.kspace, file, mask, notes if not guessed else [])
            guessed = guessed or (masks[case] is not None and mask is None)
        else:
            gaps = between(raw.mask.numpy()) & ~raw.mask.numpy()
            masks[case] = mask_from_array(raw.mask.numpy()) if gaps.any() else None
            if mask is not None and gaps.any():
                raise ValueError(f"{file}: stores which lines were measured: leave out --mask")
        if masks[case] is None and whole:
            complete[case] = filled_columns(raw.kspace)
        if (masks[case] is None) != (next(iter(masks.values())) is None):
            raise fault(
                file, "kspace", "some volumes are undersampled and others are not: give the files one at a time"
            )
        notes += [note for note in data.scan(data.locate(rows[0])[0]).notes if note not in notes]
    first, kind = data.raw_slice(0), kspace_format(data.files()[0])
    coils = len(first.kspace)
    what = "k-space" if kind == "array" and coils == 1 else f"{kind} k-space of {counted(coils, 'coil')}"
    measured = {case: chosen for case, chosen in masks.items() if chosen is not None}
    if measured or complete:
        how, measured = ("as measured", measured) if measured else ("fully sampled", complete)
        return Scan(data, f"{what}, {how}", next(iter(measured.values())), False, notes, guessed, measured)
    if not phase:
        data.combine = "rss"
        notes += [ONE_COIL] if coils > 1 else []
    data.undersampled = False  # every slice is a target
    return Scan(data, f"{what}, fully sampled", notes=notes)
