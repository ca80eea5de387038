"""fastMRI volumes, single- and multi-coil: one .h5 each.

`kspace` (slices, [coils,] H, W) complex, centred; `reconstruction_rss` and, for single coil,
`reconstruction_esc` (slices, 320, 320); `ismrmrd_header` (XML); attributes `acquisition`, `max`, `norm`,
`patient_id`. Files of the challenge's test set hold undersampled `kspace` and its `mask`, no reconstruction.
Folders end in _train, _val and _test; the last is the split "challenge" here, and the validation folder is
halved into "val" and "test" by patient (a reading: the paper does not name its test set).
"""

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.common.words import counted
from chasm.data.base import Case, DataError, Facts, FileDataset, Slice, fault, register_dataset
from chasm.data.files import H5Files, fit, h5_field, h5_slice, reading
from chasm.data.splits import assign, role_folders
from chasm.mri.fft import ifft2c

_KEYS = {"rss": "reconstruction_rss", "esc": "reconstruction_esc", "kspace": "kspace"}
_GRID = ("fieldOfView_mm", "matrixSize")


@dataclass(frozen=True, slots=True)
class Header:
    """What the ISMRMRD header says about the grid."""

    encoded: tuple[int, int]  # (H, W) of the k-space: readout, phase encoding
    recon: tuple[int, int]  # (H, W) of the image
    padding: tuple[int, int]  # first and one-past-last acquired column
    voxel: tuple[float, float, float] | None = None  # mm along H, W and slices (their thickness, without gaps)


@dataclass(frozen=True, slots=True)
class RawSlice:
    """Measured data of one slice."""

    kspace: Tensor  # (coils,H,W) complex, centred
    mask: Tensor | None  # (W,) bool: the lines a test file holds
    header: Header
    case: str
    index: int


@register_dataset("fastmri")
class FastMRI(FileDataset):
    """Slices of `target`: "rss" or "esc" magnitude (1,320,320), or "kspace": complex coil images, cropped.

    Default as published for the single-coil knee: fat-suppressed volumes only, 20 central slices each, RSS.
    `acquisition=None` takes all, `slices=None` whole volumes. `raw(i)` gives the measured k-space.
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
    ) -> None:
        if target not in _KEYS:
            raise ValueError(f"unknown target {target!r}: {suggest(target, _KEYS)}")
        super().__init__(path, split, seed=seed)
        self.target = target
        self._h5 = H5Files()
        seen: dict[str, int] = {}

        def used(case: Case) -> range:
            file = case.files[0]
            kind = _text(self._h5[file].attrs.get("acquisition", ""))
            seen[kind] = seen.get(kind, 0) + 1
            if acquisition is not None and kind != acquisition:
                return range(0)
            n = self._field(file).shape[0]
            count = n if slices is None else min(slices, n)
            start = n // 2 - count // 2
            return range(start, start + count)

        self._list(used)
        if not self.cases:
            have = ", ".join(f"{kind or 'none'} {n}" for kind, n in sorted(seen.items()))
            which = f"none is {acquisition!r} (found: {have})"
            raise DataError(f"{self.root}: acquisition: {which}: choose one, or null (in Python: None) for all")

    @classmethod
    def find(cls, path: Path, seed: int = 0) -> tuple[list[Case], str]:
        cases, challenge = [], []
        for role, folders in role_folders(path).items():
            for folder in folders:
                for file in sorted(folder.glob("*.h5")):
                    if role == "test":
                        challenge.append(Case(file.stem, "challenge", (file,)))
                    else:  # the patient matters where we cut: a validation folder, or one without a role
                        group = "" if role == "train" else _patient(file)
                        cases.append(Case(file.stem, role, (file,), group))
        cases, rule = assign(cases, seed)
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
            h, w = raw.header.recon
            image = fit(ifft2c(raw.kspace), (min(h, raw.kspace.shape[-2]), min(w, raw.kspace.shape[-1])))
        else:
            array = h5_slice(self._field(file), k, file, _KEYS[self.target])
            image = torch.from_numpy(array.astype(np.float32))[None]
        return Slice(image, None, case.name, k, f"fastMRI {_KEYS[self.target]}")

    def raw(self, i: int) -> RawSlice:
        """The measured k-space of slice i, its mask (test files), and the header's grid."""
        case, k = self._rows[i]
        return self._raw(self._cases[case], int(k))

    def _raw(self, case: Case, k: int) -> RawSlice:
        file = case.files[0]
        handle = self._h5[file]
        kspace = h5_slice(h5_field(handle, file, "kspace", (3, 4), complex_=True), k, file, "kspace")
        coils = torch.from_numpy(kspace.astype(np.complex64).reshape(-1, *kspace.shape[-2:]))
        mask = None
        if "mask" in handle:
            mask = torch.from_numpy(column_mask(handle, file, kspace.shape[-1]))
        return RawSlice(coils, mask, self._header(handle, file), case.name, k)

    def _header(self, handle: Any, file: Path) -> Header:
        return header(handle, file)

    @classmethod
    def probe(cls, case: Case) -> Facts:
        file, files = case.files[0], H5Files()
        handle = files[file]
        kspace = h5_field(handle, file, "kspace", (3, 4), complex_=True)
        head = header(handle, file)
        if "mask" in handle:
            column_mask(handle, file, kspace.shape[-1])
        targets = [key for key in ("reconstruction_rss", "reconstruction_esc") if key in handle]
        if not targets and "mask" not in handle:
            raise fault(file, "reconstruction_rss", "missing, and without a mask this is no test file")
        low, high = np.inf, 0.0
        for key in targets:
            item = h5_field(handle, file, key, (3,))
            if item.shape[0] != kspace.shape[0]:
                raise fault(file, key, f"{counted(item.shape[0], 'slice')}, but kspace has {kspace.shape[0]}")
        for k in range(kspace.shape[0]):
            h5_slice(kspace, k, file, "kspace")
            for key in targets:
                image = h5_slice(handle[key], k, file, key)
                low, high = min(low, float(image.min())), max(high, float(image.max()))
        kind = _text(handle.attrs.get("acquisition", "")) or "no acquisition attribute"
        coils = 1 if kspace.ndim == 3 else kspace.shape[1]
        shape = (coils, *(handle[targets[0]].shape[1:] if targets else head.recon))
        low = low if targets else 0.0
        varies = not kind.startswith("COR")  # knees are all alike, brains are not
        facts = Facts(shape, kspace.shape[0], str(kspace.dtype), low, high, _patient(file), kind, varies)
        files.close()
        return facts


def header(handle: Any, file: Path) -> Header:
    """The matrix sizes and the acquired columns from the ISMRMRD header of an open file."""
    if "ismrmrd_header" not in handle:
        raise fault(file, "ismrmrd_header", f"missing; the file has {', '.join(sorted(handle))}")
    with reading(file, "ismrmrd_header"):
        encoding = ET.fromstring(handle["ismrmrd_header"][()]).find("{*}encoding")

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
    """Field of view / matrix of the image; None where the header does not say."""
    space = None if encoding is None else encoding.find("{*}reconSpace")
    if space is None:
        return None
    fov, matrix = ([space.findtext(f"{{*}}{part}/{{*}}{axis}") or "" for axis in "xyz"] for part in _GRID)
    try:
        x, y, z = (float(mm) / float(n) for mm, n in zip(fov, matrix, strict=True))
    except (ValueError, ZeroDivisionError):
        return None
    return (x, y, z) if min(x, y, z) > 0 and max(x, y, z) < np.inf else None


def column_mask(handle: Any, file: Path, width: int) -> np.ndarray:
    """The stored mask of an open file, (W,) bool."""
    with reading(file, "mask"):
        mask = np.asarray(handle["mask"][()])
    if mask.shape != (width,):
        raise fault(file, "mask", f"expected one value for each of {width} columns, got shape {mask.shape}")
    if not np.isin(mask, (0, 1)).all():
        raise fault(file, "mask", f"expected zeros and ones, got values from {mask.min():g} to {mask.max():g}")
    if not mask.any():
        raise fault(file, "mask", "every value is zero: no column was measured")
    return mask.astype(bool)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _patient(file: Path) -> str:
    """The patient a file belongs to; its own name when it cannot say (then the check reports why)."""
    files = H5Files()
    try:
        return _text(files[file].attrs.get("patient_id", "")) or file.stem
    except DataError:
        return file.stem
    finally:
        files.close()
