"""What one step of training is: its slices, its step sizes, its gradients, its averages."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small import HIFI, _one_thread, checkpoint, recipe  # noqa: F401

from chasm.mixers import chasm as chasm_mixer
from chasm.train import evaluate, load_run, train
from chasm.train.loop import Trainer
from chasm.train.schedule import learning_rate, rows_of_step
from chasm.train.start import update_average


def test_an_epoch_shows_every_slice_once_and_epochs_differ() -> None:
    epochs = [[r for step in range(3 * e, 3 * e + 3) for r in rows_of_step(step, 10, 3, seed=1)] for e in range(2)]
    assert all(len(set(e)) == 9 and set(e) <= set(range(10)) for e in epochs)
    assert epochs[0] != epochs[1]
    assert rows_of_step(0, 10, 3, seed=1) != rows_of_step(0, 10, 3, seed=2)


def test_fewer_slices_than_a_batch_fill_it_evenly() -> None:
    counts = Counter(rows_of_step(7, 3, 8, seed=0))
    assert sum(counts.values()) == 8
    assert sorted(counts.values()) == [2, 3, 3]


def test_step_sizes_exactly() -> None:
    sizes = [learning_rate(s, 101, 10, 1.0, 0.01) for s in range(101)]
    assert sizes[:10] == pytest.approx([(s + 1) / 10 for s in range(10)], abs=0)
    assert sizes[10] == 1.0
    assert sizes[55] == pytest.approx(0.01 + 0.99 / 2)
    assert sizes[100] == 0.01
    assert all(a > b for a, b in pairwise(sizes[10:]))
    assert learning_rate(0, 1, 0, 1.0, 0.01) == 1.0  # a run of one step moves


def test_groups_and_their_step_sizes(tmp_path: Path) -> None:
    config = recipe(HIFI, spectral_multiplier=30, weight_decay=0.1, steps=20, warmup=0.1, lr=0.01)
    trainer = Trainer(config, tmp_path, quiet=True)
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    groups = {g["name"]: g for g in trainer.optimizer.param_groups}
    found = {k: [names[id(p)] for p in g["params"]] for k, g in groups.items()}
    assert sorted(n for v in found.values() for n in v) == sorted(names.values())
    assert groups["spectral"]["weight_decay"] == groups["plain"]["weight_decay"] == 0
    assert groups["decay"]["weight_decay"] == 0.1
    assert {n.split(".")[-2] for n in found["spectral"]} == {"theta", "gain_table"}
    assert any(n.endswith("A_log") for n in names.values())
    for name in found["decay"]:
        assert not any(word in name for word in ("A_log", "norm", "bias", "theta", "table")), name
    seen = []
    trainer.model.train()
    trainer.wrapped = trainer.model
    for micro, step in trainer._stream():
        trainer._update(micro, step)
        seen.append([g["lr"] for g in (groups["decay"], groups["spectral"])])
        trainer.step += 1
        if trainer.step == 3:
            break
    assert seen[0] == [0.005, 0.15]
    assert seen[1] == seen[2] == [0.01, 0.3]
    assert trainer.warmup == 2


def one_update(tmp_path: Path, **train_: Any) -> Trainer:
    """A trainer after its first update; its gradients are still there."""
    trainer = Trainer(recipe(**{"steps": 9, "warmup": 0, **train_}), tmp_path, quiet=True)
    trainer.model.train()
    trainer.wrapped = trainer.model
    trainer._update(*next(trainer._stream()))
    return trainer


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    one, two = (one_update(tmp_path, batch=4, accumulate=a) for a in (1, 2))
    for p, q in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_clipping(tmp_path: Path) -> None:
    free, clipped = (one_update(tmp_path, clip=clip) for clip in (None, 1e-3))
    norm = torch.nn.utils.get_total_norm([p.grad for p in free.model.parameters()])
    for p, q in zip(free.model.parameters(), clipped.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad * 1e-3 / norm, q.grad, rtol=1e-3, atol=1e-9)


def test_average_of_the_weights(tmp_path: Path) -> None:
    trainer = one_update(tmp_path, ema=0.9, lr=0.1)
    start = Trainer(trainer.config, tmp_path, quiet=True).model.state_dict()
    assert trainer.ema is not None
    assert any(not torch.equal(v, start[k]) for k, v in trainer.model.state_dict().items())
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(trainer.ema[name], start[name] + 0.9 * (value - start[name]))  # step 0: 1 / 10
    update_average(trainer.ema, trainer.model, 0.9, 10_000)
    expected = {k: 0.9 * (start[k] + 0.9 * (v - start[k])) + 0.1 * v for k, v in trainer.model.state_dict().items()}
    torch.testing.assert_close(trainer.ema, expected)


def test_averaged_weights_are_the_ones_that_are_validated_and_kept(tmp_path: Path) -> None:
    metrics = train(recipe(ema=0.5, lr=0.01), tmp_path, quiet=True)
    tensors, _ = checkpoint(tmp_path)
    assert metrics["best_step"] == 6
    for name, value in load_run(tmp_path).model.state_dict().items():
        assert torch.equal(value, tensors[f"ema.{name}"])
        assert torch.equal(value, tensors[f"best.{name}"])
    assert any(not torch.equal(v, tensors[f"model.{k}"]) for k, v in load_run(tmp_path).model.state_dict().items())
    assert evaluate(tmp_path, "val")["mean"] == metrics["best_val"]


def test_bases_are_built_once_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    original = chasm_mixer.ops.orthogonal_basis

    def counted(theta: torch.Tensor) -> torch.Tensor:
        calls.append(theta.shape)
        return original(theta)

    monkeypatch.setattr(chasm_mixer.ops, "orthogonal_basis", counted)
    one_update(tmp_path, backbone={**HIFI, "options": {**HIFI["options"], "groups": 2, "blocks": 1}})
    assert calls == [(4, 8 * 7 // 2)]  # both axes of both slots in one call


def test_the_balance_loss_counts_once(tmp_path: Path) -> None:
    """A host weighs its own loss: V2's balance enters as it comes."""
    options = {k: v for k, v in HIFI["options"].items() if k != "blocks"}
    v2 = {"name": "hifi-mamba-v2", "options": {**options, "blocks": 1, "dropout": 0.0, "drop_path": 0.0}}
    trainer = Trainer(recipe(v2, steps=3), tmp_path, quiet=True)
    trainer.model.train()
    trainer.wrapped = trainer.model
    micro, step = next(trainer._stream())
    batch = trainer.task.prepare(micro[0].image)
    with torch.no_grad():
        output, aux = trainer.model(batch.input, **batch.physics, return_aux=True)
    expected = trainer.task.loss(output, batch) + aux
    assert float(aux) > 1e-4
    value, _ = trainer._update(micro, step)
    assert value == pytest.approx(float(expected), abs=2e-6)
