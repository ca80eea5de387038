"""The paper's statements about the spectral core, as tests in float64."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chasm import CHASM, ops
from chasm.ops import AxisOperator
from chasm.ops.operators import channel_operators

FORMS = [form for form in ops.FORMS if form not in ops.GPU_FORMS]

few = settings(deadline=None, max_examples=25, derandomize=True)


def core(C: int, *size: int, **options: Any) -> CHASM:
    """A bare core in float64 with random parameters; direct tables at this size."""
    torch.manual_seed(sum(size) + C)
    mixer = CHASM(C, size=size, ndim=len(size), local=False, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(torch.randn_like(p))
    return mixer


def features(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def matrices(theta: Tensor, table: Tensor, n: int) -> Tensor:
    """(M(0), .., M(K-1)) of the direct-table family."""
    U = ops.orthogonal_basis(theta)
    lam = ops.positive_gains(table, n)
    return torch.einsum("ic,kc,jc->kij", U, lam, U)


def run(x: Tensor, operators: list[AxisOperator], form: str) -> Tensor:
    return ops.run(x, [ops.Chain(form, x.dtype, operators)])


# --- degrees of freedom ------------------------------------------------------------------------------------------


def jacobian_rank(C: int, n: int, equal: int) -> int:
    """Rank of (theta, table) -> all M(k) at a random point where `equal` eigenmodes share one signature."""
    torch.manual_seed(C * n)
    K = n // 2 + 1
    theta = 0.5 * torch.randn(C * (C - 1) // 2, dtype=torch.float64)
    table = torch.randn(K, C, dtype=torch.float64)
    table[:, :equal] = table[:, :1]
    J = torch.autograd.functional.jacobian(lambda t, g: matrices(t, g, n).flatten(), (theta, table))
    values = torch.linalg.svdvals(torch.cat([j.flatten(1) for j in J], 1))
    rank = int((values > 1e-9 * values[0]).sum())
    # The gap that makes "numerical rank" a fact: nothing lies between rounding and the tangent directions.
    assert rank == len(values) or values[rank] < 1e-12 * values[0]
    assert values[rank - 1] > 1e-5 * values[0]
    return rank


@pytest.mark.parametrize(("C", "n"), [(2, 1), (2, 4), (3, 3), (4, 5), (5, 4)])
def test_dimension_of_the_generic_stratum(C: int, n: int) -> None:
    K = n // 2 + 1
    assert jacobian_rank(C, n, equal=1) == C * (C - 1) // 2 + K * C


@pytest.mark.parametrize(("C", "n", "equal"), [(3, 4, 2), (4, 5, 2), (4, 5, 3), (4, 4, 4)])
def test_equal_signatures_lose_the_rotations_between_them(C: int, n: int, equal: int) -> None:
    K = n // 2 + 1
    generic = C * (C - 1) // 2 + K * C
    assert jacobian_rank(C, n, equal) == generic - equal * (equal - 1) // 2


@pytest.mark.parametrize(("C", "BH", "BW"), [(1, 1, 1), (3, 4, 7), (8, 5, 5), (96, 65, 65)])
def test_parameters_of_the_two_axis_core(C: int, BH: int, BW: int) -> None:
    mixer = CHASM(C, bins=(BH, BW), local=False)
    assert sum(p.numel() for p in mixer.parameters()) == C * (C - 1) + (BH + BW) * C


# --- the operators M(k) ------------------------------------------------------------------------------------------


@few
@given(
    C=st.integers(1, 6),
    n=st.integers(1, 12),
    B=st.integers(1, 9),
    scale=st.floats(0.01, 30),
    seed=st.integers(0, 2**16),
)
def test_symmetric_with_positive_spectrum(C: int, n: int, B: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    theta = scale * torch.randn(C * (C - 1) // 2, dtype=torch.float64)
    table = 5 * torch.randn(B, C, dtype=torch.float64)
    U, lam = ops.orthogonal_basis(theta), ops.positive_gains(table, n)
    assert (lam > 0).all()
    M = torch.einsum("ic,kc,jc->kij", U, lam, U)
    close(M, M.mT)
    eigenvalues = torch.linalg.eigvalsh(M)
    close(eigenvalues, lam.sort(-1).values, 1e-9)
    for a, b in itertools.combinations(M, 2):  # one basis for all: they commute
        close(a @ b, b @ a, 1e-9 * max(1.0, lam.max().item() ** 2))


@few
@given(C=st.integers(1, 8), scale=st.floats(0, 100), seed=st.integers(0, 2**16))
def test_the_basis_is_a_rotation(C: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    U = ops.orthogonal_basis(scale * torch.rand(C * (C - 1) // 2, dtype=torch.float64))
    close(U.mT @ U, torch.eye(C, dtype=torch.float64), 1e-11)
    assert torch.linalg.det(U).item() == pytest.approx(1.0, abs=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gain", ["positive", "signed", "complex"])
def test_determinant_one_is_enough(form: str, gain: str) -> None:
    """A basis of determinant -1 is this one with a column's sign flipped: the same operator."""
    ch, cw = core(4, 6, 5, gain=gain).operators(6, 5).values()
    x = features(2, 4, 6, 5)
    want = run(x, [ch, cw], form)
    assert ch.U is not None
    flip = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    assert torch.linalg.det(ch.U * flip).item() == pytest.approx(-1.0)
    close(run(x, [ch._replace(U=ch.U * flip), cw], form), want)
    # The same for any order of the eigenmodes, taken together with their gains.
    order = [2, 0, 3, 1]
    close(run(x, [ch._replace(U=ch.U[:, order], gains=ch.gains[:, order]), cw], form), want)


@few
@given(data=st.data(), C=st.integers(1, 4), n=st.integers(1, 11))
def test_reindexing_frequencies_permutes_rows_of_the_table(data: Any, C: int, n: int) -> None:
    mixer = core(C, n)
    K = n // 2 + 1
    sigma = data.draw(st.permutations(range(K)))
    inverse = [sigma.index(k) for k in range(K)]
    before = matrices(*mixer.axis_parameters("cl")[:2], n)
    with torch.no_grad():
        mixer.gain_table["cl"].copy_(mixer.gain_table["cl"][inverse])  # row k is the old row sigma^-1(k)
    after = matrices(*mixer.axis_parameters("cl")[:2], n)
    close(after, before[inverse])
    op = mixer.operators(n)["cl"]
    assert op.U is not None
    close(torch.einsum("ic,kc,jc->kij", op.U, op.gains, op.U), before[inverse])


# --- the axis pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("basis", ["shared", "untied", "identity"])
@pytest.mark.parametrize("gain", ["positive", "signed", "complex"])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_each_frequency_is_multiplied_by_its_matrix(form: str, basis: Any, gain: Any, n: int) -> None:
    """rfft(y)[k] = M(k) rfft(x)[k] at every k: nothing is lost at DC and Nyquist, where y could not hold it."""
    if basis == "untied" and (gain == "complex" or form not in ("reference", "fft")):
        pytest.skip("not a form of this variant")
    op = core(3, n, basis=basis, gain=gain).operators(n)["cl"]
    x = features(2, 3, n)
    X, Y = torch.fft.rfft(x), torch.fft.rfft(run(x, [op], form))
    U = torch.eye(3, dtype=torch.float64).expand(n // 2 + 1, 3, 3) if op.U is None else op.U.expand(n // 2 + 1, 3, 3)
    M = torch.einsum("kic,kc,kjc->kij", U.to(X.dtype), op.gains.to(X.dtype), U.to(X.dtype))
    close(Y, torch.einsum("kij,bjk->bik", M, X))
    assert Y[..., 0].imag.abs().max() == 0
    if gain != "complex":
        close(M.imag, torch.zeros_like(M.imag))
        close(channel_operators(op), M.real)
    real_bins = [0, n // 2] if n % 2 == 0 else [0]
    assert (M[real_bins].imag == 0).all()


@few
@given(
    C=st.integers(1, 4), n=st.integers(1, 9), m=st.integers(1, 4), axis=st.sampled_from([2, 3]), seed=st.integers(0, 99)
)
def test_one_pass_is_self_adjoint_and_positive(C: int, n: int, m: int, axis: int, seed: int) -> None:
    size = (n, m) if axis == 2 else (m, n)
    mixer = core(C, *size, axes="ch" if axis == 2 else "cw")
    torch.manual_seed(seed)
    x, y = torch.randn(2, 1, C, *size, dtype=torch.float64)
    close((mixer(x) * y).sum(), (x * mixer(y)).sum(), 1e-9)
    assert (x * mixer(x)).sum() > 0


def test_the_adjoint_of_a_composition_is_the_reversed_one() -> None:
    there, back = core(3, 6, 5, axes="ch>cw"), core(3, 6, 5, axes="cw>ch")
    back.load_state_dict(there.state_dict())
    x, y = features(2, 1, 3, 6, 5)
    close((there(x) * y).sum(), (x * back(y)).sum())
    # With bases that differ the order matters, and the composition is not its own adjoint.
    assert (there(x) - back(x)).norm() > 1e-3 * x.norm()
    assert ((there(x) * y).sum() - (x * there(y)).sum()).abs() > 1e-3


def test_equal_bases_make_the_passes_commute() -> None:
    there, back = core(3, 6, 5, axes="ch>cw"), core(3, 6, 5, axes="cw>ch")
    with torch.no_grad():
        there.theta["cw"].copy_(there.theta["ch"])
    back.load_state_dict(there.state_dict())
    close(there(features(2, 3, 6, 5)), back(features(2, 3, 6, 5)))


@pytest.mark.parametrize("gain", ["positive", "signed", "complex"])
def test_circular_shifts_pass_through(gain: Any) -> None:
    mixer = core(3, 6, 5, gain=gain)
    x = features(2, 3, 6, 5)
    close(mixer(x.roll((2, 3), (2, 3))), mixer(x).roll((2, 3), (2, 3)))


@pytest.mark.parametrize("gain", ["positive", "signed"])
def test_real_gains_keep_mirror_symmetry(gain: Any) -> None:
    """An even real filter: what a phase would break."""
    x = features(2, 3, 6, 5)
    mixer = core(3, 6, 5, gain=gain)
    close(mixer(x.flip(2)), mixer(x).flip(2))
    turned = core(3, 6, 5, gain="complex")
    assert (turned(x.flip(2)) - turned(x).flip(2)).norm() > 1e-3


def test_the_identity_basis_mixes_no_channels_and_the_shared_one_does() -> None:
    x = features(1, 3, 6, 5)
    x[:, 1:] = 0
    assert core(3, 6, 5, basis="identity")(x)[:, 1:].abs().max() < 1e-14
    assert core(3, 6, 5)(x)[:, 1:].abs().max() > 1e-2


@pytest.mark.parametrize("axes", ["ch>cw", "ch+cw", "cw"])
def test_constant_features_feel_the_dc_gain_only(axes: str) -> None:
    mixer = core(3, 6, 5, axes=axes)
    x = features(2, 3, 1, 1).expand(2, 3, 6, 5)
    y = mixer(x)
    close(y, y[..., :1, :1].expand_as(y))
    with torch.no_grad():
        for table in mixer.gain_table.values():
            table[1:] = 9.0
    close(mixer(x), y)


def test_a_table_with_fewer_bins_is_a_member_of_the_direct_family() -> None:
    """B < K: interpolated tables are direct tables of a special shape, with the same basis."""
    small, direct = core(3, 4, 4), core(3, 10, 9)
    with torch.no_grad():
        for axis, n in (("ch", 10), ("cw", 9)):
            direct.theta[axis].copy_(small.theta[axis])
            direct.gain_table[axis].copy_(ops.table_at(small.gain_table[axis], n))
    x = features(2, 3, 10, 9)
    close(small(x), direct(x))


@pytest.mark.parametrize("axes", ["ch>cw", "cw>ch", "ch+cw", "ch", "cw"])
@pytest.mark.parametrize("basis", ["shared", "identity", "untied"])
def test_identity_at_init(axes: str, basis: Any) -> None:
    mixer = CHASM(4, bins=5, axes=axes, basis=basis, local=False, dtype=torch.float64)
    x = features(2, 4, 7, 6)
    close(mixer(x), x, 1e-12)
