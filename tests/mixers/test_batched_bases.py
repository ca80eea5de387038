"""Bases of all mixers of a model in one call: nothing else changes, and none is used after its step."""

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from cache_cases import CHASM, SIZE, C, edit_in_place, features, fresh, moved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chasm
from chasm import batched_bases


class Net(nn.Module):
    """Mixers of two widths, one of them used twice, one identity, one untied."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (moved(CHASM(3, size=SIZE), s) for s in (1, 2))
        self.widen = nn.Conv2d(3, 4, 1)
        self.c = moved(CHASM(4, size=SIZE, axes="ch"), 3)
        self.d = moved(CHASM(4, size=SIZE, basis="identity"), 4)
        self.e = moved(CHASM(4, size=SIZE, basis="untied"), 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.e(self.d(self.c(self.widen(self.a(self.b(self.a(x)))))))
        return y


@pytest.mark.parametrize("training", [True, False])
def test_batched_bases_change_nothing_but_the_calls(builds: list[tuple[int, ...]], training: bool) -> None:
    torch.manual_seed(0)
    net = Net().train(training)
    x = features()
    plain = net(x)
    plain.square().sum().backward()
    wanted = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    builds.clear()
    with batched_bases(net):
        y = net(x)
    y.square().sum().backward()
    shared = [shape for shape in builds if shape[0] != 4 and shape[0] != 3]  # untied: one call an axis, K = 4, 3
    assert sorted(shared) == [(1, 6)]
    assert (4, 3) in builds  # two mixers of two axes and three channels, in one call
    assert len(builds) == 4
    torch.testing.assert_close(y, plain)
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, wanted[name], msg=name)


def test_after_the_context_bases_are_built_again() -> None:
    mixer = moved(CHASM(C, size=SIZE))
    x = features()
    with batched_bases(mixer):
        before = mixer(x)
        assert torch.equal(mixer(x), before)
    edit_in_place(mixer)
    torch.testing.assert_close(mixer(x), fresh(mixer)(x))
    for training in (True, False):
        mixer.train(training)
        with pytest.raises(ValueError, match="expected features"), batched_bases(mixer):
            mixer(x[0])
        edit_in_place(mixer)
        with torch.no_grad():
            torch.testing.assert_close(mixer(x), fresh(mixer)(x))


def test_a_second_backward_in_one_context_is_named() -> None:
    mixer = CHASM(C, size=SIZE)
    with batched_bases(mixer):
        mixer(features()).sum().backward()
        with pytest.raises(RuntimeError, match=r"second backward pass within one chasm\.batched_bases"):
            mixer(features()).sum().backward()
    with batched_bases(mixer):  # what autograd allows stays allowed
        mixer(features()).sum().backward(retain_graph=True)
        mixer(features()).sum().backward()


def test_a_failure_while_building_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()

    def failing(theta: Tensor) -> Tensor:
        if theta.shape[-1] == 6:
            raise MemoryError
        return torch.eye(3).expand(len(theta), 3, 3)

    with monkeypatch.context() as patch:
        patch.setattr(chasm.ops, "orthogonal_basis", failing)
        with pytest.raises(MemoryError), batched_bases(net):
            pass
    x = features()
    torch.testing.assert_close(net.a(x), fresh(net.a)(x))


def test_batched_bases_serve_every_step_anew() -> None:
    """A training loop: the bases of a step are those of its parameters."""
    torch.manual_seed(0)
    one = nn.Sequential(moved(CHASM(C, size=SIZE), 1), moved(CHASM(C, size=SIZE), 2))
    two = copy.deepcopy(one)
    losses: tuple[list[float], list[float]] = ([], [])
    for model, found, batched in ((one, losses[0], True), (two, losses[1], False)):
        optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(4):
            optimiser.zero_grad()
            if batched:
                with batched_bases(model):
                    loss = model(features()).square().mean()
            else:
                loss = model(features()).square().mean()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(losses[0])) == 4


def test_models_without_mixers_are_welcome() -> None:
    with batched_bases(nn.Linear(2, 2)):
        pass


@pytest.fixture
def pair() -> nn.Sequential:
    return nn.Sequential(moved(CHASM(C, size=SIZE), 1), moved(CHASM(C, size=SIZE), 2))


def test_batched_bases_are_not_for_parameters_passed_to_a_call(pair: nn.Sequential) -> None:
    x, other = features(), {name: 2 * p.detach() for name, p in pair.named_parameters()}
    wanted = torch.func.functional_call(pair, other, x)
    with batched_bases(pair):
        torch.testing.assert_close(torch.func.functional_call(pair, other, x), wanted)
        found = torch.func.grad(lambda p: torch.func.functional_call(pair, p, x).square().mean())(other)
    torch.testing.assert_close(
        found, torch.func.grad(lambda p: torch.func.functional_call(pair, p, x).square().mean())(other)
    )


def test_batched_bases_end_with_a_step(pair: nn.Sequential) -> None:
    optimiser = torch.optim.SGD(pair.parameters(), lr=0.5)
    with batched_bases(pair):
        before = pair(features())
        before.square().mean().backward()
        optimiser.step()
        after = pair(features())
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, pair(features()))


def test_batched_bases_are_in_no_copy(pair: nn.Sequential) -> None:
    def copies() -> Iterator[nn.Module]:
        yield copy.deepcopy(pair)
        yield pickle.loads(pickle.dumps(pair))

    with batched_bases(pair):
        with_gradient = list(copies())
    with torch.no_grad(), batched_bases(pair):
        without = list(copies())
    x = features()
    for one in [*with_gradient, *without]:
        with torch.no_grad():
            for p in one.parameters():
                p.mul_(0.5)
        one(x).sum().backward()
        assert all(p.grad is not None for p in one.parameters())
    assert torch.equal(with_gradient[0](x), without[1](x))


def test_batched_bases_made_without_gradients_are_not_used_for_them(pair: nn.Sequential) -> None:
    with torch.no_grad(), batched_bases(pair), torch.enable_grad():
        pair(features()).sum().backward()
    assert all(p.grad is not None for p in pair.parameters())


def test_batched_bases_and_compiled_code(pair: nn.Sequential) -> None:
    compiled = torch.compile(pair, backend="eager", fullgraph=True)
    for _ in range(2):
        with batched_bases(pair):
            before = compiled(features())
            with torch.no_grad():
                for p in pair.parameters():
                    p.add_(0.3)
            after = compiled(features())
        assert not torch.allclose(after, before)
        torch.testing.assert_close(after, pair(features()))


def test_batched_bases_in_checkpointed_and_accumulated_steps(pair: nn.Sequential) -> None:
    batches = [features(), features() + 1]
    for x in batches:
        pair(x).square().mean().backward()
    wanted = [p.grad for p in pair.parameters()]
    pair.zero_grad()
    for x in batches:
        with batched_bases(pair):
            y = x
            for mixer in pair:
                y = checkpoint(mixer, y, use_reentrant=False)
            y.square().mean().backward()
    torch.testing.assert_close([p.grad for p in pair.parameters()], wanted)


def test_batched_bases_leave_out_sharded_parameters(pair: nn.Sequential) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    x, wanted = features(), copy.deepcopy(pair)
    wanted(x).square().mean().backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(pair, mesh=init_device_mesh("cpu", (1,)))
        with batched_bases(pair):
            y = pair(x)
            y.square().mean().backward()
        found = [p.grad.full_tensor() for p in pair.parameters() if isinstance(p.grad, DTensor)]
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(y, wanted(x))
    torch.testing.assert_close(found, [p.grad for p in wanted.parameters()])
