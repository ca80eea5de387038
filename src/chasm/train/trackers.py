"""Trackers that follow a run: TensorBoard, Weights & Biases, MLflow and others that Accelerate knows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from chasm.common.extras import how_to_install
from chasm.common.registry import suggest
from chasm.train.config import RunConfig, flat_config

PROJECT = "chasm"


def check_trackers(names: Sequence[str]) -> None:
    """Raise if a tracker is unknown or not installed.

    Raises:
        ValueError: if a tracker is unknown or not installed.
    """
    installed = {str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"unknown tracker {name!r}: {suggest(name, LOGGER_TYPE_TO_CLASS)}")
        if name not in installed:
            raise ValueError(f"tracker {name!r} is not installed: {how_to_install(name)}")


class Trackers:
    """Sends the rows of a run's log to trackers, from the main process.

    Args:
        accelerator: accelerator of the run.
        names: names of the trackers, as Accelerate spells them.
        config: config of the run; trackers show it.
        folder: folder of the run; TensorBoard writes into its folder `tensorboard`.
        step: steps that are done. TensorBoard drops rows that an interrupted run wrote after them.
    """

    def __init__(
        self, accelerator: Accelerator, names: Sequence[str], config: RunConfig, folder: Path, step: int
    ) -> None:
        self.accelerator, self.names = accelerator, names
        if not names:
            return
        accelerator.log_with = [LoggerType(name) for name in names]
        accelerator.project_configuration.set_directories(str(folder))
        accelerator.project_configuration.logging_dir = str(folder / "tensorboard")
        options = {
            "tensorboard": {"purge_step": step + 1},
            "wandb": {"name": config.name, "dir": str(folder)},
            "mlflow": {"run_name": config.name},
            "trackio": {"name": config.name},
        }
        accelerator.init_trackers(PROJECT, _plain(config), {k: v for k, v in options.items() if k in names})

    def log(self, row: dict[str, Any]) -> None:
        """Send a row of the log: its "step", and numbers by name."""
        if self.names:
            values = {name: value for name, value in row.items() if name != "step" and value is not None}
            self.accelerator.log(values, step=row["step"])

    def close(self) -> None:
        """Write the remaining rows. (Accelerate's `end_training` would also separate the processes.)"""
        if self.names:
            for tracker in self.accelerator.trackers:
                tracker.finish()


def _plain(config: RunConfig) -> dict[str, Any]:
    """Return the config as one level of numbers and text, which all trackers take."""
    flat = flat_config(config)
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in flat.items()}
