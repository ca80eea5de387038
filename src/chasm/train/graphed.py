"""The gradients of a training step as one CUDA graph: captured once, replayed with each new batch.

A step of many small kernels spends its time launching them; a graph launches all of them at once. The graph contains
the forward pass, the loss and the backward pass, over inputs at fixed addresses. The optimiser, clipping, and all code
that reads a value stay outside. A capture freezes every decision that the host makes, so a model that waits for the
host is refused.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from chasm.common.devices import waiting_for_the_host_raises
from chasm.common.text import first_line
from chasm.tasks import TaskBatch

WARM_UP_STEPS = 3  # eager steps in which libraries choose kernels and make plans, which a capture does not allow


class GraphedGradients:
    """``graphed(batches)`` returns the loss and leaves new gradients in ``p.grad``.

    The first calls run eagerly, and so do calls with batches of other shapes than the captured ones. All other calls
    replay the graph, which writes to the same gradient tensors each time.

    Args:
        gradients: runs forward and backward over the micro-batches and returns their loss.
        parameters: the parameters that get gradients.
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
        if self.calls <= WARM_UP_STEPS:
            return self._eager(batches, is_last=self.calls == WARM_UP_STEPS)
        if self.graph is None:
            self._capture(batches)
        for static, batch in zip(self.static, batches, strict=True):
            for name in _tensors(batch):
                getattr(static, name).copy_(getattr(batch, name))
        assert self.graph is not None
        self.graph.replay()
        for p, grad in self.grads:  # an eager step or a zero_grad() may have replaced them
            p.grad = grad
        return self.loss

    def _eager(self, batches: list[TaskBatch], is_last: bool = False) -> Tensor:
        """Run eagerly on the stream that will capture. In the last warm-up step, refuse to wait for the host."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            self._forget()
            try:
                with waiting_for_the_host_raises() if is_last else nullcontext():
                    loss = self.gradients(batches)
            except RuntimeError as e:
                if is_last and "synchroniz" in str(e):
                    raise _refusal("it waits for the host in every step") from None
                raise
        here.wait_stream(self.stream)
        return loss

    def _capture(self, batches: list[TaskBatch]) -> None:
        self.static = [
            replace(batch, **{name: getattr(batch, name).clone() for name in _tensors(batch)}) for batch in batches
        ]
        self._forget()  # without gradients the backward pass writes new ones instead of adding to them
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: a loader may pin memory in its own thread without disturbing the capture
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.loss = self.gradients(self.static)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            raise _refusal(first_line(e)) from e
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
