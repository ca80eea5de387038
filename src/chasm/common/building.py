"""Watching a network while it is built."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module as torch_modules


@contextmanager
def watched_building(
    on_parameter: Callable[..., Any], on_module: Callable[..., Any], on_buffer: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Call a function whenever a module gets a parameter, a module or a buffer. One that raises stops the building.

    Args:
        on_parameter: called with the module, the name and the parameter.
        on_module: called with the module, the name and its new part.
        on_buffer: called with the module, the name and the buffer.
    """
    handles = [
        torch_modules.register_module_parameter_registration_hook(on_parameter),
        torch_modules.register_module_module_registration_hook(on_module),
    ]
    if on_buffer is not None:
        handles.append(torch_modules.register_module_buffer_registration_hook(on_buffer))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
