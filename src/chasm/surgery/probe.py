"""Run a network on an example and note what its modules see."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


def watch(model: nn.Module, hooks: Iterable[tuple[nn.Module, Hook]], example: Any) -> None:
    """Run the model once on an example, in eval mode and without gradients.

    Args:
        model: the network. Its buffers and the mode of every module stay as they were.
        hooks: modules of it, each with the function that is called as (module, args, kwargs, output) after it ran.
        example: what the network takes: one argument, or a tuple of arguments.
    """
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        with torch.no_grad(), evaluating(model):
            model(*example) if isinstance(example, tuple) else model(example)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; at the end every module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
