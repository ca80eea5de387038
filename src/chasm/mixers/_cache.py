"""What an eval mixer keeps of its parameters, and how a change of them is seen."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from chasm.ops import Prepared


class Cache:
    """Prepared constants of the last few input sizes, valid while the parameters are the ones they were made from.

    A change is seen by object identity and torch's version counter, which every in-place write bumps: optimiser step,
    `load_state_dict`, `copy_`. A write through `.data` does not; on a CPU the values are compared as well.
    """

    SIZES = 4

    def __init__(self) -> None:
        self.captured: list[Any] = []
        self.clear()

    def clear(self) -> None:
        self.entries: dict[Any, list[Prepared]] = {}
        self.params: list[nn.Parameter] = []
        self.versions: list[int] = []
        self.values: list[Tensor] = []

    def __deepcopy__(self, memo: Any) -> "Cache":
        return Cache()

    def __reduce__(self) -> Any:
        return (Cache, ())

    def get(self, key: Any, params: list[nn.Parameter], keep: bool = False) -> list[Prepared] | None:
        """`keep`: for as long as this cache lives, because a CUDA graph that is being captured reads it by address."""
        if not self._same(params):
            self.clear()
        found = self.entries.get(key)
        if keep:
            self.captured.append(found)
        return found

    def put(self, key: Any, params: list[nn.Parameter], value: list[Prepared]) -> None:
        if any(p.is_inference() for p in params):
            return  # such tensors carry no version counter
        if not self.entries:
            self.params, self.versions = list(params), [p._version for p in params]
            self.values = [p.detach().clone() for p in params if p.device.type == "cpu"]
        while len(self.entries) >= self.SIZES:
            del self.entries[next(iter(self.entries))]
        self.entries[key] = value

    def _same(self, params: list[nn.Parameter]) -> bool:
        return (
            len(params) == len(self.params)
            and all(p is q and p._version == v for p, q, v in zip(params, self.params, self.versions, strict=True))
            and all(map(torch.equal, (p for p in params if p.device.type == "cpu"), self.values))
        )


def _note_step(optimiser: torch.optim.Optimizer, *_: Any) -> None:
    stepped = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
    torch.autograd.graph.increment_version(stepped)


# Fused optimisers write without raising the version counters that `Cache` watches; the others raise them once more.
register_optimizer_step_post_hook(_note_step)
