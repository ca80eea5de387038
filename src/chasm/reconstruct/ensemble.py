"""Combine several runs into one that returns the mean of their reconstructions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chasm.reconstruct.inputs import reader_options
from chasm.train import Run
from chasm.train.classical import Classical


class Ensemble(nn.Module):
    """The mean of several models, with the call of one.

    Args:
        members: models of one task.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor, **physics: Any) -> Tensor:
        return torch.stack([member(x, **physics).float() for member in self.members]).mean(0)


def combine(runs: Sequence[Run]) -> Run:
    """Return several runs as one whose model is an `Ensemble`; a single run stays as it is.

    Args:
        runs: runs of one task, with the same mask, the same protocol of scores, and all complex or none.

    Raises:
        ValueError: if the runs differ in these.
    """
    if not runs:
        raise ValueError("no run: give a run folder, a model, or a method without training")
    first, *others = runs
    if not others:
        return first
    for i, run in enumerate(runs):
        if isinstance(run.model, Classical):
            raise ValueError(f"an ensemble needs networks, and {run.folder} needs no training: give it alone")
        twin = next((other for other in runs[:i] if _has_same_weights(run.model, other.model)), None)
        if twin is not None:
            problem = f"has the same weights as {twin.folder}, so the two cannot disagree"
            raise ValueError(f"{run.folder}: {problem}: give runs of different seeds")
        here, there = (_conditions(r) for r in (run, first))
        for name in here:
            if here[name] != there[name]:
                problem = f"trained with another {name} than {first.folder}"
                raise ValueError(f"{run.folder}: {problem}: the runs of an ensemble must share it")
    names = " + ".join(run.name for run in runs)
    return replace(first, model=Ensemble([run.model for run in runs]).eval(), folder=Path(names))


def _has_same_weights(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _conditions(run: Run) -> dict[str, Any]:
    """Return what the runs of an ensemble must share: how they are scored, and how a scan is read for them."""
    task: Any = run.task
    shared = {"sampling": task.sampling, "complex": task.complex, "protocol": task.protocol.name}
    return shared | {f"data.options.{name}": value for name, value in reader_options(run).items()}
