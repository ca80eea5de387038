"""BraTS: one folder per case with four co-registered, skull-stripped NIfTI volumes and a segmentation.

2021 and before: ID/ID_{t1,t1ce,t2,flair,seg}.nii.gz, labels 1 necrosis, 2 oedema, 4 enhancing tumour.
2023 and later:  ID/ID-{t1n,t1c,t2w,t2f,seg}.nii.gz, labels 1, 2, 3; IDs end in the number of the visit.
Here: classes 0 background, 1 necrosis, 2 oedema, 3 enhancing tumour.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from chasm.data.base import FileDataset, register_dataset
from chasm.data.files import reading, require_folder, require_single
from chasm.data.limits import open_nifti_file
from chasm.data.records import Case, CaseFacts, Slice, fault
from chasm.data.splits import assign_splits
from chasm.data.survey import SliceSurvey

_SCHEMES = {"_": ("t1", "t1ce", "t2", "flair"), "-": ("t1n", "t1c", "t2w", "t2f")}


@register_dataset("brats")
class BraTS(FileDataset):
    """Axial slices that show brain: image (4, 240, 240) in [0, 1] of t1, t1ce, t2 and flair; label (240, 240).

    Each volume is clipped to the 0.5 and 99.5 percentile of its brain and scaled to [0, 1]. Patients are split
    70/10/20. To read a slice its case is decompressed, which takes about a second, and the last case is kept: read
    slices in order, or use `to_memory`.

    Args:
        path: the folder of the download.
        split: "train", "val", "test" or "all".
        step: take every step-th slice.
        min_tumour: keep slices with at least this share of tumour pixels.
        seed: seed of the split.
    """

    summary: ClassVar[str] = "BraTS glioma: case folders with four NIfTI modalities and a segmentation"
    published: ClassVar[str] = "1,251 cases with a segmentation (2021)"

    def __init__(
        self, path: str | Path, split: str = "train", *, step: int = 1, min_tumour: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__(path, split, seed=seed)

        def used(case: Case) -> list[int]:
            flair = _volume(case.files[3])
            keep = (flair > 0).any(axis=(0, 1))  # background is exactly zero: the skull is stripped
            if min_tumour > 0:
                keep &= (_label(case.files[4]) > 0).mean(axis=(0, 1)) >= min_tumour
            return [int(k) for k in np.flatnonzero(keep)[::step]]

        with ThreadPoolExecutor(8) as pool:  # decompression runs outside the interpreter lock
            numbers = dict(zip(self._cases, pool.map(used, self._cases), strict=True))
        self.list_slices(numbers.__getitem__)

    @classmethod
    def find(cls, path: Path, seed: int = 0) -> tuple[list[Case], str]:
        return assign_splits([_case(folder, files) for folder, files in _folders(path)], seed, by="patient")

    def read(self, case: Case, k: int) -> Slice:
        images, label = self.keep_last(case, lambda: _load(case))
        image, classes = torch.from_numpy(images[k].copy()), torch.from_numpy(label[k].astype(np.int64))
        return Slice(image, classes, case.name, k, "BraTS")

    @classmethod
    def probe(cls, case: Case) -> CaseFacts:
        missing = [f.name for f in case.files if not f.is_file()]
        if missing:
            raise fault(case.files[0].parent, "modality", f"missing {', '.join(missing)}")
        raw = [_volume(file) for file in case.files[:4]]
        _load(case)
        x, y, n = raw[0].shape
        survey = SliceSurvey()
        for k in range(n):
            survey.add(np.stack([volume[..., k] for volume in raw]))
        scheme = "2023 names" if case.files[4].name.removesuffix(".gz").endswith("-seg.nii") else "2021 names"
        digests = tuple(digest for digest in survey.digests if digest)  # slices without a brain are never read
        dtype = str(raw[0].dtype)
        return CaseFacts((4, y, x), n, dtype, survey.low, survey.high, kind=scheme, digests=digests)


def _folders(path: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield folders with NIfTI files: `path` itself, and those at most three levels below."""
    require_folder(path)
    below = sorted(p for depth in ("*", "*/*", "*/*/*") for p in path.glob(depth) if p.is_dir())
    for folder in [path, *below]:
        files = sorted(f for f in folder.iterdir() if f.name.endswith((".nii", ".nii.gz")))
        if files:
            yield folder, files


def _case(folder: Path, files: list[Path]) -> Case:
    """Return the case of a folder: its five files in fixed order. A missing file gets the name it should have."""
    stems = {f.name.removesuffix(".gz").removesuffix(".nii"): f for f in files}
    scheme = "-" if any(s.endswith(("-t1n", "-t1c", "-t2w", "-t2f", "-seg")) for s in stems) else "_"
    wanted = [f"{folder.name}{scheme}{word}" for word in (*_SCHEMES[scheme], "seg")]
    paths = tuple(stems.get(stem, folder / f"{stem}.nii.gz") for stem in wanted)
    patient = folder.name.rpartition("-")[0] if scheme == "-" else folder.name
    return Case(folder.name, "", paths, patient)


def _volume(file: Path) -> np.ndarray:
    """Read a volume (x, y, slices) as it is stored."""
    if not file.is_file():
        raise fault(file, "modality", "missing: a case has four modalities and a segmentation")
    with reading(file, "volume"):
        volume = np.asarray(open_nifti_file(file).dataobj)
    if volume.ndim != 3 or 0 in volume.shape:
        raise fault(file, "volume", f"expected 3 dimensions (x, y, slices), got shape {volume.shape}")
    require_single(volume, file, "volume")
    return volume


def _label(file: Path) -> np.ndarray:
    """Read classes 0 to 3, uint8."""
    volume = _volume(file)
    allowed = (0, 1, 2, 3) if "-seg.nii" in file.name else (0, 1, 2, 4)
    odd = np.unique(volume[~np.isin(volume, allowed)]).tolist()
    if odd:
        raise fault(file, "label", f"expected the classes {allowed}, got also {odd[:5]}")
    label = volume.astype(np.uint8)
    label[label == 4] = 3
    return label


def _load(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Read normalised slices (slices, 4, y, x) float32 and classes (slices, y, x) uint8, transposed: the nose is up."""
    label = _label(case.files[4])
    x, y, n = label.shape
    images = np.empty((n, 4, y, x), dtype=np.float32)
    for m, file in enumerate(case.files[:4]):
        volume = _volume(file)
        if volume.shape != label.shape:
            raise fault(file, "volume", f"shape {volume.shape} differs from the segmentation's {label.shape}")
        brain = volume[volume > 0]
        if not brain.size:
            raise fault(file, "volume", "no voxel is above zero")
        low, high = np.percentile(brain, (0.5, 99.5))
        image = images[:, m]
        image[...] = volume.T
        image -= np.float32(low)
        image /= np.float32(max(high - low, 1e-12))
        np.clip(image, 0, 1, out=image)
    return images, np.ascontiguousarray(label.T)
