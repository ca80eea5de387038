"""Parameters prepared by replayed CUDA graphs give what they give kernel by kernel. Most of it needs a card."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chasm import CHASM
from chasm.ops import replay

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SHAPE = (2, 8, 12, 10)


# --- which calls are captured, with a stand-in for the graph ------------------------------------------------


class Counted:
    made: list[object] = []  # noqa: RUF012

    def __init__(self, params, make):
        Counted.made.append(self)

    def __call__(self, make):
        return "replayed", make([])


@pytest.fixture
def replays(monkeypatch):
    Counted.made = []
    monkeypatch.setattr(replay, "_fit", lambda params: True)
    monkeypatch.setattr(replay, "_places", lambda params: [(id(p), p.data_ptr(), p.requires_grad) for p in params])
    monkeypatch.setattr(replay, "_Captured", Counted)
    return replay.Replays()


def test_captured_after_the_eager_calls(replays):
    p = [nn.Parameter(torch.zeros(2))]
    found = [replays("key", p, lambda params: "made") for _ in range(5)]
    assert found == ["made"] * replay.EAGER_CALLS + [("replayed", "made")] * 3
    assert len(Counted.made) == 1


def test_captured_again_where_something_is_not_as_it_was(replays):
    p = [nn.Parameter(torch.zeros(2))]

    def settle(key):
        for _ in range(replay.EAGER_CALLS + 1):
            replays(key, p, lambda params: "made")

    settle("key")
    settle("another size")
    p[0].data = torch.ones(2)
    settle("key")
    p[0].requires_grad_(False)
    settle("key")
    with torch.no_grad():
        settle("key")
    assert len(Counted.made) == 5


def test_sizes_beyond_the_first_few_are_left_alone(replays):
    p = [nn.Parameter(torch.zeros(2))]
    for _ in range(replay.EAGER_CALLS + 1):
        for size in range(replay.SIZES + 4):
            replays(size, p, lambda params: "made")
    assert len(Counted.made) == replay.SIZES


def test_a_capture_that_fails_is_said_once(replays, monkeypatch):
    def fail(params, make):
        raise RuntimeError("no memory\nmore of it")

    monkeypatch.setattr(replay, "_Captured", fail)
    p = [nn.Parameter(torch.zeros(2))]
    for _ in range(replay.EAGER_CALLS):
        replays("key", p, lambda params: "made")
    with pytest.warns(UserWarning, match="no CUDA graph.*no memory$"):
        assert replays("key", p, lambda params: "made") == "made"
    assert replays("key", p, lambda params: "made") == "made"  # warnings are errors here: not a second one


def test_nothing_is_captured_on_a_cpu():
    mixer = CHASM(4, size=6)
    for _ in range(replay.EAGER_CALLS + 2):
        mixer(torch.randn(1, 4, 6, 6)).sum().backward()
    assert not mixer._replays.calls


# --- on a card ----------------------------------------------------------------------------------------------


def pair(**options):
    """A mixer, and its copy that never replays."""
    torch.manual_seed(0)
    mixer = CHASM(SHAPE[1], size=SHAPE[2:], **options).cuda()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.2 * torch.randn_like(p))
    eager = copy.deepcopy(mixer)
    eager._replays.failed = True
    return mixer, eager


def train(mixer, steps=6, calls=1, half=True, accumulate=1, run=None):
    """SGD; the outputs of every step and the gradients of the last."""
    optimiser = torch.optim.SGD(mixer.parameters(), lr=0.05)
    torch.manual_seed(1)
    outputs = []
    for step in range(steps):
        if step % accumulate == 0:
            optimiser.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            y = torch.randn(SHAPE, device="cuda", requires_grad=True)
            for _ in range(calls):
                y = mixer(y) if run is None else run(mixer, y)
        y.float().square().mean().backward()
        outputs.append(y.detach())
        if step % accumulate == accumulate - 1:
            optimiser.step()
    return outputs + [p.grad for p in mixer.parameters()] + list(mixer.parameters())


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@gpu
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"axes": "ch+cw"}, {"gain": "complex"}, {"basis": "identity"}, {"basis": "untied"}, {"form": "circulant"}],
    ids=str,
)
def test_training_is_the_same(options, half):
    mixer, eager = pair(**options)
    assert_same(train(mixer, half=half), train(eager, half=half))
    assert len(mixer._replays.captured) == 1


@gpu
def test_a_module_called_twice_in_a_step():
    mixer, eager = pair()
    assert_same(train(mixer, calls=2), train(eager, calls=2))


@gpu
def test_gradients_that_add_up():
    mixer, eager = pair()
    assert_same(train(mixer, accumulate=3), train(eager, accumulate=3))


@gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    mixer, eager = pair()
    run = lambda module, x: checkpoint(module, x, use_reentrant=reentrant)  # noqa: E731
    assert_same(train(mixer, run=run), train(eager, run=run))


@gpu
def test_parameters_changed_before_the_backward_are_an_error():
    mixer, _ = pair()
    x = torch.randn(SHAPE, device="cuda")
    for _ in range(4):
        y = mixer(x)
    with torch.no_grad():
        mixer.theta["ch"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@gpu
def test_frozen_parameters_and_no_gradient():
    mixer, eager = pair()
    x = torch.randn(SHAPE, device="cuda")
    for module in (mixer, eager):
        module.theta.requires_grad_(False)
    for _ in range(4):
        y = mixer(x)
        y.sum().backward()
        with torch.no_grad():
            z = mixer(x)
        torch.testing.assert_close(y, z)
    eager(x).sum().backward()
    torch.testing.assert_close(mixer.gain_table["cw"].grad, 4 * eager.gain_table["cw"].grad)
    assert mixer.theta["ch"].grad is None


@gpu
def test_moved_loaded_and_copied():
    mixer, eager = pair()
    train(mixer)
    mixer.load_state_dict(copy.deepcopy(eager.state_dict()), assign=True)
    assert_same(train(mixer), train(eager))
    twin = copy.deepcopy(mixer)
    assert_same(train(twin), train(eager))
    mixer.cpu().cuda()
    twin.load_state_dict(mixer.state_dict())
    assert_same(train(mixer), train(twin))


@gpu
def test_second_derivatives():
    mixer, eager = pair(form="circulant")
    x = torch.randn(SHAPE, device="cuda", requires_grad=True)
    for _ in range(4):
        found, wanted = [
            torch.autograd.grad(
                torch.autograd.grad(m(x).square().sum(), m.theta["ch"], create_graph=True)[0].square().sum(),
                list(m.theta.values()),
            )
            for m in (mixer, eager)
        ]
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@gpu
def test_inside_a_graph_of_ones_own():
    mixer, eager = pair()
    train(mixer)
    train(eager)
    x = torch.randn(SHAPE, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            torch.autograd.grad(mixer(x).square().sum(), [x, *mixer.parameters()])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = torch.autograd.grad(mixer(x).square().sum(), [x, *mixer.parameters()])
    graph.replay()
    assert_same(found, torch.autograd.grad(eager(x).square().sum(), [x, *eager.parameters()]))
