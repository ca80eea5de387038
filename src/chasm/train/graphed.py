"""The gradients of a training step as one CUDA graph: captured once, replayed with each new batch.

A step of many small kernels is bound by launching them; a graph launches all of them at once. It holds the forward
pass, loss and backward pass over inputs that stay in place. The optimiser, clipping and everything that looks at a
value stay outside. Whatever a model does differently from step to step on the host would be frozen, so a model
that waits for the host is refused.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from chasm.tasks import TaskBatch

WARM_UP = 3  # eager steps first: libraries choose kernels and make plans, which a capture does not allow


class GraphedGradients:
    """graphed(batches) -> loss, with fresh gradients in `p.grad`: always the same tensors once it is captured.

    `gradients(batches)` runs forward and backward over the micro-batches and returns their loss. The first calls,
    and calls with batches of another shape than the captured ones, run it eagerly.
    """

    def __init__(self, gradients: Callable[[list[TaskBatch]], Tensor], parameters: Iterable[nn.Parameter]) -> None:
        self.gradients, self.parameters = gradients, list(parameters)
        self.stream = torch.cuda.Stream()
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.signature: list[Any] = []

    def __call__(self, batches: list[TaskBatch]) -> Tensor:
        signature = [_signature(batch) for batch in batches]
        if signature != self.signature:
            if self.graph is not None:
                return self._eager(batches)
            self.signature, self.calls = signature, 0  # kernels and plans are made for shapes: warm up again
        self.calls += 1
        if self.calls <= WARM_UP:
            return self._eager(batches, last=self.calls == WARM_UP)
        if self.graph is None:
            self._capture(batches)
        for static, batch in zip(self.static, batches, strict=True):
            for name in _tensors(batch):
                getattr(static, name).copy_(getattr(batch, name))
        assert self.graph is not None
        self.graph.replay()
        for p, grad in self.grads:  # an eager step, or someone's zero_grad, may have put others there
            p.grad = grad
        return self.loss

    def _eager(self, batches: list[TaskBatch], last: bool = False) -> Tensor:
        """On the stream that will capture. In the last warm-up call nothing may wait for the host."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(self.stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            self._forget()
            if last:
                torch.cuda.set_sync_debug_mode("error")
            try:
                loss = self.gradients(batches)
            except RuntimeError as e:
                if last and "synchroniz" in str(e):
                    raise _refusal("it waits for the host in every step") from None
                raise
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        here.wait_stream(self.stream)
        return loss

    def _capture(self, batches: list[TaskBatch]) -> None:
        self.static = [
            replace(batch, **{name: getattr(batch, name).clone() for name in _tensors(batch)}) for batch in batches
        ]
        self._forget()  # the backward pass then writes gradients, instead of adding to them
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: a loader that pins memory in a thread of its own does not disturb the capture
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.loss = self.gradients(self.static)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            raise _refusal((str(e).strip() or type(e).__name__).splitlines()[0]) from e
        self.grads = [(p, p.grad) for p in self.parameters if p.grad is not None]
        self.graph = graph

    def _forget(self) -> None:
        for p in self.parameters:
            p.grad = None


def _refusal(why: str) -> ValueError:
    return ValueError(f"this model cannot be captured in a CUDA graph ({why}): set train.cuda_graph to false")


def _tensors(batch: TaskBatch) -> list[str]:
    return [f.name for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)]


def _signature(batch: TaskBatch) -> list[tuple[Any, ...]]:
    return [(name, getattr(batch, name).shape, getattr(batch, name).dtype) for name in _tensors(batch)]
