"""fastMRI volumes, single- and multi-coil: one .h5 each.

`kspace` (slices, [coils,] H, W) complex, centred; `reconstruction_rss` and, for single coil, `reconstruction_esc`
(slices, 320, 320); `ismrmrd_header` (XML); attributes `acquisition`, `max`, `norm`, `patient_id`. Files of the
challenge's test set hold undersampled `kspace` and its `mask`, and no reconstruction. Folders end in _train, _val and
_test. The last is the split "challenge" here, and the validation folder is halved into "val" and "test" by patient
(a reading: the paper does not name its test set).
"""

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from chasm.common.files import write_atomic
from chasm.common.registry import suggest
from chasm.common.text import counted
from chasm.data.base import KSpaceDataset, register_dataset
from chasm.data.files import (
    H5Files,
    crop_or_pad,
    h5_field,
    h5_names,
    h5_slice,
    h5_whole,
    h5_xml,
    reading,
    require_single,
)
from chasm.data.filled import between
from chasm.data.records import SOMEWHERE, Case, CaseFacts, DataError, Geometry, RawSlice, Slice, fault
from chasm.data.scan import KSpaceScan
from chasm.data.splits import SINGLE_FILE, assign_splits, role_folders
from chasm.data.survey import SliceSurvey
from chasm.mri.coils import rss
from chasm.mri.fft import ifft2c, resize_in_kspace

STORED = {"rss": "reconstruction_rss", "esc": "reconstruction_esc"}  # target -> key of the stored images
_KEYS = {**STORED, "kspace": "kspace"}
_COILS = ("single", "multi")
_GRID = ("fieldOfView_mm", "matrixSize")


@dataclass(frozen=True, slots=True)
class Header:
    """The grid of the ISMRMRD header."""

    encoded: tuple[int, int]  # (H, W) of the k-space: readout, phase encoding
    recon: tuple[int, int]  # (H, W) of the image
    padding: tuple[int, int]  # the first acquired column, and the one after the last
    # millimetres along H, W and the slices (their thickness, without gaps), if the header says
    voxel: tuple[float, float, float] | None = None


@register_dataset("fastmri")
class FastMRI(KSpaceDataset):
    """fastMRI slices: stored magnitudes (1, 320, 320), or complex coil images (coils, H, W) from the k-space.

    The defaults are those published for the single-coil knee: fat-suppressed volumes only, the 20 central slices of
    each, root-sum-of-squares images.

    Args:
        path: the folder of the download, or one .h5 file.
        split: "train", "val", "test", "challenge" or "all".
        target: "rss" or "esc" for the stored image of that name, "kspace" for coil images, cropped to the image size.
        acquisition: only volumes with this attribute; None takes all.
        slices: the number of central slices of each volume; None takes all.
        seed: seed of the split, where folders do not decide it.
        coils: "single" or "multi", where the download has folders of both.
        header: whether a file without an ISMRMRD header is an error. False takes the size of the image from the stored
            reconstruction, or from the k-space.
        crop: keep this many central rows and columns of the k-space of the images: smaller images of the same field of
            view. Where the image has fewer, zeros are added: larger images without more detail.
    """

    summary: ClassVar[str] = "fastMRI: single- and multi-coil .h5 volumes, reconstructions or raw k-space"
    published: ClassVar[str] = "973 training and 199 validation volumes (knee)"

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        target: str = "rss",
        acquisition: str | None = "CORPDFS_FBK",
        slices: int | None = 20,
        seed: int = 0,
        coils: str | None = None,
        header: bool = True,
        crop: int | None = None,
    ) -> None:
        if target not in _KEYS:
            raise ValueError(f"unknown target {target!r}: {suggest(target, _KEYS)}")
        super().__init__(path, split, seed=seed, coils=coils)
        self.target, self.needs_header, self.crop = target, header, crop
        self._h5 = H5Files()
        acquisitions: dict[str, int] = {}

        def used(case: Case) -> range:
            file = case.files[0]
            kind = _text(_attribute(self._h5[file], file, "acquisition", ""))
            acquisitions[kind] = acquisitions.get(kind, 0) + 1
            if acquisition is not None and kind != acquisition:
                return range(0)
            n = self._field(file).shape[0]
            count = n if slices is None else min(slices, n)
            start = n // 2 - count // 2
            return range(start, start + count)

        self.list_slices(used)
        if not self.cases:
            counts = ", ".join(f"{kind or 'no acquisition'} {n}" for kind, n in sorted(acquisitions.items()))
            problem = f"no volume is {acquisition!r} (found: {counts})"
            advice = "set the option acquisition=null to take all (in Python: None), or to one that was found"
            raise DataError(f"{self.root}: acquisition: {problem}: {advice}")

    @classmethod
    def find(cls, path: Path, seed: int = 0, coils: str | None = None) -> tuple[list[Case], str]:
        if coils is not None and coils not in _COILS:
            raise ValueError(f"unknown coils {coils!r}: {suggest(coils, _COILS)}")
        if path.is_file():
            return [Case(path.stem, "train", (path,))], SINGLE_FILE
        cases, challenge = [], []
        folders = role_folders(path)
        present = {name for name in _COILS for _, folder in folders if _is_of(folder, name)}
        if coils is None and len(present) > 1:
            raise fault(path, "folder", "singlecoil and multicoil folders: choose with coils=single or coils=multi")
        for role, folder in folders:
            for file in sorted(folder.glob("*.h5")) if coils is None or _is_of(folder, coils) else ():
                if role == "test":
                    challenge.append(Case(file.stem, "challenge", (file,)))
                else:  # the patient matters only where cases are split: in a validation folder, or without roles
                    group = "" if role == "train" else _patient(file)
                    cases.append(Case(file.stem, role, (file,), group))
        cases, rule = assign_splits(cases, seed)
        return cases + challenge, rule

    def _field(self, file: Path) -> Any:
        handle, key = self._h5[file], _KEYS[self.target]
        if key not in handle and "mask" in handle:
            raise fault(file, key, "missing: a test file has none; open it with target='kspace'")
        if self.target == "kspace":
            return h5_field(handle, file, key, (3, 4), complex_=True)
        return h5_field(handle, file, key, (3,))

    def read(self, case: Case, k: int) -> Slice:
        file = case.files[0]
        if self.target == "kspace":
            raw = self._raw(case, k)
            size = (min(raw.size[0], raw.kspace.shape[-2]), min(raw.size[1], raw.kspace.shape[-1]))
            image = crop_or_pad(ifft2c(raw.kspace), size)
        else:
            key = _KEYS[self.target]
            stored = h5_slice(self._field(file), k, file, key)
            image = torch.from_numpy(require_single(stored, file, f"{key} slice {k}"))[None]
        if self.crop is not None:
            image = resize_in_kspace(image, self.crop)
        return Slice(image, None, case.name, k, f"fastMRI {_KEYS[self.target]}")

    def raw_slice(self, i: int) -> RawSlice:
        return self._raw(*self.locate(i))

    def _raw(self, case: Case, k: int) -> RawSlice:
        file = case.files[0]
        handle = self._h5[file]
        kspace = h5_slice(h5_field(handle, file, "kspace", (3, 4), complex_=True), k, file, "kspace")
        coils = torch.from_numpy(require_single(kspace, file, f"kspace slice {k}").reshape(-1, *kspace.shape[-2:]))
        mask = torch.from_numpy(column_mask(handle, file, kspace.shape[-1])) if "mask" in handle else None
        return RawSlice(coils, mask, self.header_of(case).recon, case.name, k)

    def header_of(self, case: Case) -> Header:
        """Read the header of a case's file."""
        file = case.files[0]
        handle = self._h5[file]
        with reading(file, "kspace"):
            if self.needs_header or "ismrmrd_header" in handle:
                return read_header(handle, file)
            size = handle["kspace"].shape[-2:]
            recon = next((handle[key].shape[-2:] for key in STORED.values() if key in handle), size)
        return Header(size, recon, (0, size[1]))

    def geometry(self, case: str) -> Geometry | None:
        file = self.case(case).files[0]
        affine = np.asarray(_attribute(self._h5[file], file, "affine", 0))
        if affine.shape == (4, 4) and affine.dtype.kind == "f" and np.isfinite(affine).all():  # written by chasm
            return Geometry(affine, int(_attribute(self._h5[file], file, "affine_code", SOMEWHERE)))
        try:
            voxel = self.header_of(self.case(case)).voxel
        except DataError:  # the images can be read without it
            return None
        return None if voxel is None else Geometry(np.diag([voxel[1], voxel[0], voxel[2], 1.0]), SOMEWHERE)

    @classmethod
    def probe(cls, case: Case) -> CaseFacts:
        file = case.files[0]
        with H5Files() as files:
            handle = files[file]
            kspace = h5_field(handle, file, "kspace", (3, 4), complex_=True)
            header = read_header(handle, file)
            if "mask" in handle:
                column_mask(handle, file, kspace.shape[-1])
            targets = [key for key in STORED.values() if key in handle]
            if not targets and "mask" not in handle:
                raise fault(file, "reconstruction_rss", "missing, and without a mask this is no test file")
            raw, images = SliceSurvey(), SliceSurvey()
            for key in targets:
                item = h5_field(handle, file, key, (3,))
                if item.shape[0] != kspace.shape[0]:
                    raise fault(file, key, f"{counted(item.shape[0], 'slice')}, but kspace has {kspace.shape[0]}")
            for k in range(kspace.shape[0]):
                raw.add(h5_slice(kspace, k, file, "kspace"))
                for key in targets:
                    images.add(h5_slice(handle[key], k, file, key))
            kind = _text(_attribute(handle, file, "acquisition", "")) or "no acquisition attribute"
            coils = 1 if kspace.ndim == 3 else kspace.shape[1]
            shape = (coils, *(handle[targets[0]].shape[1:] if targets else header.recon))
            low, high = (images.low, images.high) if targets else (0.0, 0.0)
            varies = not kind.startswith("COR")  # knees all have one shape, brains do not
            dtype, digests = str(kspace.dtype), tuple(raw.digests)
            return CaseFacts(shape, len(digests), dtype, low, high, _patient(file), kind, varies, digests)


def _is_of(folder: Path, coils: str) -> bool:
    return folder.name.lower().startswith(f"{coils}coil")


def read_header(handle: Any, file: Path) -> Header:
    """Read the matrix sizes, the acquired columns and the voxel size from the ISMRMRD header of an open file."""
    if "ismrmrd_header" not in handle:
        raise fault(file, "ismrmrd_header", f"missing; the file has {', '.join(h5_names(handle, file))}")
    with reading(file, "ismrmrd_header"):
        encoding = ET.fromstring(h5_xml(handle, file, "ismrmrd_header")).find("{*}encoding")

    def number(*steps: str) -> int:
        node = encoding
        for step in steps:
            node = None if node is None else node.find("{*}" + step)
        if node is None or not (node.text or "").strip().isdigit():
            raise fault(file, "ismrmrd_header", f"no number at encoding/{'/'.join(steps)}")
        return int(node.text or "")

    def matrix(space: str) -> tuple[int, int]:
        return number(space, "matrixSize", "x"), number(space, "matrixSize", "y")

    encoded, recon = matrix("encodedSpace"), matrix("reconSpace")
    limits = ("encodingLimits", "kspace_encoding_step_1")
    left = encoded[1] // 2 - number(*limits, "center")
    return Header(encoded, recon, (left, left + number(*limits, "maximum") + 1), _voxel(encoding))


def _voxel(encoding: ET.Element | None) -> tuple[float, float, float] | None:
    """Return the field of view over the matrix of the image; None if the header does not say."""
    space = None if encoding is None else encoding.find("{*}reconSpace")
    if space is None:
        return None
    fov, matrix = ([space.findtext(f"{{*}}{part}/{{*}}{axis}") or "" for axis in "xyz"] for part in _GRID)
    try:
        x, y, z = (float(mm) / float(n) for mm, n in zip(fov, matrix, strict=True))
    except (ValueError, ZeroDivisionError):
        return None
    return (x, y, z) if min(x, y, z) > 0 and max(x, y, z) < np.inf else None


def write_fastmri(scan: KSpaceScan, file: Path) -> None:
    """Write a volume in the layout of fastMRI, with its mask if it is undersampled, or else with its images.

    The layout has no place for noise, which is lost, nor for where the volume lies, which is kept in an attribute.
    """
    import h5py

    from chasm.data.ismrmrd import header_xml

    kspace = scan.kspace[:, 0] if scan.kspace.shape[1] == 1 else scan.kspace
    columns = scan.columns
    undersampled = (between(columns) & ~columns).any()

    def write(partial: Path) -> None:
        with h5py.File(partial, "w") as f:
            f["kspace"], f["ismrmrd_header"] = kspace, header_xml(scan)
            f.attrs["acquisition"], f.attrs["patient_id"] = "", scan.patient or file.stem
            if undersampled:
                f["mask"] = columns.astype(np.uint8)
            else:
                images = crop_or_pad(ifft2c(torch.from_numpy(scan.kspace)), scan.size)
                target = rss(images)[:, 0].numpy()
                f["reconstruction_rss"] = target
                f.attrs["max"], f.attrs["norm"] = float(target.max()), float(np.linalg.norm(target))
            if scan.geometry is not None:
                f.attrs["affine"], f.attrs["affine_code"] = scan.geometry.affine, scan.geometry.code

    write_atomic(file, write)


def column_mask(handle: Any, file: Path, width: int) -> np.ndarray:
    """Read the mask of an open file: (W,) bool, True for measured columns.

    Args:
        handle: the open file.
        file: its path, for messages.
        width: the number of columns of its k-space.
    """
    mask = np.asarray(h5_whole(handle, file, "mask"))
    if mask.shape != (width,):
        raise fault(file, "mask", f"expected one value for each of {width} columns, got shape {mask.shape}")
    if not np.isin(mask, (0, 1)).all():
        raise fault(file, "mask", f"expected zeros and ones, got values from {mask.min():g} to {mask.max():g}")
    if not mask.any():
        raise fault(file, "mask", "every value is zero: no column was measured")
    return mask.astype(bool)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _attribute(handle: Any, file: Path, name: str, default: Any) -> Any:
    with reading(file, name):
        return handle.attrs.get(name, default)


def _patient(file: Path) -> str:
    """Return the patient of a file, or the file's name without one; `probe` reports what is wrong with such a file."""
    try:
        with H5Files() as files:
            return _text(_attribute(files[file], file, "patient_id", "")) or file.stem
    except DataError:
        return file.stem
