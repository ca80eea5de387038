"""What a card tells of a finished run, from the files in its folder."""

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from chasm.common.files import MAKE_AGAIN, read_json
from chasm.common.text import counted
from chasm.data.terms import Terms
from chasm.models import RECORD
from chasm.studies.records import Environment, Metrics
from chasm.studies.statistics import central_interval, resampled
from chasm.train import RunConfig
from chasm.train.weights import ENVIRONMENT


def read_record(folder: Path) -> dict[str, Any]:
    """Return size, steps and scores of a finished run, or the record of a model.

    Args:
        folder: of the run or model.

    Raises:
        ValueError: if the run is not finished, or its metrics.json is damaged.
    """
    if (folder / RECORD).is_file():
        return read_json(folder / RECORD)
    if not (folder / "metrics.json").is_file():
        raise ValueError(f"{folder}: not finished: train it to the end first, the card needs its metrics.json")
    path = folder / "metrics.json"
    Metrics.read(path)
    metrics = read_json(path)
    try:
        size = {name: metrics[name] for name in ("parameters", "steps", "best_step")}
        return {**size, "scores": scores_of("test split", metrics)}
    except (KeyError, TypeError) as e:
        raise ValueError(f"{path}: not what a finished run writes ({type(e).__name__}: {e}): {MAKE_AGAIN}") from None


def read_environment(folder: Path) -> dict[str, Any]:
    """Return environment.json of a run or model; nothing if a person copied only the other files.

    Raises:
        ValueError: with one line that names the file, if a value has another type than it should.
    """
    path = folder / ENVIRONMENT
    if not path.is_file():
        return {}
    Environment.read(path)
    return read_json(path)


def describe(
    name: str, config: RunConfig, shape: Sequence[int], trained_on: list[Terms], recorded: dict[str, Any]
) -> dict[str, Any]:
    """Return what `chasm.publish.card.write_card` needs.

    Args:
        name: of the model.
        config: of the run.
        shape: of a raw image, (M, H, W).
        trained_on: the terms of the training data.
        recorded: from `read_record`.
    """
    return {
        "name": name,
        "task": {"name": config.task.name, **config.task.create().report(shape)},
        "image_shape": list(shape),
        "parameters": recorded["parameters"],
        "trained_on": [asdict(terms) for terms in trained_on],
        "steps": recorded["steps"],
        "best_step": recorded["best_step"],
        "scores": recorded["scores"],
    }


def with_other_lines(task: Any, shape: Sequence[int]) -> tuple[Any, str] | None:
    """Return a task under a mask with other lines, and in words how they differ.

    Equispaced lines move by half of their distance, and random ones are drawn again.

    Args:
        task: of a run.
        shape: of a raw image, (M, H, W).

    Returns:
        None if there is no mask, if it is a file, or if every slice has a mask of its own in the scores, too.
    """
    sampling = getattr(task, "sampling", None)
    if sampling is None or sampling.kind == "file" or getattr(task, "masks", None) not in ("fixed", "epoch"):
        return None
    mask = sampling.on(*shape[-2:])
    if (offset := getattr(mask, "offset", None)) is not None:
        first_lines = [column for column in mask.columns if column < mask.center[0]][:2]
        half = (first_lines[-1] - first_lines[0]) // 2 if first_lines else 0
        if half == 0:  # no room beside the centre
            return None
        sampling = replace(sampling, offset=offset - half if offset >= half else offset + half)
        words = f"lines moved by {counted(half, 'column')}"
    else:
        sampling = replace(sampling, seed=(*mask.seed, 1) if isinstance(mask.seed, tuple) else mask.seed + 1)
        words = "other lines drawn"
    moved = copy(task)
    moved.sampling, moved.masks = sampling, "fixed"
    return moved, words


def scores_of(split: str, metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Return mean and 95 % interval of every metric, and the mean of the reference: for each part of the data.

    Args:
        split: how the card calls the slices.
        metrics: as in metrics.json.
    """
    parts: dict[str, list[str]] = {}
    for case in metrics["cases"]:
        part = f"proxy:{case.split('/')[0]}" if metrics["proxy"] else metrics["source"]
        parts.setdefault(part, []).append(case)
    rows = []
    for source, cases in parts.items():
        values: dict[str, dict[str, float]] = {}
        for metric in metrics["mean"]:
            each = np.array([[metrics["cases"][case][metric] for case in cases]], dtype=float)
            low, high = central_interval(resampled(each))
            values[metric] = {"mean": float(each.mean()), "low": low, "high": high}
        reference = metrics["reference"]
        if reference is not None:
            each = np.array([[reference["cases"][case][m] for m in values] for case in cases], dtype=float)
            means = dict(zip(values, each.mean(0).tolist(), strict=True))
            reference = {"name": reference["name"] or "reference", **means}  # earlier runs of own tasks have None
        rows.append(
            {
                "split": split,
                "source": source,
                "cases": len(cases),
                "protocol": metrics["protocol"],
                "meaning": metrics["meaning"],
                "values": values,
                "reference": reference,
            }
        )
    return rows
