"""Compressed sensing, evaluated like a trained run: with the same data, mask, scores and examples."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chasm.common.files import read_json, write_json
from chasm.mri import Operator, fft2c, to_channels, to_complex, total_variation
from chasm.train.config import RunConfig
from chasm.train.evaluation import measure, save_examples
from chasm.train.run import Run, open_split


class TotalVariation(nn.Module):
    """Calls `chasm.mri.total_variation` with the arguments of a backbone: zero-filled channels in, channels out."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.ModuleDict()

    def forward(self, x: Tensor, *, mask: Tensor, maps: Tensor | None = None, measured: Tensor | None = None) -> Tensor:
        # With one coil the zero-filled image contains all measured lines.
        y = mask * fft2c(to_complex(x)) if measured is None else measured
        return to_channels(total_variation(Operator(mask, maps), y))


def evaluate_classical(config: RunConfig, folder: str | Path) -> dict[str, Any]:
    """Score total variation on the test split, and write metrics and examples like a trained run.

    Args:
        config: names the data and the task.
        folder: folder to write to. A finished one is left alone.

    Returns:
        The content of metrics.json.
    """
    folder = Path(folder)
    if (folder / "metrics.json").is_file():
        done: dict[str, Any] = read_json(folder / "metrics.json")
        return done
    device, start = torch.device("cpu"), time.monotonic()
    run, data = Run(TotalVariation(), config.task.create(), config, folder), open_split(config, "test")
    metrics = measure(run, data, device) | {"seconds": round(time.monotonic() - start, 2)}
    save_examples(run, data, device)
    write_json(folder / "metrics.json", metrics)
    return metrics
