"""Measured k-space in the formats that scanners and the field write, and the dataset that reads all of them.

ISMRMRD (.h5, .mrd), BART (.cfl with .hdr), Siemens twix (.dat), fastMRI and CC359 volumes, and plain arrays (.npy,
.npz, .h5) whose axes are named. The content of a file decides its format.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from chasm.common.registry import suggest
from chasm.common.text import counted
from chasm.data.arrays import read_arrays, write_arrays
from chasm.data.bart import read_bart, write_bart
from chasm.data.base import KSpaceDataset, existing, register_dataset
from chasm.data.cc359 import CC359
from chasm.data.fastmri import FastMRI, write_fastmri
from chasm.data.files import H5Files, crop_or_pad, open_npy, reading
from chasm.data.filled import between, is_filled, is_undersampled
from chasm.data.ismrmrd import ismrmrd_group, read_ismrmrd, write_ismrmrd
from chasm.data.records import Case, CaseFacts, DataError, Geometry, RawSlice, Slice, fault
from chasm.data.scan import KSpaceScan
from chasm.data.splits import SINGLE_FILE, assign_splits, role_folders, splits_from_list
from chasm.data.survey import SliceSurvey
from chasm.data.twix import read_twix
from chasm.mri.coils import rss
from chasm.mri.fft import ifft2c

HDF5 = (".h5", ".hdf5", ".mrd")
SUFFIXES = (*HDF5, ".cfl", ".dat", ".npy", ".npz")
WRITERS: dict[str, Callable[[KSpaceScan, Path], None]] = {
    ".mrd": write_ismrmrd,
    ".cfl": write_bart,
    ".h5": write_fastmri,
    ".npy": write_arrays,
    ".npz": write_arrays,
}
FORMAT_NAMES = {".mrd": "ISMRMRD", ".cfl": "BART", ".h5": "fastMRI", ".npy": "array", ".npz": "array"}
COMBINATIONS = ("coils", "rss")


def kspace_format(file: Path) -> str:
    """Return the format of a file of k-space, in words; "" if it is unknown.

    >>> kspace_format(Path("meas_MID1.dat")), kspace_format(Path("a.png"))
    ('Siemens twix', '')
    """
    suffix = file.suffix.lower()
    if suffix in (".cfl", ".hdr", ".dat"):
        return "Siemens twix" if suffix == ".dat" else "BART"
    if suffix == ".npy":
        array = open_npy(file)
        return "CC359" if array.ndim == 4 and array.shape[-1] == 2 and array.dtype.kind == "f" else "array"
    if suffix == ".npz":
        return "array"
    if suffix not in HDF5:
        return ""
    if ismrmrd_group(file):
        return "ISMRMRD"
    with H5Files() as files:
        handle = files[file]
        with reading(file, "kspace"):
            item = handle.get("kspace")
        kind, ndim = getattr(getattr(item, "dtype", None), "kind", ""), len(getattr(item, "shape", ()))
    if kind == "c" and ndim in (3, 4):
        return "fastMRI"
    return "CC359" if kind == "f" and ndim == 4 else "array"


@lru_cache(maxsize=2)
def _read(file: Path, changed: int, axes: str | None) -> dict[str, KSpaceScan]:
    form = "array" if axes is not None else kspace_format(file)
    if form == "fastMRI":
        return _from_dataset(FastMRI(file, "all", target="kspace", acquisition=None, slices=None, header=False))
    if form == "CC359":
        return _from_dataset(CC359(file, "all", skip=0, combine="coils"))
    if form == "array":
        return read_arrays(file, axes)
    readers = {"ISMRMRD": read_ismrmrd, "BART": read_bart, "Siemens twix": read_twix}
    if form not in readers:
        raise fault(file, "format", f"expected k-space in {', '.join(SUFFIXES)}")
    return readers[form](file)


def read_scans(path: str | Path, axes: str | None = None) -> dict[str, KSpaceScan]:
    """Read the volumes of a file of k-space.

    Args:
        path: the file, or either file of a BART pair.
        axes: the axes of a plain array, one letter each: S slices, C coils, H rows, W columns.

    Returns:
        Volumes by a name that says how they differ, such as "repetition2"; "" for the only one.

    Raises:
        DataError: if the file is damaged, unknown, or not Cartesian.
    """
    file = existing(path)
    file = file.with_suffix(".cfl") if file.suffix.lower() == ".hdr" else file
    if not file.is_file():
        raise fault(file, "file", "expected a file" if file.exists() else f"missing beside {Path(path).name}")
    return dict(_read(file, file.stat().st_mtime_ns, axes))


def write_scan(scan: KSpaceScan, file: Path) -> KSpaceScan:
    """Write a volume. The suffix sets the format: .mrd ISMRMRD, .cfl BART, .h5 fastMRI, .npy or .npz (SCHW).

    ISMRMRD keeps everything. For other formats the data is prewhitened first. For BART and arrays, which cannot mark
    the oversampling of the readout, it is removed.

    Returns:
        The volume as it was written; its notes list changes of the data.
    """
    suffix = file.suffix.lower()
    if suffix not in WRITERS:
        raise ValueError(f"{file}: expected a name that ends in {', '.join(WRITERS)}: the suffix says the format")
    if suffix != ".mrd":
        scan = scan.prewhitened()
        scan = scan if suffix == ".h5" else scan.cropped_readout()
    WRITERS[suffix](scan, file)
    return scan


def _from_dataset(data: KSpaceDataset) -> dict[str, KSpaceScan]:
    """Read all slices of a dataset of one volume."""
    raw = [data.raw_slice(i) for i in range(len(data))]
    kspace = torch.stack([r.kspace for r in raw]).numpy()
    mask = None if raw[0].mask is None else raw[0].mask.numpy()
    size = (min(raw[0].size[0], kspace.shape[2]), min(raw[0].size[1], kspace.shape[3]))
    return {"": KSpaceScan(kspace, size, data.geometry(raw[0].case), mask=mask)}


@register_dataset("kspace")
class KSpace(KSpaceDataset):
    """Slices of measured k-space: complex coil images (coils, H, W), or their root-sum-of-squares (1, H, W).

    A volume is a case; a file may hold several. Oversampling is cut off, and noise scans are used for prewhitening.

    Args:
        path: a file, or a folder of files.
        split: "train", "val", "test" or "all".
        axes: the axes of plain arrays, one letter each: S slices, C coils, H rows, W columns.
        combine: "coils" for complex images of every coil, "rss" for the root-sum-of-squares magnitude.
        prewhiten: whether noise scans are used.
        splits: a text file with a case and its split on each line.
        seed: seed of the split, where folders do not decide it.
        undersampled: whether undersampled slices may be read, which are no targets to train with.
    """

    summary: ClassVar[str] = "measured k-space: ISMRMRD .h5 .mrd, BART .cfl, Siemens .dat, arrays .npy .npz .h5"

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        axes: str | None = None,
        combine: str = "coils",
        prewhiten: bool = True,
        splits: str | Path | None = None,
        seed: int = 0,
        undersampled: bool = False,
    ) -> None:
        if combine not in COMBINATIONS:
            raise ValueError(f"unknown combine {combine!r}: {suggest(combine, COMBINATIONS)}")
        self.axes, self.combine, self.prewhiten, self.undersampled = axes, combine, prewhiten, undersampled
        super().__init__(path, split, splits=splits, seed=seed, axes=axes)
        self.list_slices(lambda case: range(len(self.scan(case).kspace)))

    @classmethod
    def find(
        cls, path: Path, splits: str | Path | None = None, seed: int = 0, axes: str | None = None
    ) -> tuple[list[Case], str]:
        if path.is_file():
            return _cases(path, "train", path.stem, axes), SINGLE_FILE
        cases = []
        for role, folder in role_folders(path):
            for file in sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix.lower() in SUFFIXES):
                name = file.relative_to(folder).with_suffix("").as_posix()
                cases += _cases(file, role, f"{folder.name}/{name}" if role else name, axes)
        if splits is not None:
            return splits_from_list(cases, splits)
        return assign_splits(cases, seed, by="patient, or of the file if no patient is known")

    def scan(self, case: Case) -> KSpaceScan:
        """Read the volume of a case, prewhitened if that was asked for."""

        def read() -> KSpaceScan:
            scan = _volume(case, self.axes)
            return scan.prewhitened() if self.prewhiten else scan

        return self.keep_last(case, read)

    def raw_slice(self, i: int) -> RawSlice:
        case, k = self.locate(i)
        scan = self.scan(case)
        mask = None if scan.mask is None else torch.from_numpy(scan.mask)
        return RawSlice(torch.from_numpy(np.array(scan.kspace[k])), mask, scan.size, case.name, k, scan.noise_level)

    def read(self, case: Case, k: int) -> Slice:
        scan = self.scan(case)
        kspace = torch.from_numpy(np.array(scan.kspace[k]))
        if not self.undersampled and _has_gaps(scan, kspace):
            problem = "undersampled: no target to train with or to score by"
            raise fault(case.files[0], f"kspace slice {k}", f"{problem}: reconstruct it (chasm reconstruct)")
        image = crop_or_pad(ifft2c(kspace), scan.size)
        image = rss(image, dim=0) if self.combine == "rss" else image
        return Slice(image, None, case.name, k, f"{kspace_format(case.files[0])} k-space")

    def geometry(self, case: str) -> Geometry | None:
        return self.scan(self.case(case)).geometry

    @classmethod
    def probe(cls, case: Case, axes: str | None = None) -> CaseFacts:
        scan, survey = _volume(case, axes), SliceSurvey()
        for kspace in scan.kspace:
            survey.add(np.asarray(kspace))
        if survey.high == 0:
            raise fault(case.files[0], "kspace", "every value is zero")
        coils, width = scan.kspace.shape[1], scan.kspace.shape[3]
        measured = int(scan.columns.sum())
        lines = f"{measured} of {counted(width, 'line')}" if measured < width else counted(width, "line")
        kind = ", ".join([f"{kspace_format(case.files[0])} k-space", lines, *scan.notes])
        return survey.facts((coils, *scan.size), "complex64", group=scan.patient, kind=kind, varies=True)


def _cases(file: Path, role: str, name: str, axes: str | None) -> list[Case]:
    """Return a case for each volume, and one for a file that cannot be read, which `probe` reports."""
    try:
        scans = read_scans(file, axes)
    except DataError:
        return [Case(name, role, (file,))]
    return [Case(f"{name}/{v}" if v else name, role, (file,), scan.patient or name) for v, scan in scans.items()]


def _volume(case: Case, axes: str | None) -> KSpaceScan:
    scans = read_scans(case.files[0], axes)
    volume = next((v for v in scans if v and case.name.endswith(f"/{v}")), "")
    return scans[volume]


def _has_gaps(scan: KSpaceScan, kspace: torch.Tensor) -> bool:
    columns = np.asarray(is_filled(kspace).any(0))
    return bool((between(columns) & ~columns).any()) or (scan.mask is None and is_undersampled(is_filled(kspace)))
