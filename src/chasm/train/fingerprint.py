"""What a run was begun with: config, data and code. Every checkpoint carries it, and a run that goes on compares it.

Another config, or other files of data, would continue a run as something else: that is an error. Other code, versions
or numbers of threads change the rounding: that is said, and the run goes on.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chasm.common.files import json_safe
from chasm.data import Volumes
from chasm.data.base import FileDataset, SliceDataset
from chasm.train.config import RunConfig, changes

Fingerprint = dict[str, Any]  # config, data, code: plain values, for JSON
CODE = ("source", "python", "versions", "device", "processes", "with", "plugins")


def fingerprint(config: RunConfig, data: Mapping[str, SliceDataset], environment: Mapping[str, Any]) -> Fingerprint:
    """Return what a run is begun with.

    Args:
        config: of the run.
        data: its datasets, by split. Files are not read, only listed.
        environment: as `chasm.train.run.environment` returns it.
    """
    content = {
        "config": config.model_dump(mode="json"),
        "data": {split: _describe(dataset) for split, dataset in data.items()},
        "code": {key: environment[key] for key in CODE if key in environment},
    }
    return dict(json_safe(content))  # as a checkpoint returns it


def compare(stored: Fingerprint, now: Fingerprint, folder: Path) -> list[str]:
    """Compare what a run was begun with and what it would go on with.

    Args:
        stored: of the checkpoint.
        now: of this process.
        folder: of the run, for messages.

    Returns:
        Notes, one line each, on what may differ without making it another run.

    Raises:
        ValueError: with one line, if config or data differ.
    """
    if other := changes(stored["config"], now["config"]):
        raise ValueError(f"{folder} holds a run with another config: {other}: choose another folder, or remove it")
    if other := changes(_without_dates(stored), _without_dates(now)):
        raise ValueError(
            f"{folder}: the data are not those that the run began with: {other}: put them back, "
            "or choose another folder"
        )
    notes = []
    if changes(stored["data"], now["data"]):
        notes.append("note: files of the data have another date than when the run began, with the same names and sizes")
    if other := changes(stored["code"], now["code"]):
        notes.append(f"note: the run began under other conditions: {other}: it will not be bit-equal to one in a piece")
    return notes


def _without_dates(record: Fingerprint) -> dict[str, Any]:
    return {split: {k: v for k, v in facts.items() if k != "dates"} for split, facts in record["data"].items()}


def _describe(data: SliceDataset) -> dict[str, Any]:
    """Return the number of cases and slices of a split, and digests of the names, sizes and dates of its files."""
    names, dates = [], []
    files = data.data if isinstance(data, Volumes) else data
    if isinstance(files, FileDataset):
        for file in files.files():
            facts = file.stat()
            names.append((os.path.relpath(file, files.root), facts.st_size))
            dates.append(facts.st_mtime_ns)
    return {
        "cases": len(data.cases),
        "slices": len(data),
        "files": _digest([data.cases, names]),
        "dates": _digest(dates),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
