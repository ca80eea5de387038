"""Batches of slices for training and scoring, read here or by processes of a loader."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from chasm.common.signals import delayed_signals, ignore_signals, postponed_handlers
from chasm.data import Batch, Resident, SliceDataset, collate


def batches(data: SliceDataset, rows: Iterable[list[int]], device: torch.device, workers: int) -> Generator[Batch]:
    """Yield batches on the device, without drawing from the global random stream.

    Args:
        data: slices of a split.
        rows: numbers of the slices of each batch.
        device: device of the batches.
        workers: processes that read slices, for data that is not in memory.

    Raises:
        DataError: if a slice cannot be read, here or in a worker.
        ChildProcessError: if a worker was killed.
    """
    if isinstance(data, Resident):
        for chosen in rows:
            yield data.batch(chosen).to(device)
    else:
        loader: DataLoader[Any] = DataLoader(
            _Collated(data),
            batch_sampler=rows,
            collate_fn=_as_it_is,
            num_workers=workers,
            worker_init_fn=_ignore_signals,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # without one it draws a seed from the stream that dropout uses
        )
        with dead_readers_are_one_line():
            with delayed_signals():  # they reach every process, also one that does not ignore them yet
                loaded = iter(loader)
            try:
                for batch in loaded:
                    if isinstance(batch, Exception):
                        raise batch
                    yield batch.to(device, non_blocking=True)
            finally:
                # The loader ends its processes when its last reference goes. An error in `batch` has a traceback that
                # leads back here and would keep them, and at exit Python waits for processes that ignore SIGTERM.
                with postponed_handlers():
                    del loaded
                    batch = None


class _Collated(Dataset[Any]):
    """Batches of a dataset by their rows. An error comes as a value: from a worker, torch would raise its traceback."""

    def __init__(self, data: SliceDataset) -> None:
        self.data = data

    def __getitems__(self, rows: list[int]) -> Batch | Exception:
        try:
            return collate([self.data[i] for i in rows])
        except (ValueError, OSError, MemoryError) as e:
            return e


def _as_it_is(batch: Any) -> Any:
    return batch


def _ignore_signals(worker: int) -> None:
    """Ignore the stop signals: the workers end with the main process, after it has saved."""
    ignore_signals()


@contextmanager
def dead_readers_are_one_line() -> Iterator[None]:
    """Raise one line if a process of a loader dies while the block runs.

    Torch raises its own error wherever the main process is at that moment, in the middle of a step, too.

    Raises:
        ChildProcessError: if a process was killed.
    """
    try:
        yield
    except RuntimeError as e:
        if not str(e).startswith("DataLoader worker"):
            raise
        raise ChildProcessError(
            "a process that reads data was killed, often for lack of memory: set train.workers lower, and start again"
        ) from e
