"""CHASM under torch.compile, torch.export and functional_call, and the form that it says it runs in."""

import copy
from typing import Any

import pytest
import torch
from chasm_cases import features, moved, relative
from torch import Tensor

import chasm
from chasm import CHASM
from helpers import pairwise


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
    assert mixer.explain(x).form == "fft"
    assert mixer.eval().explain(x).form == "fft"


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


@pytest.mark.parametrize(("axes", "dims"), [("ch", [2]), ("cw", [3]), ("ch+cw", [2, 3]), ("cw>ch", [3, 2])])
def test_the_axes_of_the_mixer_and_no_others_count(axes: str, dims: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a long axis has another form than a short one, unless no pass runs along it."""
    asked: list[Any] = []
    original = chasm.ops.choose_form

    def noting(shape: torch.Size, dims: list[int], **options: Any) -> Any:
        asked.append((tuple(shape), dims))
        return original(shape, dims, **options)

    monkeypatch.setattr(chasm.ops, "choose_form", noting)
    mixer, x = CHASM(2, bins=3, axes=axes), torch.zeros(1, 2, 4, 400)
    mixer.explain(x)
    mixer(x)
    assert asked == [((1, 2, 4, 400), dims)] * 2


def test_a_forced_form_that_cannot_be_is_refused() -> None:
    x = features(1, 3, 6, 5)
    with pytest.raises(ValueError, match="form 'triton' needs"):
        CHASM(3, bins=3, form="triton", basis="untied")(x)
    with pytest.raises(ValueError, match="form 'triton' cannot run"):
        CHASM(3, bins=3, form="triton")(x)


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
