"""Scores of a run and of its reference on a split, and a few example pictures."""

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chasm.common.files import write_atomic, write_bytes
from chasm.common.precision import tf32
from chasm.common.provenance import device_name
from chasm.data import Slice, SliceDataset, collate
from chasm.mri import to_complex
from chasm.surgery.count import count, count_parameters
from chasm.tasks import Summary, TaskBatch
from chasm.train.config import load_recipe
from chasm.train.run import Run, load_run, open_split, resident, score

MAX_EXAMPLES = 4


def evaluate(
    folder: str | Path,
    split: str = "test",
    *,
    device: torch.device | str = "cpu",
    data_path: str | None = None,
    changes: Sequence[str] = (),
) -> dict[str, Any]:
    """Score the best weights of a run on a split.

    Args:
        folder: folder of the run.
        split: "train", "val" or "test".
        device: device to compute on.
        data_path: folder of the dataset. Default: the path in the run's config.
        changes: conditions that the run was not trained under, as in `under`.

    Returns:
        The metrics as in metrics.json.

    Raises:
        FileNotFoundError: if the folder holds no run that has validated.
        ValueError: if a change is wrong, or a score is not a number.
    """
    run, device = under(load_run(folder, device), changes), torch.device(device)
    with tf32(run.config.train.tf32):
        metrics = score_split(run, split_of(run, split, device, data_path), device)
    if wrong := [name for name, value in metrics["mean"].items() if math.isnan(value)]:
        raise ValueError(f"{folder}: {wrong[0]} of the {split} split is not a number: check the data and their scale")
    return metrics


def under(run: Run, changes: Sequence[str]) -> Run:
    """Return a run as it is to be scored under other conditions: with other data or another mask, and the same model.

    Args:
        run: from `load_run`.
        changes: of its recipe, each "data...=value" or "task.options...=value".

    Raises:
        ValueError: if a change is of something else, or asks for images that the model does not take.

    Example:
        moved = under(run, ["task.options.sampling.offset=2", "task.options.masks=fixed"])
    """
    for change in changes:
        if not change.startswith(("data.", "task.options.")):
            raise ValueError(f"{change}: a trained run can be scored with other data.* and task.options.* only")
    config = load_recipe(run.config.model_dump(mode="json"), list(changes))
    task = config.task.create()
    if task.channels(1) != run.task.channels(1):
        raise ValueError(f"{' '.join(changes)}: asks for images with other channels than the model was trained with")
    return replace(run, config=config, task=task)


def split_of(run: Run, split: str, device: torch.device, data_path: str | None = None) -> SliceDataset:
    """Return the slices that a run is scored on.

    Args:
        run: run from `load_run`.
        split: "train", "val" or "test".
        device: device to hold the slices, if the run keeps them in memory.
        data_path: folder of the dataset. Default: the path in the run's config.
    """
    config = run.config
    if data_path is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": data_path})})
    return resident(config, open_split(config, split), device)


def score_split(run: Run, data: SliceDataset, device: torch.device) -> dict[str, Any]:
    """Score a run's model and the task's reference on a split.

    Args:
        run: run from `load_run`.
        data: slices of the split.
        device: device to compute on.

    Returns:
        The content of metrics.json: scores per case with mean and standard deviation, the protocol, the reference's
        scores, parameters, multiply-adds, and the device.
    """
    config = run.config
    model = score(run.model, run.task, data, device, config.train.batch, config.train.workers)
    reference = score(None, run.task, data, device, config.train.batch, config.train.workers)
    assert model is not None
    first = data[0]
    batch = _prepared(run, first, device)
    cost = count(run.model, batch.input, **batch.physics)
    name_of_reference = REFERENCES.get(config.task.name, "reference")  # a task of a user's has one as well
    return {
        "status": "done",
        "split": data.split,
        "source": first.source,
        "proxy": "proxy" in first.source,
        "task": run.task.report(first.image.shape),
        **_summary(model),
        "reference": None if reference is None else {"name": name_of_reference, **_summary(reference)},
        "seed": config.seed,
        "parameters": _parameters(run),
        "macs": cost.inference,  # multiply-adds of one image
        "macs_of_weights": cost.total - cost.inference,  # once per call, whatever the batch
        "device": device_name(device),
    }


REFERENCES = {"reconstruction": "zero-filled", "superres": "bicubic", "volume": "zero-filled"}


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "protocol": summary.protocol,
        "meaning": summary.meaning,
        "cases": summary.per_case,
        "mean": {k: s.mean for k, s in summary.stats.items()},
        "std": {k: s.std for k, s in summary.stats.items()},
        "blank_slices": summary.blank,
    }


def _parameters(run: Run) -> dict[str, int]:
    once, real = count_parameters(run.model.slots)  # type: ignore[arg-type]
    model = sum(p.numel() for p in run.model.parameters())
    return {"model": model, "slots_complex_once": once, "slots_real": real}


@torch.no_grad()
def save_examples(run: Run, data: SliceDataset, device: torch.device) -> None:
    """Write a few slices, spread over the split, to examples.npz and as pictures to pictures/.

    Each example has a target, a reference and an output: images in [0, 1], or label maps for segmentation.

    Args:
        run: run from `load_run`; its folder gets the files.
        data: slices of the split.
        device: device to compute on.
    """
    rows = np.linspace(0, len(data) - 1, min(MAX_EXAMPLES, len(data))).round().astype(int)
    views: dict[str, list[np.ndarray]] = {"target": [], "reference": [], "output": []}
    names = []
    for row in rows:
        s = data[int(row)]
        batch = _prepared(run, s, device)
        output = run.model(batch.input, **batch.physics)
        reference = run.task.reference(batch)
        is_complex = batch.input.shape[1] != batch.target.shape[1]  # channels are real and imaginary parts
        views["target"].append(_picture(batch.target, False))
        views["reference"].append(_picture(batch.input if reference is None else reference, is_complex))
        views["output"].append(_picture(output.argmax(1) if batch.target.ndim == 3 else output, is_complex))
        names.append(f"{s.case}:{s.index}")
        _save_picture(run.folder / "pictures" / f"{len(names)}.png", [images[-1] for images in views.values()])
    arrays = {k: np.stack(v) for k, v in views.items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays, slices=np.array(names))  # type: ignore[arg-type]
    write_bytes(run.folder / "examples.npz", buffer.getvalue())


def _save_picture(path: Path, views: list[np.ndarray]) -> None:
    """Write target, reference and output side by side as a PNG."""
    from PIL import Image

    largest_label = max(1, *(int(v.max()) for v in views if v.dtype == np.uint8), 0)
    shown = [v / largest_label if v.dtype == np.uint8 else v.astype(np.float32) for v in views]
    rgb = [np.stack([v] * 3, -1) if v.ndim == 2 else v.transpose(1, 2, 0) for v in shown]
    pixels = np.concatenate(rgb, axis=1)
    write_atomic(path, lambda p: Image.fromarray((255 * pixels).round().astype(np.uint8)).save(p, "PNG"))


def _prepared(run: Run, s: Slice, device: torch.device) -> TaskBatch:
    raw = collate([s]).to(device)
    return run.task.prepare(raw.image, raw.label, raw.case)


def _picture(x: Tensor, is_complex: bool) -> np.ndarray:
    """Return a picture of the first image of a batch: its magnitude, its first modality, RGB, or its label map."""
    if x.ndim == 3:  # labels (1, H, W)
        return x[0].to(torch.uint8).cpu().numpy()
    x = to_complex(x).abs() if is_complex else x
    x = x if x.shape[1] == 3 else x[:, :1]
    return x[0].squeeze(0).clamp(0, 1).to(torch.float16).cpu().numpy()
