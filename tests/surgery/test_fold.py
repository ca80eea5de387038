"""Folded models: constants only, equal to the original."""

import copy
import itertools
from typing import Any

import pytest
import torch
from networks import Net, Outputs, features, moved, relative
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import chasm
from chasm import CHASM
from chasm.surgery.fold import FoldedCHASM

BASES = ["shared", "identity", "untied", None]
GAINS = ["positive", "signed", "complex"]
VARIANTS = [(b, g) for b, g in itertools.product(BASES, GAINS) if (b, g) != ("untied", "complex")]


class Operations(TorchDispatchMode):
    """Names of the operations that ran, and the dtypes of what they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        self.dtypes.update(t.dtype for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor))
        return out


@pytest.mark.parametrize(("basis", "gain"), VARIANTS)
@pytest.mark.parametrize("axes", ["ch>cw", "cw>ch", "ch+cw", "ch", "cw"])
@pytest.mark.parametrize("local", [True, False])
def test_every_variant_folds(axes: str, basis: Any, gain: Any, local: bool) -> None:
    mixer = moved(CHASM(3, size=(6, 7), axes=axes, basis=basis, gain=gain, local=local)).eval()
    for size in ((6, 7), (5, 8), (1, 2)):
        folded = chasm.fold(mixer, size=size)
        x = features(2, 3, *size)
        with torch.no_grad():
            assert relative(folded(x), mixer(x)) <= 1e-5
            with Operations() as ran:
                folded(x)
        banned = [
            n
            for n in ran.names
            if n == "exp" or any(w in n for w in ("fft", "complex", "polar", "matrix_exp", "softplus"))
        ]
        assert not banned, banned
        assert ran.dtypes <= {torch.float32}
        assert not any(t.is_complex() for t in folded.state_dict().values())
        assert not any(p.requires_grad for p in folded.parameters())


@pytest.mark.parametrize(
    ("ndim", "axes", "size"), [(1, "cl", (9,)), (3, "cd>ch>cw", (4, 3, 5)), (3, "cw+cd", (2, 3, 4))]
)
@pytest.mark.parametrize(("basis", "gain"), [("shared", "complex"), ("untied", "positive")])
def test_sequences_and_volumes_fold(ndim: int, axes: str, size: tuple[int, ...], basis: Any, gain: Any) -> None:
    mixer = moved(CHASM(2, bins=3, axes=axes, ndim=ndim, basis=basis, gain=gain)).eval()
    x = features(2, 2, *size)
    with torch.no_grad():
        assert relative(chasm.fold(mixer, size=size)(x), mixer(x)) <= 1e-5


def test_an_untied_basis_with_complex_gains_does_not_fold() -> None:
    with pytest.raises(ValueError, match="untied basis with real gains, got complex ones"):
        chasm.fold(CHASM(4, size=8, basis="untied", gain="complex"), size=(8, 8))


def test_float64_folds_to_rounding() -> None:
    mixer = moved(CHASM(5, size=(12, 9), dtype=torch.float64)).eval()
    x = features(2, 5, 12, 9, dtype=torch.float64)
    assert relative(chasm.fold(mixer, size=(12, 9))(x), mixer(x)) <= 1e-12


@pytest.mark.parametrize("basis", ["shared", "untied", "identity"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_models_fold(basis: Any, dtype: torch.dtype, tolerance: float) -> None:
    mixer = moved(CHASM(3, size=(6, 5), basis=basis)).to(dtype).eval()
    x = features(2, 3, 6, 5).to(dtype)
    folded = chasm.fold(mixer, size=(6, 5))
    with torch.no_grad():
        y = folded(x)
        assert y.dtype == dtype
        assert relative(y, mixer(x)) <= tolerance


@pytest.mark.parametrize("basis", ["shared", "untied", "identity"])
@pytest.mark.parametrize("local", [True, False])
def test_folded_models_run_under_autocast(basis: Any, local: bool) -> None:
    mixer = moved(CHASM(3, size=(6, 5), basis=basis, local=local)).eval()
    folded = chasm.fold(mixer, size=(6, 5))
    x = features(2, 3, 6, 5)
    for grad in (False, True):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
            y = folded(x)
        assert y.dtype == torch.float32
        assert relative(y, mixer(x)) <= 2e-2


def test_autocast_does_not_round_the_constants_of_a_folded_model() -> None:
    mixer, x = moved(CHASM(8, size=(6, 5))).eval(), features(2, 8, 6, 5)
    plain, low = chasm.fold(mixer, size=(6, 5)), chasm.fold(mixer, size=(6, 5))
    (expected,) = plain._chains(x, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = low._chains(x, torch.bfloat16)
    for a, b in zip(found.constants, expected.constants, strict=True):
        assert torch.equal(a, b)


def test_folded_models_take_any_layout_batch_and_gradient() -> None:
    mixer = moved(CHASM(4, size=(6, 5))).eval()
    folded = chasm.fold(mixer, size=(6, 5))
    base = features(2, 4, 6, 5)
    want = mixer(base).detach()
    for x in (base.contiguous(memory_format=torch.channels_last), base.mT.contiguous().mT):
        with torch.no_grad():
            assert relative(folded(x), want) <= 1e-5
        assert relative(folded(x), want) <= 1e-5
    a, b = base.clone().requires_grad_(), base.clone().requires_grad_()
    folded(a).square().sum().backward()
    mixer(b).square().sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert relative(a.grad, b.grad) <= 1e-5
    with torch.no_grad():
        assert folded(base[:0]).shape == (0, 4, 6, 5)
        assert relative(folded(base[:1]), want[:1]) <= 1e-5


def test_a_network_folds_by_example() -> None:
    net = moved(Net())
    x = features(2, 4, 8, 6)
    with torch.no_grad():
        want = copy.deepcopy(net).eval()(x)
        for example in (x, (x,), x[:1]):
            folded: Any = chasm.fold(net, example=example)
            assert not folded.training
            assert [type(m) for m in folded.modules() if isinstance(m, CHASM)] == []
            assert folded.first.size == (8, 6)
            assert folded.rest["mix"].size == (4, 3)
            assert relative(folded(x), want) <= 1e-5


def test_the_original_is_left_as_it_was() -> None:
    net = moved(Net()).train()
    net.norm.eval()  # a frozen normalisation in a model that trains
    before = {k: v.clone() for k, v in net.state_dict().items()}
    modes = [m.training for m in net.modules()]
    chasm.fold(net, example=features(2, 4, 8, 6))
    assert [m.training for m in net.modules()] == modes
    assert isinstance(net.first, CHASM)
    assert all(p.requires_grad for p in net.parameters())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any(m._forward_hooks for m in net.modules())
    folded = chasm.fold(net.first, size=(8, 6))
    with torch.no_grad():
        x = features(1, 4, 8, 6)
        kept = folded(x)
        for p in net.parameters():
            p.add_(1)
        assert torch.equal(folded(x), kept)


def test_a_mixer_under_two_names_is_folded_under_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = moved(CHASM(3, size=(6, 5)))
            self.two = self.one

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.two(self.one(x))
            return y

    net = Twice().eval()
    x = features(2, 3, 6, 5)
    for folded in (chasm.fold(net, size=(6, 5)), chasm.fold(net, example=x)):
        assert not any(isinstance(m, CHASM) for m in folded.modules())
        with torch.no_grad():
            assert relative(folded(x), net(x)) <= 1e-5


def test_slots_and_lists_fold() -> None:
    net = nn.Sequential(chasm.create_slot("chasm", 3, (6, 5)), nn.Sequential(chasm.create_slot("gfnet", 3, (6, 5))))
    net = moved(net).eval()
    folded: Any = chasm.fold(net, size=(6, 5))
    assert isinstance(folded[0], FoldedCHASM)
    with torch.no_grad():
        x = features(2, 3, 6, 5)
        assert relative(folded(x), net(x)) <= 1e-5


def test_channel_products_are_convolutions_in_files_alone() -> None:
    """Convolutions may be rounded to TF32 on a GPU, without a word."""
    folded, x = chasm.fold(moved(chasm.CHASM(6, size=(4, 4), local=False)), size=(4, 4)), features(2, 6, 4, 4)
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(folded, backend=backend, fullgraph=True)(x), folded(x))
    exported = [str(node.target) for node in torch.export.export(folded, (x,)).graph.nodes]
    assert any("conv2d" in name for name in exported)
    assert not any("conv2d" in name for name in compiled)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_folded_float32_is_not_tf32_on_a_gpu(layout: torch.memory_format) -> None:
    mixer = moved(chasm.CHASM(32, size=(12, 10))).cuda().eval()
    x = features(2, 32, 12, 10, dtype=torch.float32).cuda().to(memory_format=layout)
    with torch.no_grad():
        torch.testing.assert_close(chasm.fold(mixer, size=(12, 10))(x), mixer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_folded_network_in_a_cuda_graph() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 32, 1), moved(chasm.CHASM(32, size=(8, 96))), nn.Conv2d(32, 3, 1)).cuda()
    x = features(2, 3, 8, 96, dtype=torch.bfloat16).cuda()
    folded = chasm.fold(network.eval(), example=x.float()).to(torch.bfloat16)
    with torch.no_grad():
        want = [folded(z) for z in (x, 2 * x)]
        graphed: Any = torch.cuda.make_graphed_callables(folded, (x.clone(),))
        assert torch.equal(graphed(x), want[0])
        assert torch.equal(graphed(2 * x), want[1])


def test_another_size_than_folded_for_is_an_error() -> None:
    folded = chasm.fold(CHASM(3, size=(6, 5)), size=(6, 5))
    with pytest.raises(ValueError, match=r"folded for spatial size \(6, 5\), got \(5, 6\): fold again") as info:
        folded(features(1, 3, 5, 6))
    assert "\n" not in str(info.value)
    assert chasm.fold(CHASM(3), size=4)(features(1, 3, 4, 4)).shape == (1, 3, 4, 4)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(2, 2), {"size": 4}, "contains no CHASM, GFNet or SpectFormer"),
        (CHASM(3), {}, r"either size= .* or example="),
        (CHASM(3), {"size": 4, "example": torch.zeros(1, 3, 4, 4)}, r"either size= .* or example="),
        (CHASM(3), {"size": (4,)}, r"size=\(4,\): expected"),
        (CHASM(3), {"size": (4, 4, 4)}, r"size=\(4, 4, 4\): expected"),
        (CHASM(3), {"size": 0}, r"size=0: expected"),
        (CHASM(3), {"size": (4, -1)}, r"size=\(4, -1\): expected"),
        (CHASM(3), {"size": 4.5}, r"size=4.5: expected"),
        (CHASM(3), {"size": (4, 4.5)}, r"size=\(4, 4.5\): expected"),
        (CHASM(3), {"example": torch.zeros(3, 4, 4)}, r"expected features \(B, 3, H, W\), got \(3, 4, 4\)"),
    ],
)
def test_bad_requests_are_one_line(model: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        chasm.fold(model, **options)
    assert "\n" not in str(info.value)


def test_an_example_must_reach_every_mixer_at_one_size() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = CHASM(3), CHASM(3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.used(x)
            return y

    with pytest.raises(ValueError, match="never reached mixer 'spare'"):
        chasm.fold(Spare(), example=torch.zeros(1, 3, 4, 4))

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = CHASM(3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mixer(self.mixer(x)[..., ::2])
            return y

    net = Pyramid()
    with pytest.raises(ValueError, match=r"mixer 'mixer' is called with sizes \(4, 4\) and \(4, 2\)"):
        chasm.fold(net, example=torch.zeros(1, 3, 4, 4))
    assert net.training
    assert not any(m._forward_hooks for m in net.modules())


class Doubled(CHASM):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Named(CHASM):
    """Nothing that changes a result."""

    def extra_repr(self) -> str:
        return "mine"


def test_what_folding_would_drop_is_refused() -> None:
    after, before, patched, inside = CHASM(3), CHASM(3), CHASM(3), CHASM(3)
    after.register_forward_hook(lambda _m, _x, y: 2 * y)
    before.register_forward_pre_hook(lambda _m, x: (2 * x[0],))
    patched.forward = patched.forward  # type: ignore[method-assign]  # as offloading libraries do
    inside.core = inside.core  # type: ignore[method-assign]
    x = features(1, 3, 4, 4)
    for mixer, what in (
        (Doubled(3), r"\(Doubled\) has a forward of its own, which folding would drop: put a plain CHASM inside"),
        (patched, r"\(CHASM\) has a forward of its own"),
        (inside, r"\(CHASM\) has a core of its own"),
        (after, "has forward hooks, which folding would drop: remove them"),
        (before, "has forward hooks"),
    ):
        nested = nn.Sequential(CHASM(3), nn.ModuleDict({"a": mixer}))
        for where, model in (("the mixer", mixer), ("mixer '1.a'", nested)):
            with pytest.raises(ValueError, match=f"{where} {what}") as info:
                chasm.fold(model, size=4)
            assert "\n" not in str(info.value)
        with pytest.raises(ValueError, match=what):
            chasm.fold(nn.Sequential(CHASM(3), mixer), example=x)
    around = nn.Sequential(moved(CHASM(3, size=4)))
    around.register_forward_hook(lambda _m, _x, y: 2 * y)  # stays
    for kept in (around, nn.Sequential(moved(Named(3, size=4))), moved(Named(3, size=4))):
        with torch.no_grad():
            assert relative(chasm.fold(kept, size=4)(x), kept.eval()(x)) <= 1e-5


def test_a_mixer_inside_a_layer_of_another_is_folded_too() -> None:
    outer: Any = CHASM(3, size=4)
    outer.refine = nn.Sequential(CHASM(3, size=4, gain="complex"), nn.Conv2d(3, 3, 1))
    x = features(1, 3, 4, 4)
    for model in (moved(outer).eval(), nn.Sequential(outer).eval()):
        for folded in (chasm.fold(model, size=4), chasm.fold(model, example=x)):
            assert not any(isinstance(m, CHASM) for m in folded.modules())
            with torch.no_grad():
                assert relative(folded(x), model(x)) <= 1e-5


def test_a_mixer_called_by_keyword_is_seen() -> None:
    net = Outputs().eval()
    x = features(1, 3, 6, 5)
    folded = chasm.fold(net, example=(x, torch.tensor(2.0)))
    assert isinstance(folded.mixer, FoldedCHASM)
    assert folded.mixer.size == (6, 5)
    with torch.no_grad():
        assert relative(folded(x, torch.tensor(2.0))["y"], net(x, torch.tensor(2.0))["y"]) <= 1e-5


@pytest.mark.parametrize("called_before", [False, True])
def test_a_folded_model_compiles_as_one_operator(called_before: bool) -> None:
    """After an eager call its constants are inputs of the graph; before, they are made in every call."""
    torch.compiler.reset()
    mixer = moved(CHASM(4, size=(6, 5))).eval()
    folded, x, seen = chasm.fold(mixer, size=(6, 5)), features(2, 4, 6, 5), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad():
        if called_before:
            folded(x)
        compiled = torch.compile(folded, fullgraph=True, backend=backend)
        assert relative(compiled(x), mixer(x)) <= 1e-5
    assert seen.count("chasm.block.default") == 1
    assert any("rfft" in name for name in seen) != called_before
