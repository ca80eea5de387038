"""The values that a mixer in eval mode computes from its parameters and keeps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from chasm.common.tracing import is_transformed
from chasm.ops.library import wants_gradient


class Cache:
    """Values made from parameters, for the last few keys.

    They are kept until a parameter is replaced, moved or written to in a way that its version counter sees, or until
    `clear`. Writes through `.data` and steps of fused optimisers go unseen.
    """

    MAX_ENTRIES = 4

    def __init__(self) -> None:
        self.captured: list[Any] = []  # kept as long as this cache: CUDA graphs read these values by address
        self.batched: tuple[dict[str, Tensor], list[Tensor], list[Any]] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self.params: list[Tensor] = []
        self.state: list[Any] = []
        self.entries: dict[Any, Any] = {}

    def get(self, key: Any, params: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        """Return make(), or its earlier result for this key if the parameters have not changed.

        Args:
            key: tells values apart that are made from the same parameters.
            params: parameters that values depend on besides the key.
            make: called without gradients.
        """
        if any(p.is_inference() for p in params):  # these have no version counter
            return make()
        state = _state(params)
        if state != self.state:
            self.params, self.state, self.entries = list(params), state, {}  # holding params keeps their ids unique
        entries = self.entries  # if another thread writes a parameter during make(), these are no longer in use
        value = entries.get(key)
        if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            if value is None:
                return make()  # part of the graph, which has not run yet
            self.captured.append(value)
        if value is None:
            with torch.inference_mode(False), torch.no_grad():  # usable later in any mode
                value = make()
            while len(entries) >= self.MAX_ENTRIES:
                entries.pop(next(iter(entries)), None)
            entries[key] = value
        return value

    def set_batched_bases(self, bases: dict[str, Tensor] | None, thetas: dict[str, Tensor]) -> None:
        """Take the bases that `chasm.batched_bases` computed from these thetas, by axis; with None forget them."""
        params = list(thetas.values())
        self.batched = None if bases is None else (bases, params, _state(params))

    def batched_bases(self, thetas: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return these bases if they fit the present thetas and have the gradient that is needed; else nothing."""
        params = list(thetas.values())
        if self.batched is None or torch.compiler.is_compiling() or is_transformed(params[0]):
            return {}  # compiled and transformed code cannot read version counters
        bases, _, state = self.batched
        lacks_gradient = wants_gradient(params) and not all(U.requires_grad for U in bases.values())
        return {} if lacks_gradient or state != _state(params) else bases

    def __deepcopy__(self, memo: Any) -> "Cache":
        return Cache()

    def __reduce__(self) -> Any:
        return (Cache, ())


def _state(params: Sequence[Tensor]) -> list[Any]:
    """Return values that change when a parameter is replaced, moved or written to.

    The caller keeps the parameters, so that no id is used again.
    """
    return [(id(p), p.data_ptr(), p._version) for p in params]
