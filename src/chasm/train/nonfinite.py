"""Stop a run, or skip a step, when numbers are not finite."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from chasm.common.files import unwritable

MAX_SKIPPED_STEPS = 10  # in a row, with train.on_nonfinite=skip


class NonFiniteError(FloatingPointError):
    """Loss, gradient or weights are not finite. For loss and gradient the message says where the slices are listed."""


class NonFiniteGuard:
    """Tells whether a step may be taken. If not, lists the slices of the step in a file, and stops or goes on.

    Args:
        folder: folder of the run, for `nonfinite.jsonl`.
        on_nonfinite: "stop" or "skip".
        writes: True in the process that writes the file.
        say: shows a line to the user.
    """

    def __init__(self, folder: Path, on_nonfinite: str, *, writes: bool, say: Callable[[str], None]) -> None:
        self.path = folder / "nonfinite.jsonl"
        self.on_nonfinite, self.writes, self.say = on_nonfinite, writes, say
        self.skipped = 0  # steps skipped in a row

    def allows(self, step: int, loss: float, norm: float, slices: Callable[[], Sequence[Sequence[object]]]) -> bool:
        """Return True if the step may be taken, and False if it is to be skipped.

        Args:
            step: number of the step.
            loss: loss of all processes.
            norm: norm of the gradient.
            slices: gathers case and index of every slice of the step. It is called only if the step is refused.

        Raises:
            NonFiniteError: if the run is to stop.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped = 0
            return True
        self._list(step, loss, norm, slices())
        self.skipped += 1
        what = f"step {step}: loss {loss}, gradient norm {norm}"
        if self.on_nonfinite == "stop":
            raise NonFiniteError(f"{what}: stopped; its slices are in {self.path}")
        if self.skipped == MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{what}: stopped, {self.skipped} such steps in a row; their slices are in {self.path}"
            )
        self.say(f"{what}: skipped; its slices are in {self.path}")
        return False

    def _list(self, step: int, loss: float, norm: float, slices: Sequence[Sequence[object]]) -> None:
        if not self.writes:
            return
        row = {"step": step, "loss": str(loss), "grad_norm": str(norm), "slices": slices}
        try:
            with open(self.path, "a") as f:
                f.write(json.dumps(row) + "\n")
        except OSError as e:
            raise unwritable(self.path, e) from None


def check_weights_are_finite(step: int, *states: Mapping[str, Tensor] | None) -> None:
    """Raise a NonFiniteError if weights are not finite: no step can repair them."""
    for weights in states:
        for name, value in (weights or {}).items():
            if not torch.isfinite(value).all():
                raise NonFiniteError(
                    f"step {step}: weights are not finite ({name}): stopped; lower train.lr or set train.clip"
                )
