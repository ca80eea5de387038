"""Enlarge photographs with a super-resolution run."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from chasm.common.devices import usable_device
from chasm.common.files import expanded, require_replaceable, write_atomic
from chasm.common.precision import tf32
from chasm.data.base import existing
from chasm.data.files import reading
from chasm.data.limits import open_picture
from chasm.reconstruct.outputs import name_outputs
from chasm.reconstruct.settings import Settings
from chasm.tasks import SuperResolution
from chasm.train import Run, load_run
from chasm.train.classical import METHODS
from chasm.train.config import config_of_run

PNG_MARK = ("Software", "chasm reconstruct")  # a text field of every picture that is written here
PILLOW_MODES = {1: "L", 3: "RGB"}  # channels of a network -> Pillow's mode of its input
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")
EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
OPTIONS = {"kind": "as", "options": "option", "map_sets": "map-sets"}  # field of Settings -> option, where they differ


@dataclass(frozen=True)
class Enlarged:
    """A photograph that was enlarged.

    Attributes:
        file: the PNG file.
        size: height and width of the photograph.
        enlarged_size: height and width of the file.
        notes: what the user should know.
        seconds: how long it took.
    """

    file: Path
    size: tuple[int, int]
    enlarged_size: tuple[int, int]
    notes: list[str]
    seconds: float


def is_enlarger(run: str | Path) -> bool:
    """Return True for a run that was trained for super-resolution.

    Args:
        run: as for `chasm.reconstruct.reconstruct`. False for a run that is not there, which loading then reports.
    """
    if str(run) in METHODS:
        return False
    try:
        return config_of_run(run).task.name == "superres"
    except (ValueError, OSError):
        return False


def enlarge_each(
    sources: Sequence[str | Path],
    run: str | Path,
    out: str | Path | None = None,
    settings: Settings | None = None,
    *,
    device: torch.device | str = "cpu",
    force: bool = False,
    on_file: Callable[[Path, int, int], None] = lambda path, done, total: None,
) -> Iterator[tuple[Path, Enlarged | ValueError | OSError]]:
    """Enlarge photographs one after the other; one that fails does not stop the others.

    Args:
        sources: PNG, JPEG, TIFF, BMP or WebP files with 8 bits per channel.
        run: a run of the task "superres"; it is loaded once.
        out: the PNG file to write; with several sources, the name of each is added to it. Default: NAME-x4.png for a
            run that enlarges by 4.
        settings: must be the defaults, because all of them are for scans.
        device: where the model runs.
        force: whether files that chasm did not write may be replaced. Inputs never are.
        on_file: called after each file with its path, the number of files done and the number of all.

    Yields:
        Each source with its outcome, or with the error that it ended with.

    Raises:
        ValueError: when the settings, the name of the output or the run cannot be used.
    """
    for field in fields(Settings):
        if settings is not None and getattr(settings, field.name) != getattr(Settings(), field.name):
            option = OPTIONS.get(field.name, field.name)
            raise ValueError(f"{run}: enlarges photographs, and --{option} is for scans: leave it out")
    device = usable_device(device)
    loaded = load_run(run, device)
    task, mode = loaded.task, PILLOW_MODES.get(getattr(loaded.model, "in_channels", 0))
    if not isinstance(task, SuperResolution) or mode is None:
        raise ValueError(f"{loaded.folder}: expected a super-resolution run of grey or RGB photographs")
    paths = list(dict.fromkeys(existing(source) for source in sources))
    outs = _names(paths, out, task.factor)
    for done, (path, file) in enumerate(zip(paths, outs, strict=True), 1):
        try:
            if file.exists() and any(file.samefile(other) for other in paths):
                raise ValueError(f"{file}: is an input, which would be lost: give another name with --out")
            require_replaceable(file, _is_ours, force)
            yield path, _enlarge(path, file, loaded, task, mode, device)
        except (ValueError, OSError) as e:
            yield path, e
        except (torch.OutOfMemoryError, MemoryError):
            yield path, OSError(f"{path}: out of memory on {device}: give a smaller photograph")
        on_file(path, done, len(paths))


def _names(paths: list[Path], out: str | Path | None, factor: int) -> list[Path]:
    """Return the file that each photograph goes to."""
    if out is None:
        outs = [Path(f"{path.stem}-x{factor}.png") for path in paths]
        for file, n in Counter(outs).items():
            if n > 1:
                raise ValueError(
                    f"{file}: the default name of {n} inputs: give --out, which then has their names added"
                )
        return outs
    out = expanded(out)
    if out.suffix.lower() != ".png":
        raise ValueError(f"{out}: an enlarged photograph is a PNG file: give a name that ends in .png")
    return [out] if len(paths) == 1 else name_outputs(out, {path: path.stem for path in paths})


@torch.no_grad()
def _enlarge(path: Path, file: Path, run: Run, task: SuperResolution, mode: str, device: torch.device) -> Enlarged:
    """Enlarge one photograph and write it."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    started = time.monotonic()
    pixels, notes = _read(path, mode)
    small = torch.from_numpy(pixels).to(device).movedim(-1, 0)[None].float() / 255  # (1, C, H, W)
    with tf32(run.config.train.tf32):
        output = run.model(task.enlarge(small)).float()
    values = (output[0].clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1).cpu().numpy()  # (H, W, C)
    picture, mark = Image.fromarray(values.squeeze(-1) if values.shape[-1] == 1 else values), PngInfo()
    mark.add_text(*PNG_MARK)
    write_atomic(file, lambda partial: picture.save(partial, format="PNG", pnginfo=mark))
    seconds = round(time.monotonic() - started, 2)
    (H, W), (enlarged_H, enlarged_W) = pixels.shape[:2], values.shape[:2]
    return Enlarged(file, (H, W), (enlarged_H, enlarged_W), notes, seconds)


def _read(path: Path, mode: str) -> tuple[np.ndarray, list[str]]:
    """Return the pixels (H, W, C) of a photograph, upright, and notes for the user."""
    from PIL import ImageOps

    if path.is_dir():
        raise ValueError(f"{path}: a folder: give its photographs, as in {path}/*.png")
    if path.suffix.lower() not in SUFFIXES:
        advice = f"give a photograph ({', '.join(SUFFIXES)}), or a run of a reconstruction task"
        raise ValueError(f"{path}: the run was trained for superres: {advice}")
    with reading(path, "photograph"), open_picture(path, path) as picture:
        stored, transparent = picture.mode, picture.has_transparency_data
        pixels = np.asarray(ImageOps.exif_transpose(picture).convert(mode))
    if stored not in EIGHT_BIT_MODES:
        raise ValueError(f"{path}: photograph: expected 8 bits per channel, got Pillow's mode {stored}: convert it")
    notes = ["transparency is left out"] if transparent else []
    if mode == "L" and stored not in ("1", "L"):
        notes.append("the run was trained on grey images: colours are left out")
    return pixels.reshape(*pixels.shape[:2], -1).copy(), notes


def _is_ours(file: Path) -> bool:
    """Return True for a picture that was written here."""
    try:
        with reading(file), open_picture(file, file) as picture:
            return bool(picture.info.get(PNG_MARK[0]) == PNG_MARK[1])
    except ValueError:  # no picture
        return False
