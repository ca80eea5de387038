"""Processes that read data: stop signals do not reach them, and one that dies is one line wherever the run is."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small import _one_thread, at_step, recipe  # noqa: F401

from chasm.common.signals import STOP_SIGNALS, delayed_signals
from chasm.train import train
from chasm.train.loading import batches
from chasm.train.run import open_split


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_that_comes_while_a_process_starts_does_not_end_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C and schedulers signal all processes of a run, among them those that an epoch has just started."""

    def early() -> None:  # torch calls it in the new process, before that ignores the signals
        os.kill(os.getpid(), number)

    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_set_worker_signal_handlers", early)
    data = open_split(recipe(), "train")
    assert len(list(batches(data, [[0], [1]], torch.device("cpu"), workers=1))) == 2


def test_a_delayed_signal_comes_after_the_block() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        with delayed_signals():
            signal.raise_signal(signal.SIGUSR1)  # to this thread: another one may take what the process gets
            time.sleep(0.01)
            assert not received
        assert received == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_while_readers_end_is_handled_when_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users press Ctrl-C twice. Torch's loader would print the second as a traceback, and not end its processes."""
    loader: Any = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    end = loader._shutdown_workers

    def interrupted(self: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        end(self)

    monkeypatch.setattr(loader, "_shutdown_workers", interrupted)
    stream = batches(open_split(recipe(), "train"), [[0], [1]], torch.device("cpu"), workers=1)
    next(stream)
    try:
        with pytest.raises(KeyboardInterrupt):
            stream.close()
        assert not multiprocessing.active_children()
    finally:
        for left in multiprocessing.active_children():
            left.kill()  # else a test that fails would wait for it at exit


def test_a_reader_that_dies_during_a_step_is_one_line_and_the_run_goes_on_later(tmp_path: Path) -> None:
    config: Any = recipe(resident=False, workers=1)
    others = set(multiprocessing.active_children())  # of tests before this one

    def kill() -> None:
        for reader in set(multiprocessing.active_children()) - others:
            os.kill(reader.pid or 0, signal.SIGKILL)
        time.sleep(10)  # until torch raises its error here

    with pytest.raises(ChildProcessError, match="a process that reads data was killed") as e, at_step(4, kill):
        train(config, tmp_path, quiet=True)
    assert "\n" not in str(e.value)
    assert train(config, tmp_path, quiet=True)["steps"] == 6
