"""Folded models: constants only, equal to the original; ONNX files that appear only when they are right."""

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import chasm
from chasm import CHASM
from chasm.deploy import FoldedCHASM

BASES = ["shared", "identity", "untied", None]
GAINS = ["positive", "signed", "complex"]
VARIANTS = [(b, g) for b, g in itertools.product(BASES, GAINS) if (b, g) != ("untied", "complex")]


def moved(model: nn.Module) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def features(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Net(nn.Module):
    """Mixers at two sizes, one in a container, and a normalisation whose eval mode differs from training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.first = CHASM(4, size=(8, 6))
        self.down = nn.Conv2d(4, 4, 2, stride=2)
        self.rest = nn.ModuleDict({"mix": CHASM(4, size=(4, 3), axes="ch+cw", residual=False)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest["mix"](self.down(self.first(self.norm(x))))
        return y


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
        (nn.Linear(2, 2), {"size": 4}, "contains no chasm.CHASM"),
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
    inside._block = inside._block  # type: ignore[method-assign]
    x = features(1, 3, 4, 4)
    for mixer, what in (
        (Doubled(3), r"\(Doubled\) has a forward of its own, which folding would drop: put a plain CHASM inside"),
        (patched, r"\(CHASM\) has a forward of its own"),
        (inside, r"\(CHASM\) has a _block of its own"),
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


class Outputs(nn.Module):
    """A number beside the image, the mixer called by keyword, and outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = CHASM(3, size=(6, 5))

    def forward(self, x: Tensor, level: Tensor) -> dict[str, Any]:
        y = self.mixer(x=x) * level
        return {"y": y, "more": (y.mean(), None), "label": y.argmax(1)}


# --- ONNX ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """One real export of a network with every kind of pass, for a batch of one."""
    pytest.importorskip("onnxruntime")
    net = nn.Sequential(Net(), CHASM(4, bins=3, basis="untied"), CHASM(4, bins=3, gain="complex", local=False))
    moved(net).train()
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    assert chasm.export_onnx(net, path, features(1, 4, 8, 6)) == path
    return net, path


def test_the_onnx_file_runs_at_another_batch_size(exported: tuple[nn.Module, Path]) -> None:
    import onnx
    import onnxruntime

    net, path = exported
    assert os.listdir(path.parent) == [path.name]
    assert net.training
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    reference = copy.deepcopy(net).eval()
    for batch in (1, 2, 5):
        x = features(batch, 4, 8, 6)
        with torch.no_grad():
            want = reference(x)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert relative(torch.from_numpy(got), want) <= 1e-5
    used = {node.op_type for node in onnx.load(str(path)).graph.node}
    assert not {op for op in used if "DFT" in op or "FFT" in op or op in ("Exp", "Softplus")}, used


class Runtime:
    """Stands in for onnxruntime: answers with the model's output times a factor."""

    def __init__(self, answer: Any, factor: float) -> None:
        self.answer, self.factor = answer, factor

    def InferenceSession(self, path: str, providers: list[str]) -> "Runtime":  # noqa: N802
        assert Path(path).read_bytes() == b"new"
        return self

    def get_inputs(self) -> list[Any]:
        return [type("Input", (), {"name": "x"})]

    def run(self, names: None, feed: dict[str, Any]) -> list[Any]:
        with torch.no_grad():
            return [self.answer(torch.from_numpy(feed["x"])).numpy() * self.factor]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("failure", ["export", "runtime", "difference", "nan", "none"])
def test_a_file_appears_whole_and_checked_or_not_at_all(
    existing: bool, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    mixer = moved(CHASM(3, size=(6, 5)))
    x = features(1, 3, 6, 5)
    path = tmp_path / "mixer.onnx"
    if existing:
        path.write_bytes(b"old")

    def export(model: nn.Module, args: Any, file: str, **options: Any) -> None:
        Path(file).write_bytes(b"new")
        if failure == "export":
            raise RuntimeError("no such operator")

    runtime = Runtime(chasm.fold(mixer, size=(6, 5)), {"difference": 1.01, "nan": np.nan}.get(failure, 1.0))
    if failure == "runtime":
        monkeypatch.setattr(Runtime, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("bad file")))
    monkeypatch.setattr(torch.onnx, "export", export)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    if failure == "none":
        assert chasm.export_onnx(mixer, str(path), x) == path
        assert path.read_bytes() == b"new"
    else:
        expected: Any = ValueError if failure in ("difference", "nan") else RuntimeError
        with pytest.raises(expected) as info:
            chasm.export_onnx(mixer, str(path), x)
        if expected is ValueError:
            assert "differs from the model" in str(info.value)
            assert "\n" not in str(info.value)
        assert not existing or path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ([path.name] if existing or failure == "none" else [])


def test_the_file_is_compared_with_the_model_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the folded copy, where a fault of folding would meet itself."""
    import sys

    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mixer = nn.BatchNorm2d(3), moved(CHASM(3, size=4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mixer(self.norm(x))
            return y if isinstance(self.mixer, CHASM) else 1.01 * y

    net = Sly().train()
    net.norm.running_mean = torch.ones(3)
    x = features(2, 3, 4, 4)
    monkeypatch.setattr(torch.onnx, "export", lambda _model, _args, file, **_: Path(file).write_bytes(b"new"))
    monkeypatch.setitem(sys.modules, "onnxruntime", Runtime(chasm.fold(net, example=x), 1.0))
    with pytest.raises(ValueError, match=r"differs from the model by 1.0e-02 \(allowed 1e-04\)"):
        chasm.export_onnx(net, tmp_path / "x.onnx", x)
    monkeypatch.setitem(sys.modules, "onnxruntime", Runtime(chasm.fold(net, example=x), 1 / 1.01))
    chasm.export_onnx(net, tmp_path / "x.onnx", x)
    assert all(m.training for m in net.modules())
    assert torch.equal(net.norm.running_mean, torch.ones(3))


def test_outputs_of_every_kind_and_an_input_without_batch(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    net = moved(Outputs())
    path = chasm.export_onnx(net, tmp_path / "net.onnx", (features(1, 3, 6, 5), torch.tensor(2.0)))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x, level = features(3, 3, 6, 5), torch.tensor(0.5)
    y, mean, label = session.run(None, {"x": x.numpy(), "level": level.numpy()})
    with torch.no_grad():
        want = net.eval()(x, level)
    assert relative(torch.tensor(y), want["y"]) <= 1e-5
    assert relative(torch.tensor(mean), want["more"][0]) <= 1e-5
    assert (torch.tensor(label) == want["label"]).all()


def test_every_output_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.mean((2, 3))

    x = features(2, 3, 4, 4)
    monkeypatch.setattr(torch.onnx, "export", lambda _model, _args, file, **_: Path(file).write_bytes(b"new"))
    monkeypatch.setitem(sys.modules, "onnxruntime", Runtime(None, 1.0))
    mean = x.mean((2, 3)).numpy()
    for second, error in ((mean, None), (1.01 * mean, "1.0e-02"), (mean[:1], "inf"), (mean * np.nan, "nan")):
        monkeypatch.setattr(Runtime, "run", lambda *_, second=second: [x.numpy(), second])
        if error is None:
            chasm.export_onnx(Pair(), tmp_path / "x.onnx", x)
        else:
            with pytest.raises(ValueError, match=f"differs from the model by {error}"):
                chasm.export_onnx(Pair(), tmp_path / "x.onnx", x)


def test_float16_models_are_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    chasm.export_onnx(moved(CHASM(3, size=(6, 5))).half(), tmp_path / "half.onnx", features(1, 3, 6, 5).half())


def test_what_cannot_be_exported_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")

    class Chatty(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            return x, "done"

    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: pytest.fail("the whole export ran"))
    x, path = features(1, 3, 4, 4), tmp_path / "x.onnx"
    requests: list[tuple[nn.Module, Path, Any, type[Exception], str]] = [
        (CHASM(3).double(), path, x.double(), ValueError, "checks float32 and float16, got torch.float64: convert"),
        (CHASM(3).bfloat16(), path, x.bfloat16(), ValueError, "checks float32 and float16, got torch.bfloat16"),
        (CHASM(3), tmp_path / "none" / "x.onnx", x, FileNotFoundError, "none: no such folder for x.onnx: make it"),
        (CHASM(3), path, (x, 2.0), ValueError, "a tensor or a tuple of tensors, got float"),
        (Chatty(), path, x, ValueError, "returns tensors, got str"),
    ]
    for model, file, example, kind, message in requests:
        with pytest.raises(kind, match=message) as info:
            chasm.export_onnx(model, file, example)
        assert "\n" not in str(info.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ValueError, match=r"needs onnxruntime: pip install 'chasm-mixer\[export\]'"):
        chasm.export_onnx(CHASM(3), tmp_path / "x.onnx", features(1, 3, 4, 4))
    assert os.listdir(tmp_path) == []
