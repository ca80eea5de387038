"""The state of training as named tensors: weights, optimiser, averaged weights, random state."""

from pathlib import Path

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, ema: Tensors | None, device: torch.device) -> Tensors:
    """Return the state of training: tensors by name, for `restore`.

    Args:
        model: model in training.
        optimizer: its optimiser.
        ema: averaged weights, or None.
        device: device whose random state is included, beside that of the CPU.
    """
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    state = optimizer.state_dict()["state"]
    tensors |= {f"optimizer.{i}.{k}": v for i, values in state.items() for k, v in values.items()}
    tensors |= {f"ema.{k}": v for k, v in (ema or {}).items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        tensors["rng.mps"] = torch.mps.get_rng_state()
    return tensors


def check_fits(
    place: Path,
    tensors: Tensors,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Tensors | None,
    *,
    has_best: bool,
) -> None:
    """Raise a ValueError if tensors from a file have not the names and shapes that `restore` needs.

    Args:
        place: folder of the checkpoint, for the message.
        tensors: tensors of a checkpoint.
        model: model that gets the weights.
        optimizer: its optimiser.
        ema: averaged weights, or None.
        has_best: True if the best weights so far must be among the tensors.
    """
    expected = {"rng.cpu": torch.get_rng_state().shape}
    for prefix in ("model", *(("ema",) if ema is not None else ()), *(("best",) if has_best else ())):
        expected |= {f"{prefix}.{k}": v.shape for k, v in model.state_dict().items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    steps = {key.split(".")[1] for key in tensors if key.startswith("optimizer.")}
    for i, parameter in enumerate(parameters):
        if str(i) in steps:  # a parameter that never had a gradient has no state
            shapes = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
            expected |= {f"optimizer.{i}.{k}": shape for k, shape in shapes.items()}
    stored_shapes = {k: v.shape for k, v in tensors.items() if not k.startswith("rng.") or k == "rng.cpu"}
    if wrong := [k for k in {**expected, **stored_shapes} if expected.get(k) != stored_shapes.get(k)]:
        raise ValueError(
            f"{place}: the checkpoint does not fit this model: {wrong[0]} has shape "
            f"{_text(stored_shapes.get(wrong[0]))}, not {_text(expected.get(wrong[0]))}: go on with the code that "
            "saved it, or choose another folder"
        )


def _text(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))


def restore(
    tensors: Tensors, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Tensors | None, device: torch.device
) -> Tensors | None:
    """Restore the state of training.

    Args:
        tensors: tensors from `snapshot`.
        model: gets the weights.
        optimizer: gets the moments.
        ema: None if the run does not average its weights.
        device: device of the averaged weights and of the random state.

    Returns:
        The averaged weights on the device, or None if the run does not average them.
    """
    model.load_state_dict(tensors_of("model.", tensors))
    state: dict[int, Tensors] = {}
    for key, value in tensors_of("optimizer.", tensors).items():
        i, name = key.split(".", 1)
        state.setdefault(int(i), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    elif "rng.mps" in tensors and device.type == "mps":
        torch.mps.set_rng_state(tensors["rng.mps"])
    return None if ema is None else {k: v.to(device) for k, v in tensors_of("ema.", tensors).items()}


def tensors_of(prefix: str, tensors: Tensors) -> Tensors:
    """Return the tensors whose names begin with a prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
