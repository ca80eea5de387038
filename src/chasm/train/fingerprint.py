"""The fingerprint of a run: its config, data and code. Every checkpoint has it, and a resumed run compares it.

Another config, or other data files, would continue a run as something else, so they are an error. Other code, versions
or numbers of threads change only the rounding: a note names them, and the run goes on.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chasm.common.files import json_safe
from chasm.data import Volumes
from chasm.data.base import FileDataset, SliceDataset
from chasm.train.config import RunConfig, changes

CODE = ("source", "python", "versions", "device", "processes", "with", "plugins")


@dataclass(frozen=True)
class Fingerprint:
    """Plain values, as JSON holds them.

    Attributes:
        config: config of the run.
        data: number of cases and slices, and digests of files, by split.
        code: entries `CODE` of the environment.
    """

    config: dict[str, Any]
    data: dict[str, dict[str, Any]]
    code: dict[str, Any]


def fingerprint(config: RunConfig, data: Mapping[str, SliceDataset], environment: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of a run.

    Args:
        config: config of the run.
        data: its datasets, by split. Files are not read, only listed.
        environment: as `chasm.train.run.environment` returns it.
    """
    code = {key: environment[key] for key in CODE if key in environment}
    return Fingerprint(
        json_safe(config.model_dump(mode="json")),
        {split: json_safe(_describe(dataset)) for split, dataset in data.items()},
        json_safe(code),
    )


def compare_fingerprints(stored: Fingerprint, now: Fingerprint, folder: Path) -> list[str]:
    """Compare the fingerprint of a run with that of the process that resumes it.

    Args:
        stored: fingerprint of the checkpoint.
        now: fingerprint of this process.
        folder: folder of the run, for messages.

    Returns:
        Notes, one line each, on what may differ without making it another run.

    Raises:
        ValueError: if config or data differ.
    """
    if other := changes(stored.config, now.config):
        raise ValueError(f"{folder} holds a run with another config: {other}: choose another folder, or remove it")
    if other := changes(_without_dates(stored), _without_dates(now)):
        raise ValueError(
            f"{folder}: the data are not those that the run began with: {other}: put them back, "
            "or choose another folder"
        )
    notes = []
    if changes(stored.data, now.data):
        notes.append("note: the data files have another date than when the run began, but the same names and sizes")
    if other := changes(stored.code, now.code):
        notes.append(
            f"note: the run began under other conditions: {other}: the result will not be "
            "bit for bit that of a run without a stop"
        )
    return notes


def _without_dates(fingerprint: Fingerprint) -> dict[str, Any]:
    return {split: {k: v for k, v in facts.items() if k != "dates"} for split, facts in fingerprint.data.items()}


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
