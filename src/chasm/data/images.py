"""Photographs: ADE20K, ImageNet, or any folder of images, as RGB squares.

The short side is resized to `size` (Pillow's bicubic, antialiased), then a square is cut: the centre, or for training a
random crop and flip drawn from (seed, epoch, index), so that a run can be repeated. Splits are the folders train(ing),
val(idation) and test; without a test folder every second validation image is in the test split.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from chasm.common.files import expanded
from chasm.data.base import FileDataset, register_dataset
from chasm.data.files import reading
from chasm.data.limits import open_picture
from chasm.data.records import Case, CaseFacts, Slice, fault
from chasm.data.splits import assign_splits, role_folders
from chasm.data.survey import SliceSurvey

_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp")
_ANNOTATION = re.compile(r"_(seg|parts_\d+)\.png$")  # label maps that ADE20K keeps beside its photographs
# Where the split folders may lie: in the folder itself, in ADE20K (challenge or full release), in ImageNet.
_LAYOUTS = (".", "images", "images/ADE", "ADEChallengeData2016/images", "Data/CLS-LOC", "ILSVRC/Data/CLS-LOC")


@register_dataset("images")
class Images(FileDataset):
    """Photographs (3, size, size) in [0, 1]; one photograph is one case.

    Args:
        path: the folder of the download.
        split: "train", "val", "test" or "all".
        size: the side of the square.
        augment: random crops and flips; default: for the training split only.
        files: a text file with one path per line, relative to the folder; exactly these images are read, in this order.
        limit: take a fixed subset of this many, chosen by `seed`.
        seed: seed of the subset, the split and the crops.
    """

    summary: ClassVar[str] = "ADE20K, ImageNet or any folder of photographs, as RGB squares"
    published: ClassVar[str] = "20,210 + 2,000 photographs (ADE20K challenge), 1,281,167 + 50,000 (ImageNet)"
    domain = "photo"

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        size: int = 256,
        augment: bool | None = None,
        files: str | Path | None = None,
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(path, split, files=files, listed_as=split, seed=seed)
        if limit is not None and limit < len(self._cases):
            ranked = sorted(self._cases, key=lambda c: hashlib.sha256(f"{seed}:{c.name}".encode()).digest())
            self._cases = sorted(ranked[:limit], key=lambda c: c.name)
        self.size, self.seed = size, seed
        self.augment = split == "train" if augment is None else augment
        self.fixed = not self.augment
        # in shared memory, so that loader processes that already run see it change
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.list_slices(lambda case: (0,))

    @classmethod
    def find(
        cls, path: Path, files: str | Path | None = None, listed_as: str = "train", seed: int = 0
    ) -> tuple[list[Case], str]:
        if files is not None:
            listing = expanded(files)
            with reading(listing, "list"):
                lines = [line.split("#")[0].strip() for line in listing.read_text().splitlines()]
            names = [line for line in lines if line]
            for name in names:
                if not (path / name).is_file():
                    raise fault(listing, "list", f"{name!r} is not in {path}")
            return [Case(n, listed_as, (path / n,)) for n in names], f"list {listing.name}"
        roots = [path / layout for layout in _LAYOUTS if (path / layout).is_dir()] or [path]
        root = next((r for r in roots if "" not in dict(role_folders(r))), path)
        pairs = [(role, file) for role, folder in role_folders(root) for file in _walk(folder)]
        return assign_splits([Case(file.relative_to(path).as_posix(), role, (file,)) for role, file in pairs], seed)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __getitem__(self, i: int) -> Slice:
        case, _ = self.locate(i)
        rng = np.random.default_rng([self.seed, int(self._epoch), i % len(self)]) if self.augment else None
        return Slice(_square(case.files[0], self.size, rng), None, case.name, 0, "images")

    @classmethod
    def probe(cls, case: Case) -> CaseFacts:
        pixels = np.asarray(_rgb(case.files[0]))
        survey = SliceSurvey()
        survey.add(pixels)
        if survey.low == survey.high:
            raise fault(case.files[0], "pixels", f"every value is {survey.low:g}")
        h, w, _ = pixels.shape
        kind = "short side under 256: will be enlarged" if min(h, w) < 256 else ""
        return survey.facts((3, h, w), "uint8", kind=kind, varies=True)


def _walk(folder: Path) -> list[Path]:
    """Return image files at any depth, sorted, with os.walk because ImageNet has over a million."""
    files, visited = [], set()
    for here, below, names in os.walk(folder, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in visited:  # a link leads back here
            below.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        for name in names:
            if name.lower().endswith(_SUFFIXES) and not _ANNOTATION.search(name) and not name.startswith("."):
                files.append(Path(here, name))
    return sorted(files)


def _rgb(file: Path) -> Any:
    with reading(file, "image"), open_picture(file, file) as image:
        return image.convert("RGB")


def _square(file: Path, size: int, rng: np.random.Generator | None) -> Tensor:
    """Resize the short side, and return the centre, or with `rng` a random crop and flip: (3, size, size) in [0, 1]."""
    from PIL import Image

    image = _rgb(file)
    w, h = image.size
    scale = size / min(w, h)
    w, h = max(size, round(w * scale)), max(size, round(h * scale))
    if image.size != (w, h):
        image = image.resize((w, h), Image.Resampling.BICUBIC)
    if rng is None:
        left, top, flip = (w - size) // 2, (h - size) // 2, False
    else:
        left, top = int(rng.integers(w - size + 1)), int(rng.integers(h - size + 1))
        flip = bool(rng.integers(2))
    pixels = np.array(image.crop((left, top, left + size, top + size)))  # (H,W,3) uint8
    pixels = pixels[:, ::-1] if flip else pixels
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).float() / 255
