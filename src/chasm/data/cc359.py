"""Calgary-Campinas brain k-space (CC359).

Single channel: one .npy per volume, (slices, 256, 256, 2), real and imaginary part of hybrid k-space (already
transformed along the slices) with the zero frequency at index 0: a plain inverse FFT gives the image.
Several channels: one .h5 per volume, `kspace` (slices, 218, 170..180, 2 * coils), real and imaginary parts
interleaved, uncentred as well. Folders Train/ and Val/ (and Test/, where one has it); Val alone is halved.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.common.words import counted
from chasm.data.base import Case, Facts, FileDataset, Slice, fault, register_dataset
from chasm.data.files import H5Files, finite, h5_field, open_npy, reading
from chasm.data.splits import assign, role_folders


@register_dataset("cc359")
class CC359(FileDataset):
    """`combine="rss"`: magnitude (1,H,W), as in the published protocol; `"coils"`: complex (coils,H,W).

    `skip` slices are left out at either end of a volume: they show little but neck and air.
    """

    summary: ClassVar[str] = "CC359 brain: single-channel .npy or multi-channel .h5 volumes of hybrid k-space"
    published: ClassVar[str] = "25 training and 10 validation volumes (single-channel)"

    def __init__(
        self, path: str | Path, split: str = "train", *, skip: int = 30, combine: str = "rss", seed: int = 0
    ) -> None:
        super().__init__(path, split, seed=seed)
        if combine not in ("rss", "coils"):
            raise ValueError(f"unknown combine {combine!r}: {suggest(combine, ('rss', 'coils'))}")
        self.combine = combine
        self._h5 = H5Files()

        def used(case: Case) -> range:
            n = len(_volume(case.files[0], self._h5))
            if n <= 2 * skip:
                raise fault(case.files[0], "shape", f"{counted(n, 'slice')}, and skip={skip} leaves none: lower skip")
            return range(skip, n - skip)

        self._list(used)

    @classmethod
    def find(cls, path: Path, seed: int = 0) -> tuple[list[Case], str]:
        cases = []
        for role, folders in role_folders(path).items():
            for folder in folders:
                files = sorted([*folder.glob("*.npy"), *folder.glob("*.h5")])
                cases += [Case(f.stem, role, (f,)) for f in files]
        return assign(cases, seed)

    def read(self, case: Case, k: int) -> Slice:
        file = case.files[0]
        image = _image(_raw(_volume(file, self._h5), k, file))
        if self.combine == "rss":
            image = image.abs().square().sum(0, keepdim=True).sqrt()
        channels = "single" if file.suffix == ".npy" else "multi"
        return Slice(image, None, case.name, k, f"CC359 {channels}-channel")

    @classmethod
    def probe(cls, case: Case) -> Facts:
        file, files = case.files[0], H5Files()
        volume = _volume(file, files)
        low, high = np.inf, 0.0
        for k in range(len(volume)):  # one slice at a time: a volume may be 3 GB
            magnitude = _image(_raw(volume, k, file)).abs()
            low, high = min(low, magnitude.min().item()), max(high, magnitude.max().item())
        if high == 0.0:
            raise fault(file, "kspace", "every value is zero")
        (n, h, w, pairs), dtype = volume.shape, f"{volume.dtype} pairs"
        files.close()
        multi = file.suffix == ".h5"  # there the width differs between sound volumes
        kind = counted(pairs // 2, "channel") if multi else "single-channel"
        return Facts((pairs // 2, h, w), n, dtype, low, high, kind=kind, varies=multi)


def _volume(file: Path, h5: H5Files) -> Any:
    """The stored array (slices, H, W, 2 * coils), checked, not yet read."""
    single = file.suffix == ".npy"
    item = open_npy(file) if single else h5_field(h5[file], file, "kspace", (4,))
    paired = item.ndim == 4 and (item.shape[3] == 2 if single else item.shape[3] % 2 == 0)
    if 0 in item.shape:
        raise fault(file, "kspace", f"holds no slices: shape {item.shape}")
    if not paired or item.dtype.kind != "f":
        expected = "(slices, H, W, 2)" if single else "(slices, H, W, 2 * coils)"
        raise fault(file, "kspace", f"expected {expected} floats, got shape {item.shape} of {item.dtype}")
    return item


def _raw(volume: Any, k: int, file: Path) -> np.ndarray:
    with reading(file, "kspace"):
        raw = np.array(volume[k], dtype=np.float32)
    return finite(raw, file, f"kspace slice {k}")


def _image(raw: np.ndarray) -> Tensor:
    """(H, W, 2 * coils) interleaved k-space -> complex images (coils, H, W)."""
    pairs = torch.from_numpy(raw)
    k = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)))  # (H, W, coils)
    return torch.fft.ifft2(k.permute(2, 0, 1), norm="ortho").contiguous()
