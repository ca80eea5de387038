"""Turn a finished run into a model folder: weights, config, a record with checksums and scores, and a card."""

import gzip
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from chasm.app.model import graph_key, graph_of
from chasm.common.files import expanded, is_folder_name, sha256, write_bytes, write_json, write_text
from chasm.common.precision import tf32
from chasm.data import SliceDataset
from chasm.data.terms import Terms, terms_of
from chasm.models import GRAPH, RECORD
from chasm.publish.card import ELSEWHERE, write_card
from chasm.publish.record import describe, read_environment, read_record, scores_of, with_other_lines
from chasm.train import Run, RunConfig, load_run
from chasm.train.config import dump
from chasm.train.evaluation import score_split, split_of, under
from chasm.train.weights import WEIGHTS, save_weights

FORMAT = 1
ENVIRONMENT = (
    "image_shape",
    "training_data",  # `chasm reconstruct` compares a scan with it
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
    A run is also scored on its test split under a mask with other lines, if its data is still there and not every slice
    has a mask of its own. A model can be packed again: it keeps its weights, gets a new card, and adds the scores of
    `others`, which replace those of the same split and source.

    Args:
        run: the run folder, or a model.
        name: name of the model.
        out: the folder to write; default: NAME in the current folder.
        others: data of another source to score on, each as changes of the run's recipe: "data.options.part=raw_complex"
            (several changes: with spaces between them).
        data_path: folder of the data of `others`. Default: that of the run's data.
        licence: the terms of the training data, for datasets whose terms are not known.
        page: whether to write the network for `chasm app` as well, which then starts at once.
        device: device to score `others` on.

    Returns:
        The model folder.

    Raises:
        ValueError: if the run is not finished, needs other files, or its data does not allow it.
    """
    if not is_folder_name(name):
        raise ValueError(f"{name!r}: expected a name that a folder can have: give the place with --out")
    finished = load_run(run, device)
    recorded, environment = read_record(finished.folder), read_environment(finished.folder)
    if environment.get("with") or environment.get("plugins"):
        raise ValueError(f"{finished.folder}: uses code beside chasm's (--with, or a plugin): others could not load it")
    sampling = finished.config.task.options.get("sampling", {})
    if sampling.get("file"):
        raise ValueError(f"{finished.folder}: its mask is the file {sampling['file']}: others do not have it")
    trained_on = _terms(finished.config, licence, recorded)
    shape, device = list(finished.images.shape), torch.device(device)
    new = [] if (finished.folder / RECORD).is_file() else _scored_with_other_lines(finished, device)
    new += [s for change in others for s in _scored_elsewhere(finished, change, data_path, device)]
    scores = [old for old in recorded["scores"] if _subject(old) not in map(_subject, new)] + new
    graph = graph_of(finished) if page or (finished.folder / GRAPH).is_file() else None

    folder = expanded(out if out is not None else name)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
        raise ValueError(f"{folder}: holds other files: give the name of a new folder")
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
        **describe(name, finished.config, shape, trained_on, recorded),
        "scores": scores,
        "sha256": {file: sha256(folder / file) for file in hashed},
    }
    if graph is not None:
        record["page"] = graph_key(finished)
    write_json(folder / RECORD, record)
    write_text(folder / "README.md", write_card(record, finished.config, environment))
    return folder


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
    """Score the model on other data."""
    overrides = change.split(" ") + ([f"data.path={data_path}"] if data_path else [])
    split = next((o.removeprefix("split=") for o in overrides if o.startswith("split=")), "test")
    elsewhere = under(run, [o for o in overrides if not o.startswith("split=")])
    return scores_of(f"{split} split, {ELSEWHERE}", _measured(elsewhere, split_of(elsewhere, split, device), device))


def _scored_with_other_lines(run: Run, device: torch.device) -> list[dict[str, Any]]:
    """Score a run on its own test split under a mask with other lines; nothing if its data is no longer there."""
    moved = with_other_lines(run.task, run.images.shape)
    if moved is None:
        return []
    try:
        data = split_of(run, "test", device)
    except (OSError, ValueError):
        return []
    return scores_of(f"test split, {moved[1]}", _measured(replace(run, task=moved[0]), data, device))


def _measured(run: Run, data: SliceDataset, device: torch.device) -> dict[str, Any]:
    with tf32(run.config.train.tf32):
        return score_split(run, data, device)
