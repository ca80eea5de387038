"""Calgary-Campinas brain k-space (CC359).

Single channel: one .npy per volume, (slices, 256, 256, 2), real and imaginary part of hybrid k-space (already
transformed along the slices) with the zero frequency at index 0: a plain inverse FFT gives the image. Several channels:
one .h5 per volume, `kspace` (slices, 218, 170 to 180, 2 * coils), real and imaginary parts interleaved, with the zero
frequency at index 0 as well. The folders are Train/, Val/ and, in some releases, Test/. Without Test, Val is halved.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.common.text import counted
from chasm.data.base import KSpaceDataset, register_dataset
from chasm.data.files import H5Files, h5_field, open_npy, reading, require_finite
from chasm.data.records import Case, CaseFacts, RawSlice, Slice, fault
from chasm.data.splits import SINGLE_FILE, assign_splits, role_folders
from chasm.data.survey import SliceSurvey
from chasm.mri.coils import rss
from chasm.mri.fft import exchange_image_halves, resize_in_kspace


@register_dataset("cc359")
class CC359(KSpaceDataset):
    """CC359 slices: magnitudes (1, H, W), as in the published protocol, or complex coil images (coils, H, W).

    Args:
        path: the folder of the download, or one .npy or .h5 file.
        split: "train", "val", "test" or "all".
        skip: the number of slices left out at either end of a volume, which show little but neck and air.
        combine: "rss" for the root-sum-of-squares magnitude, "coils" for complex images.
        seed: seed of the split, where folders do not decide it.
        crop: keep this many central rows and columns of k-space: smaller images of the same field of view. Where the
            image has fewer, zeros are added: larger images without more detail.
    """

    summary: ClassVar[str] = "CC359 brain: single-channel .npy or multi-channel .h5 volumes of hybrid k-space"
    published: ClassVar[str] = "25 training and 10 validation volumes (single-channel)"

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        skip: int = 30,
        combine: str = "rss",
        seed: int = 0,
        crop: int | None = None,
    ) -> None:
        super().__init__(path, split, seed=seed)
        self.crop = crop
        if combine not in ("rss", "coils"):
            raise ValueError(f"unknown combine {combine!r}: {suggest(combine, ('rss', 'coils'))}")
        self.combine = combine
        self._h5 = H5Files()

        def used(case: Case) -> range:
            n = len(_open_volume(case.files[0], self._h5))
            if n <= 2 * skip:
                raise fault(case.files[0], "shape", f"{counted(n, 'slice')}, and skip={skip} leaves none: lower skip")
            return range(skip, n - skip)

        self.list_slices(used)

    @classmethod
    def find(cls, path: Path, seed: int = 0) -> tuple[list[Case], str]:
        if path.is_file():
            return [Case(path.stem, "train", (path,))], SINGLE_FILE
        cases = []
        for role, folder in role_folders(path):
            cases += [Case(f.stem, role, (f,)) for f in sorted([*folder.glob("*.npy"), *folder.glob("*.h5")])]
        return assign_splits(cases, seed)

    def read(self, case: Case, k: int) -> Slice:
        file = case.files[0]
        image = _image(_kspace(_open_volume(file, self._h5), k, file))
        if self.crop is not None:
            image = resize_in_kspace(image, self.crop)
        if self.combine == "rss":
            image = rss(image, dim=0)
        channels = "single" if file.suffix == ".npy" else "multi"
        return Slice(image, None, case.name, k, f"CC359 {channels}-channel")

    def raw_slice(self, i: int) -> RawSlice:
        case, k = self.locate(i)
        stored = _kspace(_open_volume(case.files[0], self._h5), k, case.files[0])
        centred = exchange_image_halves(torch.fft.fftshift(stored, dim=(-2, -1)))
        return RawSlice(centred, None, (stored.shape[-2], stored.shape[-1]), case.name, k)

    @classmethod
    def probe(cls, case: Case) -> CaseFacts:
        file = case.files[0]
        with H5Files() as files:
            volume = _open_volume(file, files)
            survey = SliceSurvey()
            for k in range(len(volume)):  # one slice at a time: a volume may be 3 GB
                survey.add(_image(_kspace(volume, k, file)).numpy())
            if survey.high == 0.0:
                raise fault(file, "kspace", "every value is zero")
            (_, h, w, pairs), dtype = volume.shape, f"{volume.dtype} pairs"
        multi = file.suffix == ".h5"  # there the width differs between sound volumes
        kind = counted(pairs // 2, "channel") if multi else "single-channel"
        return survey.facts((pairs // 2, h, w), dtype, kind=kind, varies=multi)


def _open_volume(file: Path, h5: H5Files) -> Any:
    """Open the stored array (slices, H, W, 2 * coils), checked and not yet read."""
    single = file.suffix == ".npy"
    item = open_npy(file) if single else h5_field(h5[file], file, "kspace", (4,))
    paired = item.ndim == 4 and (item.shape[3] == 2 if single else item.shape[3] % 2 == 0)
    if 0 in item.shape:
        raise fault(file, "kspace", f"holds no slices: shape {item.shape}")
    if not paired or item.dtype.kind != "f":
        expected = "(slices, H, W, 2)" if single else "(slices, H, W, 2 * coils)"
        raise fault(file, "kspace", f"expected {expected} floats, got shape {item.shape} of {item.dtype}")
    return item


def _kspace(volume: Any, k: int, file: Path) -> Tensor:
    """Read slice k as it is stored: (coils, H, W) complex, zero frequency at index 0."""
    with reading(file, "kspace"):
        stored = np.array(volume[k], dtype=np.float32, order="C")
    pairs = torch.from_numpy(require_finite(stored, file, f"kspace slice {k}"))
    return torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).permute(2, 0, 1)  # (H, W, coils) -> (coils, H, W)


def _image(kspace: Tensor) -> Tensor:
    return torch.fft.ifft2(kspace, norm="ortho").contiguous()
