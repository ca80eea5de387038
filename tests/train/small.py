"""A dataset of a few drawn pictures, the recipe of a run that takes a moment, and processes that run it and die."""

import json
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chasm.data import SPLITS, Slice, SliceDataset, register_dataset
from chasm.data.records import check_split
from chasm.train import RunConfig, load_recipe, loop
from chasm.train.fingerprint import Fingerprint
from chasm.train.record import Best, Record


@register_dataset("tiny")
class Tiny(SliceDataset):
    """Discs of 16 x 16. `bad` is the case whose first slice is NaN; with `changing` a slice moves with the epoch."""

    needs_path = False

    def __init__(
        self, split: str = "train", *, cases: int = 3, bad: str = "", changing: bool = False, shared: str = ""
    ) -> None:
        self.split, self.bad, self.fixed = check_split(split), bad, not changing
        self.cases = [f"{split}{i}" for i in range(cases)] + ([shared] if shared else [])
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 2 * len(self.cases)

    def set_epoch(self, epoch: int) -> None:
        if not self.fixed:
            self._epoch.fill_(epoch)

    def __getitem__(self, i: int) -> Slice:
        case, index = self.cases[i // 2], i % 2
        rng = torch.Generator().manual_seed(100 * SPLITS.index(self.split) + i)
        y, x = torch.meshgrid(*2 * [torch.linspace(-1, 1, 16)], indexing="ij")
        centre, radius = torch.rand(2, 1, 1, generator=rng) - 0.5, 0.3 + torch.rand((), generator=rng) / 2
        image = ((x - centre[0]) ** 2 + (y - centre[1]) ** 2 < radius**2) * 1.0 + 0.1 * torch.rand(
            16, 16, generator=rng
        )
        image = image.roll(int(self._epoch), -1)
        if case == self.bad and index == 0:
            image = image * torch.nan
        return Slice(image[None], None, case, index, "tiny")


UNET: dict[str, Any] = {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0, 1]}}
VARNET = {"name": "varnet", "options": {"cascades": 2, **UNET["options"]}}
HIFI = {"name": "hifi-mamba", "options": {"width": 8, "groups": 1, "blocks": 2, "state": 2, "expansion": 1}}


def recipe(backbone: dict[str, Any] = UNET, data: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    training = {"steps": 6, "batch": 2, "lr": 1e-3, "val_every": 2, "save_every": 2, "log_every": 1, **train}
    return load_recipe(
        {
            "data": {"name": "tiny", "options": data or {}},
            "backbone": backbone,
            "mixer": {"name": "chasm"},
            "train": training,
        }
    )


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bit-equality is promised for one machine and number of threads; and for the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def record(step: int) -> Record:
    """The record of a checkpoint that holds nothing else."""
    return Record(step, Best(), 10.0 * step, [], Fingerprint({}, {}, {}))


def checkpoint(folder: Path, step: int | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and record of a checkpoint, the newest unless told."""
    found = sorted((folder / "checkpoints").glob("[0-9]*"))
    chosen = found[-1] if step is None else folder / "checkpoints" / f"{step:08d}"
    return load_file(chosen / "state.safetensors"), json.loads((chosen / "record.json").read_text())


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: weights, optimiser, random state, best so far, log, scores. Times and settings may differ."""
    (tensors, record), (others, other) = checkpoint(a), checkpoint(b)
    assert tensors.keys() == others.keys()
    for name, value in tensors.items():
        assert torch.equal(value, others[name]), name
    times: dict[str, Any] = {"seconds": 0, "fingerprint": {}, "record_sha256": ""}  # a checksum of the whole record
    assert {**record, **times} == {**other, **times}
    for name in ("log.jsonl", "log.csv", "weights.safetensors", "examples.npz"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    metrics, those = (json.loads((f / "metrics.json").read_text()) for f in (a, b))
    assert {**metrics, "seconds": 0} == {**those, "seconds": 0}


# --- real processes ---------------------------------------------------------------------------------

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["chasm.train", "PIL.Image", "torch._dynamo"])  # what every run imports


def process(work: Callable[..., None], *args: Any, env: dict[str, str] | None = None) -> Any:
    started = _context.Process(target=_alone, args=(work, args, env or {}))
    started.start()
    return started


def code(work: Callable[..., None], *args: Any) -> int:
    """Exit code of `work` in a process of its own; negative: the signal that ended it."""
    child = process(work, *args)
    child.join(60)
    return child.exitcode


def _alone(work: Callable[..., None], args: tuple[Any, ...], env: dict[str, str]) -> None:
    os.setpgid(0, 0)  # a group of its own, to be signalled as one
    multiprocessing.set_start_method("fork", force=True)  # of loader workers; else that of this process
    os.environ |= {"ACCELERATE_USE_CPU": "true", **env}
    torch.set_num_threads(1)
    work(*args)


def run(config: RunConfig, folder: Path) -> None:
    loop.train(config, folder, quiet=True)


@contextmanager
def at_step(step: int, act: Callable[[], None]) -> Iterator[None]:
    """`act` in the middle of that step, after its gradients and before its update."""
    original = loop.Trainer._agree

    def agree(self: Any, loss: torch.Tensor) -> float:
        if self.step == step:
            act()
        return original(self, loss)

    loop.Trainer._agree = agree  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.Trainer._agree = original  # type: ignore[method-assign]


def interrupt_twice() -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


def run_signalled(config: RunConfig, folder: Path, step: int, number: int, group: bool = False) -> None:
    def send() -> None:
        if group:  # from outside, as a scheduler does: a loader's worker takes no offence at its own parent's signal
            subprocess.run(["kill", f"-{number}", "--", f"-{os.getpgrp()}"], start_new_session=True, check=True)
        else:
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may themselves run under nohup, which ignores it
    with at_step(step, send):
        run(config, folder)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
