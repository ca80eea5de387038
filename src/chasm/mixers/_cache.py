"""What a mixer keeps of its parameters, and how a change of them is seen."""

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class MadeFrom(dict[Any, Any]):
    """Whatever was made from these parameters, valid while they are the same.

    A change is seen by object identity and torch's version counter, which every in-place write bumps: optimiser step,
    `load_state_dict`, `copy_`. A write through `.data` does not; `values`: on a CPU those are compared as well.
    """

    def __init__(self, params: Iterable[Tensor], *, values: bool = False) -> None:
        super().__init__()
        self.params = list(params)
        watch(self.params)
        self.versions = [p._version for p in self.params]
        self.contents = [p.detach().clone() for p in self.params if values and p.device.type == "cpu"]

    def holds_for(self, params: Sequence[Tensor]) -> bool:
        return (
            len(params) == len(self.params)
            and all(p is q and p._version == v for p, q, v in zip(params, self.params, self.versions, strict=True))
            and all(map(torch.equal, (p for p in params if p.device.type == "cpu"), self.contents))
        )


class Cache:
    """What an eval mixer prepared for the last few input sizes, and the bases `batched_bases` gives it for a while."""

    SIZES = 4

    def __init__(self) -> None:
        self.captured: list[Any] = []  # for as long as this cache lives: CUDA graphs read these by address
        self.clear()

    def clear(self) -> None:
        self.entries = MadeFrom([])
        self.given: MadeFrom | None = None

    def __deepcopy__(self, memo: Any) -> "Cache":
        return Cache()

    def __reduce__(self) -> Any:
        return (Cache, ())

    def of(self, params: Sequence[Tensor]) -> MadeFrom:
        """The entries of these parameters as they are now.

        Ask before making one, and `put` it here: if another thread writes a parameter meanwhile, both are let go of.
        """
        if any(p.is_inference() for p in params):
            return MadeFrom([])  # such tensors carry no version counter
        entries = self.entries
        if not entries.holds_for(params):
            entries = self.entries = MadeFrom(params, values=True)
        return entries

    def put(self, entries: MadeFrom, key: Any, value: Any) -> None:
        while len(entries) >= self.SIZES:
            entries.pop(next(iter(entries)), None)
        entries[key] = value


_WATCHED: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by id: tensors compare element by element


def watch(params: Iterable[Tensor]) -> None:
    """From now on a step of any optimiser raises the version counters of these parameters, and of no others."""
    for p in params:
        if _WATCHED.get(id(p)) is not p:
            _WATCHED[id(p)] = p


def _note_step(optimiser: torch.optim.Optimizer, *_: Any) -> None:
    if not _WATCHED:
        return
    ours = {id(ref()) for ref in _WATCHED.valuerefs()}
    params = (p for group in optimiser.param_groups for p in group["params"] if id(p) in ours)
    torch.autograd.graph.increment_version([p for p in params if p.grad is not None])


# Fused optimisers write without raising version counters; the others raise them once more.
register_optimizer_step_post_hook(_note_step)
