"""Start the processes of a run together, and stop them in order."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator

from chasm.common.signals import heeded_signals


def make_accelerator() -> Accelerator:
    """Return the Accelerator of this process; precision is the run's own. Without a GPU processes meet on the CPU.

    Raises:
        ValueError: if not all processes that were launched found each other.
    """
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if launched > 1 and not torch.cuda.is_available():
        accelerator = Accelerator(mixed_precision="no", cpu=True)
    else:
        accelerator = Accelerator(mixed_precision="no")
    if accelerator.num_processes != launched:
        raise ValueError(
            f"{launched} processes were launched (WORLD_SIZE), {accelerator.num_processes} found each other: "
            "start them with torchrun, or unset WORLD_SIZE"
        )
    return accelerator


class StopRequest:
    """Remembers the signal that asked this process to stop, so that the loop can finish its step first.

    A second Ctrl-C stops at once if there is one process. With several, one Ctrl-C reaches each of them twice: from the
    terminal and from their launcher.

    Args:
        processes: number of processes of the run.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.signal = 0  # no signal yet

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the stop signals inside this context, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._on_signal) for number in heeded_signals()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, *_: Any) -> None:
        if self.signal and number == signal.SIGINT and self.processes == 1:
            raise KeyboardInterrupt
        self.signal = number
