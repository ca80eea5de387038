"""The weights that a run begins with (`train.start`: those of another run or model), and their running average."""

from typing import Any

import torch
from torch import Tensor, nn

from chasm.common.files import read_json, sha256
from chasm.models import RECORD
from chasm.train.run import load_run


def load_start(model: nn.Module, start: str) -> dict[str, Any]:
    """Load the weights of a run or model into a network that has just been built.

    Args:
        model: a model with the same host and mixer, for the same image size.
        start: a run folder, the name of a shipped model, or owner/name on the Hugging Face Hub.

    Returns:
        The name of the start, the checksum of its weights, and how many steps it was trained for if that is known.

    Raises:
        ValueError: if the weights are of another network; the message is one line.
    """
    run = load_run(start)
    theirs, ours = run.model.state_dict(), model.state_dict()
    for name in dict.fromkeys((*ours, *theirs)):
        a, b = (tuple(of[name].shape) if name in of else "nothing" for of in (theirs, ours))
        if a != b:
            raise ValueError(
                f"train.start: {start} has other weights than this recipe ({name}: {a}, not {b}): take backbone, mixer "
                "and image size from its config.yaml"
            )
    model.load_state_dict(theirs)
    steps = None
    for record in (RECORD, "metrics.json"):
        if (run.folder / record).is_file():
            steps = read_json(run.folder / record).get("steps")
    return {"name": run.config.name, "sha256": sha256(run.folder / "weights.safetensors"), "steps": steps}


@torch.no_grad()
def update_average(average: dict[str, Tensor], model: nn.Module, decay: float, step: int) -> None:
    """Move the exponential average of the weights towards those of the model, in place.

    Args:
        average: averages by name, as in `state_dict`.
        model: the model after the step.
        decay: decay of the average. It is shorter at first, to forget the weights that the run began with.
        step: number of the step, from 0.
    """
    decay = min(decay, (1 + step) / (10 + step))
    weights = model.state_dict()
    floating = [k for k, v in weights.items() if v.is_floating_point()]
    torch._foreach_lerp_([average[k] for k in floating], [weights[k] for k in floating], 1 - decay)
    for k in weights.keys() - set(floating):
        average[k].copy_(weights[k])
