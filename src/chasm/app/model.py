"""Write a trained run for the page: the network as ONNX, facts to show, and an example to try."""

import gzip
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chasm.backbones.base import Backbone
from chasm.backbones.measurement import RealMeasurement
from chasm.backbones.unet import UNet
from chasm.backbones.varnet import VarNet
from chasm.common.files import read_json, write_bytes, write_text
from chasm.common.progress import ProgressBar
from chasm.common.provenance import source_digest
from chasm.data import open_dataset
from chasm.mixers.chasm import CHASM
from chasm.models import GRAPH, RECORD, read_card
from chasm.mri import Mask
from chasm.mri.plane_masks import PlaneMask
from chasm.surgery.banded import Banded
from chasm.surgery.onnx import write_checked
from chasm.surgery.onnx_weights import weights_as_bytes
from chasm.train import Run
from chasm.train.config import dump

FORMAT = 2  # format of the graph; a new number makes older graphs unusable
WEIGHTS = "model.bin"  # the name that the graph knows the file of its weights by
BANDS = 5  # number of sliders in the page
MIN_SIZE, MAX_SIZE = 32, 4096
MAX_GRAPH_BYTES = 64 * 2**20  # a graph without weights takes less than one MiB
TASKS = ("reconstruction", "superres")


def write_model(run: Run, folder: Path) -> None:
    """Write a run as ``model.onnx``, ``model.bin`` with its weights, ``page.json`` and an example.

    Args:
        run: run of a reconstruction with one complex image, or of super-resolution.
        folder: folder of the files; made if needed.

    Raises:
        ValueError: if the page cannot run such a network, or the ONNX file differs from it.
    """
    task, config = run.task, run.config
    channels = 2 if config.task.name == "reconstruction" else 3
    if config.task.name not in TASKS or getattr(run.model, "in_channels", None) != channels:
        raise ValueError(f"{run.folder}: the page runs reconstructions of one image and super-resolution, not this run")
    assert isinstance(run.model, Backbone)
    folder.mkdir(parents=True, exist_ok=True)
    shape = run.images.shape
    write_bytes(folder / "model.onnx", graph_of(run))
    write_bytes(folder / WEIGHTS, weights_as_bytes(ForPage(run.model).state_dict()))
    about: dict[str, Any] = {"name": config.task.name}
    if config.task.name == "reconstruction":
        sampling = task.sampling  # type: ignore[attr-defined]
        about |= {"complex": task.complex, "kind": sampling.kind, "acceleration": sampling.acceleration}  # type: ignore[attr-defined]
        about |= {"masks": task.masks, "trained": _trained_mask(sampling.on(*shape[1:]))}  # type: ignore[attr-defined]
    else:
        about["factor"] = task.factor  # type: ignore[attr-defined]
    example, content = _example(config.task.name, shape[1:])
    page = {
        "name": run.name,
        "task": about,
        "size": shape[1:],
        "card": _card(run),
        "mixers": _mixers(run.model),
        "example": example,
    }
    write_text(folder / "page.json", json.dumps(page, separators=(",", ":")))  # a third of what indented numbers take
    write_bytes(folder / example, content)


def graph_key(run: Run) -> str:
    """Return a checksum of everything that the graph of a run depends on; its weights are not in the graph.

    Args:
        run: run of a reconstruction or super-resolution.
    """
    config = run.config.model_dump(mode="json")
    shape = run.images.shape
    tensors = {name: list(value.shape) for name, value in run.model.state_dict().items()}
    facts = [FORMAT, config["backbone"], config["mixer"], config["task"]["name"], shape, tensors]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def graph_of(run: Run) -> bytes:
    """Return the network of a run as an ONNX graph without weights, which refers to the file ``model.bin`` for them.

    A model that `chasm models pack --page` made contains it. Otherwise it is made once for an architecture, which takes
    a minute or two, and kept in the cache of the user. Other code of chasm does not use what this code kept.

    Args:
        run: run of a reconstruction or super-resolution.
    """
    key, record = graph_key(run), run.folder / RECORD
    if (run.folder / GRAPH).is_file() and record.is_file() and read_json(record).get("page") == key:
        with gzip.open(run.folder / GRAPH) as f:
            return f.read(MAX_GRAPH_BYTES)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chasm" / "page"
    cached = cache / f"{key}-{source_digest()}.onnx"
    if cached.is_file():
        return cached.read_bytes()
    graph = _make_graph(run)
    with suppress(OSError):  # a home that cannot be written to
        write_bytes(cached, graph)
    return graph


def _make_graph(run: Run) -> bytes:
    """Trace the network for all sizes, and compare what onnxruntime computes with it."""
    model = run.model
    assert isinstance(model, Backbone)
    is_scan = run.config.task.name == "reconstruction"
    _, height, width = run.images.shape
    # Not the size of the run: tables made for it have a shortcut there, which a file for all sizes must not keep.
    sizes = [(height + 16, width + 32), (height + 5, width + 11), (height, width)]
    examples = [_inputs(model.in_channels, H, W, is_scan) for H, W in sizes]
    with torch.no_grad():
        checks = [(x, [model(x[0], mask=x[1]) if is_scan else model(x[0])]) for x in examples]
    rows = torch.export.Dim("height", min=MIN_SIZE, max=MAX_SIZE)
    columns = torch.export.Dim("width", min=MIN_SIZE, max=MAX_SIZE)
    free: list[dict[int, Any]] = [{2: rows, 3: columns}, *([{3: columns}] if is_scan else []), {}]
    page = ForPage(model)
    names = ["x", *(["mask"] if is_scan else []), "bands"]
    with tempfile.TemporaryDirectory(prefix="chasm-app-") as folder, ProgressBar(2) as bar:
        bar.update(0, text="tracing the network")
        program = torch.export.export(
            page,
            examples[0],
            dynamic_shapes=tuple(free),
            prefer_deferred_runtime_asserts_over_guards=True,  # sizes of features that only look different
        )
        bar.update(1, text="writing it as ONNX, and comparing")
        file, weights = Path(folder) / "model.onnx", page.state_dict()
        write_bytes(file.with_name(WEIGHTS), weights_as_bytes(weights))
        outside: dict[str, Any] = {"weights": weights, "weights_file": WEIGHTS}
        write_checked(file, program, checks, input_names=names, output_names=["y"], **outside)
        return file.read_bytes()


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


def _trained_mask(mask: Mask | PlaneMask) -> dict[str, Any]:
    """What the page compares the lines of a scan with."""
    lines = {"width": mask.width, "columns": mask.columns} if isinstance(mask, Mask) else {}
    return {"acceleration": mask.acceleration, **lines}


def _card(run: Run) -> str:
    """Return the card of a model, or the recipe of a run that has no card."""
    try:
        return read_card(run.folder)
    except FileNotFoundError:
        return f"{run.folder.name}: a run without a card.\n\n```yaml\n{dump(run.config)}```"


def _mixers(model: nn.Module) -> list[dict[str, Any]]:
    """Return gains and bases of every CHASM mixer at its own size, with the digits that a picture needs."""
    mixers = []
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
        mixers.append({"name": _place(model, name.removeprefix("slots.")), "channels": module.channels, "axes": axes})
    return mixers


def _place(model: nn.Module, slot: str) -> str:
    """Return the place of a slot of a U-Net or varnet, in words; other hosts name their slots."""
    if isinstance(model, VarNet):
        cascade, level = model.place_of(int(slot))
        return f"cascade {cascade + 1}, level {level}"
    return f"level {slot}" if isinstance(model, UNet) else slot


def _digits(values: Any) -> list[list[float]]:
    rows: list[list[float]] = np.round(values.double().numpy(), 3).tolist()
    return rows


def _example(task: str, size: Sequence[int]) -> tuple[str, bytes]:
    """Return the file name and the content of a drawn image, to try the page without data."""
    buffer = io.BytesIO()
    if task == "superres":
        from PIL import Image

        small = tuple(max(MIN_SIZE, n // 2) for n in size)  # it is enlarged
        photo = open_dataset("embedded", split="test", content="photos", size=small, cases=10, slices=1)[0].image
        pixels = (photo.float() / photo.max() * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(buffer, "PNG")
        return "example.png", buffer.getvalue()
    image = open_dataset("embedded", split="test", content="brain", size=tuple(size), cases=10, slices=1)[0].image.abs()
    np.save(buffer, (image[0].float() / image.max()).numpy())
    return "example.npy", buffer.getvalue()
