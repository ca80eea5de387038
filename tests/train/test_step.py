"""One training step for all: its gradients are those of the loss, however it is cut into micro-batches."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from chasm.backbones import create_backbone
from chasm.tasks import Reconstruction, TaskBatch
from chasm.train.step import add_gradients

TASK = Reconstruction()


@pytest.fixture
def host() -> nn.Module:
    torch.manual_seed(0)
    return create_backbone("unet", mixer="chasm", size=(16, 16), width=4, depth=1, levels=[0, 1])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def batches(count: int) -> list[TaskBatch]:
    images = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    return [TASK.prepare(part) for part in images.chunk(count)]


def test_micro_batches_add_up_to_the_batch(host: nn.Module) -> None:
    found = []
    for count in (1, 2, 4):
        loss = add_gradients(host, TASK, batches(count), micro_batches=count)
        assert not loss.requires_grad
        found.append((float(loss), gradients(host)))
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert grads.keys() == found[0][1].keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, found[0][1][name], rtol=1e-3, atol=1e-5)


def test_the_loss_of_a_host_is_added_to_that_of_the_task(host: nn.Module) -> None:
    weight = next(host.parameters())

    def with_loss(*args: Tensor, return_aux: bool, **physics: Tensor) -> tuple[Tensor, Tensor]:
        return host(*args, **physics), 10 * weight.sum()

    plain = add_gradients(host, TASK, batches(2), micro_batches=2)
    expected = weight.grad + 10
    gradients(host)
    total = add_gradients(host, TASK, batches(2), micro_batches=2, forward=with_loss)
    torch.testing.assert_close(total, plain + 10 * weight.detach().sum())
    torch.testing.assert_close(weight.grad, expected)


def test_gradients_are_added_to_those_that_are_there(host: nn.Module) -> None:
    add_gradients(host, TASK, batches(1))
    once = gradients(host)
    for _ in range(2):
        add_gradients(host, TASK, batches(1))
    for name, grad in gradients(host).items():
        torch.testing.assert_close(grad, 2 * once[name])


def test_processes_exchange_gradients_with_the_last_micro_batch_only(host: nn.Module) -> None:
    entered = []

    @contextmanager
    def no_sync() -> Iterator[None]:
        entered.append(True)
        yield

    add_gradients(host, TASK, batches(4), micro_batches=4, no_sync=no_sync)
    assert len(entered) == 3


def test_a_step_needs_a_batch(host: nn.Module) -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        add_gradients(host, TASK, [])
