"""Turn a finished run into a model folder: weights, config, a record with checksums and scores, and a card."""

import gzip
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

from chasm.app.model import graph_key, graph_of
from chasm.common.files import is_folder_name, read_json, sha256, write_bytes, write_json, write_text
from chasm.common.precision import tf32
from chasm.data.terms import Terms, terms_of
from chasm.models import GRAPH, RECORD
from chasm.publish.card import ELSEWHERE, write_card
from chasm.studies.statistics import interval, resampled
from chasm.train import Run, RunConfig, load_recipe, load_run
from chasm.train.config import dump
from chasm.train.evaluation import measure
from chasm.train.run import open_split, resident
from chasm.train.weights import WEIGHTS, save_weights

FORMAT = 1
ENVIRONMENT = (
    "image_shape",
    "training_data",  # what `chasm reconstruct` compares a scan with
    "start",
    "seed",
    "device",
    "python",
    "versions",
    "commit",
    "modified",
    "date",
    "tf32",
)


def pack(
    run: str | Path,
    name: str,
    out: str | Path | None = None,
    *,
    others: Sequence[str] = (),
    data_path: str | None = None,
    licence: str | None = None,
    page: bool = False,
    device: torch.device | str = "cpu",
) -> Path:
    """Write a model folder from a finished run, with a card made from what the run recorded.

    The config is that of the run without the path of its data. Scores come with 95 % intervals, from resampled cases.
    A model can be packed again: it keeps its weights, gets a new card, and adds the scores of `others`, which replace
    those of the same split and source.

    Args:
        run: the run folder, or a model.
        name: of the model.
        out: the folder to write; default: NAME in the current folder.
        others: data of another source to score on, each as changes of the run's recipe: "data.options.part=raw_complex"
            (several changes: with spaces between them).
        data_path: where the data of `others` is, if not where the run's was.
        licence: the terms of the training data, for datasets whose terms are not known.
        page: whether to write the network for `chasm app`, too, which then starts at once.
        device: where `others` are scored.

    Returns:
        The model folder.

    Raises:
        ValueError: if the run is not finished, needs files of its own, or its data does not allow it.
    """
    if not is_folder_name(name):
        raise ValueError(f"{name!r}: expected a name that a folder can have: give the place with --out")
    finished = load_run(run, device)
    recorded, environment = _recorded(finished.folder), read_json(finished.folder / "environment.json")
    if environment.get("with") or environment.get("plugins"):
        raise ValueError(f"{finished.folder}: uses code beside chasm's (--with, or a plugin): others could not load it")
    sampling = finished.config.task.options.get("sampling", {})
    if sampling.get("file"):
        raise ValueError(f"{finished.folder}: its mask is the file {sampling['file']}: others do not have it")
    trained_on = _terms(finished.config, licence, recorded)
    new = [s for change in others for s in _scored_elsewhere(finished, change, data_path, torch.device(device))]
    scores = [old for old in recorded["scores"] if _subject(old) not in map(_subject, new)] + new
    graph = graph_of(finished) if page or (finished.folder / GRAPH).is_file() else None

    folder = Path(out if out is not None else name).expanduser()
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
        raise ValueError(f"{folder}: holds other files: give the name of a new folder")
    shape = list(finished.images.shape)
    write_text(folder / "config.yaml", dump(_without_paths(finished.config, name)))
    if (finished.folder / RECORD).is_file():
        write_bytes(folder / WEIGHTS, (finished.folder / WEIGHTS).read_bytes())
    else:
        save_weights(folder / WEIGHTS, load_file(finished.folder / WEIGHTS), finished.images)
    write_json(folder / "environment.json", {k: environment[k] for k in ENVIRONMENT if k in environment})
    hashed = ["config.yaml", WEIGHTS]
    (folder / GRAPH).unlink(missing_ok=True)
    if graph is not None:
        write_bytes(folder / GRAPH, gzip.compress(graph, mtime=0))
        hashed.append(GRAPH)
    record = {
        "format": FORMAT,
        "name": name,
        "task": {"name": finished.config.task.name, **finished.task.report(shape)},
        "image_shape": shape,
        "parameters": recorded["parameters"],
        "trained_on": [asdict(terms) for terms in trained_on],
        "steps": recorded["steps"],
        "best_step": recorded["best_step"],
        "scores": scores,
        "sha256": {file: sha256(folder / file) for file in hashed},
    }
    if graph is not None:
        record["page"] = graph_key(finished)
    write_json(folder / RECORD, record)
    write_text(folder / "README.md", write_card(record, finished.config, environment))
    return folder


def _recorded(folder: Path) -> dict[str, Any]:
    """Return size, steps and scores of a finished run, or the record of a model."""
    if (folder / RECORD).is_file():
        record: dict[str, Any] = read_json(folder / RECORD)
        return record
    if not (folder / "metrics.json").is_file():
        raise ValueError(f"{folder}: not finished: train it to the end first, the card needs its metrics.json")
    metrics = read_json(folder / "metrics.json")
    return {name: metrics[name] for name in ("parameters", "steps", "best_step")} | {
        "scores": _scores("test split", metrics)
    }


def _subject(scores: dict[str, Any]) -> tuple[str, str]:
    return scores["split"], scores["source"]


def _without_paths(config: RunConfig, name: str) -> RunConfig:
    """Return the config under the name of the model, without the places of data and of weights on this machine."""
    start = None if config.train.start is None else Path(config.train.start).name
    data, train = config.data.model_copy(update={"path": None}), config.train.model_copy(update={"start": start})
    return config.model_copy(update={"name": name, "data": data, "train": train})


def _terms(config: RunConfig, licence: str | None, recorded: dict[str, Any]) -> list[Terms]:
    """Return the terms of the training data; refuse data whose terms are not known or do not allow it."""
    if licence is not None:
        return [Terms(config.data.name, licence, True)]
    known = terms_of(config.data.name, config.data.options)
    if known is None and "trained_on" in recorded:  # a model, which says it
        return [Terms(**terms) for terms in recorded["trained_on"]]
    if not known:
        raise ValueError(f"the terms of dataset {config.data.name!r} are not known here: give them with --licence")
    for terms in known:
        if not terms.weights:
            raise ValueError(f"{terms.source}: licence {terms.licence}: a model trained on it cannot be given away")
    return known


def _scored_elsewhere(run: Run, change: str, data_path: str | None, device: torch.device) -> list[dict[str, Any]]:
    """Score the model on other data, with its own task."""
    overrides = change.split(" ") + ([f"data.path={data_path}"] if data_path else [])
    split = next((o.removeprefix("split=") for o in overrides if o.startswith("split=")), "test")
    overrides = [o for o in overrides if not o.startswith("split=")]
    stored = yaml.safe_load(dump(run.config))
    config = load_recipe(stored, overrides)
    data = resident(config, open_split(config, split), device)
    elsewhere = replace(run, config=config)
    with tf32(config.train.tf32):
        metrics = measure(elsewhere, data, device)
    return _scores(f"{split} split, {ELSEWHERE}", metrics)


def _scores(split: str, metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Return mean and 95 % interval of every metric, and the mean of the reference: for each part of the data."""
    parts: dict[str, list[str]] = {}
    for case in metrics["cases"]:
        part = f"proxy:{case.split('/')[0]}" if metrics["proxy"] else metrics["source"]
        parts.setdefault(part, []).append(case)
    rows = []
    for source, cases in parts.items():
        values: dict[str, dict[str, float]] = {}
        for metric in metrics["mean"]:
            each = np.array([[metrics["cases"][case][metric] for case in cases]], dtype=float)
            low, high = interval(resampled(each))
            values[metric] = {"mean": float(each.mean()), "low": low, "high": high}
        reference = metrics["reference"]
        if reference is not None:
            means = {m: float(np.mean([reference["cases"][case][m] for case in cases])) for m in values}
            reference = {"name": reference["name"], **means}
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
