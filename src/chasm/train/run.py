"""Build datasets and models from a config, score a model, and load a run from its folder."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from chasm.backbones import create_backbone
from chasm.backbones.base import BACKBONES
from chasm.common.extensions import loaded, plugins
from chasm.common.files import read_json, write_json
from chasm.common.provenance import provenance, source_digest
from chasm.common.registry import Registry, suggest
from chasm.common.text import first_line
from chasm.data import DataError, SliceDataset, Volumes, open_dataset
from chasm.mixers import MIXERS
from chasm.models import RECORD, check_model, find_model
from chasm.tasks import Meter, Summary, Task
from chasm.train.config import Part, RunConfig, load_recipe
from chasm.train.fingerprint import CODE
from chasm.train.loading import batches, dead_readers_are_one_line
from chasm.train.size import build_within_limits
from chasm.train.weights import WEIGHTS, TrainingImages, training_images


@dataclass
class Run:
    """A model ready to use, with the task and config it was trained under, and the images it was trained on.

    Attributes:
        model: the model, in eval mode.
        task: task of the training.
        config: config of the training.
        folder: folder of the run.
        images: facts about the training images; none for a method without training.
    """

    model: nn.Module
    task: Task
    config: RunConfig
    folder: Path
    images: TrainingImages = field(default_factory=TrainingImages)

    @property
    def name(self) -> str:
        """Name of the model in its record, or of the folder of a run."""
        record = self.folder / RECORD
        return str(read_json(record)["name"]) if record.is_file() else self.folder.name


def open_split(config: RunConfig, split: str) -> SliceDataset:
    """Open a split of the config's dataset.

    Args:
        config: names the dataset.
        split: "train", "val" or "test".
    """
    data: SliceDataset = open_dataset(config.data.name, config.data.path, split=split, **config.data.options)
    return data if config.data.depth is None else Volumes(data, config.data.depth)


def check_disjoint(data: dict[str, SliceDataset]) -> None:
    """Raise a ValueError if a case is in two splits."""
    for a, b in (("train", "val"), ("train", "test"), ("val", "test")):
        shared = sorted(set(data[a].cases) & set(data[b].cases))
        if shared:
            raise ValueError(
                f"case {shared[0]!r} ({len(shared)} in all) is in the {a} and the {b} split: give every case one split"
            )


def resident(config: RunConfig, data: SliceDataset, device: torch.device) -> SliceDataset:
    """Return the slices in memory on the device, if the config asks for it and they fit, else `data` itself.

    Args:
        config: its ``train.resident`` asks for it.
        data: slices of a split.
        device: device to hold them.
    """
    if not config.train.resident or not data.fixed:
        return data
    try:
        return data.to_memory(device)
    except DataError as e:
        if "GiB" not in str(e):
            raise
        return data  # larger than memory: read from the files


def build_model(config: RunConfig, task: Task, shape: tuple[int, ...]) -> nn.Module:
    """Return the backbone with its mixer on the CPU, initialised from the config's seed.

    Args:
        config: names backbone, mixer and their options.
        task: decides the channels.
        shape: shape of a raw image, (M, H, W).

    Raises:
        ValueError: if an option is unknown, or the network is larger than `chasm.train.size` allows.
    """
    _check_options(MIXERS, config.mixer, ("channels", "size", "device", "dtype"))
    _check_options(BACKBONES, config.backbone, ("mixer", "mixer_options", "in_channels", "out_channels", "size"))
    into, out = task.channels(shape[0])
    options: dict[str, Any] = {"size": shape[-2:]}
    if "global_residual" in BACKBONES.options(config.backbone.name):
        options["global_residual"] = task.residual  # segmentation may have equal channel counts too

    def build() -> nn.Module:
        torch.manual_seed(config.seed)
        return create_backbone(
            config.backbone.name,
            mixer=config.mixer.name,
            mixer_options=config.mixer.options,
            in_channels=into,
            out_channels=out,
            **{**options, **config.backbone.options},
        )

    return build_within_limits(build)


def _check_options(registry: Registry, part: Part, decided: tuple[str, ...]) -> None:
    """Refuse unknown options, and options that follow from the rest of the recipe."""
    known = [option for option in registry.options(part.name) if option not in decided]
    for option in part.options:
        if option not in known:
            raise ValueError(f"{registry.kind} {part.name!r} has no option {option!r}: {suggest(option, known)}")


def consecutive_batches(n: int, batch: int) -> Iterator[list[int]]:
    """Yield 0 to n - 1 in batches; the last one may be shorter.

    >>> list(consecutive_batches(5, batch=2))
    [[0, 1], [2, 3], [4]]
    """
    return (list(range(i, min(i + batch, n))) for i in range(0, n, batch))


@torch.no_grad()
def score(
    model: nn.Module | None, task: Task, data: SliceDataset, device: torch.device, batch: int, workers: int = 0
) -> Summary | None:
    """Score a model over a split, in dataset order.

    Args:
        model: model to score, or None for the task's reference (zero-filled, bicubic).
        task: defines batches and scores.
        data: slices of a split.
        device: device to compute on.
        batch: slices per batch.
        workers: processes that read slices.

    Returns:
        The scores, or None if the task has no reference.
    """
    meter = Meter(task.protocol)
    training = model.training if model is not None else False
    if model is not None:
        model.eval()
    stream = batches(data, consecutive_batches(len(data), batch), device, workers)
    with dead_readers_are_one_line(), closing(stream):
        for raw in stream:
            prepared = task.for_scoring(task.prepare(raw.image, raw.label, raw.case))
            output = task.reference(prepared) if model is None else model(prepared.input, **prepared.physics)
            if output is None:
                return None
            meter.add(task.scores(output.float(), prepared), raw.case)
    if model is not None:
        model.train(training)
    return meter.summary()


def load_run(folder: str | Path, device: torch.device | str = "cpu") -> Run:
    """Load the best model of a run, finished or running, in eval mode.

    Args:
        folder: folder of the run; or the name of a shipped model, or owner/name on the Hugging Face Hub.
        device: device of the model.

    Returns:
        The model with its task and config.

    Raises:
        FileNotFoundError: if the folder holds no run that has validated.
        ValueError: if a file of the run is damaged.
    """
    folder = find_model(folder)
    check_model(folder)
    weights = folder / WEIGHTS
    for needed in (folder / "config.yaml", weights):
        if not needed.is_file():
            raise FileNotFoundError(f"{needed}: not there: give the folder of a run that has validated at least once")
    config = load_recipe(folder / "config.yaml")
    task = config.task.create()
    images = training_images(folder)
    with torch.random.fork_rng(devices=[]):  # building the model seeds the generator
        model = build_model(config, task, images.shape)
    try:
        stored = load_file(weights)
        for name, value in stored.items():
            if not torch.isfinite(value).all():
                raise ValueError(f"{weights}: {name}: weights that are not finite: train again, with a lower train.lr")
        model.load_state_dict(stored)
    except RuntimeError as e:  # torch's message has many lines
        raise ValueError(f"{weights}: not the weights of {folder / 'config.yaml'} ({first_line(e)})") from None
    return Run(model.to(device).eval(), task, config, folder, images)


def load_model(name: str | Path, device: torch.device | str = "cpu") -> nn.Module:
    """Load a trained network by name.

    Its input and output depend on its task: `chasm reconstruct` prepares scans for it, and so does
    ``chasm.train.load_run(name).task``.

    Args:
        name: a shipped model (`chasm models list`), a run or model folder, or owner/name on the Hugging Face Hub.
        device: device of the model.

    Returns:
        The network in eval mode.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if its files are damaged.
    """
    return load_run(name, device).model


def environment(config: RunConfig, device: torch.device, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what is needed to repeat a run, beside its config: versions, commit, device, seed, extensions.

    Args:
        config: config of the run.
        device: device of the run.
        shape: shape of a raw image, (M, H, W).
    """
    return {
        **asdict(provenance(device)),
        "source": source_digest(),
        "seed": config.seed,
        "image_shape": list(shape),
        **({"with": loaded()} if loaded() else {}),
        **({"plugins": plugins()} if plugins() else {}),
    }


def write_environment(path: Path, now: dict[str, Any], step: int) -> None:
    """Record where a run started, and where it was resumed if the machine or the code changed.

    Args:
        path: environment.json of the run.
        now: the conditions of this process.
        step: number of steps that were done before it.

    Raises:
        ValueError: if the file has another shape than chasm gives it.
        OSError: if it cannot be read or written.
    """
    if step > 0 and path.is_file():
        first = read_json(path)
        resumed = first.get("resumed", [])
        if not (isinstance(resumed, list) and all(isinstance(entry, dict) for entry in resumed)):
            raise ValueError(f"{path}: resumed: expected a list of objects: remove the file to go on without it")
        last = resumed[-1] if resumed else first
        if any(last.get(k) != now.get(k) for k in (*CODE, "commit", "modified")):
            first["resumed"] = [*resumed, {"step": step, **now}]
        now = first
    write_json(path, now)
