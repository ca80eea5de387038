"""What a CHASM mixer computes: every variant is its equation, in every mode and precision."""

import copy
from typing import Any

import pytest
import torch
from chasm_cases import AXES_2D, VARIANTS, features, moved, oracle, oracle_core, relative
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import chasm
from chasm import CHASM
from chasm.mixers._wrapper import joined_parameters


@pytest.mark.parametrize(("basis", "gain"), VARIANTS)
@pytest.mark.parametrize("axes", AXES_2D)
@pytest.mark.parametrize("training", [True, False])
def test_every_variant_is_its_equation(axes: str, basis: Any, gain: Any, training: bool) -> None:
    mixer = moved(CHASM(3, size=(6, 7), axes=axes, basis=basis, gain=gain, dtype=torch.float64)).train(training)
    for size in ((6, 7), (5, 8), (1, 2)):
        x = features(2, 3, *size, dtype=torch.float64)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        params = list(mixer.parameters())
        y, want = mixer(a), oracle(mixer, b)
        assert relative(y, want) <= 1e-10
        weight = torch.randn_like(want)
        got_grads = torch.autograd.grad((y * weight).sum(), [a, *params])
        want_grads = torch.autograd.grad((want * weight).sum(), [b, *params])
        for g, w in zip(got_grads, want_grads, strict=True):
            assert (g - w).norm() <= 1e-10 * max(w.norm().item(), 1.0)
        with torch.no_grad():
            assert relative(mixer(x), want) <= 1e-10  # the form without gradients


@pytest.mark.parametrize(
    ("ndim", "axes", "size"),
    [
        (1, "cl", (9,)),
        (1, None, (8,)),
        (3, None, (3, 4, 5)),
        (3, "cd>ch>cw", (4, 3, 5)),
        (3, "cw>cd", (4, 3, 2)),
        (3, "cd+ch+cw", (2, 3, 4)),
        (3, "ch", (2, 5, 3)),
    ],
)
def test_sequences_and_volumes(ndim: int, axes: str | None, size: tuple[int, ...]) -> None:
    for gain in ("positive", "complex"):
        mixer = moved(CHASM(2, size=size, axes=axes, ndim=ndim, gain=gain, dtype=torch.float64))
        for shape in (size, tuple(n + 1 for n in size)):
            x = features(2, 2, *shape, dtype=torch.float64)
            for mode in (mixer.train(), mixer.eval()):
                with torch.no_grad():
                    assert relative(mode(x), oracle(mixer, x)) <= 1e-10
                y = mode(x)
                assert relative(y, oracle(mixer, x)) <= 1e-10


@pytest.mark.parametrize("form", ["reference", "fft"])
@pytest.mark.parametrize("training", [True, False])
def test_float32_in_every_form(form: str, training: bool) -> None:
    mixer = moved(CHASM(6, size=(12, 15), form=form)).train(training)
    exact = copy.deepcopy(mixer).double()
    x = features(2, 6, 12, 15)
    assert mixer.explain(x) == (form, "forced by the user")
    y, want = mixer(x), oracle(exact, x.double())
    assert y.dtype == torch.float32
    assert relative(y, want) <= 1e-5
    y.square().sum().backward()
    want.square().sum().backward()
    for (name, p), q in zip(mixer.named_parameters(), exact.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert relative(p.grad, q.grad) <= 1e-5, name


@pytest.mark.parametrize(("basis", "gain"), VARIANTS)
@pytest.mark.parametrize(("ndim", "axes"), [*((2, a) for a in AXES_2D), (1, "cl"), (3, "cd>ch>cw"), (3, "cw+cd")])
def test_the_core_is_the_identity_at_init(ndim: int, axes: str, basis: Any, gain: Any) -> None:
    core = CHASM(4, bins=5, axes=axes, basis=basis, gain=gain, ndim=ndim, local=False)
    x = features(2, 4, *(6, 5, 3)[:ndim])
    for mode in (core.train(), core.eval()):
        assert relative(mode(x), x) <= 1e-6
    with torch.no_grad():
        assert relative(core(x), x) <= 1e-6


def test_identity_paths() -> None:
    x = features(2, 4, 6, 5)
    block = moved(CHASM(4, size=(6, 5)))
    assert block.residual
    bare = copy.deepcopy(block)
    bare.residual = False
    assert relative(x + bare(x), block(x)) <= 1e-6
    core = CHASM(4, size=(6, 5), local=False)
    assert not core.residual
    assert core.refine is None
    assert core.fuse is None
    core.load_state_dict(block.state_dict(), strict=False)
    assert relative(core(x), oracle_core(block, x)) <= 1e-5
    with_identity = CHASM(4, size=(6, 5), local=False, residual=True)
    with_identity.load_state_dict(core.state_dict())
    assert relative(with_identity(x), x + core(x)) <= 1e-6
    assert not CHASM(4, residual=False).residual
    assert chasm.create_slot("chasm", 4, (6, 5), host_residual=True).residual is False
    assert chasm.create_slot("chasm", 4, (6, 5)).residual is True


def test_the_wrapper_is_made_of_ordinary_layers() -> None:
    """Hooks fire, spectral_norm and the like work, and a layer can be exchanged: also where the 1x1 is a product."""
    x = features(2, 4, 6, 5)
    mixer: Any = moved(CHASM(4, size=(6, 5), dtype=torch.float64)).eval()
    seen: list[Tensor] = []
    for layer in (mixer.refine, mixer.fuse):
        assert isinstance(layer, nn.Conv2d)
        layer.register_forward_hook(lambda _m, _x, out: seen.append(out))
    y = mixer(x.double())
    assert len(seen) == 2
    assert relative(seen[1], y - x) <= 1e-10
    mixer.fuse = nn.Conv2d(4, 4, 1, bias=False, dtype=torch.float64)
    assert relative(mixer(x.double()) - x, F.conv2d(F.gelu(seen[0]), mixer.fuse.weight)) <= 1e-10
    normed: Any = moved(CHASM(4, size=(6, 5)))
    nn.utils.spectral_norm(normed.fuse)
    normed(x).sum().backward()
    assert normed.fuse.weight_orig.grad is not None


def by_layers(mixer: Any, x: Tensor) -> Tensor:
    conv, z = mixer.fuse, F.gelu(mixer.refine(mixer.core(x)))
    return x + F.conv2d(z, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("refine", {"padding": 1, "padding_mode": "circular"}),
        ("refine", {"padding": 2, "dilation": 2}),
        ("refine", {"padding": 2, "kernel_size": 5}),
        ("refine", {"padding": 1, "groups": 1}),
        ("refine", {"padding": 1, "bias": False}),
        ("refine", {"padding": "same"}),
        ("fuse", {"bias": False}),
        ("fuse", {"groups": 2}),
        ("fuse", {"kernel_size": 3, "padding": 1}),
    ],
)
def test_an_exchanged_layer_is_what_runs(name: str, options: dict[str, Any]) -> None:
    mixer: Any = CHASM(4, size=(6, 5))
    usual: dict[str, Any] = {"kernel_size": 3, "groups": 4} if name == "refine" else {"kernel_size": 1}
    layer = type(getattr(mixer, name))(4, 4, **(usual | options))  # as code does that rewrites all convolutions
    setattr(mixer, name, layer)
    mixer, x = moved(mixer).eval(), features(2, 4, 6, 5)
    want = by_layers(mixer, x)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert relative(mixer(x), want) <= 1e-6
            assert relative(chasm.fold(mixer, size=(6, 5))(x), want) <= 1e-5
    plain: Any = CHASM(4)
    chains = plain._chains(x, x.dtype)
    assert not joined_parameters(x, chains, mixer.refine, mixer.fuse)
    assert joined_parameters(x, chains, plain.refine, plain.fuse)


@pytest.mark.parametrize("change", ["padding_mode", "_conv_forward", "stride", "bias"])
def test_a_layer_set_otherwise_is_what_runs(change: str) -> None:
    mixer: Any = moved(CHASM(4, size=(6, 5)))
    x = features(2, 4, 6, 5)
    before = mixer(x)
    if change == "padding_mode":
        mixer.refine.padding_mode = "circular"
    elif change == "_conv_forward":
        mixer.refine._conv_forward = lambda x, weight, bias: F.conv2d(x, -weight, bias, padding=1, groups=4)
    elif change == "stride":
        mixer.fuse.padding, mixer.fuse.stride = (3, 2), (2, 2)  # (6, 5) again
    else:
        mixer.fuse.bias = None
    assert relative(mixer(x), by_layers(mixer, x)) <= 1e-6
    assert relative(mixer(x), before) > 1e-2


def test_wrapper_only_control() -> None:
    control = moved(CHASM(4, size=(6, 5), basis=None))
    assert {n.split(".")[0] for n, _ in control.named_parameters()} == {"refine", "fuse"}
    x = features(2, 4, 6, 5)
    for mode in (control.train(), control.eval()):
        assert relative(mode(x), oracle(control, x)) <= 1e-6
    assert control.explain(x).form == "none"
    bare = CHASM(4, basis=None, local=False)
    assert list(bare.parameters()) == []
    assert torch.equal(bare(x), x)


def test_channel_count_one_and_two() -> None:
    for C in (1, 2):
        mixer = moved(CHASM(C, size=6, dtype=torch.float64))
        x = features(2, C, 6, 5, dtype=torch.float64)
        assert relative(mixer(x), oracle(mixer, x)) <= 1e-10


@pytest.mark.parametrize("n", [90, 218, 320])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
def test_half_precision_at_awkward_sizes(n: int, dtype: torch.dtype, tolerance: float) -> None:
    mixer = moved(CHASM(4, size=(n, 90)), 0.3)
    x = features(1, 4, n, 90)
    with torch.no_grad():
        want = copy.deepcopy(mixer).double()(x.double())
    low = copy.deepcopy(mixer).to(dtype)
    for training in (True, False):
        mixer.train(training), low.train(training)
        for model, inputs, cast in ((mixer, x, True), (low, x.to(dtype), False)):
            with torch.autocast("cpu", dtype, enabled=cast):
                y = model(inputs)
                loss = y.float().square().mean()
            assert y.dtype == inputs.dtype
            assert y.isfinite().all()
            assert relative(y, want) <= tolerance
            model.zero_grad()
            loss.backward()
            for name, p in model.named_parameters():
                assert p.grad is not None, name
                assert p.grad.isfinite().all(), name
            with torch.no_grad(), torch.autocast("cpu", dtype, enabled=cast):
                assert relative(model(inputs), want) <= tolerance


def test_under_autocast_features_travel_in_its_dtype() -> None:
    """The core hands its features to the convolutions, and keeps them for backward, in half the memory."""
    mixer = CHASM(3, bins=4)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert mixer.core(features(1, 3, 6, 5)).dtype == dtype
    assert mixer.core(features(1, 3, 6, 5)).dtype == torch.float32


def test_float64_input_keeps_its_precision_under_autocast() -> None:
    core = moved(CHASM(3, bins=4, local=False, dtype=torch.float64))
    x = features(1, 3, 6, 5, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative(core(x), oracle(core, x)) <= 1e-10


@pytest.mark.parametrize("options", [{}, {"gain": "complex"}, {"basis": "identity"}], ids=str)
@pytest.mark.parametrize("trained", ["nothing", "theta", "gain_table", "refine"])
def test_gradients_with_most_parameters_frozen(options: dict[str, Any], trained: str) -> None:
    """In training mode: the gradient of x needs no maps of the core, that of a table all of them."""
    mixer = moved(CHASM(3, bins=4, **options)).double()
    names = [name for name, p in mixer.named_parameters() if p.requires_grad_(name.startswith(trained)).requires_grad]
    wanted = []
    for form in ("auto", "reference"):
        mixer.form = form
        x = features(2, 3, 6, 5, dtype=torch.float64).requires_grad_()
        parameters = dict(mixer.named_parameters())
        y = mixer(x)
        wanted.append(torch.autograd.grad(y.square().sum(), [x, *(parameters[name] for name in names)]))
    for found, expected in zip(*wanted, strict=True):
        assert relative(found, expected) <= 1e-10


def test_a_core_takes_features_of_any_float_type() -> None:
    """The bare core has no convolution, so features need not have the dtype of its parameters."""
    for gain in ("positive", "complex"):
        for form in ("auto", "reference", "fft"):
            for own in (torch.float32, torch.float64):
                core = moved(CHASM(3, bins=4, local=False, dtype=own, gain=gain, form=form))
                for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
                    x = features(1, 3, 6, 5, dtype=dtype)
                    y = core(x)
                    assert y.dtype == dtype
                    assert relative(y, oracle(copy.deepcopy(core).double(), x.double())) <= tolerance
                    y.sum().backward()


def test_memory_formats_and_empty_batches() -> None:
    mixer = moved(CHASM(4, size=(6, 5)))
    x = features(2, 4, 6, 5)
    for mode in (mixer.train(), mixer.eval()):
        y = mode(x)
        assert relative(mode(x.contiguous(memory_format=torch.channels_last)), y) <= 1e-6
        assert relative(mode(x.mT.contiguous().mT), y) <= 1e-6
        for options in (
            {},
            {"local": False},
            {"basis": None},
            {"axes": "ch+cw", "gain": "complex"},
            {"basis": "untied"},
        ):
            empty = CHASM(4, size=(6, 5), **options).train(mode.training)
            for p in empty.parameters():
                nn.init.constant_(p, torch.inf)
            got = empty(x[:0].clone().requires_grad_())
            assert got.shape == (0, 4, 6, 5)
            got.sum().backward()
            for p in empty.parameters():  # DistributedDataParallel waits for every one
                assert p.grad is not None
                assert torch.equal(p.grad, torch.zeros_like(p))
    with torch.no_grad():
        mixer.eval()(x[:0])


@pytest.mark.parametrize("form", [form for form in chasm.ops.FORMS if form not in chasm.ops.GPU_FORMS])
def test_checkpointing(form: str) -> None:
    mixer = CHASM(4, size=6, form=form)
    inputs = [torch.randn(2, 4, 6, 6, requires_grad=True), *mixer.parameters()]
    found, expected = (
        torch.autograd.grad(y.square().sum(), inputs)
        for y in (checkpoint(mixer, inputs[0], use_reentrant=False), mixer(inputs[0]))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_in_a_network_it_learns() -> None:
    """A low-pass filter with channel mixing is in the family; a few steps get most of the way there."""
    torch.manual_seed(0)
    target = moved(CHASM(4, size=(8, 8), local=False), 1.0).requires_grad_(False)
    student = CHASM(4, size=(8, 8), local=False)
    optimiser = torch.optim.Adam(student.parameters(), lr=0.05 / student.step_scale)
    losses = []
    for _ in range(80):
        x = torch.randn(8, 4, 8, 8)
        loss = F.mse_loss(student(x), target(x))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
