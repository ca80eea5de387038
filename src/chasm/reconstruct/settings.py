"""The settings of a reconstruction, and the run or method that does it."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from chasm.common.registry import suggest
from chasm.data.base import existing
from chasm.mri import Sampling
from chasm.mri.masks import forget_mask_files
from chasm.mri.plane_masks import PLANE_KINDS
from chasm.train import Run, RunConfig, load_run
from chasm.train.classical import METHODS, Classical

INPUT_KINDS = ("kspace", "image")
MIN_DRAWS = 2  # draws of an uncertainty map


@dataclass(frozen=True)
class Settings:
    """The settings of a reconstruction.

    Attributes:
        kind: what complex arrays hold: "image" (default) or "kspace".
        mask: a mask file that replaces the run's mask, or gives the mask of undersampled k-space.
        acceleration: acceleration of the mask that undersamples full data. Default: that of the run.
        options: how to read the files: axes of an array, plane or volume of NIfTI. Default: as the run was trained.
        strength: strength of the regularisation, for a method without training. Default: that of the method.
        report: the page to write, to look at the result in a browser.
        complex: whether the volume is complex and not a magnitude.
        maps: coil sensitivities: "lowres", "espirit" or a file; see `chasm.reconstruct.coils.CoilModel`.
        map_sets: number of sets of maps that ESPIRiT makes.
        compress: number of virtual coils.
        uncertainty: number of draws of an uncertainty map; 0 for no map.
    """

    kind: str | None = None
    mask: str | Path | None = None
    acceleration: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    strength: float | None = None
    report: str | Path | None = None
    complex: bool = False
    maps: str | Path = "lowres"
    map_sets: int = 1
    compress: int | None = None
    uncertainty: int = 0

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in INPUT_KINDS:
            raise ValueError(f"--as {self.kind}: {suggest(self.kind, INPUT_KINDS)}")
        if self.mask is not None and self.acceleration is not None:
            raise ValueError("--mask says which columns are kept: leave out --acceleration")
        if self.uncertainty != 0 and self.uncertainty < MIN_DRAWS:
            raise ValueError(f"--uncertainty {self.uncertainty}: expected {MIN_DRAWS} draws or more")

    @property
    def mask_file(self) -> Path | None:
        """The mask file, which exists."""
        return None if self.mask is None else existing(self.mask)


def is_method(run: Run) -> bool:
    """Return True for a method without training."""
    return isinstance(run.model, Classical)


def load_run_or_method(run: str | Path, settings: Settings, device: torch.device) -> Run:
    """Load a run, or make one from a method without training, with the mask of the settings.

    Args:
        run: a run folder or model, as for `load_run`, or a name of `METHODS`. A folder of that name is "./tv".
        settings: what the user chose.
        device: where the model runs.
    """
    if str(run) in METHODS:
        config = RunConfig.model_validate({"name": str(run), "train": {"steps": 1}})
        model = Classical(str(run), settings.strength).to(device).eval()
        loaded = with_task(Run(model, config.task.create(), config, Path(str(run))), complex=True)
    elif settings.strength is not None:
        raise ValueError(
            f"--strength belongs to {' and '.join(m for m in METHODS if METHODS[m].strength)}: leave it out"
        )
    else:
        try:
            loaded = load_run(run, device)
        except FileNotFoundError as e:
            raise FileNotFoundError(f"{e}; {', '.join(METHODS)} need no training") from None
        if loaded.config.task.name != "reconstruction":
            problem = f"trained for {loaded.config.task.name}: give a run of a reconstruction task"
            raise ValueError(f"{loaded.folder}: {problem}")
        loaded = with_task(loaded, masks="fixed")  # a scan is undersampled as the run was validated
    sampling = loaded.task.sampling  # type: ignore[attr-defined]
    if settings.mask_file is not None:
        forget_mask_files()
        return with_task(loaded, sampling=Sampling("file", file=str(settings.mask_file)))
    if settings.acceleration is not None:
        kind = Sampling().kind if sampling.kind in ("file", *PLANE_KINDS) else sampling.kind
        return with_task(loaded, sampling=Sampling(kind, settings.acceleration, offset=0, seed=sampling.seed))
    if sampling.kind in PLANE_KINDS:
        advice = "give --acceleration for equispaced columns, or --mask FILE"
        raise ValueError(
            f"{loaded.folder}: trained on {sampling.kind} masks, and scans have masks of columns: {advice}"
        )
    return loaded


def with_task(run: Run, **attributes: Any) -> Run:
    """Return the run with a task that has other attributes. Its config stays that of the training."""
    task = copy(run.task)
    for name, value in attributes.items():
        setattr(task, name, value)
    return replace(run, task=task)
