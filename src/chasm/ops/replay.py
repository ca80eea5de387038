"""What is made from parameters alone, as CUDA graphs: launched at once instead of kernel by kernel.

An eager training step of a mixer is bound by launches, and most of them turn theta and tables into bases and
matrices: the same kernels over the same memory in every step, whatever the input. So they are captured, with their
backward, and replayed. The values are those of the parameters as they are now; none is kept from step to step.
"""

import warnings
from collections.abc import Callable, Sequence
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
        self.params = params
        self.inputs = [p for p in params if p.requires_grad and torch.is_grad_enabled()]
        device = params[0].device
        here, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        # thread_local: threads that pin memory or watch a network do not disturb the capture
        how: Any = {"pool": torch.cuda.graph_pool_handle(), "stream": stream, "capture_error_mode": "thread_local"}
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # The same memory, but leaves of this stream: autograd ties a leaf to the stream that first used it.
        tensors = [p.detach().requires_grad_(p.requires_grad) for p in params]
        wanted = [t for t in tensors if t.requires_grad] if self.inputs else []
        stream.wait_stream(here)
        with torch.cuda.device(device), torch.autograd.set_multithreading_enabled(False):
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

    def __call__(self, make: Make) -> Any:
        if not self.inputs:
            self.forward.replay()
            return tree_unflatten(self.leaves, self.tree)
        made = iter(_Replayed.apply(self, make, *self.inputs))
        leaves = [next(made) if isinstance(t, Tensor) and t.requires_grad else t for t in self.leaves]
        return tree_unflatten(leaves, self.tree)


def _differentiable(made: Any) -> list[Tensor]:
    return [t for t in tree_flatten(made)[0] if isinstance(t, Tensor) and t.requires_grad]


def _gradients(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
    """Nothing that was saved is given back: a module called twice replays its forward twice, then its backward."""
    return list(torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)) if inputs else []


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, make: Make, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.captured, ctx.make = captured, make
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        captured.forward.replay()
        return tuple(t.detach() for t in _differentiable(captured.leaves))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        captured, inputs = ctx.captured, ctx.saved_tensors  # an error where one was changed since the forward
        if torch.is_grad_enabled():  # create_graph=True: by kernels, whose backward has one itself
            made = _differentiable(ctx.make(captured.params))
            pairs = [(t, g) for t, g in zip(made, grads, strict=True) if g is not None]
            outputs, of = zip(*pairs, strict=True)
            return None, None, *torch.autograd.grad(outputs, inputs, of, create_graph=True, allow_unused=True)
        for place, g in zip(captured.grads, grads, strict=True):
            place.zero_() if g is None else place.copy_(g)
        captured.backward.replay()
        return None, None, *(None if g is None else g.clone() for g in captured.found)  # the next replay writes there


def _places(params: list[nn.Parameter]) -> list[Any]:
    """What a graph is tied to: where parameters lie, and the stream."""
    stream = torch.cuda.current_stream(params[0].device)
    return [stream.cuda_stream, *((id(p), p.data_ptr(), p.requires_grad) for p in params)]


def _fit(params: list[nn.Parameter]) -> bool:
    """Whether params are plain ones on a card, and nobody records, watches or counts what is done with them."""
    if not params or not all(type(p) is nn.Parameter and p.is_cuda and p.is_leaf for p in params):
        return False
    if traced(params[0]) or torch.is_inference_mode_enabled() or torch.is_anomaly_enabled():
        return False
    if torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode():
        return False
    if torch._C._len_torch_dispatch_stack() > 0:  # somebody counts
        return False
    # Checkpointing compares what is saved with what is saved when it computes again, which may be another way.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None
