"""What is made from parameters alone, as CUDA graphs: launched at once instead of kernel by kernel.

An eager training step of a mixer is bound by launches, and most of them turn theta and tables into bases and
matrices: the same kernels over the same memory in every step, whatever the input. So they are captured, with their
backward, and replayed. The values are those of the parameters as they are now; none is kept from step to step.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from chasm.ops.kernels import traced

EAGER_CALLS = 2  # come first: libraries choose kernels and constants are made, which a capture does not allow
Make = Callable[[Sequence[Tensor]], Any]
SIZES = 8  # are captured, those that come first: whoever changes sizes all the time would only capture


class Replays:
    """replays(key, params, make) -> make(params), a tree of tensors that depends on the key and the params alone."""

    def __init__(self) -> None:
        self.params: list[int] = []
        self.clear()

    def clear(self) -> None:
        self.calls: dict[Any, int] = {}
        self.captured: dict[Any, _Captured] = {}
        self.failed = False

    def __deepcopy__(self, memo: Any) -> "Replays":
        return Replays()

    def __reduce__(self) -> Any:
        return (Replays, ())

    def __call__(self, key: Any, params: list[nn.Parameter], make: Make) -> Any:
        if self.failed or not _fit(params):
            return make(params)
        if self.params != [id(p) for p in params]:  # others than before: what is captured is of no use
            self.clear()
            self.params = [id(p) for p in params]
        key = (key, torch.is_grad_enabled(), *_places(params))
        if key not in self.captured:
            if key not in self.calls and len(self.calls) == SIZES:
                return make(params)
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] <= EAGER_CALLS:
                return make(params)
            try:
                self.captured[key] = _Captured(params, make)
            except RuntimeError as e:
                self.failed = True
                reason = (str(e).strip() or type(e).__name__).splitlines()[0]
                warnings.warn(f"no CUDA graph, so training steps are slower: {reason}", stacklevel=2)
                return make(params)
        return self.captured[key](make)


class _Captured:
    """make() and its backward, as two graphs. What it makes stays where it is, and is written again in every replay."""

    def __init__(self, params: list[nn.Parameter], make: Make) -> None:
        self.params, self.addresses = params, [p.data_ptr() for p in params]
        self.inputs = [p for p in params if p.requires_grad and torch.is_grad_enabled()]
        device = params[0].device
        here, stream = torch.cuda.current_stream(device), capture_stream(device)
        # thread_local: threads that pin memory or watch a network do not disturb the capture
        how: Any = {"pool": torch.cuda.graph_pool_handle(), "stream": stream, "capture_error_mode": "thread_local"}
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # The same memory, but leaves of this stream: autograd ties a leaf to the stream that first used it.
        tensors = [p.detach().requires_grad_(p.requires_grad) for p in params]
        wanted = [t for t in tensors if t.requires_grad] if self.inputs else []
        stream.wait_stream(here)
        with torch.cuda.device(device), torch.autograd.set_multithreading_enabled(False), no_collection():
            with torch.cuda.stream(stream):
                outputs = _differentiable(make(tensors))
                _gradients(outputs, wanted, [torch.zeros_like(t) for t in outputs])
            with torch.cuda.graph(self.forward, **how):
                self.leaves, self.tree = tree_flatten(make(tensors))
                outputs = _differentiable(self.leaves)
                self.grads = [torch.empty_like(t) for t in outputs]  # filled before each backward
            if wanted:
                with torch.cuda.graph(self.backward, **how):
                    self.found = _gradients(outputs, wanted, self.grads)
        here.wait_stream(stream)
        self.finish()

    def finish(self) -> None:
        of_params = {p.untyped_storage().data_ptr() for p in self.params}
        tensors = [t for t in self.leaves if isinstance(t, Tensor)]
        self.written = [t for t in tensors if t.untyped_storage().data_ptr() not in of_params]
        self.versions: list[int] = []

    def __call__(self, make: Make) -> Any:
        versions = [p._version for p in self.params]
        if versions != self.versions:  # who still wants a gradient by the values of before gets an error, not these
            torch.autograd.graph.increment_version(self.written)
            self.versions = versions
        if not self.inputs:
            self.forward.replay()
            return tree_unflatten(self.leaves, self.tree)
        made = iter(_Replayed.apply(self, make, *self.inputs))
        leaves = [next(made) if isinstance(t, Tensor) and t.requires_grad else t for t in self.leaves]
        return tree_unflatten(leaves, self.tree)


@contextmanager
def no_collection() -> Iterator[None]:
    """A collection during a capture could free tensors of other streams, which a capture does not allow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: what libraries and warm-ups leave behind belongs to a stream."""
    return torch.cuda.Stream(device)


def _differentiable(made: Any) -> list[Tensor]:
    return [t for t in tree_flatten(made)[0] if isinstance(t, Tensor) and t.requires_grad]


def _gradients(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
    """Nothing that was saved is given back: a module called twice replays its forward twice, then its backward."""
    return list(torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)) if inputs else []


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, make: Make, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.captured, ctx.make = captured, make
        ctx.save_for_backward(*captured.params)
        ctx.set_materialize_grads(False)
        captured.forward.replay()
        return tuple(t.detach() for t in _differentiable(captured.leaves))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        captured, params = ctx.captured, ctx.saved_tensors  # an error where one was changed since the forward
        if all(g is None for g in grads):
            return (None,) * (2 + len(captured.inputs))
        create_graph = torch.is_grad_enabled()
        if create_graph or captured.addresses != [p.data_ptr() for p in params]:  # FSDP moves them
            wanted = [any(p is q for q in captured.inputs) for p in captured.params]
            return None, None, *_by_kernels(ctx.make, params, wanted, grads, create_graph)
        for place, g in zip(captured.grads, grads, strict=True):
            place.zero_() if g is None else place.copy_(g)
        captured.backward.replay()
        return None, None, *(None if g is None else g.clone() for g in captured.found)  # the next replay writes there


def _by_kernels(
    make: Make, params: Sequence[Tensor], wanted: list[bool], grads: Sequence[Tensor | None], create_graph: bool
) -> Any:
    """Gradients of the wanted params, without a CUDA graph."""
    with torch.enable_grad():
        tensors = [p.view_as(p) for p in params]  # hooks of the parameters, and their sums, are for who called
        made = zip(_differentiable(make(tensors)), grads, strict=True)
        outputs, of = zip(*((t, g) for t, g in made if g is not None), strict=True)
    inputs = [t for t, w in zip(tensors, wanted, strict=True) if w]
    return torch.autograd.grad(outputs, inputs, of, create_graph=create_graph, allow_unused=True)


def _places(params: list[nn.Parameter]) -> list[Any]:
    """What a graph is tied to: where parameters lie, and the stream."""
    stream = torch.cuda.current_stream(params[0].device)
    return [stream.cuda_stream, *((id(p), p.data_ptr(), p.requires_grad) for p in params)]


def _fit(params: list[nn.Parameter], device: str = "cuda") -> bool:
    """Whether params are plain ones on a card, and nobody records, watches or counts what is done with them."""
    if not params or not all(type(p) is nn.Parameter and p.device.type == device and p.is_leaf for p in params):
        return False
    if traced(params[0]) or torch.is_inference_mode_enabled() or any(p.is_inference() for p in params):
        return False
    if torch.is_anomaly_enabled():
        return False
    if torch.version.hip is not None:  # never tried there
        return False
    if device == "cuda" and (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode()):
        return False
    if torch._C._len_torch_dispatch_stack() > 0:  # somebody counts
        return False
    # Checkpointing compares what is saved with what is saved when it computes again, which may be another way.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None
