"""Every form of the selective scan against the sequential oracle, outputs and all gradients."""

import warnings
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import chasm.ops.selective_scan as package
from chasm.common.cost import Tally, measuring
from chasm.ops.selective_scan import choose_form, chunked, selective_scan
from chasm.ops.selective_scan.op import scan
from chasm.ops.selective_scan.reference import ScanInputs
from helpers import CUDA, DEVICE, INTERPRETED, kernel_test

NAMES = ("u", "delta", "A", "B", "C", "D", "delta_bias")


def make(batch: int, channels: int, length: int, states: int, regime: str = "usual", seed: int = 0) -> list[Tensor]:
    """float64 inputs for delta_softplus=True: softplus(-2) = 0.13, softplus(-14) = 1e-6, softplus(2) = 2.1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shift, scale = {"usual": (-2, 1), "delta near 0": (-14, 1), "strong decay": (2, 20)}[regime]
    u, delta = normal(batch, channels, length), normal(batch, channels, length) + shift
    A = -scale * torch.exp(normal(channels, states))
    B, C = normal(batch, states, length), normal(batch, states, length)
    return [u, delta, A, B, C, normal(channels), 0.1 * normal(channels)]


def run(inputs: list[Tensor | None], grad: Tensor, form: str, softplus: bool = True) -> dict[str, Tensor]:
    """y and the gradients of all inputs that are there."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in inputs]
    y = selective_scan(*leaves, delta_softplus=softplus, form=form)
    given = [(name, x) for name, x in zip(NAMES, leaves, strict=True) if x is not None]
    gradients = torch.autograd.grad(y, [x for _, x in given], grad.to(y))
    return {"y": y.detach()} | {name: dx for (name, _), dx in zip(given, gradients, strict=True)}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, want in expected.items():
        error = (found[name].cpu().double() - want).abs().max()
        assert error <= tolerance * want.abs().max().clamp_min(1e-30), (name, error.item(), want.abs().max().item())


def assert_matches_oracle(
    inputs: list[Tensor | None],
    form: str,
    dtype: torch.dtype,
    tolerance: float,
    softplus: bool = True,
    device: str = "cpu",
) -> None:
    inputs = [x if x is None else x.to(dtype) for x in inputs]
    exact = [x if x is None else x.double() for x in inputs]
    grad = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype).double()
    expected = run(exact, grad, "sequential", softplus)
    found = run([x if x is None else x.to(device) for x in inputs], grad, form, softplus)
    assert found["y"].dtype == dtype
    assert_close(found, expected, tolerance)


# ---- chunked


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    def set_sizes(chunk: int, step_elements: int) -> None:
        monkeypatch.setattr(chunked, "CHUNK", chunk)
        monkeypatch.setattr(chunked, "STEP_ELEMENTS_CPU", step_elements)

    return set_sizes


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("length", [1, 7, 8, 37, 100])
@pytest.mark.parametrize("regime", ["usual", "delta near 0", "strong decay"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_chunked_matches_oracle(small_chunks, dtype, tolerance, regime, length, lanes):
    small_chunks(8, lanes * 2 * 5 * 4)
    assert chunked.choose_chunking(2, 5, 4, length, torch.device("cpu")).lanes == min(lanes, -(-length // 8))
    assert_matches_oracle(make(2, 5, length, 4, regime), "chunked", dtype, tolerance)


@pytest.mark.parametrize("length", [31, 33, 150])
def test_chunked_with_its_own_chunk_length(length):
    assert_matches_oracle(make(1, 3, length, 2), "chunked", torch.float64, 1e-10)


@pytest.mark.parametrize("lanes", [1, 8])
def test_gradcheck(small_chunks, lanes):
    small_chunks(8, lanes * 3 * 4)
    inputs = [x.requires_grad_() for x in make(1, 3, 37, 4)]
    assert torch.autograd.gradcheck(lambda *x: selective_scan(*x, delta_softplus=True), inputs)


@pytest.mark.parametrize("missing", ["D", "delta_bias", "both"])
def test_without_skip_bias_or_softplus(missing):
    inputs = make(2, 3, 40, 4)
    inputs[1] = inputs[1].exp()  # already positive
    if missing in ("D", "both"):
        inputs[5] = None
    if missing in ("delta_bias", "both"):
        inputs[6] = None
    assert_matches_oracle(inputs, "chunked", torch.float64, 1e-10, softplus=False)


def test_large_delta_where_softplus_is_the_identity():
    inputs = make(1, 2, 40, 3)
    inputs[1] += 25
    assert_matches_oracle(inputs, "chunked", torch.float64, 1e-10)


@pytest.mark.parametrize("form", ["chunked", "sequential"])
def test_constant_coefficients_give_a_geometric_sum(form):
    length, delta, A = 50, 0.3, torch.full((1, 1), -0.7, dtype=torch.float64)
    ones = torch.ones(1, 1, length, dtype=torch.float64)
    y = selective_scan(ones, delta * ones, A, ones, ones, form=form)
    decay = A.exp()[0, 0] ** delta
    expected = delta * (1 - decay ** torch.arange(1, length + 1)) / (1 - decay)
    torch.testing.assert_close(y[0, 0], expected, rtol=1e-12, atol=0)


def test_delta_zero_leaves_the_skip():
    u, _, A, B, C, D, _ = make(2, 3, 40, 4)
    torch.testing.assert_close(selective_scan(u, torch.zeros_like(u), A, B, C, D), D[:, None] * u)


@pytest.mark.parametrize("wanted", [{"u"}, {"A"}, {"B", "D"}, {"delta_bias"}])
def test_only_some_inputs_need_a_gradient(wanted):
    inputs = make(2, 3, 40, 4)
    grad = torch.ones(2, 3, 40, dtype=torch.float64)
    expected = run(inputs, grad, "sequential")
    leaves = [x.clone().requires_grad_(name in wanted) for name, x in zip(NAMES, inputs, strict=True)]
    selective_scan(*leaves, delta_softplus=True).backward(grad)
    for name, x in zip(NAMES, leaves, strict=True):
        assert (x.grad is not None) == (name in wanted)
        if name in wanted:
            torch.testing.assert_close(x.grad, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["chunked", "sequential"])
@pytest.mark.parametrize(("batch", "length"), [(0, 40), (2, 0)])
def test_nothing_to_scan(form, batch, length):
    leaves = [x.requires_grad_() for x in make(batch, 3, length, 4)]
    y = selective_scan(*leaves, delta_softplus=True, form=form)
    assert y.shape == (batch, 3, length)
    y.sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in leaves)


def test_memory_layout_does_not_matter():
    inputs = [x.float() for x in make(2, 6, 40, 4)]
    strided = [
        x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x[:, None].expand(6, 2)[:, 0]
        for x in inputs
    ]
    assert not strided[0].is_contiguous()
    grad = torch.randn(2, 40, 6).transpose(1, 2)
    found, expected = run(strided, grad, "chunked"), run(inputs, grad.contiguous(), "chunked")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("form", ["chunked", "sequential"])
def test_autocast_changes_nothing_inside(form):
    inputs = [x.bfloat16() if x.dim() == 3 else x.float() for x in make(2, 3, 40, 4)]
    grad = torch.ones(2, 3, 40)
    expected = run([x.float() for x in inputs], grad, form)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(inputs, grad, form)
    assert found["y"].dtype == torch.bfloat16
    assert found["u"].dtype == torch.bfloat16
    assert found["A"].dtype == torch.float32
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want.to(found[name].dtype), rtol=0, atol=0)


@pytest.mark.parametrize(("precision", "multiplies"), [("highest", True), ("medium", False)])
def test_no_matrix_product_when_the_user_made_them_inexact(precision, multiplies):
    class Record(TorchDispatchMode):
        names: ClassVar[set[str]] = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert_matches_oracle(make(2, 3, 40, 4), "chunked", torch.float32, 1e-5)
        with Record() as record, torch.no_grad():
            chunked.forward(ScanInputs(*make(2, 3, 40, 4), True))
    finally:
        torch.set_float32_matmul_precision(before)
    assert ("bmm" in record.names) == multiplies, record.names


def test_saves_a_state_per_chunk_and_no_graph_over_time():
    inputs = [x.float().requires_grad_() for x in make(2, 8, 4096, 16)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = selective_scan(*inputs, delta_softplus=True)
    mine = sum(x.numel() for x in inputs)
    states = 2 * 8 * 16 * 4096 // chunked.CHUNK
    assert sum(x.numel() for x in saved) <= mine + 1.1 * states
    nodes, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [parent for parent, _ in node.next_functions]
    assert len(nodes) < 20


def test_operator_contract_and_one_graph_under_compile():
    inputs = [x.float().requires_grad_() for x in make(2, 3, 40, 4)]
    torch.library.opcheck(scan, (*inputs, True, "chunked"))
    compiled = torch.compile(
        lambda *x: 2 * selective_scan(*x, delta_softplus=True), fullgraph=True, backend="aot_eager"
    )
    y, expected = compiled(*inputs), 2 * selective_scan(*inputs, delta_softplus=True)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    for found, want in zip(
        torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_second_derivatives_are_refused():
    inputs = [x.requires_grad_() for x in make(1, 2, 10, 2)]
    (gradient,) = torch.autograd.grad(selective_scan(*inputs).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="selective_scan_backward"):
        torch.autograd.grad(gradient.sum(), inputs[0])


# ---- dispatch, checks, cost


def test_choice_and_reason():
    assert choose_form(torch.zeros(1, 2, 3)) == ("chunked", "a CPU tensor")
    assert choose_form(torch.zeros(1, 2, 3), "sequential") == ("sequential", "asked for")
    form, reason = choose_form(torch.zeros(1, 2, 3, dtype=torch.float64, device="meta"))
    assert form == "chunked"
    assert "triton: it computes in float32" in reason
    with pytest.raises(ValueError, match="did you mean 'chunked'"):
        choose_form(torch.zeros(1, 2, 3), "chunk")
    with pytest.raises(ValueError, match="'mamba_ssm' cannot run: it needs a CUDA tensor, got one on cpu"):
        selective_scan(*(x.float() for x in make(1, 2, 3, 2)), form="mamba_ssm")


def test_a_large_scan_on_the_fallback_warns_once(monkeypatch):
    """A fake tensor stands for one on a GPU without the kernels."""
    package._warn_once.cache_clear()
    with FakeTensorMode():
        large = [torch.empty_strided(x.shape, x.stride(), device="xpu") for x in make(1, 2, 3, 2)]
    monkeypatch.setattr(package, "MIN_WARNED_ELEMENTS", 12)
    with pytest.warns(UserWarning, match="chunked form, many times slower.*needs a CUDA tensor"):
        selective_scan(*large)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selective_scan(*large)  # said once
        package._warn_once.cache_clear()
        selective_scan(*large, form="chunked")  # chosen by the caller
        selective_scan(*make(1, 2, 3, 2))  # on a CPU it is what there is
        selective_scan(*(x.to("meta", torch.float32) for x in make(1, 2, 3, 2)))  # nothing is computed
        monkeypatch.setattr(package, "MIN_WARNED_ELEMENTS", 13)
        selective_scan(*large)  # small


@pytest.mark.parametrize("name", NAMES[1:])
def test_wrong_shapes_are_named(name):
    inputs = dict(zip(NAMES, make(2, 3, 10, 4), strict=True))
    inputs[name] = inputs[name][..., :-1] if name != "A" else inputs[name][:-1]
    with pytest.raises(ValueError, match=f"expected {name} of shape"):
        selective_scan(**inputs)


def test_wrong_types_are_named():
    inputs = make(2, 3, 10, 4)
    with pytest.raises(ValueError, match="expected u"):
        selective_scan(inputs[0][0], *inputs[1:])
    inputs[2] = inputs[2].to(torch.complex128)
    with pytest.raises(ValueError, match="real floating-point A"):
        selective_scan(*inputs)


@pytest.mark.parametrize("form", ["chunked", "sequential"])
def test_cost_is_the_formula(form):
    tally = Tally()
    with measuring(tally):
        selective_scan(*make(2, 3, 10, 4), form=form)
    assert dict(tally.macs) == {"scan": 2 * 10 * (9 * 3 * 4 + 3)}


# ---- Triton


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, poisoned: None):
    """Kernels with small blocks, on memory full of NaN."""
    from chasm.ops.selective_scan import kernels

    monkeypatch.setattr(kernels, "CHUNK", 16)
    if INTERPRETED:
        for name, sizes in {"FORWARD": (2,), "BACKWARD": (2,), "CARRY": (2, 2), "ROWS": (2, 8)}.items():
            blocks = [key for key in getattr(kernels, name) if key.startswith("BLOCK")]
            monkeypatch.setattr(kernels, name, dict(zip(blocks, sizes, strict=True)))
    return kernels


@kernel_test
@pytest.mark.parametrize(
    ("size", "regime"),
    [
        ((2, 5, 37, 3), "usual"),  # 3 chunks and 3 blocks of channels, the last ones filled up; N filled up to 4
        ((1, 2, 32, 4), "usual"),  # nothing to fill up
        ((1, 3, 33, 3), "strong decay"),
        ((1, 3, 33, 3), "delta near 0"),
        ((1, 1, 1, 1), "usual"),
    ],
)
def test_kernels_match_oracle(kernels, size, regime):
    assert_matches_oracle(make(*size, regime), "triton", torch.float32, 1e-4, device=DEVICE)


@kernel_test
def test_kernels_without_skip_bias_or_softplus(kernels):
    inputs = make(1, 2, 17, 2)
    inputs[1] = inputs[1].exp()
    assert_matches_oracle([*inputs[:5], None, None], "triton", torch.float32, 1e-4, softplus=False, device=DEVICE)


@kernel_test
def test_kernels_take_any_strides(kernels):
    inputs = make(2, 3, 20, 2)
    rows = [x.mT.contiguous().mT if x.dim() == 3 else x for x in inputs]
    assert_matches_oracle(rows, "triton", torch.float32, 1e-4, device=DEVICE)


@kernel_test
def test_kernels_with_bfloat16_and_an_empty_batch(kernels):
    assert_matches_oracle(make(1, 2, 17, 2), "triton", torch.bfloat16, 1e-2, device=DEVICE)
    empty = [x.float().to(DEVICE).requires_grad_() for x in make(0, 2, 17, 2)]
    y = selective_scan(*empty, form="triton")
    assert y.shape == (0, 2, 17)
    y.sum().backward()
    assert not empty[2].grad.any()


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("size", [(2, 96, 1000, 16), (1, 33, 129, 5)])
@pytest.mark.parametrize("form", ["triton", "chunked"])
def test_on_a_gpu(size, form):
    assert_matches_oracle(make(*size), form, torch.float32, 1e-4, device="cuda")


@pytest.mark.skipif(not (CUDA and package._installed("mamba_ssm")), reason="needs a GPU and mamba_ssm installed")
def test_mamba_ssm_matches_oracle():
    assert_matches_oracle(make(2, 32, 300, 16), "mamba_ssm", torch.float32, 1e-4, device="cuda")
