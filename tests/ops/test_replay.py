"""Parameters prepared by replayed CUDA graphs give what they give kernel by kernel."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from chasm import CHASM
from chasm.ops import replay

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
semantic = pytest.mark.usefixtures("replayed")
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


# --- what comes out: on a card, or with graphs that are run again instead of replayed -------------------------


class RunAgain(replay._Captured):
    """As a graph does it: over the same memory, and unseen by version counters."""

    def __init__(self, params, make):
        self.params, self.addresses = params, [p.data_ptr() for p in params]
        wants = torch.is_grad_enabled()
        self.inputs = [p for p in params if p.requires_grad and wants]
        tensors = [p.detach().requires_grad_(p.requires_grad) for p in params]
        wanted = [t for t in tensors if t.requires_grad] if wants else []
        self.leaves, self.tree = tree_flatten(make(tensors))
        self.grads = [torch.zeros_like(t) for t in replay._differentiable(self.leaves)]
        self.found = replay._gradients(replay._differentiable(self.leaves), wanted, self.grads)
        self.finish()

        def write(places, values):
            for place, value in zip(places, values, strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.detach().numpy()[...] = value.detach().numpy()

        def forward():
            with torch.set_grad_enabled(wants):
                self.again = tree_flatten(make(tensors))[0]
            write(self.leaves, self.again)

        def backward():
            with torch.enable_grad():
                outputs = replay._differentiable(self.again)
                write(self.found, replay._gradients(outputs, wanted, self.grads))

        self.forward, self.backward = SimpleNamespace(replay=forward), SimpleNamespace(replay=backward)


@pytest.fixture
def replayed(monkeypatch):
    if DEVICE == "cpu":
        fit = replay._fit
        monkeypatch.setattr(replay, "_fit", lambda params: fit(params, "cpu"))
        monkeypatch.setattr(replay, "_places", lambda params: [(id(p), p.data_ptr(), p.requires_grad) for p in params])
        monkeypatch.setattr(replay, "_Captured", RunAgain)


def pair(**options):
    """A mixer, and its copy that never replays."""
    torch.manual_seed(0)
    mixer = CHASM(SHAPE[1], size=SHAPE[2:], **options).to(DEVICE)
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
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            y = torch.randn(SHAPE, device=DEVICE, requires_grad=True)
            for _ in range(calls):
                y = mixer(y) if run is None else run(mixer, y)
        y.float().square().mean().backward()
        outputs.append(y.detach())
        if step % accumulate == accumulate - 1:
            optimiser.step()
    return outputs + [p.grad for p in mixer.parameters()] + list(mixer.parameters())


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        exactly = {"rtol": 0, "atol": 0} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(a, b, **exactly)


@semantic
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


@semantic
def test_a_module_called_twice_in_a_step():
    mixer, eager = pair()
    assert_same(train(mixer, calls=2), train(eager, calls=2))


@semantic
def test_gradients_that_add_up():
    mixer, eager = pair()
    assert_same(train(mixer, accumulate=3), train(eager, accumulate=3))


@semantic
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    mixer, eager = pair()
    run = lambda module, x: checkpoint(module, x, use_reentrant=reentrant)  # noqa: E731
    assert_same(train(mixer, run=run), train(eager, run=run))


@semantic
def test_parameters_changed_before_the_backward_are_an_error():
    mixer, _ = pair()
    x = torch.randn(SHAPE, device=DEVICE)
    for _ in range(4):
        y = mixer(x)
    with torch.no_grad():
        mixer.theta["ch"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@semantic
def test_frozen_parameters_and_no_gradient():
    mixer, eager = pair()
    x = torch.randn(SHAPE, device=DEVICE)
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


@semantic
def test_moved_loaded_and_copied():
    mixer, eager = pair()
    train(mixer)
    mixer.load_state_dict(copy.deepcopy(eager.state_dict()), assign=True)
    assert_same(train(mixer), train(eager))
    twin = copy.deepcopy(mixer)
    assert_same(train(twin), train(eager))
    mixer.cpu().to(DEVICE)
    twin.load_state_dict(mixer.state_dict())
    assert_same(train(mixer), train(twin))


@semantic
def test_second_derivatives():
    mixer, eager = pair(form="circulant")
    x = torch.randn(SHAPE, device=DEVICE, requires_grad=True)
    for _ in range(4):
        found, wanted = [
            torch.autograd.grad(
                torch.autograd.grad(m(x).square().sum(), m.theta["ch"], create_graph=True)[0].square().sum(),
                list(m.theta.values()),
            )
            for m in (mixer, eager)
        ]
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@semantic
@pytest.mark.parametrize("form", ["fft", "circulant", "dft"])
@pytest.mark.parametrize("frozen", ["nothing", "tables", "all"])
def test_values_of_before_are_an_error_once_they_are_gone(form, frozen):
    mixer, _ = pair(form=form)
    if frozen != "nothing":
        mixer.gain_table.requires_grad_(False)
    if frozen == "all":
        mixer.theta.requires_grad_(False)
    x = torch.randn(SHAPE, device=DEVICE, requires_grad=True)
    for _ in range(4):
        y = mixer(x)
    with torch.no_grad():
        for p in mixer.gain_table.values():
            p.mul_(2)
    mixer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.square().sum(), x)
    torch.autograd.grad(mixer(x).square().sum(), x)


@semantic
@pytest.mark.parametrize("kind", ["one parameter for both axes", "hook"])
def test_a_graph_of_the_backward_counts_nothing_twice(kind):
    found = []
    for module in pair(form="circulant"):
        if kind == "hook":
            module.theta["ch"].register_hook(lambda g: 2 * g)
        else:
            module.theta["cw"] = module.theta["ch"]
        torch.manual_seed(0)
        x = torch.randn(SHAPE, device=DEVICE)
        for _ in range(4):
            module.zero_grad()
            module(x).square().sum().backward(create_graph=True)
        found.append(module.theta["ch"].grad.detach())
        module.zero_grad()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@semantic
def test_parameters_that_move_before_the_backward():
    found = []
    for module in pair():
        x = torch.ones(SHAPE, device=DEVICE)
        for _ in range(4):
            y = module(x)
        for p in module._spectral():  # as sharding does: freed after the forward, elsewhere in the backward
            before = p.data
            p.data = before.clone()
            before.fill_(torch.nan)
        module.zero_grad()
        y.square().sum().backward()
        found.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(*found)


@semantic
def test_no_gradient_at_all():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return None

    mixer, _ = pair(local=False)
    x = torch.randn(SHAPE, device=DEVICE)
    for _ in range(4):
        Nothing.apply(mixer(x)).sum().backward()
    assert all(p.grad is None for p in mixer.parameters())


@semantic
def test_a_module_that_keeps_its_output_is_collected():
    mixer, _ = pair()
    x = torch.randn(SHAPE, device=DEVICE)
    for _ in range(4):
        mixer.last = mixer(x)
    gone = weakref.ref(mixer)
    del mixer
    gc.collect()
    assert gone() is None


@semantic
def test_graphs_of_exchanged_parameters_go():
    mixer, _ = pair()
    x = torch.randn(SHAPE, device=DEVICE)
    for _ in range(2 * replay.SIZES):
        mixer.load_state_dict(copy.deepcopy(mixer.state_dict()), assign=True)
        for _ in range(replay.EAGER_CALLS + 1):
            mixer(x)
        assert len(mixer._replays.captured) == 1


@gpu
def test_inside_a_graph_of_ones_own():
    mixer, eager = pair()
    train(mixer)
    train(eager)
    x = torch.randn(SHAPE, device=DEVICE, requires_grad=True)
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
