"""Optimiser groups: spectral parameters get their own step size and no weight decay.

Under Adam a parameter moves by about the step size per step, whatever its gradient. At 5e-4 the filters of a rival
hardly move in a short run, hence `spectral_lr`; CHASM has a step scale of its own. Weight decay would pull filters and
norms towards zero and CHASM towards the identity, so none of them decays.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.01, spectral_lr: float | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimiser.

    Args:
        model: the network.
        lr: the step size.
        weight_decay: weight decay of the group "decay" only.
        spectral_lr: the step size of the group "spectral"; default: `lr`.

    Returns:
        Groups with the names "decay", "plain" (biases, norms, other vectors, and what a module lists in
        `no_decay_parameters`) and "spectral" (what mixers list in `spectral_parameters`). Empty ones are left out.

    Example:
        >>> import torch, chasm
        >>> groups = param_groups(chasm.CHASM(4, size=(8, 8)), lr=5e-4, spectral_lr=5e-3)
        >>> [group["name"] for group in groups]
        ['decay', 'plain', 'spectral']
        >>> optimizer = torch.optim.AdamW(groups)
    """
    spectral, exempt = (
        {id(p) for p in listed_parameters(model, name)} for name in ("spectral_parameters", "no_decay_parameters")
    )
    groups: dict[str, dict[str, Any]] = {
        "decay": {"params": [], "lr": lr, "weight_decay": weight_decay},
        "plain": {"params": [], "lr": lr, "weight_decay": 0.0},
        "spectral": {"params": [], "lr": lr if spectral_lr is None else spectral_lr, "weight_decay": 0.0},
    }
    for p in model.parameters():
        if not p.requires_grad:
            continue
        kind = "spectral" if id(p) in spectral else "plain" if id(p) in exempt or p.ndim <= 1 else "decay"
        groups[kind]["params"].append(p)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]


def listed_parameters(model: nn.Module, attribute: str) -> Iterator[nn.Parameter]:
    """Return the parameters that modules list in an attribute, by the name of a parameter or of a container."""
    for module in model.modules():
        for name in getattr(module, attribute, ()):
            item = getattr(module, name)
            if isinstance(item, nn.Module):
                yield from item.parameters()
            elif item is not None:
                yield item
