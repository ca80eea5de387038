"""The signals that ask a process to save and stop."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Schedulers send SIGTERM, SIGUSR1 (before a requeue) or SIGHUP, a lost terminal SIGHUP. Windows has the first two.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)


def heeded_signals() -> list[signal.Signals]:
    """Return the stop signals of this process, without SIGHUP where it is ignored, as under nohup."""
    ignored = getattr(signal, "SIGHUP", None)
    return [n for n in STOP_SIGNALS if n != ignored or signal.getsignal(n) != signal.SIG_IGN]


@contextmanager
def delayed_signals(numbers: Iterable[int] = STOP_SIGNALS) -> Iterator[None]:
    """Keep signals waiting while the block runs. A process that is started meanwhile keeps them waiting for good."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def restored_handlers() -> Iterator[None]:
    """Restore the handlers of the stop signals after the block, in the main thread, which alone can set them."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def postponed_handlers() -> Iterator[None]:
    """Call the handlers of stop signals after the block, so that a Ctrl-C does not leave its work half done.

    Unlike `delayed_signals` this also holds when another thread takes the signal, and only for this process.
    """
    if threading.current_thread() is not threading.main_thread():  # where no handler is called
        yield
        return
    received: list[int] = []
    try:
        with restored_handlers():
            for number in heeded_signals():
                signal.signal(number, lambda number, _: received.append(number))
            yield
    finally:
        for late in dict.fromkeys(received):
            signal.raise_signal(late)


def ignore_signals() -> None:
    """Ignore the stop signals in this process from now on, those that wait among them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
