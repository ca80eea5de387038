"""Data that needs no file and no network: drawn brains, drawn tumours, and the photographs scikit-image ships.

`brain`: complex slices (1, H, W) of one contrast, with the whole head. `tumour`: four contrasts (4, H, W) in [0, 1]
with the skull stripped, and classes 0 background, 1 necrosis, 2 oedema, 3 enhancing tumour, as BraTS has them.
`photos`: RGB crops (3, H, W) in [0, 1]. A slice depends only on the options, its case and its index, in whatever order
slices are read.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from chasm.common.registry import suggest
from chasm.data.base import SliceDataset, register_dataset
from chasm.data.files import reading
from chasm.data.limits import open_picture
from chasm.data.phantom import CONTRASTS, HIGHEST, LOWEST, Head, as_scanned, draw, signal_table
from chasm.data.records import Case, DataError, Slice, fault, in_split
from chasm.data.splits import assign_splits

CONTENTS = ("brain", "tumour", "photos")
MAX_SIZE = 2048  # pixels; a slice of that size takes seconds and half a GiB to draw
MAX_SLICES = 100_000
# Files of every scikit-image wheel, so that nothing is downloaded. The two views of one motorcycle are one case.
_PHOTOS = {
    "astronaut": ("train", "astronaut.png"),
    "brick": ("train", "brick.png"),
    "camera": ("train", "camera.png"),
    "galaxies": ("train", "hubble_deep_field.jpg"),
    "grass": ("train", "grass.png"),
    "motorcycle": ("train", "motorcycle_left.png", "motorcycle_right.png"),
    "retina": ("train", "retina.jpg"),
    "tissue": ("train", "ihc.png"),
    "gravel": ("val", "gravel.png"),
    "rocket": ("val", "rocket.jpg"),
    "chelsea": ("test", "chelsea.png"),
    "coffee": ("test", "coffee.png"),
    "coins": ("test", "coins.png"),
}


@register_dataset("embedded")
class Embedded(SliceDataset):
    """Slices that are drawn, or cut from bundled photographs, on first use and then kept.

    Args:
        split: "train", "val", "test" or "all"; subjects are split 70/10/20.
        content: "brain", "tumour" or "photos".
        contrast: contrast of brains: "t1", "t1ce", "t2" or "flair".
        size: size of a slice: a number, or (height, width).
        cases: the number of subjects in all splits together.
        slices: per subject, from the basal ganglia upwards or through the tumour; the most crops per photograph.
        seed: seed of the subjects and the split.

    Example:
        >>> Embedded("val", content="tumour", size=32)[0].image.shape
        torch.Size([4, 32, 32])
    """

    summary: ClassVar[str] = "drawn brains and tumours, and bundled photographs: no file, no network"
    needs_path: ClassVar[bool] = False

    def __init__(
        self,
        split: str = "train",
        *,
        content: str = "brain",
        contrast: str = "t2",
        size: int | tuple[int, int] = 256,
        cases: int = 20,
        slices: int = 12,
        seed: int = 0,
    ) -> None:
        for word, value, known in (("content", content, CONTENTS), ("contrast", contrast, CONTRASTS)):
            if value not in known:
                raise ValueError(f"unknown {word} {value!r}: {suggest(value, known)}")
        try:
            height, width = (size, size) if isinstance(size, int) else size
            self.shape = int(height), int(width)
        except (TypeError, ValueError):
            raise ValueError(f"size {size!r}: expected a number of pixels, or height and width") from None
        if not 16 <= min(self.shape) <= max(self.shape) <= MAX_SIZE:
            raise ValueError(f"size {size}: expected 16 to {MAX_SIZE} pixels each way")
        if cases < 1 or slices < 1 or seed < 0:
            raise ValueError(f"cases {cases}, slices {slices}, seed {seed}: expected at least 1, 1 and 0")
        if cases * slices > MAX_SLICES:
            raise ValueError(f"cases {cases}, slices {slices}: expected at most {MAX_SLICES} slices in all")
        self.split, self.content, self.contrast, self.slices, self.seed = split, content, contrast, slices, seed
        self.domain = "photo" if content == "photos" else "mri"
        if content == "photos":
            all_cases, self.split_rule = _photo_cases(), "fixed, by photograph"
        else:
            drawn = [Case(f"{content}{i:03d}", "", ()) for i in range(cases)]
            all_cases, self.split_rule = assign_splits(drawn, seed)
        self._cases = in_split(all_cases, split, Path("embedded"))
        self.cases = [case.name for case in self._cases]
        counts = [slices if content != "photos" else len(self._crops(case)) for case in self._cases]
        self._rows = [(case, k) for case, n in zip(self._cases, counts, strict=True) for k in range(n)]
        self._heads: dict[str, Head] = {}
        self._slices: dict[int, Slice] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Slice:
        i = range(len(self))[i]
        if i not in self._slices:
            case, k = self._rows[i]
            self._slices[i] = self._crop(case, k) if self.content == "photos" else self._section(case, k)
        return self._slices[i]

    def case_name(self, i: int) -> str:
        return self._rows[i][0].name

    def __getstate__(self) -> dict[str, Any]:
        # A worker draws its slices again: that is cheaper than sending them.
        return {**self.__dict__, "_heads": {}, "_slices": {}}

    def _section(self, case: Case, k: int) -> Slice:
        number, tumour = int(case.name.removeprefix(self.content)), self.content == "tumour"
        if case.name not in self._heads:
            self._heads[case.name] = Head(self.seed, number, tumour)
        head = self._heads[case.name]
        low, high = LOWEST, HIGHEST
        if head.mass is not None:
            reach = 1.2 * head.mass.radius + 8  # mm above and below the centre of the tumour
            low, high = max(low, head.mass.z - reach), min(high, head.mass.z + reach)
        z = low + (high - low) * (k + 0.5) / self.slices
        table = signal_table(*(CONTRASTS if tumour else [self.contrast]))
        clean, classes = draw(head, z, self.shape, table, skull=not tumour)
        scanned = torch.from_numpy(as_scanned(np.random.default_rng([self.seed, number, 1, k]), clean))
        source = f"embedded {self.content}"
        if not tumour:
            return Slice(scanned, None, case.name, k, source)
        inside = torch.from_numpy(clean.max(0) > 0.02)  # stripped: outside is exactly zero
        return Slice(scanned.abs().clamp_(max=1) * inside, torch.from_numpy(classes), case.name, k, source)

    def _crops(self, case: Case) -> list[tuple[Path, int, int, int, int]]:
        """Places (file, height, width, top, left) of crops that do not overlap.

        The photograph is reduced to height x width, so that about two crops fit along its short side and small ones
        show detail too. If there are more than `slices`, they are chosen evenly.
        """
        (h, w), places = self.shape, []
        for file in case.files:
            with reading(file, "image"), open_picture(file, file) as image:
                width, height = image.size
            if height < h or width < w:
                raise DataError(f"{file.name}: photograph of {height} x {width} pixels: choose a size below {h} x {w}")
            scale = min(1, 2 * max(h / height, w / width))
            height, width = round(scale * height), round(scale * width)
            for top in np.linspace(0, height - h, height // h).astype(int).tolist():
                for left in np.linspace(0, width - w, width // w).astype(int).tolist():
                    places.append((file, height, width, top, left))
        chosen = np.linspace(0, len(places) - 1, min(self.slices, len(places))).astype(int)
        return [places[i] for i in chosen]

    def _crop(self, case: Case, k: int) -> Slice:
        from PIL import Image

        (h, w), (file, height, width, top, left) = self.shape, self._crops(case)[k]
        with reading(file, "image"), open_picture(file, file) as image:
            whole = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.array(whole)[top : top + h, left : left + w]
        rgb = torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255)
        return Slice(rgb.contiguous(), None, case.name, k, "embedded photos")


def _photo_cases() -> list[Case]:
    try:
        import skimage
    except ImportError:
        raise ValueError("content 'photos' comes with scikit-image: pip install 'chasm-mixer[data]'") from None
    folder = Path(skimage.__file__).parent / "data"
    for _, *files in _PHOTOS.values():
        for name in files:
            if not (folder / name).is_file():
                raise fault(folder / name, "image", "not in this scikit-image: install a release from 0.20 on")
    return [Case(name, split, tuple(folder / f for f in files)) for name, (split, *files) in _PHOTOS.items()]
