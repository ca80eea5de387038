"""Compressed sensing under the protocol of a run: the same data, mask, scores and examples, and no training."""

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
    """`chasm.mri.total_variation` with the call of a backbone: zero-filled channels in, channels out."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.ModuleDict()

    def forward(self, x: Tensor, *, mask: Tensor, maps: Tensor | None = None, measured: Tensor | None = None) -> Tensor:
        # Of one coil the zero-filled image holds all that was measured.
        y = mask * fft2c(to_complex(x)) if measured is None else measured
        return to_channels(total_variation(Operator(mask, maps), y))


def evaluate_classical(config: RunConfig, folder: str | Path) -> dict[str, Any]:
    """Score total variation on the config's test split and write metrics and examples as a run does."""
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
