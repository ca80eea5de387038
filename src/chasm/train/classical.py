"""Methods without training (total variation, SENSE, zero-filled), called and evaluated like a trained run."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chasm.common.files import read_json, write_json, write_text
from chasm.common.registry import suggest
from chasm.mri import Operator, fft2c, sense, to_channels, to_complex, total_variation
from chasm.train.config import RunConfig, dump
from chasm.train.evaluation import save_examples, score_split
from chasm.train.loop import check_config
from chasm.train.run import Run, open_split


@dataclass(frozen=True)
class Method:
    """A method without training."""

    summary: str  # one line for people
    strength: float | None  # its regularisation unless another is asked for; None if it has none


METHODS = {
    "tv": Method("compressed sensing with total variation", 3e-3),
    "sense": Method("regularised SENSE, for several coils", 1e-2),
    "zero-filled": Method("the unmeasured columns stay empty, coils are combined", None),
}


class Classical(nn.Module):
    """A method of `METHODS` with the call of a backbone: zero-filled channels in, channels out.

    Args:
        name: the method.
        strength: strength of its regularisation. Default: that of the method.

    Raises:
        ValueError: when the name is unknown, or the strength cannot be used.
    """

    def __init__(self, name: str = "tv", strength: float | None = None) -> None:
        super().__init__()
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}: {suggest(name, METHODS)}")
        default = METHODS[name].strength
        if strength is not None and default is None:
            raise ValueError(f"{name} has no regularisation: leave out the strength")
        if strength is not None and not 0 < strength < float("inf"):
            raise ValueError(f"the strength of {name} must be greater than 0, got {strength:g} (default {default:g})")
        self.name, self.strength = name, default if strength is None else strength
        self.slots = nn.ModuleDict()

    def forward(self, x: Tensor, *, mask: Tensor, maps: Tensor | None = None, measured: Tensor | None = None) -> Tensor:
        if self.strength is None:
            return x
        # With one coil, the zero-filled image holds everything that was measured.
        y = mask * fft2c(to_complex(x)) if measured is None else measured
        A = Operator(mask, maps)
        if self.name == "tv":
            return to_channels(total_variation(A, y, self.strength))
        if maps is None:
            raise ValueError("sense combines several coils, and this data has one coil: use tv or zero-filled")
        return to_channels(sense(A, y, self.strength))


def evaluate_classical(config: RunConfig, folder: str | Path) -> dict[str, Any]:
    """Score total variation on the test split, and write config, metrics and examples like a trained run.

    Args:
        config: names the data and the task.
        folder: folder to write to. A finished run in it is left as it is.

    Returns:
        The content of metrics.json.

    Raises:
        ValueError: if the folder holds scores under another config.
    """
    folder = Path(folder)
    check_config(config, folder)
    if (folder / "metrics.json").is_file():
        done: dict[str, Any] = read_json(folder / "metrics.json")
        return done
    device, start = torch.device("cpu"), time.monotonic()
    run, data = Run(Classical("tv"), config.task.create(), config, folder), open_split(config, "test")
    metrics = score_split(run, data, device) | {"seconds": round(time.monotonic() - start, 2)}
    save_examples(run, data, device)
    write_text(folder / "config.yaml", dump(config))
    write_json(folder / "metrics.json", metrics)
    return metrics
