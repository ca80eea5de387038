"""Run a network on an example and note what its modules see."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


def watch(model: nn.Module, hooks: Iterable[tuple[nn.Module, Hook]], example: Any) -> None:
    """Run the model once on an example, in eval mode and without gradients.

    Args:
        model: the network. Its buffers and the mode of every module stay as they were.
        hooks: its modules, each with a function that is called as (module, args, kwargs, output) after the module ran.
        example: input of the network, see `call`.
    """
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        with torch.no_grad(), evaluating(model):
            call(model, example)
    finally:
        for handle in handles:
            handle.remove()


def call(model: nn.Module, example: Any) -> Any:
    """Return the output of a network for an example.

    Args:
        model: the network.
        example: one argument, a tuple of arguments, or a dictionary of keyword arguments. (For a network that takes one
            dictionary, give a tuple with that dictionary.)

    >>> call(nn.Identity(), {"input": 3}), call(nn.Identity(), (3,)), call(nn.Identity(), 3)
    (3, 3, 3)
    """
    if isinstance(example, tuple):
        return model(*example)
    return model(**example) if isinstance(example, Mapping) else model(example)


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
