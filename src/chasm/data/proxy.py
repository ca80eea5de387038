"""Proxy bundle: small .npz files of real images that stand in for the paper's datasets.

Results on it are not results on those datasets: its name and the `source` of every slice say proxy.
Parts, by the keys they hold for each split s: `s_images_dx` (N,H,W) uint8, differences along the rows (sums
modulo 256 undo them), with `s_subject` or `s_patient` and perhaps `s_masks_bits` (N,H,W/8); or `s_bytes`,
`s_offsets` and `s_source`: encoded photographs end to end. The file raw_complex.npz holds complex slices as
16-bit numbers in two byte planes (part "raw_complex") and one multi-channel k-space (part "raw_8ch").
"""

import io
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from chasm.common.registry import suggest
from chasm.common.text import counted
from chasm.data.base import FileDataset, register_dataset
from chasm.data.files import reading, require_finite
from chasm.data.limits import open_picture, read_npz
from chasm.data.records import Case, CaseFacts, DataError, Slice, fault
from chasm.data.survey import SliceSurvey
from chasm.mri.fft import ifft2c, resize_in_kspace
from chasm.mri.phase import smooth_phase

_RAW, _RAW_8CH = "raw_complex", "raw_8ch"
_UNREADABLE = "unreadable"
LUMA = (0.299, 0.587, 0.114)  # the grey of red, green and blue, as ITU-R BT.601 has it
_OWNERS = ("subject", "patient", "source")


@register_dataset("proxy")
class Proxy(FileDataset):
    """Parts of the bundle: MRI (1, H, W) in [0, 1], some with a mask, photographs (3, H, W) in [0, 1], or complex
    images (coils, H, W). A subject, or a photograph, is a case.

    Args:
        path: the folder of the bundle, or one of its files.
        split: "train", "val", "test" or "all", as stored in the file.
        part: the name of a file without its suffix, or "raw_8ch"; or several of them, whose masks are then left out.
        also: further parts of the training split only. Photographs become grey among MRI.
        crop: keep this many central rows and columns of k-space: smaller images of the same field of view. Where the
            image has fewer, zeros are added: larger images without more detail.
        phase: make complex images of magnitudes, by a smooth phase that is drawn for each slice. Every fourth slice
            keeps phase zero, so that a network learns both.
    """

    summary: ClassVar[str] = "proxy bundle: small stand-ins for the paper's datasets (and so are results)"

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        part: str | Sequence[str] = "brain_siat_t2",
        also: Sequence[str] = (),
        crop: int | None = None,
        phase: bool = False,
    ) -> None:
        names = _names(part) + (_names(also) if split == "train" else [])
        super().__init__(path, split, part=names)
        self.crop, self.phase = crop, phase
        self.several = not isinstance(part, str) or bool(also)
        domains = {"photo" if _is_photo(name) else "mri" for name in _names(part)}
        if len(domains) > 1 or (phase and "photo" in domains):
            raise ValueError(f"part: {part}: photographs go neither with MRI nor with a phase: give parts of one kind")
        self.domain = domains.pop()
        if self.domain == "photo" and not all(_is_photo(name) for name in names):
            raise ValueError(f"also: {also}: photographs do not go with MRI: give parts of one kind")
        opened = {(_part(case), case.split): case.files[0] for case in self._cases}
        self._stacks = {key: _stack(file, *key) for key, file in opened.items()}
        self.list_slices(lambda case: self._stacks[_part(case), case.split].rows(case.name))

    @classmethod
    def find(cls, path: Path, part: str | Sequence[str] | None = None) -> tuple[list[Case], str]:
        files = {f.stem: f for f in ([path] if path.is_file() else sorted(path.glob("*.npz")))}
        if _RAW in files:
            files[_RAW_8CH] = files[_RAW]
        for name in _names(part):
            if name not in files:
                raise fault(path, "part", f"no {name!r}: {suggest(name, files)}" if files else "no .npz file here")
        cases = []
        for name in files if part is None else _names(part):
            try:
                for split in _splits(files[name], name):
                    owners = dict.fromkeys(_owners(files[name], name, split))
                    cases += [Case(owner, split, (files[name],)) for owner in owners]
            except DataError:
                if part is not None:
                    raise
                cases.append(Case(f"{name}/", _UNREADABLE, (files[name],)))  # so that the check reports it by probe
        return cases, "stored in the files"

    def read(self, case: Case, k: int) -> Slice:
        part = _part(case)
        stack = self._stacks[part, case.split]
        image = stack.image(k)
        if self.domain == "mri" and _is_photo(part):
            image = (image * torch.tensor(LUMA)[:, None, None]).sum(0, keepdim=True)
        masks = None if self.several else stack.masks
        label = None if masks is None else torch.from_numpy(masks[k].astype(np.int64))
        if self.crop is not None:
            image, label = resize_in_kspace(image, self.crop), None if label is None else _nearest(label, self.crop)
        if self.phase and not image.is_complex():
            seed = zlib.crc32(f"{case.name}/{k}".encode())
            H, W = image.shape[-2:]
            image = image * smooth_phase((H, W), seed) if seed % 4 else image.to(torch.complex64)
        return Slice(image, label, case.name, k, f"proxy:{part}")

    @classmethod
    def probe(cls, case: Case) -> CaseFacts:
        file = case.files[0]
        part = _part(case)
        if case.split == _UNREADABLE:
            cls.find(file, part=part)
        stack = _cached_stack(file, part, case.split)
        images = [stack.image(k) for k in stack.rows(case.name)]
        shapes = {tuple(image.shape) for image in images}
        if len(shapes) > 1:
            raise fault(file, case.name, f"images of several shapes: {sorted(shapes)}")
        survey = SliceSurvey()
        for image in images:
            survey.add(image.numpy())
        if survey.low == survey.high:
            raise fault(file, case.name, f"every value is {survey.low:g}")
        return survey.facts(shapes.pop(), str(images[0].dtype).removeprefix("torch."), kind=part)


def _names(part: str | Sequence[str] | None) -> list[str]:
    return [] if part is None else [part] if isinstance(part, str) else list(part)


def _is_photo(part: str) -> bool:
    return part.startswith("natural")


def _part(case: Case) -> str:
    return case.name.split("/")[0]


def _nearest(label: Tensor, size: int) -> Tensor:
    """Return the label at the positions of the pixels of a resized image."""
    rows, columns = ((torch.arange(size) * n / size).round().long().clamp(max=n - 1) for n in label.shape)
    return label[rows][:, columns]


class _Stack(NamedTuple):
    """One split of one part, decoded (photographs stay encoded: they are small that way)."""

    file: Path
    owners: list[str]  # case of each image
    pixels: np.ndarray | list[bytes]  # (N,H,W) uint8, (N,coils,H,W) complex64, or encoded photographs
    masks: np.ndarray | None  # (N,H,W) uint8

    def rows(self, case: str) -> list[int]:
        return [k for k, owner in enumerate(self.owners) if owner == case]

    def image(self, k: int) -> Tensor:
        if isinstance(self.pixels, list):
            with reading(self.file, f"photograph {k}"), open_picture(io.BytesIO(self.pixels[k]), self.file) as photo:
                rgb = np.array(photo.convert("RGB"))
            return torch.from_numpy(rgb.transpose(2, 0, 1)).float().div_(255).contiguous()
        pixels = torch.from_numpy(self.pixels[k])
        return pixels if pixels.is_complex() else pixels[None].float().div_(255)


def _field(file: Path, key: str, dtype: Any = None, ndim: int | None = None) -> np.ndarray:
    with reading(file, key), np.load(file, allow_pickle=False) as archive:
        if key not in archive.files:
            raise fault(file, key, f"missing; the file has {', '.join(archive.files) or 'nothing'}")
        array = read_npz(file, archive, key)
    if dtype is not None and not np.issubdtype(array.dtype, dtype):
        raise fault(file, key, f"expected {np.dtype(dtype).name} numbers, got {array.dtype}")
    if ndim is not None and array.ndim != ndim:
        raise fault(file, key, f"expected {ndim} dimensions, got shape {array.shape}")
    return array


def _keys(file: Path) -> list[str]:
    with reading(file, "archive"), np.load(file, allow_pickle=False) as archive:
        return list(archive.files)


def _splits(file: Path, part: str) -> list[str]:
    if part == _RAW_8CH:
        return ["test"]
    if part == _RAW:
        return list(dict.fromkeys(_field(file, "siat_split").tolist()))
    ends = ("_images_dx", "_bytes")
    splits = [key.removesuffix(end) for key in _keys(file) for end in ends if key.endswith(end)]
    if not splits:
        raise fault(file, "train_images_dx", f"missing; the file has {', '.join(_keys(file)) or 'nothing'}")
    return splits


def _owners(file: Path, part: str, split: str) -> list[str]:
    """Return the case of each image of a split."""
    if part == _RAW_8CH:
        return [f"{part}/brain8ch"]
    if part == _RAW:
        subjects = _field(file, "siat_subject")[_field(file, "siat_split") == split]
    else:
        keys = _keys(file)
        key = next((f"{split}_{o}" for o in _OWNERS if f"{split}_{o}" in keys), f"{split}_subject")
        subjects = _field(file, key, ndim=1)
    return [f"{part}/{s}" for s in subjects.tolist()]


def _stack(file: Path, part: str, split: str) -> _Stack:
    owners, masks = _owners(file, part, split), None
    pixels: np.ndarray | list[bytes]
    if part == _RAW_8CH:
        pixels = _multichannel(file)
    elif part == _RAW:
        pixels = _complex(file)[_field(file, "siat_split") == split]
    elif f"{split}_bytes" in _keys(file):
        pixels = _photographs(file, split)
    else:
        differences = _field(file, f"{split}_images_dx", np.uint8, ndim=3)
        pixels = np.cumsum(differences, axis=-1, dtype=np.uint8)
        if f"{split}_masks_bits" in _keys(file):
            bits = _field(file, f"{split}_masks_bits", np.uint8, ndim=3)
            masks = np.unpackbits(bits, axis=-1)[..., : pixels.shape[-1]]
            if masks.shape != pixels.shape:
                raise fault(file, f"{split}_masks_bits", f"{masks.shape} when unpacked, images are {pixels.shape}")
    if len(pixels) != len(owners):
        counts = f"{counted(len(pixels), 'image')}, but {counted(len(owners), 'subject')}"
        raise fault(file, f"{split} of {part}", counts)
    return _Stack(file, owners, pixels, masks)


_cached_stack = lru_cache(maxsize=4)(_stack)


def _photographs(file: Path, split: str) -> list[bytes]:
    buffer = _field(file, f"{split}_bytes", np.uint8, ndim=1).tobytes()
    offsets = _field(file, f"{split}_offsets", np.integer, ndim=1).tolist()
    if sorted(offsets) != offsets or offsets[:1] != [0] or offsets[-1] != len(buffer):
        raise fault(file, f"{split}_offsets", f"expected rising numbers from 0 to {len(buffer)}")
    return [buffer[a:b] for a, b in pairwise(offsets)]


def _complex(file: Path) -> np.ndarray:
    """Decode signed 12-bit numbers in a low and a high byte plane: (N,1,H,W) complex64 of peak magnitude 1."""
    low, high = _field(file, "siat_lo", np.uint8, ndim=4), _field(file, "siat_hi", np.int8, ndim=4)
    value = (high.astype(np.int16) << 8 | low).astype(np.float32) / 2047
    return (value[:, :1] + 1j * value[:, 1:]).astype(np.complex64)


def _multichannel(file: Path) -> np.ndarray:
    """Return coil images (1,coils,H,W) complex64 of the k-space, put back on its full grid."""
    stored = require_finite(_field(file, "brain8ch_kspace_f16", np.floating, ndim=4), file, "brain8ch_kspace_f16")
    scale, first, width = (
        _field(file, f"brain8ch_{word}").item() for word in ("scale", "first_column", "full_columns")
    )
    k = np.zeros((*stored.shape[:1], stored.shape[2], int(width)), dtype=np.complex64)
    parts = stored.astype(np.float32) * float(scale)
    k[..., int(first) : int(first) + stored.shape[-1]] = parts[:, 0] + 1j * parts[:, 1]
    return ifft2c(torch.from_numpy(k)).numpy()[None]
