"""Where a program runs, and how it finds out that a call waits for the host."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from chasm.common.text import first_line


def usable_device(device: torch.device | str | None = None) -> torch.device:
    """Return a device that can be used here; by default a CUDA device if there is one, and the CPU otherwise.

    Raises:
        ValueError: if torch does not know the name, or the machine does not have the device.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise ValueError(
            f"device {str(device)!r} cannot be used here ({first_line(e)}): choose cpu, or cuda on a GPU"
        ) from None
    return torch.device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def waiting_for_the_host_raises() -> Iterator[None]:
    """Make CUDA calls that wait for the host raise a RuntimeError: no CUDA graph can contain one.

    A capture that fails leaves torch's allocator and random generators in a state that breaks later calls, so a call
    is tried inside this context first.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
