"""Scores of finished runs on images of other sizes than they were trained on, without training again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chasm.common.files import read_json, write_json
from chasm.common.precision import tf32
from chasm.studies.factors import SETTINGS, TINY_SIZE, image_size
from chasm.studies.plan import Plan
from chasm.studies.state import state
from chasm.train.run import load_run, open_split, score

# Dataset to the option that sets the size.
SIZE_OPTIONS = {"cc359": "crop", "embedded": "size", "fastmri": "crop", "proxy": "crop", "images": "size"}


@dataclass(frozen=True)
class Transfer:
    """The mean scores of one run at one size, or the reason why there are none."""

    run: str
    size: int
    mean: dict[str, float] | None
    error: str = ""


def sizes_of(plan: Plan) -> list[int]:
    """Return the sizes that a study declares. At tiny scale they have the same ratio to the size of training."""
    trained = image_size(SETTINGS[plan.study.grids[0].settings[0]], "full")
    return [size * TINY_SIZE // trained if plan.scale == "tiny" else size for size in plan.study.sizes]


def transfer_run(folder: Path, size: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return scores of the best weights of a run on test images of another size. Stored scores are read."""
    file = folder / "sizes" / f"{size}.json"  # where a report looks for it
    if file.is_file():
        stored: dict[str, Any] = read_json(file)
        return stored
    run = load_run(folder, device)
    data = run.config.data
    option = SIZE_OPTIONS.get(data.name)
    if option is None:
        raise ValueError(f"dataset {data.name!r} has one size: expected one of {', '.join(sorted(SIZE_OPTIONS))}")
    changed = data.model_copy(update={"options": data.options | {option: size}})
    slices = open_split(run.config.model_copy(update={"data": changed}), "test")
    try:
        with tf32(run.config.train.tf32):
            summary = score(run.model, run.task, slices, torch.device(device), run.config.train.batch)
    except RuntimeError as e:
        raise ValueError(f"{run.config.backbone.name} takes no {size} x {size} images: {e}") from e
    assert summary is not None
    record = {"size": size, "cases": summary.per_case, "mean": {k: s.mean for k, s in summary.stats.items()}}
    write_json(file, record)
    return record


def transfer(plan: Plan, root: str | Path, sizes: list[int], device: torch.device | str = "cpu") -> list[Transfer]:
    """Score every finished run of a study at other sizes.

    Args:
        plan: the study, or a part of it.
        root: folder of the runs.
        sizes: heights and widths of the images.
        device: device to compute on.
    """
    transfers = []
    for planned in plan.runs:
        folder = plan.folder(root, planned)
        if state(folder, planned.config)[0] != "done":
            continue
        for size in sizes:
            try:
                transfers.append(Transfer(planned.key, size, transfer_run(folder, size, device)["mean"]))
            except ValueError as e:
                transfers.append(Transfer(planned.key, size, None, str(e)))
    return transfers
