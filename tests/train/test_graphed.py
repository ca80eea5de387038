"""A step as a CUDA graph follows the eager one; where there is none, it is refused. And float32 means float32."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from small import HIFI, UNET, VARNET, at_step, recipe
from torch import Tensor, nn

from chasm.tasks import TaskBatch, create_task
from chasm.train import evaluate, graphed, train
from chasm.train.graphed import GraphedGradients
from chasm.train.loop import Trainer

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _forget_devices() -> None:
    AcceleratorState._reset_state()
    PartialState._reset_state()


@pytest.fixture
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _forget_devices()
    yield
    _forget_devices()


@pytest.fixture
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    _forget_devices()
    yield
    _forget_devices()


# --- without a GPU ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_on_cpu")
def test_a_cpu_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train.cuda_graph needs one process on a CUDA device, got 1 on cpu") as e:
        train(recipe(cuda_graph=True), tmp_path / "run", quiet=True)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "run").exists()


def test_a_graph_and_recomputation_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"set one of them to false"):
        recipe({**HIFI, "options": {**HIFI["options"], "checkpoint": True}}, cuda_graph=True)


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_as_the_config_says_while_it_trains_and_as_before_after(allowed: bool, tmp_path: Path) -> None:
    flags = lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)  # noqa: E731
    seen, before = [], flags()
    with at_step(1, lambda: seen.append(flags())):
        train(recipe(tf32=allowed, steps=2), tmp_path, quiet=True)
    assert seen == [(allowed, allowed)]
    assert flags() == before
    assert json.loads((tmp_path / "environment.json").read_text())["tf32"] is allowed


@pytest.mark.usefixtures("_on_cpu")
def test_scores_of_a_run_are_taken_under_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(recipe(steps=2), tmp_path, quiet=True)
    seen = []
    original = nn.Conv2d.forward

    def noting(self: nn.Conv2d, x: Tensor) -> Tensor:
        seen.append(torch.backends.cudnn.allow_tf32)
        return original(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", noting)
    evaluate(tmp_path, "val")
    assert seen
    assert not any(seen)


class _Stage:
    """CUDA's stream and graph, played on a CPU: a capture notes what was asked, a replay does it again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing = False
        self.modes: list[Any] = []
        stage = self

        class Stream:
            def wait_stream(self, _: Any) -> None: ...

        class Graph:
            def replay(self) -> None:
                stage.work()

        class Context:
            def __init__(self, *_: Any, **__: Any) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *_: Any) -> None: ...

        class Capture(Context):
            def __enter__(self) -> None:
                stage.capturing = True

            def __exit__(self, *_: Any) -> None:
                stage.capturing = False

        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "stream": Context,
            "graph": Capture,
            "current_stream": Stream,
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": self.modes.append,
        }.items():
            monkeypatch.setattr(graphed.torch.cuda, name, value)


def test_warm_up_capture_replay_and_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = _Stage(monkeypatch)
    weight = nn.Parameter(torch.ones(2))
    eager: list[int] = []

    def gradients(batches: list[TaskBatch]) -> Tensor:
        loss = torch.zeros(())
        if not stage.capturing:
            eager.append(len(batches[0].input))
            for batch in batches:
                part = (weight * batch.input).sum()
                part.backward()
                loss += part.detach()
            return loss
        weight.grad = torch.zeros(2)
        grad = weight.grad

        def work() -> None:  # what the captured kernels do: write, not add, over static inputs
            grad.copy_(sum(b.input.sum(0) for b in batches))
            loss.copy_(sum((weight * b.input).sum().detach() for b in batches))

        stage.work = work  # type: ignore[attr-defined]
        return loss

    def batch(rows: int, value: float) -> TaskBatch:
        return TaskBatch(torch.full((rows, 2), float(value)), torch.zeros(rows))

    step = GraphedGradients(gradients, [weight])
    assert step([batch(2, 1.0), batch(2, 1.0)]) == 8  # a shape that does not come again warms nothing up
    eager.clear()
    for i in range(graphed.WARM_UP_STEPS):
        assert step([batch(3, i), batch(3, 1.0)]) == 6 * (i + 1)
        assert torch.equal(weight.grad, torch.full((2,), 3.0 * (i + 1)))
    assert eager == graphed.WARM_UP_STEPS * [3]
    assert stage.modes.count("error") == 1  # the last warm-up call must not wait for the host
    kept = None
    for value in (5.0, 7.0):
        assert step([batch(3, value), batch(3, 1.0)]) == 6 * (value + 1)
        assert torch.equal(weight.grad, torch.full((2,), 3 * (value + 1)))
        assert kept is None or weight.grad is kept  # the same tensor in every replay
        kept = weight.grad
    assert eager == graphed.WARM_UP_STEPS * [3]
    assert step([batch(1, 2.0), batch(1, 2.0)]) == 8  # another shape runs eagerly
    assert torch.equal(weight.grad, torch.full((2,), 4.0))
    weight.grad = None
    step([batch(3, 9.0), batch(3, 1.0)])
    assert weight.grad is kept
    assert torch.equal(weight.grad, torch.full((2,), 30.0))


def test_every_tensor_of_a_batch_is_copied() -> None:
    image = torch.rand(2, 1, 16, 16)
    prepared = create_task("reconstruction").prepare(image)
    assert graphed._tensors(prepared) == ["input", "target", "mask", "low", "scale"]
    assert graphed._signature(prepared) == graphed._signature(copy.deepcopy(prepared))
    assert graphed._signature(prepared) != graphed._signature(create_task("reconstruction").prepare(image[:1]))


# --- with one ---------------------------------------------------------------------------------------


def curve(tmp_path: Path, steps: int = 20, **options: Any) -> tuple[list[float], Trainer]:
    trainer = Trainer(recipe(**{"steps": steps, "warmup": 0, **options}), tmp_path, quiet=True)
    trainer.model.train()
    trainer.wrapped = trainer.model
    losses = []
    for micro, step in trainer._stream():
        losses.append(trainer._update(micro, step)[0])
        trainer.step += 1
    return losses, trainer


@GPU
@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("backbone", [UNET, VARNET, HIFI], ids=["unet", "varnet", "hifi-mamba"])
def test_twenty_graphed_steps_follow_twenty_eager_ones(
    backbone: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    options = {"backbone": backbone, "precision": precision, "accumulate": 2, "batch": 4, "clip": 1.0}
    eager, _ = curve(tmp_path, **options)
    replayed, trainer = curve(tmp_path, cuda_graph=True, **options)
    assert trainer.graphed is not None
    assert trainer.graphed.graph is not None
    tolerance = 1e-3 if precision == "float32" else 3e-2
    assert replayed == pytest.approx(eager, rel=tolerance)
    assert all(p.grad is g for p, g in trainer.graphed.grads)
    assert len(trainer.graphed.grads) == len(list(trainer.model.parameters()))


@GPU
@pytest.mark.usefixtures("_on_gpu")
def test_a_whole_run_and_its_resumption(tmp_path: Path) -> None:
    config = recipe(cuda_graph=True, steps=12)
    metrics = train(config, tmp_path / "whole", quiet=True)
    assert metrics["best_step"] > 0

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), at_step(7, stop):
        train(config, tmp_path / "cut", quiet=True)
    train(config, tmp_path / "cut", quiet=True)
    log = [
        [json.loads(line) for line in (tmp_path / n / "log.jsonl").read_text().splitlines()] for n in ("whole", "cut")
    ]
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in log]
    assert len(losses[0]) == 12
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@GPU
@pytest.mark.usefixtures("_on_gpu")
def test_a_model_that_waits_for_the_host_is_refused(tmp_path: Path) -> None:
    v2 = {"name": "hifi-mamba-v2", "options": HIFI["options"]}
    with pytest.raises(ValueError, match=r"set train.cuda_graph to false"):
        curve(tmp_path, backbone=v2, cuda_graph=True)
