"""Every form of the axis passes against the oracle: outputs, and gradients of x, theta, table and phase."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from chasm import CHASM, ops
from chasm.ops import AxisOperator, reference
from helpers import pairwise

GAINS = ["positive", "signed", "complex"]
FORMS = [form for form in ops.FORMS if form not in ops.GPU_FORMS]  # those: test_triton_form.py, test_fused_kernel.py
OWN_BACKWARD = ["fft"]
BASES = ["shared", "identity", "untied"]


def possible(form: str, basis: str, gain: str, **_: Any) -> bool:
    return basis != "untied" or form in ("reference", "fft")


KINDS = {"form": FORMS, "basis": BASES, "gain": GAINS}
VARIANTS = pairwise(KINDS, possible)
LAYOUTS = [
    *((size, dims) for size in ((6, 9), (1, 1), (2, 3), (7, 1), (5, 4), (13, 2)) for dims in ((2, 3), (3, 2))),
    *((size, (dim,)) for size in ((6, 5), (5, 6), (1, 4), (2, 2)) for dim in (2, 3)),
    *(((n,), (2,)) for n in (1, 2, 3, 8, 13, 30)),
    ((3, 4, 5), (2, 3, 4)),
    ((4, 3, 2), (4, 2, 3)),
    ((2, 5, 4), (4, 2)),
    ((4, 1, 3), (3, 4)),
    ((4, 5, 3), (3,)),
    ((4, 3, 5), (2,)),
]


class Axis(NamedTuple):
    """The raw parameters of one axis pass."""

    dim: int
    basis: str
    gain: str
    theta: Tensor  # (C(C-1)/2,), untied: (B, C(C-1)/2)
    table: Tensor  # (B, C)
    phase: Tensor  # (B, C)


def axes_of(C: int, dims: tuple[int, ...], basis: str, gain: str, bins: int = 4) -> list[Axis]:
    torch.manual_seed(C + bins)
    rows = (bins,) if basis == "untied" else ()

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    found = []
    for dim in dims:
        # Away from zero: at norms of a few hundredths torch's matrix_exp, the oracle, is only good to 1.5e-10.
        theta = leaf(*rows, C * (C - 1) // 2).abs() + 0.3
        table, phase = leaf(bins, C), leaf(bins, C)
        found.append(Axis(dim, basis, gain, *(t.requires_grad_() for t in (theta, table, phase))))
    return found


def oracle(x: Tensor, axes: list[Axis]) -> Tensor:
    """Nothing but chasm.ops.reference."""
    for dim, basis, gain, theta, table, phase in axes:
        n = x.shape[dim]
        if basis == "untied":
            theta = reference.interpolate(theta, n // 2 + 1)
        U = torch.eye(x.shape[1], dtype=x.dtype) if basis == "identity" else reference.basis(theta)
        x = reference.axis_pass(x, U, reference.gains(table, n, gain, phase), dim)
    return x


def operators_of(shape: torch.Size, axes: list[Axis]) -> list[AxisOperator]:
    found = []
    for dim, basis, gain, theta, table, phase in axes:
        n = shape[dim]
        U = None
        if basis != "identity":
            U = ops.orthogonal_basis(ops.table_at(theta, n) if basis == "untied" else theta)
        if gain == "complex":
            gains = ops.complex_gains(table, phase, n)
        else:
            gains = (ops.positive_gains if gain == "positive" else ops.signed_gains)(table, n)
        found.append(AxisOperator(dim, U, gains))
    return found


def apply(x: Tensor, axes: list[Axis], form: str) -> Tensor:
    return ops.run(x, [ops.Chain(form, x.dtype, operators_of(x.shape, axes))])


def leaves(axes: list[Axis]) -> dict[str, Tensor]:
    used = {}
    for axis in axes:
        used[f"table {axis.dim}"] = axis.table
        if axis.basis != "identity":
            used[f"theta {axis.dim}"] = axis.theta
        if axis.gain == "complex":
            used[f"phase {axis.dim}"] = axis.phase
    return used


def close(got: Tensor | None, want: Tensor, tolerance: float, what: str) -> None:
    """Relative in norm. A gradient that is zero by nature may be rounding noise of the size of the tolerance."""
    assert got is not None, what
    assert got.shape == want.shape, what
    error = (got.double() - want.double()).norm()
    assert error <= tolerance * max(want.double().norm().item(), 1.0), f"{what}: {error:.1e}"


def check(x: Tensor, axes: list[Axis], form: str, tolerance: float, *, dtype: Any = torch.float64) -> None:
    """x and the parameters are float64; the form runs on x rounded to dtype, with parameters of at least float32."""
    x = x.to(dtype).double().requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    named = {"x": x, **leaves(axes)}
    want = oracle(x, axes)
    weight = torch.randn_like(want).to(dtype).double()
    want_grads = torch.autograd.grad((want * weight).sum(), list(named.values()), allow_unused=True)

    mine = [
        axis._replace(theta=axis.theta.to(wide), table=axis.table.to(wide), phase=axis.phase.to(wide)) for axis in axes
    ]
    x_mine = x.to(dtype)
    got = apply(x_mine, mine, form)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert got.isfinite().all()
    close(got, want, tolerance, "output")
    with torch.no_grad():  # other constants, and nothing kept
        close(apply(x_mine, mine, form), want, tolerance, "output without a gradient")
        chain = ops.prepare(ops.Chain(form, dtype, operators_of(x.shape, mine)), x.shape)
        close(ops.run(x_mine, [chain]), want, tolerance, "output of a prepared chain")
    # The casts above are part of the graph: gradients arrive in float64, having passed through dtype.
    got_grads = torch.autograd.grad((got * weight.to(dtype)).sum(), list(named.values()), allow_unused=True)
    for name, a, b in zip(named, got_grads, want_grads, strict=True):
        if b is not None:
            close(a, b, tolerance, f"gradient of {name}")


def features(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64)


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("form", "basis", "gain", "layout"), pairwise({**KINDS, "layout": LAYOUTS}, possible))
def test_float64(form: str, basis: str, gain: str, layout: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    size, dims = layout
    check(features(2, 3, *size), axes_of(3, dims, basis, gain), form, 1e-10)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    variant=st.sampled_from(VARIANTS),
    size=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    order=st.permutations([2, 3, 4]),
    passes=st.integers(1, 3),
    C=st.integers(1, 5),
    B=st.integers(1, 2),
    bins=st.integers(1, 8),
)
def test_float64_anything(
    variant: tuple[str, str, str], size: list[int], order: list[int], passes: int, C: int, B: int, bins: int
) -> None:
    form, basis, gain = variant
    dims = tuple(d for d in order if d < 2 + len(size))[:passes]
    check(features(B, C, *size), axes_of(C, dims, basis, gain, bins), form, 1e-10)


PRECISIONS = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]


@pytest.mark.parametrize(("form", "basis", "gain", "precision"), pairwise({**KINDS, "precision": PRECISIONS}, possible))
def test_low_precision(form: str, basis: str, gain: str, precision: tuple[torch.dtype, float]) -> None:
    dtype, tolerance = precision
    check(features(2, 6, 30, 23), axes_of(6, (2, 3), basis, gain, 9), form, tolerance, dtype=dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(90, 218), (7, 63)])
def test_float32_at_sizes_that_are_no_power_of_two(form: str, size: tuple[int, int]) -> None:
    check(features(1, 8, *size), axes_of(8, (2, 3), "shared", "positive", 16), form, 1e-5, dtype=torch.float32)


@pytest.mark.parametrize(("form", "basis", "gain"), VARIANTS)
def test_memory_formats_and_views(form: str, basis: str, gain: str) -> None:
    base = features(2, 4, 6, 5)
    axes = axes_of(4, (2, 3), basis, gain)
    want = oracle(base, axes)
    wider = features(3, 8, 6, 10)
    wider[1:, ::2, :, ::2] = base
    for name, view in {
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "every other entry": wider[1:, ::2, :, ::2],
        "transposed": base.mT.contiguous().mT,
        "expanded": base[:1].expand(2, -1, -1, -1),
    }.items():
        assert not view.is_contiguous()
        kept = view.clone()
        x = view.detach().requires_grad_()
        got = apply(x, axes, form)
        expected = oracle(base[:1], axes).expand_as(want) if name == "expanded" else want
        close(got, expected, 1e-10, name)
        got.backward(torch.ones(1, dtype=torch.float64).expand_as(got))  # a gradient without memory of its own
        plain = view.detach().contiguous().requires_grad_()
        oracle(plain, axes).sum().backward()
        assert plain.grad is not None
        close(x.grad, plain.grad, 1e-10, f"gradient, {name}")
        assert torch.equal(view, kept), f"{name}: the input was written to"


@pytest.mark.parametrize("form", OWN_BACKWARD)
@pytest.mark.parametrize("gain", ["positive", "complex"])
@pytest.mark.parametrize("wanted", ["x", "table 2", "theta 3", "table 3"])
def test_a_gradient_asked_for_alone_is_the_same(form: str, gain: str, wanted: str) -> None:
    x = features(2, 3, 5, 6).requires_grad_()
    axes = axes_of(3, (2, 3), "shared", gain)
    named = {"x": x, **leaves(axes)}
    for name, t in named.items():
        t.requires_grad_(name == wanted)
    y = apply(x, axes, form)
    (got,) = torch.autograd.grad(y.square().sum(), named[wanted])
    (want,) = torch.autograd.grad(oracle(x, axes).square().sum(), named[wanted])
    close(got, want, 1e-10, wanted)


@pytest.mark.parametrize(("form", "basis", "gain"), VARIANTS)
def test_the_output_may_be_written_to(form: str, basis: str, gain: str) -> None:
    """As by nn.ReLU(inplace=True)."""
    x = features(2, 3, 4, 5).requires_grad_()
    axes = axes_of(3, (2, 3), basis, gain)
    wanted = [x, *leaves(axes).values()]
    found = []
    for activation in (torch.relu, torch.relu_):
        y = activation(apply(x, axes, form))
        found.append(torch.autograd.grad(y.square().sum(), wanted))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("form", FORMS)
def test_backward_twice_over_a_kept_graph(form: str) -> None:
    x = features(1, 3, 4, 5).requires_grad_()
    axes = axes_of(3, (2, 3), "shared", "positive")
    y = apply(x, axes, form)
    first = torch.autograd.grad(y.sum(), [x, *leaves(axes).values()], retain_graph=True)
    second = torch.autograd.grad(y.sum(), [x, *leaves(axes).values()])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("form", "basis", "gain", "power"), pairwise({**KINDS, "power": [1, 3]}, possible))
def test_second_derivatives_are_right_or_refused(form: str, basis: str, gain: str, power: int) -> None:
    """A gradient penalty beside a loss: where the form cannot, it must say so, and not drop the penalty."""
    x = features(1, 3, 4, 5).requires_grad_()
    axes = axes_of(3, (2, 3), basis, gain)
    wanted = list(leaves(axes).values())

    def loss(y: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(y.pow(power).sum(), x, create_graph=True)
        return y.sum() + g.square().sum()

    if form in OWN_BACKWARD and basis != "untied":
        with pytest.raises(RuntimeError, match="no second derivative: use form="):
            loss(apply(x, axes, form)).backward()
        with pytest.raises(RuntimeError, match="no second derivative: use form="):
            torch.autograd.grad(loss(apply(x, axes, form)), wanted)
    else:
        got = torch.autograd.grad(loss(apply(x, axes, form)), wanted)
        for a, b in zip(got, torch.autograd.grad(loss(oracle(x, axes)), wanted), strict=True):
            close(a, b, 1e-9, "second derivative")


@pytest.mark.parametrize(("form", "gain"), [("fft", "positive"), ("fft", "complex")])
def test_gradcheck_of_the_own_backward(form: str, gain: str) -> None:
    axes = axes_of(2, (2, 3), "shared", gain, 3)

    def f(x: Tensor, t1: Tensor, g1: Tensor, p1: Tensor, t2: Tensor, g2: Tensor, p2: Tensor) -> Tensor:
        first, last = axes
        return apply(
            x,
            [first._replace(theta=t1, table=g1, phase=p1), last._replace(theta=t2, table=g2, phase=p2)],
            form,
        )

    flat = [t for axis in axes for t in (axis.theta, axis.table, axis.phase)]
    for size in ((3, 4), (4, 3)):
        assert torch.autograd.gradcheck(f, (features(1, 2, *size).requires_grad_(), *flat))


@pytest.mark.parametrize("form", FORMS)
def test_autocast_leaves_the_core_alone(form: str) -> None:
    x = features(1, 6, 9, 8).float()
    axes = axes_of(6, (2, 3), "shared", "positive")
    plain = apply(x, axes, form)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(apply(x, axes, form), plain)


@pytest.mark.parametrize(("form", "basis", "gain"), VARIANTS)
def test_runs_on_tensors_without_storage(form: str, basis: str, gain: str) -> None:
    axes = [
        a._replace(**{k: getattr(a, k).detach().to("meta").requires_grad_() for k in ("theta", "table", "phase")})
        for a in axes_of(3, (2, 3), basis, gain)
    ]
    x = torch.empty(2, 3, 6, 5, dtype=torch.float64, device="meta", requires_grad=True)
    y = apply(x, axes, form)
    assert y.shape == x.shape
    y.sum().backward()
    with torch.no_grad():
        assert apply(x, axes, form).shape == x.shape


def test_fake_tensors_and_real_ones_do_not_meet() -> None:
    """Memory estimators run a model on fake tensors first; constants kept from there would break the real run."""
    for form in FORMS:
        for _ in range(2):
            with FakeTensorMode():
                axes = axes_of(2, (2,), "shared", "positive")
                assert apply(torch.randn(1, 2, 17, dtype=torch.float64), axes, form).shape == (1, 2, 17)
            x = features(1, 2, 17)
            axes = axes_of(2, (2,), "shared", "positive")
            close(apply(x, axes, form), oracle(x, axes), 1e-10, form)


@pytest.mark.parametrize("size", [5, 7, 16, 24, 63, 90])
@pytest.mark.parametrize("form", FORMS)
def test_theta_rests_at_the_start(form: str, size: int) -> None:
    """While all gains are one no basis matters. Rounding cancels too: Adam takes full steps along what it leaves."""
    torch.manual_seed(0)
    mixer = CHASM(8, size=size, form=form)
    mixer(torch.randn(2, 8, size, size)).square().mean().backward()
    for name, theta in mixer.theta.items():
        assert theta.grad is not None
        assert not theta.grad.any(), (name, theta.grad.abs().max())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("form", "basis", "gain"), VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_on_a_gpu(form: str, basis: str, gain: str, dtype: torch.dtype, tolerance: float) -> None:
    # Rounding a basis to bfloat16 shifts each of its few entries; the averages a real width takes need a real width.
    C, H, W = (32, 60, 46) if dtype == torch.bfloat16 else (6, 30, 23)
    x = features(2, C, H, W).to(dtype).double().requires_grad_()
    axes = axes_of(C, (2, 3), basis, gain, 9)
    wide = torch.promote_types(dtype, torch.float32)
    mine = [a._replace(**{k: getattr(a, k).to("cuda", wide) for k in ("theta", "table", "phase")}) for a in axes]
    want, got = oracle(x, axes), apply(x.to("cuda", dtype), mine, form)
    close(got.cpu(), want, tolerance, "output")
    named = {"x": x, **leaves(axes)}
    weight = torch.randn_like(want).to(dtype).double()
    wanted = torch.autograd.grad((want * weight).sum(), list(named.values()))
    found = torch.autograd.grad((got * weight.to("cuda", dtype)).sum(), list(named.values()))
    for name, a, b in zip(named, found, wanted, strict=True):
        close(a, b, tolerance, f"gradient of {name}")
