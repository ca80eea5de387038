"""Two processes compute what one computes."""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from small import HIFI, UNET, _one_thread, at_step, checkpoint, interrupt_twice, process, recipe, run, run_signalled  # noqa: F401

from chasm.train import RunConfig, load_recipe, train
from chasm.train.loop import Trainer

STILL = {**HIFI, "options": {**HIFI["options"], "dropout": 0.0, "drop_path": 0.0}}
VIT = {
    "name": "vit",
    "options": {"width": 8, "depth": 2, "heads": 2, "patch": 4, "head_width": 4, "slot_blocks": [2]},
}


def two(work: Any, config: RunConfig, folder: Path, *args: Any, **env: str) -> list[int]:
    """Exit codes of two processes, started as torchrun starts them; `env` beside its variables."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
    ranks = [process(work, config, folder, *args, env={**shared, "RANK": r, "LOCAL_RANK": r}) for r in ("0", "1")]
    for rank in ranks:
        rank.join(90)
    return [rank.exitcode for rank in ranks]


def assert_close(a: Path, b: Path) -> None:
    """Within rounding, measured by how far the weights have moved. Not by their size: while all gains are near one no
    basis matters, so the gradient of theta is tiny, in places mostly rounding, and Adam takes full steps even so."""
    (tensors, record), (others, other) = checkpoint(a), checkpoint(b)
    start = Trainer(load_recipe(a / "config.yaml"), a, quiet=True).model.state_dict()
    for name, first in start.items():
        value, that = tensors[f"model.{name}"], others[f"model.{name}"]
        moved, apart = (value - first).norm(), (value - that).norm()
        assert apart <= 0.01 * moved + 5e-5, f"{name}: moved by {moved:.2g}, {apart:.2g} apart"
    assert [r["step"] for r in record["log"]] == [r["step"] for r in other["log"]]
    for row, that in zip(record["log"], other["log"], strict=True):
        assert row == pytest.approx(that, rel=1e-3)
    metrics, those = (json.loads((f / "metrics.json").read_text()) for f in (a, b))
    assert metrics["mean"] == pytest.approx(those["mean"], rel=1e-3)


@pytest.mark.parametrize(
    ("backbone", "options"),
    [(UNET, {"accumulate": 2, "ema": 0.9, "clip": 0.5}), (STILL, {"steps": 4}), (VIT, {"steps": 4})],
    ids=["unet accumulated", "hifi", "vit"],
)
def test_two_processes_give_the_result_of_one(backbone: Any, options: dict[str, Any], tmp_path: Path) -> None:
    config = recipe(backbone, batch=4, spectral_multiplier=10, **options)
    assert two(run, config, tmp_path / "two") == [0, 0]
    train(config, tmp_path / "one", quiet=True)
    assert_close(tmp_path / "one", tmp_path / "two")


def test_without_a_gpu_they_meet_on_the_cpu(tmp_path: Path) -> None:
    """torchrun does not say that it is for the CPU: each would train by itself, into one folder."""
    env = {"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": ""}
    assert two(expect_two, recipe(batch=4), tmp_path, **env) == [0, 0]


def expect_two(config: RunConfig, folder: Path) -> None:
    trainer = Trainer(config, folder, quiet=True)
    assert trainer.accelerator.num_processes == 2
    assert trainer.device.type == "cpu"
    torch.distributed.barrier()


def test_a_process_that_finds_no_other_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # this process has found long ago that it is alone
    with pytest.raises(ValueError, match=r"2 processes were launched \(WORLD_SIZE\), 1 found each other"):
        train(recipe(), tmp_path, quiet=True)


def test_both_stop_at_one_step_when_one_is_told_to(tmp_path: Path) -> None:
    config = recipe(batch=4)
    assert two(signal_the_second, config, tmp_path / "two") == [143, 143]
    assert checkpoint(tmp_path / "two")[1]["step"] == 4
    assert two(run, config, tmp_path / "two") == [0, 0]
    train(config, tmp_path / "one", quiet=True)
    assert_close(tmp_path / "one", tmp_path / "two")


def signal_the_second(config: RunConfig, folder: Path) -> None:
    if os.environ["RANK"] == "1":
        run_signalled(config, folder, 3, signal.SIGTERM)
    else:
        run(config, folder)


def test_one_interrupt_that_comes_twice_is_one(tmp_path: Path) -> None:
    """From the terminal to all of a group, and again from what launched them."""
    assert two(interrupted_twice, recipe(batch=4, save_every=9), tmp_path) == [130, 130]
    assert checkpoint(tmp_path)[1]["step"] == 4


def interrupted_twice(config: RunConfig, folder: Path) -> None:
    with at_step(3, interrupt_twice):
        run(config, folder)


def test_slices_of_every_process_are_named(tmp_path: Path) -> None:
    config = recipe(batch=4, data={"bad": "train1"})
    assert two(run, config, tmp_path) == [1, 1]
    assert len(json.loads((tmp_path / "nonfinite.jsonl").read_text())["slices"]) == 4


def test_a_batch_that_cannot_be_shared_out(tmp_path: Path) -> None:
    assert two(expect_refusal, recipe(batch=3), tmp_path) == [7, 7]


def expect_refusal(config: RunConfig, folder: Path) -> None:
    with pytest.raises(ValueError, match="batch 3 must be a multiple of 2 processes x 1 accumulated"):
        run(config, folder)
    torch.distributed.barrier()  # the one that hosts the meeting place must not leave before the other has arrived
    raise SystemExit(7)
