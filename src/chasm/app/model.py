"""A trained run as the page needs it: the network as ONNX, what to show about it, and an example to try."""

import hashlib
import io
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chasm.backbones.base import Backbone
from chasm.backbones.measurement import RealMeasurement
from chasm.common.files import read_json, write_bytes, write_text
from chasm.data import open_dataset
from chasm.mixers.chasm import CHASM
from chasm.models import RECORD, read_card, sha256
from chasm.surgery.banded import Banded
from chasm.surgery.onnx import write_checked
from chasm.train import Run
from chasm.train.config import dump

FORMAT = 1  # of the ONNX file: another number makes files in the cache old
BANDS = 5  # as many as the page has sliders
MIN_SIZE, MAX_SIZE = 32, 4096
EXAMPLE = "example.npy"
TASKS = ("reconstruction", "superres")


def write_model(run: Run, folder: Path) -> None:
    """Write a run as ``model.onnx``, ``page.json`` and an example.

    Args:
        run: of a reconstruction with one complex image, or of super-resolution.
        folder: where the files go; made if needed.

    Raises:
        ValueError: if the page cannot run such a network, or the ONNX file differs from it.
    """
    task, config = run.task, run.config
    channels = 2 if config.task.name == "reconstruction" else 3
    if config.task.name not in TASKS or getattr(run.model, "in_channels", None) != channels:
        raise ValueError(f"{run.folder}: the page runs reconstructions of one image and super-resolution, not this run")
    folder.mkdir(parents=True, exist_ok=True)
    shape = read_json(run.folder / "environment.json")["image_shape"]
    write_bytes(folder / "model.onnx", _cached_onnx(run, (shape[1], shape[2])))
    about: dict[str, Any] = {"name": config.task.name}
    if config.task.name == "reconstruction":
        sampling = task.sampling  # type: ignore[attr-defined]
        about |= {"complex": task.complex, "kind": sampling.kind, "acceleration": sampling.acceleration}  # type: ignore[attr-defined]
    else:
        about["factor"] = task.factor  # type: ignore[attr-defined]
    record = run.folder / RECORD
    page = {
        "name": record.parent.name if not record.is_file() else read_json(record)["name"],
        "task": about,
        "size": shape[1:],
        "card": _card(run),
        "mixers": _mixers(run.model),
        "example": EXAMPLE,
    }
    write_text(folder / "page.json", json.dumps(page, separators=(",", ":")))  # a third of what indented numbers take
    write_bytes(folder / EXAMPLE, _example(config.task.name, shape[1:]))


def _cached_onnx(run: Run, size: tuple[int, int]) -> bytes:
    """The network as ONNX; made once for the weights and config of a run, because it takes a minute."""
    digests = [sha256(run.folder / name) for name in ("weights.safetensors", "config.yaml")]
    key = hashlib.sha256(" ".join([*digests, str(FORMAT), version("chasm-mixer")]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chasm" / "page"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        kept = cache / f"{key}.onnx"
        if not kept.is_file():
            _write_onnx(run, kept, size)
        return kept.read_bytes()
    except OSError:  # a home that cannot be written to
        with tempfile.TemporaryDirectory() as folder:
            _write_onnx(run, Path(folder) / "model.onnx", size)
            return (Path(folder) / "model.onnx").read_bytes()


def _write_onnx(run: Run, path: Path, size: tuple[int, int]) -> None:
    model = run.model
    assert isinstance(model, Backbone)
    is_scan = run.config.task.name == "reconstruction"
    # Not the size of the run: tables made for it have a shortcut there, which a file for all sizes must not keep.
    sizes = [(size[0] + 16, size[1] + 32), size]
    examples = [_inputs(model.in_channels, H, W, is_scan) for H, W in sizes]
    with torch.no_grad():
        checks = [(x, [model(x[0], mask=x[1]) if is_scan else model(x[0])]) for x in examples]
    height = torch.export.Dim("height", min=MIN_SIZE, max=MAX_SIZE)
    width = torch.export.Dim("width", min=MIN_SIZE, max=MAX_SIZE)
    free: list[dict[int, Any]] = [{2: height, 3: width}, *([{3: width}] if is_scan else []), {}]
    program = torch.export.export(
        ForPage(model),
        examples[0],
        dynamic_shapes=tuple(free),
        prefer_deferred_runtime_asserts_over_guards=True,  # sizes of features that only look different
    )
    names = ["x", *(["mask"] if is_scan else []), "bands"]
    write_checked(path, program, checks, input_names=names, output_names=["y"])


class ForPage(nn.Module):
    """A host in real arithmetic, whose slots weigh frequency bands: maps x, a mask and the factors to an image."""

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.banded = Banded(model)
        for module in self.banded.modules():
            if isinstance(module, Backbone):
                module.measurement = RealMeasurement

    def forward(self, x: Tensor, a: Tensor, b: Tensor | None = None) -> Tensor:
        """Return the image. Call it with (x, mask, bands) for a reconstruction, else with (x, bands).

        Args:
            x: input of the host.
            a: the mask, or the factors of the bands.
            b: the factors of the bands, for a reconstruction.
        """
        y: Tensor = self.banded(a, x) if b is None else self.banded(b, x, mask=a)
        return y


def _inputs(channels: int, H: int, W: int, is_scan: bool) -> tuple[Tensor, ...]:
    x = torch.rand(1, channels, H, W, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 1, 1, W)
    mask[..., ::4] = 1
    return (x, *([mask] if is_scan else []), torch.ones(BANDS))


def _card(run: Run) -> str:
    """The card of a model, or the recipe of a run that has none."""
    try:
        return read_card(run.folder)
    except FileNotFoundError:
        return f"{run.folder.name}: a run without a card.\n\n{dump(run.config)}"


def _mixers(model: nn.Module) -> list[dict[str, Any]]:
    """Gains and bases of every CHASM mixer at its own size, in the digits that a picture needs."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, CHASM) or module.basis is None or module.gain == "complex":
            continue
        sizes = {axis: 2 * (len(table) - 1) for axis, table in module.gain_table.items()}
        with torch.no_grad():
            operators = module.operators(*(max(sizes.get(axis, 2), 2) for axis in ("ch", "cw")))
        axes = {}
        for axis, operator in operators.items():
            shared = operator.U is not None and operator.U.ndim == 2
            axes[axis] = {"gains": _digits(operator.gains), "basis": _digits(operator.U) if shared else None}
        found.append({"name": name.removeprefix("slots."), "channels": module.channels, "axes": axes})
    return found


def _digits(values: Any) -> list[list[float]]:
    rows: list[list[float]] = np.round(values.double().numpy(), 3).tolist()
    return rows


def _example(task: str, size: list[int]) -> bytes:
    """A drawn image, so that a person can try the page without data."""
    content = "brain" if task == "reconstruction" else "photos"
    image = open_dataset("embedded", split="test", content=content, size=tuple(size), cases=10, slices=1)[0].image
    array = image.abs() if image.is_complex() else image
    buffer = io.BytesIO()
    np.save(buffer, (array[0].float() / array.max()).numpy())
    return buffer.getvalue()
