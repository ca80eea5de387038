"""The gradients of one training step: the only place that runs forward, loss and backward."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from chasm.mixers.batched import batched_bases
from chasm.tasks import Task, TaskBatch

Context = AbstractContextManager[Any]


def add_gradients(
    model: nn.Module,
    task: Task,
    batches: Iterable[TaskBatch],
    *,
    micro_batches: int = 1,
    bf16: bool = False,
    is_graphed: bool = False,
    forward: Callable[..., Any] | None = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
    no_sync: Callable[[], Context] = nullcontext,
    part: Callable[[str], Context] = nullcontext,
) -> Tensor:
    """Add the gradients of a step to those in `p.grad`, and return its loss, a scalar without a gradient.

    Args:
        model: a backbone in training mode.
        task: defines the loss.
        batches: the micro-batches of the step.
        micro_batches: number of micro-batches; the loss is their mean.
        bf16: run the forward pass under bfloat16 autocast. The loss is always taken in float32.
        is_graphed: the call is captured in a CUDA graph.
        forward: called instead of the model, for example the model wrapped for several processes.
        backward: called with the loss; Accelerate has its own.
        no_sync: context around all micro-batches but the last, in which processes do not exchange gradients.
        part: context around the parts "bases", "model" and "loss" of the forward pass, for a profiler.
    """
    total: Tensor | None = None
    for i, batch in enumerate(batches):
        is_last = i == micro_batches - 1
        with ExitStack() as stack:
            with part("bases"):
                stack.enter_context(batched_bases(model))
            stack.enter_context(nullcontext() if is_last else no_sync())
            # Every replay of a graph must cast the weights anew, so autocast may not cache earlier casts.
            kind = batch.input.device.type
            with part("model"), torch.autocast(kind, torch.bfloat16, enabled=bf16, cache_enabled=not is_graphed):
                output, aux = (forward or model)(batch.input, **batch.physics, return_aux=True)
            with part("loss"):
                loss = (task.loss(output.float(), batch) + aux.float()) / micro_batches
            backward(loss)
        total = loss.detach() if total is None else total + loss.detach()
    if total is None:
        raise ValueError("a training step needs at least one batch, got none")
    return total
