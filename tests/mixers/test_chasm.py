"""The CHASM module: options, variants, identity paths, precision, compilers, errors."""

import copy
import itertools
import math
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import chasm
from chasm import CHASM
from chasm.mixers._wrapper import joined_layers
from chasm.ops import reference
from helpers import pairwise

AXES_2D = ["ch>cw", "cw>ch", "ch+cw", "ch", "cw"]
BASES = ["shared", "identity", "untied"]
GAINS = ["positive", "signed", "complex"]
VARIANTS = list(itertools.product(BASES, GAINS))
SPATIAL = {1: ("cl",), 2: ("ch", "cw"), 3: ("cd", "ch", "cw")}


def moved(mixer: CHASM, scale: float = 0.5) -> CHASM:
    """Parameters away from their initial values; theta clear of zero, where torch's matrix_exp is less exact."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            spectral = name.split(".")[0] in mixer.spectral_parameters
            step = torch.rand_like(p) + 0.5 if "theta" in name else torch.randn_like(p)
            p.add_(scale / (mixer.step_scale if spectral else 1) * step)
    return mixer


def features(*shape: int, **like: Any) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, **like)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def oracle_core(mixer: CHASM, x: Tensor) -> Tensor:
    """Phi(x) from the mixer's parameters by chasm.ops.reference alone."""

    def one_axis(z: Tensor, axis: str) -> Tensor:
        dim = 2 + SPATIAL[mixer.ndim].index(axis)
        n = z.shape[dim]
        theta, table, phase = mixer.axis_parameters(axis)
        U = torch.eye(mixer.channels, dtype=z.dtype)
        if mixer.basis != "identity":
            U = reference.basis(reference.interpolate(theta, n // 2 + 1) if mixer.basis == "untied" else theta)
        return reference.axis_pass(z, U, reference.gains(table, n, mixer.gain, phase), dim)

    if "+" in mixer.axes:
        passes = mixer.axes.split("+")
        return torch.stack([one_axis(x, axis) for axis in passes]).mean(0)
    for axis in mixer.axes.split(">"):
        x = one_axis(x, axis)
    return x


def oracle(mixer: CHASM, x: Tensor) -> Tensor:
    y = x if mixer.basis is None else oracle_core(mixer, x)
    if mixer.refine is not None:
        assert mixer.fuse is not None
        conv = (F.conv1d, F.conv2d, F.conv3d)[mixer.ndim - 1]
        y = conv(y, mixer.refine.weight, mixer.refine.bias, padding=1, groups=mixer.channels)
        y = conv(F.gelu(y), mixer.fuse.weight, mixer.fuse.bias)
    return x + y if mixer.residual else y


# --- what it computes ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("form", ["reference", "fft", "circulant"])
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
    assert not joined_layers(x, chains, mixer.refine, mixer.fuse)
    assert joined_layers(x, chains, plain.refine, plain.fuse)


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


# --- tables and counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "bins"),
    [
        ({}, (64, 64)),
        ({"size": 128}, (65, 65)),
        ({"size": (128, 128)}, (65, 65)),
        ({"size": (7, 10)}, (4, 6)),
        ({"bins": 9}, (9, 9)),
        ({"bins": (3, 8)}, (3, 8)),
        ({"bins": 9, "size": (128, 64)}, (9, 9)),
        ({"size": [12, 1]}, (7, 1)),
    ],
)
def test_bins_follow_size_unless_given(options: dict[str, Any], bins: tuple[int, int]) -> None:
    mixer = CHASM(2, **options)
    assert {a: tuple(t.shape) for a, t in mixer.gain_table.items()} == {"ch": (bins[0], 2), "cw": (bins[1], 2)}
    untied = CHASM(3, basis="untied", **options)
    assert {a: tuple(t.shape) for a, t in untied.theta.items()} == {"ch": (bins[0], 3), "cw": (bins[1], 3)}


def test_bins_of_one_and_three_axes() -> None:
    assert CHASM(2, ndim=1, size=9).gain_table["cl"].shape == (5, 2)
    volume = CHASM(2, ndim=3, bins=(2, 3, 4), axes="cw>cd")
    assert {a: t.shape[0] for a, t in volume.gain_table.items()} == {"cw": 4, "cd": 2}


@pytest.mark.parametrize("C", [1, 2, 7, 96])
def test_parameter_counts(C: int) -> None:
    BH, BW = 5, 9

    def count(**options: Any) -> int:
        return sum(p.numel() for p in CHASM(C, bins=(BH, BW), **options).parameters())

    core = C * (C - 1) + (BH + BW) * C  # the paper's count
    wrapper = 9 * C + C + C * C + C  # depthwise 3x3 and 1x1, with biases
    assert count(local=False) == core
    assert count() == core + wrapper
    assert count(basis=None) == wrapper
    assert count(basis="identity", local=False) == (BH + BW) * C
    assert count(basis="untied", local=False) == (BH + BW) * (C * (C - 1) // 2 + C)
    assert count(gain="signed", local=False) == core
    assert count(gain="complex", local=False) == core + (BH + BW) * C
    assert count(axes="ch", local=False) == C * (C - 1) // 2 + BH * C
    assert count(axes="cw", local=False) == C * (C - 1) // 2 + BW * C
    assert count(axes="ch+cw", local=False) == count(axes="cw>ch", local=False) == core


def test_the_size_it_was_built_for_reads_the_table_directly() -> None:
    mixer = moved(CHASM(3, size=(12, 9), gain="signed"))
    ops = mixer.operators(12, 9)
    for axis in ("ch", "cw"):
        assert torch.equal(ops[axis].gains, mixer.axis_parameters(axis).gain_table)
    assert mixer.operators(30, 31)["ch"].gains.shape == (16, 3)


def test_channel_count_one_and_two() -> None:
    for C in (1, 2):
        mixer = moved(CHASM(C, size=6, dtype=torch.float64))
        x = features(2, C, 6, 5, dtype=torch.float64)
        assert relative(mixer(x), oracle(mixer, x)) <= 1e-10


# --- which form -------------------------------------------------------------------------------------------


def test_explain_names_the_form_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    original = chasm.ops.run

    def noting(x: Tensor, chains: Any, **options: Any) -> Tensor:
        ran.extend(chain.form for chain in chains)
        return original(x, chains, **options)

    monkeypatch.setattr(chasm.ops, "run", noting)
    flags = {key: [False, True] for key in ("frozen", "training", "needs", "grad")}
    for axes, size, frozen, training, needs, grad in pairwise(
        {"axes": ["ch>cw", "ch+cw"], "size": [(6, 5), (5, 300), (300, 5)], **flags}
    ):
        mixer = CHASM(2, bins=3, axes=axes).train(training).requires_grad_(not frozen)
        x = features(1, 2, *size).requires_grad_(needs)
        with torch.set_grad_enabled(grad):
            told = mixer.explain(x)
            ran.clear()
            mixer(x)
        assert set(ran) == {told.form}, (axes, frozen, training, needs, grad, size)
        assert told.reason


def test_explain_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, x = CHASM(2, bins=3), features(1, 2, 6, 5)
    for name in ("orthogonal_basis", "positive_gains", "prepare", "run"):
        monkeypatch.setattr(chasm.ops, name, None)
    assert mixer.explain(x).form == "circulant"
    assert mixer.eval().explain(x).form == "circulant"


def test_nothing_but_long_circulants_is_too_large_to_keep() -> None:
    def kept(form: str, n: int) -> bool:
        return chasm.ops.can_be_kept(form, torch.Size((1, 2, 4, n)))

    assert kept("triton", 512)
    assert not kept("triton", 513)
    assert kept("fft", 513)


@pytest.mark.parametrize("training", [False, True])
def test_explain_asks_for_the_dtype_that_runs(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    original = chasm.ops.choose_form

    def noting(*args: Any, dtype: torch.dtype, **options: Any) -> Any:
        asked.append(dtype)
        return original(*args, dtype=dtype, **options)

    monkeypatch.setattr(chasm.ops, "choose_form", noting)
    mixer, x = CHASM(2, bins=3).train(training), features(1, 2, 6, 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixer.explain(x)
        mixer(x)
    mixer.explain(x)
    assert asked == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_the_mean_of_axes_counts_every_axis_as_long() -> None:
    """A circulant per channel on an axis of 4,000 would be 64 MB a channel, whichever axis is named first."""
    for axes in ("ch+cw", "cw+ch"):
        mixer = CHASM(2, bins=3, axes=axes).eval()
        with torch.no_grad():
            assert mixer.explain(torch.zeros(1, 2, 4, 4000)).form == "fft"
            assert mixer.explain(torch.zeros(1, 2, 4000, 4)).form == "fft"


def test_a_forced_form_that_cannot_be_is_refused() -> None:
    x = features(1, 3, 6, 5)
    with pytest.raises(ValueError, match="form 'circulant' needs"):
        CHASM(3, bins=3, form="circulant", basis="untied")(x)
    with pytest.raises(ValueError, match="form 'triton' cannot run"):
        CHASM(3, bins=3, form="triton")(x)


# --- precision ---------------------------------------------------------------------------------------------


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


def test_a_core_takes_features_of_any_float_type() -> None:
    """The bare core has no convolution, so features need not have the dtype of its parameters."""
    for gain in ("positive", "complex"):
        for form in ("auto", "reference", "fft", "circulant"):
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


# --- compilers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"axes": "ch+cw", "gain": "complex"}])
def test_compiles_as_one_graph(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    mixer = moved(CHASM(3, size=(6, 5), **options))
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    a, b = (features(2, 3, 6, 5).requires_grad_() for _ in range(2))
    y = mixer(a)
    y.square().sum().backward()
    wanted = [p.grad for p in mixer.parameters()]
    mixer.zero_grad()
    z = compiled(b)
    z.square().sum().backward()
    assert relative(z, y) <= 1e-6
    for p, want in zip([b, *mixer.parameters()], [a.grad, *wanted], strict=True):
        assert p.grad is not None
        assert want is not None
        assert relative(p.grad, want) <= 1e-5
    mixer.eval()
    with torch.no_grad():
        assert relative(compiled(b), y) <= 1e-5
        mixer.gain_table["ch"].add_(1)  # a compiled graph holds no old constants either
        assert relative(compiled(b), mixer(b)) <= 1e-5
        assert relative(compiled(b), y) > 1e-3


@pytest.mark.parametrize("options", [{"basis": "untied"}, {"form": "fft"}, {"form": "reference"}, {"basis": None}])
def test_other_variants_are_one_graph_too(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    mixer = moved(CHASM(3, size=(6, 5), **options))
    x = features(2, 3, 6, 5)
    assert relative(torch.compile(mixer, fullgraph=True, backend="eager")(x), mixer(x)) <= 1e-6


def test_inductor_on_the_bare_core() -> None:
    """Half a minute of C++ compiler on the first run of a machine, seconds later."""
    torch.compiler.reset()
    core = moved(CHASM(3, size=(6, 5), local=False)).eval()
    x = features(2, 3, 6, 5)
    with torch.no_grad():
        assert relative(torch.compile(core, fullgraph=True)(x), core(x)) <= 1e-5


@pytest.mark.parametrize(
    ("options", "named"), [({}, True), ({"axes": "ch+cw", "gain": "complex"}, False), ({"basis": "untied"}, False)]
)
def test_exports_with_free_height_and_width(options: dict[str, Any], named: bool) -> None:
    """Named dimensions want prefer_deferred_runtime_asserts_over_guards: 2(W//2+1) divides by W//2+1, not proved."""
    mixer = moved(CHASM(3, size=(8, 10), **options)).eval()
    Dim = torch.export.Dim
    program = torch.export.export(
        mixer,
        (features(3, 3, 12, 14),),
        dynamic_shapes=({0: Dim("b"), 2: Dim("h"), 3: Dim("w")} if named else dict.fromkeys((0, 2, 3), Dim.DYNAMIC),),
        prefer_deferred_runtime_asserts_over_guards=named,
    )
    run = program.module()
    for shape in ((3, 3, 12, 14), (2, 3, 9, 7), (5, 3, 8, 10), (2, 3, 31, 2), (2, 3, 3, 16)):
        x = features(*shape)
        assert relative(run(x), mixer(x)) <= 1e-5, shape


def test_functional_call() -> None:
    for mixer in (moved(CHASM(3, size=(6, 5))), moved(CHASM(3, size=(6, 5))).eval()):
        x = features(2, 3, 6, 5)
        other = {name: p.detach() + 0.003 for name, p in mixer.named_parameters()}
        changed = copy.deepcopy(mixer)
        changed.load_state_dict(mixer.state_dict() | other)
        with torch.no_grad():
            mixer(x)
            assert relative(torch.func.functional_call(mixer, other, (x,)), changed(x)) <= 1e-6
        grads = torch.func.grad(lambda p, m=mixer, x=x: torch.func.functional_call(m, p, (x,)).square().sum())(other)
        changed(x).square().sum().backward()
        for name, p in changed.named_parameters():
            assert p.grad is not None
            assert relative(grads[name], p.grad) <= 1e-5, name


# --- saving --------------------------------------------------------------------------------------------------


def test_state_dict_names_and_round_trips(tmp_path: Any) -> None:
    mixer = moved(CHASM(3, size=(6, 5), gain="complex")).eval()
    assert set(mixer.state_dict()) == {
        *(f"{part}.{axis}" for part in ("theta", "gain_table", "phase_table") for axis in ("ch", "cw")),
        *(f"{part}.{kind}" for part in ("refine", "fuse") for kind in ("weight", "bias")),
        "stored_step_scale",
    }
    x = features(2, 3, 6, 5)
    with torch.no_grad():
        want = mixer(x)
        save_file(mixer.state_dict(), tmp_path / "mixer.safetensors")
        other = CHASM(3, size=(6, 5), gain="complex").eval()
        other.load_state_dict(load_file(tmp_path / "mixer.safetensors"))
        assert torch.equal(other(x), want)
        assert torch.equal(pickle.loads(pickle.dumps(mixer))(x), want)
        assert torch.equal(copy.deepcopy(mixer)(x), want)
        sizes = [len(pickle.dumps(m)) for m in (mixer, CHASM(3, size=(6, 5), gain="complex"))]
        assert abs(sizes[0] - sizes[1]) < 200  # the cache does not travel


def test_device_and_dtype() -> None:
    meta = CHASM(3, size=(6, 5), device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.float64)}
    x = torch.empty(2, 3, 8, 9, device="meta", dtype=torch.float64)
    assert meta(x).shape == meta.eval()(x).shape == x.shape


def test_repr_names_the_variant() -> None:
    text = repr(CHASM(3, bins=4, axes="ch+cw", gain="signed"))
    assert "axes='ch+cw'" in text
    assert "gain='signed'" in text


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, r"expected .*channel.*, got channels=0"),
        ({"channels": -3}, r"expected .*channel.*, got channels=-3"),
        ({"channels": 2.5}, r"expected .*channel.*, got channels=2.5"),
        ({"channels": "8"}, r"expected .*channel.*, got channels='8'"),
        ({"axes": "ch>cz"}, r"axes='ch>cz' .*'ch>cw'"),
        ({"axes": "ch>ch"}, r"axes='ch>ch' .*each axis at most once"),
        ({"axes": ""}, r"axes=''"),
        ({"axes": "ch>cw+ch"}, r"axes="),
        ({"axes": "cd", "ndim": 2}, r"axes='cd' is not a composition of ch, cw"),
        ({"axes": "ch", "ndim": 1}, r"axes='ch' is not a composition of cl"),
        ({"axes": 5}, r"axes=5"),
        ({"basis": "shard"}, r"unknown basis='shard': did you mean 'shared'\?"),
        ({"basis": "None"}, r"basis='None' is text: write None in Python, null in YAML"),
        ({"gain": "positve"}, r"unknown gain='positve': did you mean 'positive'\?"),
        ({"form": "circulent"}, r"unknown form='circulent': did you mean 'circulant'\?"),
        ({"ndim": 4}, r"unknown ndim=4: known: 1, 2, 3"),
        ({"bins": 0}, r"bins=0: expected a positive whole number, or 2"),
        ({"bins": (4,)}, r"bins=\(4,\): expected"),
        ({"bins": (4, 2.5)}, r"bins=\(4, 2.5\): expected"),
        ({"size": (8, 8, 8)}, r"size=\(8, 8, 8\): expected"),
        ({"size": -1}, r"size=-1: expected"),
        ({"size": 2.5}, r"size=2.5: expected"),
        ({"size": "8"}, r"size='8': expected"),
        ({"bins": True}, r"bins=True: expected"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        CHASM(**{"channels": 4, **options})
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("ndim", "x", "message"),
    [
        (2, torch.zeros(4, 6, 5), r"expected features \(B, 4, H, W\), got \(4, 6, 5\): pass ndim="),
        (2, torch.zeros(1, 4, 6, 5, 3), r"expected features \(B, 4, H, W\), got \(1, 4, 6, 5, 3\): pass ndim="),
        (2, torch.zeros(1, 6, 5, 4), r"expected features \(B, 4, H, W\), got \(1, 6, 5, 4\): set channels"),
        (1, torch.zeros(1, 4, 6, 5), r"expected features \(B, 4, L\), got \(1, 4, 6, 5\)"),
        (3, torch.zeros(1, 4, 6, 5), r"expected features \(B, 4, D, H, W\), got \(1, 4, 6, 5\)"),
        (2, torch.zeros(1, 4, 6, 5, dtype=torch.int64), r"expected real floating-point .*got torch.int64"),
        (2, torch.zeros(1, 4, 6, 5, dtype=torch.bool), r"expected real floating-point .*got torch.bool"),
        (2, torch.zeros(1, 4, 6, 5, dtype=torch.complex64), r"got torch.complex64: .*stack re and im"),
        (2, torch.zeros(1, 4, 0, 5), r"expected .*length 1 or more, got \(1, 4, 0, 5\)"),
        (2, torch.zeros(0, 4, 3, 0), r"expected .*length 1 or more, got \(0, 4, 3, 0\)"),
    ],
)
def test_bad_input_is_one_line(ndim: int, x: Tensor, message: str) -> None:
    for options in ({}, {"basis": None}, {"local": False}):
        mixer = CHASM(4, bins=3, ndim=ndim, **options)
        for call in (mixer, mixer.explain):
            with pytest.raises(ValueError, match=message) as info:
                call(x)
            assert "\n" not in str(info.value)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    mixer = CHASM(np.int64(4), size=(np.int32(8), np.int64(6)))
    assert mixer(torch.zeros(1, 4, 8, 6)).shape == (1, 4, 8, 6)
    assert CHASM(4, bins=np.int64(3)).gain_table["ch"].shape == (3, 4)


def test_operators_take_a_size_as_numbers_or_as_a_tuple() -> None:
    mixer = CHASM(4, size=8)
    x = torch.zeros(1, 4, 8, 6)
    for given in ((8, 6), ((8, 6),), (x.shape[2:],), (np.int64(8), 6)):
        assert mixer.operators(*given)["cw"].gains.shape == (4, 4)
    for wrong in ((8,), (8, 6, 4), ((8, 6), 4), (8, 0), ("8x6",)):
        with pytest.raises(ValueError, match="expected 2 positive whole numbers"):
            mixer.operators(*wrong)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="axis"):
        CHASM(4, axis="ch")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no option 'axis': did you mean 'axes'"):
        chasm.create_mixer("chasm", channels=4, axis="ch")


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


# --- the step scale ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", GAINS)
def test_a_step_moves_basis_and_gains_by_the_step_scale(gain: Any) -> None:
    """One step of Adam moves every entry of theta, Gamma and phi by lr * s; one of SGD by lr * s * gradient."""
    x, weight = features(2, 3, 6, 5), features(2, 3, 6, 5)

    def stepped_by(optimiser: Any, s: float) -> dict[str, Tensor]:
        mixer = moved(CHASM(3, size=(6, 5), gain=gain, step_scale=s).double())
        before = torch.cat([t.flatten() for a in ("ch", "cw") for t in mixer.axis_parameters(a) if t is not None])
        step = optimiser(mixer.parameters())
        (mixer(x.double()) * weight).sum().backward()
        step.step()
        after = torch.cat([t.flatten() for a in ("ch", "cw") for t in mixer.axis_parameters(a) if t is not None])
        return (after - before).detach()

    adam, sgd = partial(torch.optim.Adam, lr=1e-3), partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    moves = stepped_by(adam, 30.0)
    assert torch.allclose(moves.abs()[moves != 0], torch.tensor(0.03).double(), rtol=1e-3)
    torch.testing.assert_close(stepped_by(sgd, 30.0), 30 * stepped_by(sgd, 1.0))


def test_weight_decay_pulls_to_the_identity() -> None:
    mixer = moved(CHASM(3, size=(6, 5), local=False).double())
    with torch.no_grad():
        for p in mixer.parameters():
            p.zero_()
    x = features(2, 3, 6, 5).double()
    torch.testing.assert_close(mixer(x), x)


def test_weights_of_another_step_scale_load_as_the_same_operator() -> None:
    written = moved(CHASM(3, size=(6, 5), gain="complex", step_scale=7.3)).eval()
    read = nn.ModuleList([CHASM(3, size=(6, 5), gain="complex", step_scale=100)]).eval()
    state = {f"0.{k}": v for k, v in written.state_dict().items()}
    kept = {k: v.clone() for k, v in state.items()}
    read.load_state_dict(state)
    x = features(2, 3, 6, 5)
    with torch.no_grad():
        assert relative(read[0](x), written(x)) <= 1e-6
    assert read[0].step_scale == read.state_dict()["0.stored_step_scale"] == 100
    assert all(torch.equal(state[k], v) for k, v in kept.items())  # the caller's dict is left alone
    del state["0.stored_step_scale"]
    with pytest.raises(RuntimeError, match="stored_step_scale"):
        read.load_state_dict(state)


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf, "30", None])
def test_a_step_scale_must_be_a_positive_number(scale: Any) -> None:
    with pytest.raises(ValueError, match="positive step_scale"):
        CHASM(3, step_scale=scale)
