"""A folder of one's own magnitude images: .npy, .npz, .png, .tif, .nii(.gz) or DICOM, without writing code.

A file is a case, or the files of one DICOM series are; other files in a sub-folder together are one case (a stack of
PNGs), and the first sub-folder is the patient for the split. Splits: folders named train, val and test; else a text
file `splits` with a case and its split on each line; else 70/10/20 by hash. Arrays are (H,W) or (slices,H,W), real or
complex; an .npz holds `image` and may hold `label`; DICOM is ordered by instance number, other files by name.
"""

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from chasm.data.base import Case, DataError, Facts, FileDataset, Slice, existing, fault, register_dataset
from chasm.data.files import finite, fit, open_npy, reading
from chasm.data.splits import assign, listed, role_folders

_SUFFIXES = (".npy", ".npz", ".png", ".tif", ".tiff", ".nii", ".nii.gz", ".dcm", ".ima")
FORMATS = f"{' '.join(_SUFFIXES)} or DICOM"
_LABEL_KEYS = ("label", "labels", "mask", "seg")


@register_dataset("folder")
class Folder(FileDataset):
    """Image (1,H,W) as stored, label (H,W) where there is one; `size` crops or pads all to one shape."""

    # what images may be called in an .npz, first choice first
    arrays: ClassVar[tuple[str, ...]] = ("image", "images", "data", "arr_0")
    summary: ClassVar[str] = "your own folder: .npy .npz .png .tif .nii.gz or DICOM magnitude images"

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        splits: str | Path | None = None,
        size: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(path, split, splits=splits, seed=seed)
        self.size = None if size is None else (int(size[0]), int(size[1]))
        self._frames = {c.name: np.cumsum([0, *(_count(f, self.arrays) for f in c.files)]) for c in self._cases}
        self._last: tuple[Path, np.ndarray, np.ndarray | None] | None = None
        self._list(lambda case: range(int(self._frames[case.name][-1])))

    @classmethod
    def find(cls, path: Path, splits: str | Path | None = None, seed: int = 0) -> tuple[list[Case], str]:
        if path.is_file():
            if not _suffix(path):
                raise fault(path, "format", f"expected {FORMATS}")
            return [Case(path.name, "train", (path,))], "a single file"
        cases = []
        for role, folders in role_folders(path).items():
            for folder in folders:
                cases += _cases(folder, role)
        if splits is not None:
            return listed(cases, existing(splits))
        return assign(cases, seed)

    def read(self, case: Case, k: int) -> Slice:
        starts = self._frames[case.name]
        number = int(np.searchsorted(starts, k, side="right")) - 1
        file, frame = case.files[number], k - int(starts[number])
        if self._last is None or self._last[0] != file:
            self._last = (file, *_load(file, self.arrays))
        _, images, labels = self._last
        array = np.array(images[frame])
        finite(array, file, f"image {frame}")
        wide = np.complex64 if array.dtype.kind == "c" else np.float32
        image, label = torch.from_numpy(array.astype(wide))[None], None
        if labels is not None:
            label = torch.from_numpy(labels[frame].astype(np.int64))
        if self.size is not None:
            image = fit(image, self.size)
            label = None if label is None else fit(label, self.size)
        return Slice(image, label, case.name, k, f"folder {self.root.name}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}

    @classmethod
    def probe(cls, case: Case) -> Facts:
        shapes, low, high, total, kinds = set(), np.inf, -np.inf, 0, set()
        for file in case.files:
            images, _ = _load(file, cls.arrays)
            finite(np.asarray(images), file, "image")
            values = np.abs(images) if images.dtype.kind == "c" else images
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            total += len(images)
            shapes.add(images.shape[1:])
            kinds.add(str(images.dtype))
            if len(shapes) > 1:
                raise fault(file, "image", f"shape {images.shape[1:]} differs from others of the case: {shapes}")
        if low == high:
            raise fault(case.files[0], "image", f"every value is {low:g}")
        return Facts((1, *shapes.pop()), total, "/".join(sorted(kinds)), low, high)


def _cases(folder: Path, role: str) -> list[Case]:
    groups: dict[tuple[str, str], list[Path]] = {}
    for file in folder.rglob("*"):
        if readable(file):
            parent = file.parent.relative_to(folder).as_posix()
            alone = file.name if parent == "." else ""
            groups.setdefault((parent, _series(file) or alone), []).append(file)
    prefix, cases = f"{folder.name}/" if role else "", []
    for (parent, _), files in groups.items():
        files = ordered(files)
        shared = sum(parent == other for other, _ in groups) > 1
        name = files[0].name if parent == "." else f"{parent}/{files[0].name}" if shared else parent
        cases.append(Case(prefix + name, role, tuple(files), prefix + name.split("/")[0]))
    return sorted(cases, key=lambda case: case.name)


def readable(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".") and bool(_suffix(file))


def _series(file: Path) -> str:
    """What the files of a DICOM series have in common, "" for others."""
    try:
        return str(_dicom(file, pixels=False).get("SeriesInstanceUID") or "") if _suffix(file) == ".dcm" else ""
    except DataError:  # said when it is read
        return ""


def _suffix(file: Path) -> str:
    """Which format a file is in, by its name, or for DICOM also by its preamble; "" = none of ours."""
    name = file.name.lower()
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return {".tiff": ".tif", ".nii.gz": ".nii", ".ima": ".dcm"}.get(suffix, suffix)
    if not file.suffix or file.suffix[1:].isdigit():  # DICOM exports often have no extension
        with open(file, "rb") as f:
            return ".dcm" if f.read(132)[128:] == b"DICM" else ""
    return ""


def ordered(files: list[Path]) -> list[Path]:
    def natural(file: Path) -> list[tuple[int, int | str]]:
        return [(0, int(w)) if w.isdigit() else (1, w) for w in re.findall(r"\d+|\D+", file.name)]

    files = sorted(files, key=natural)
    if len(files) > 1 and all(_suffix(f) == ".dcm" for f in files):
        files.sort(key=_instance)
    return files


def single_image(file: Path) -> bool:
    """Is it one picture, in a format that does not say what volume it is a slice of?"""
    return _suffix(file) in (".png", ".tif") and _count(file, ()) == 1


def _instance(file: Path) -> int:
    try:
        return int(_dicom(file, pixels=False).get("InstanceNumber") or 0)
    except DataError:  # said when it is read
        return 0


def _count(file: Path, arrays: tuple[str, ...]) -> int:
    """How many images a file holds, from its header where there is one."""
    suffix = _suffix(file)
    if suffix == ".npy":
        array = open_npy(file)
        if array.ndim < 2:
            raise fault(file, "array", f"expected (H,W) or (slices,H,W), got shape {array.shape}")
        return 1 if array.ndim == 2 else len(array)
    if suffix == ".dcm":
        return int(_dicom(file, pixels=False).get("NumberOfFrames") or 1)
    if suffix == ".png":
        return 1
    if suffix == ".nii":
        return _axial(file)
    return len(_load(file, arrays)[0])


def _load(file: Path, arrays: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    """Images (N,H,W) of a file, and labels (N,H,W) if it has them; `arrays`: what images may be called in an .npz."""
    suffix, labels = _suffix(file), None
    if suffix == ".npy":
        images = open_npy(file)
    elif suffix == ".npz":
        images, labels = _npz(file, arrays)
    elif suffix == ".png":
        images = _png(file)
    elif suffix == ".tif":
        import tifffile

        with reading(file, "image"):
            images = tifffile.imread(file)
    elif suffix == ".nii":
        images = _nifti(file)
    else:
        images = _frames(file)
    images = images[None] if images.ndim == 2 else images
    if images.ndim != 3 or 0 in images.shape or images.dtype.kind not in "buifc":
        raise fault(file, "image", f"expected (H,W) or (slices,H,W) numbers, got {images.shape} {images.dtype}")
    if suffix in (".npy", ".npz", ".tif") and len(images) > 1 and images.shape[-1] in (2, 3, 4):
        raise fault(file, "image", f"shape {images.shape} looks like colours last: expected (slices,H,W)")
    if labels is not None:
        labels = labels[None] if labels.ndim == 2 else labels
        if labels.shape != images.shape or labels.dtype.kind not in "bui":
            raise fault(file, "label", f"expected integers {images.shape}, got {labels.shape} {labels.dtype}")
    return images, labels


def _npz(file: Path, arrays: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    with reading(file, "archive"), np.load(file, allow_pickle=False) as archive:
        image = next((k for k in arrays if k in archive.files), None)
        if image is None:
            have = ", ".join(archive.files) or "nothing"
            raise fault(file, arrays[0], f"missing; the file has {have}; name the array {arrays[0]!r}")
        label = next((k for k in _LABEL_KEYS if k in archive.files), None)
        return archive[image], None if label is None else archive[label]


def _png(file: Path) -> np.ndarray:
    from PIL import Image

    with reading(file, "image"), Image.open(file) as image:
        grey = image.mode in ("L", "I", "F") or image.mode.startswith("I;16")
        return np.asarray(image if grey else image.convert("L"))


def _nifti(file: Path) -> np.ndarray:
    """Axial slices, upright: rows from front to back."""
    with reading(file, "volume"):
        volume = np.asarray(_canonical(file).dataobj)
    return volume[:, ::-1].transpose(2, 1, 0)


def _canonical(file: Path) -> Any:
    """The volume with its axes turned to run to the right, to the front and up; one slice is a volume, too."""
    import nibabel

    image = _opened(file)
    if image.ndim == 2:
        image = nibabel.Nifti1Image(np.asarray(image.dataobj)[..., None], image.affine)
    return nibabel.as_closest_canonical(image)


def _axial(file: Path) -> int:
    """How many axial slices there are, from the header: the axis that runs up need not be the last one stored."""
    import nibabel

    with reading(file, "header"):
        image = _opened(file)
        axes = nibabel.io_orientation(image.affine)[:, 0]
        return int((*image.shape, 1)[axes.tolist().index(2)])


def _opened(file: Path) -> Any:
    import nibabel

    image = nibabel.load(file)
    if image.ndim not in (2, 3):
        raise fault(file, "volume", f"expected 2 or 3 dimensions, got shape {image.shape}")
    return image


def affine(files: tuple[Path, ...]) -> np.ndarray | None:
    """Voxel (column, row from below, slice) of a case to millimetres, x to the right, y to the front, z up.

    None where the files do not say: a NIfTI file does, and a DICOM series with orientation, position and spacing.
    """
    if len(files) == 1 and _suffix(files[0]) == ".nii":
        with reading(files[0], "header"):
            return np.asarray(_canonical(files[0]).affine)
    return _dicom_affine(files) if all(_suffix(file) == ".dcm" for file in files) else None


def _dicom_affine(files: tuple[Path, ...]) -> np.ndarray | None:
    headers = [_dicom(file, pixels=False) for file in files]
    first = headers[0]
    needed = [(h.get("ImageOrientationPatient"), h.get("ImagePositionPatient"), h.get("PixelSpacing")) for h in headers]
    alike = all((n[0], n[2]) == (needed[0][0], needed[0][2]) for n in needed)
    if not alike or any(None in n for n in needed) or int(first.get("NumberOfFrames") or 1) > 1:
        return None
    columns, rows = np.array(first.ImageOrientationPatient, float).reshape(2, 3)  # directions in which they count up
    between_rows, between_columns = (float(v) for v in first.PixelSpacing)
    places = np.array([position for _, position, _ in needed], float)
    if len(files) > 1:
        step = (places[-1] - places[0]) / (len(files) - 1)
        even = np.abs(places - places[0] - np.arange(len(files))[:, None] * step).max() <= 0.01 * np.linalg.norm(step)
        if not even or not step.any():  # slices left out, or all in one place: there is no grid
            return None
    else:
        step = np.cross(columns, rows) * float(first.get("SpacingBetweenSlices") or first.get("SliceThickness") or 1)
    found = np.eye(4)
    found[:3, 0], found[:3, 1], found[:3, 2] = columns * between_columns, -rows * between_rows, step
    found[:3, 3] = places[0] + (first.Rows - 1) * between_rows * rows  # the lowest row
    found[:2] *= -1  # DICOM counts x to the left and y to the back
    return found


def _dicom(file: Path, pixels: bool = True) -> Any:
    import pydicom

    with reading(file, "header"):
        return pydicom.dcmread(file, stop_before_pixels=not pixels)


def _frames(file: Path) -> np.ndarray:
    data = _dicom(file)
    with reading(file, "PixelData"):
        pixels = data.pixel_array.astype(np.float32)
    if data.get("SamplesPerPixel", 1) != 1:
        raise fault(file, "SamplesPerPixel", f"expected 1 (grey), got {data.SamplesPerPixel}")
    pixels = pixels * float(data.get("RescaleSlope", 1)) + float(data.get("RescaleIntercept", 0))
    inverted = data.get("PhotometricInterpretation") == "MONOCHROME1"  # small values are shown bright
    return pixels.max() - pixels if inverted else pixels
