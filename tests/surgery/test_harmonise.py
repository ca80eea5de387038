"""The projection of an untied mixer onto the best shared basis, and the joint diagonalisation behind it."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import features, relative
from torch import Tensor, nn

import chasm
from chasm import CHASM, ops
from chasm.mixers.base import Residual
from chasm.surgery.harmonise import frequency_operators, joint_basis, logarithm, multiplicities, nearest_rotation

few = settings(deadline=None, max_examples=25, derandomize=True)


def untied(C: int = 6, basis: float = 0.0, common: float = 1.0, **options: Any) -> CHASM:
    """An untied mixer whose thetas are one random vector of norm `common` per entry, plus `basis` of their own."""
    torch.manual_seed(7)
    mixer = CHASM(C, **{"size": (8, 11), "basis": "untied", **options})
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(torch.randn_like(p) / 2)
        for axis, theta in mixer.theta.items():
            theta.copy_((common * torch.randn(theta.shape[1]) + basis * torch.randn(theta.shape)) / mixer.step_scale)
            mixer.gain_table[axis].copy_(torch.randn_like(mixer.gain_table[axis]) / mixer.step_scale)
    return mixer


def energy_off_diagonal(M: Tensor, V: Tensor) -> float:
    turned = V.mH @ M @ V
    off = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    return float((multiplicities(len(M))[:, None, None] * off.abs().square()).sum())


def orthogonal(C: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linalg.qr(torch.randn(C, C, dtype=dtype))[0]


# --- the mixer ---------------------------------------------------------------------------------------------------


@few
@given(st.integers(1, 9), st.sampled_from(["positive", "signed"]), st.floats(0, 3), st.sampled_from([1.0, 30.0]))
def test_a_shared_basis_comes_back(C: int, gain: Any, size: float, step_scale: float) -> None:
    mixer = untied(C, common=size, gain=gain, step_scale=step_scale, dtype=torch.float64)
    shared = chasm.harmonise(mixer)
    assert shared.basis == "shared"
    before, after = frequency_operators(mixer), frequency_operators(shared)
    for axis in ("ch", "cw"):
        torch.testing.assert_close(after[axis].matrices, before[axis].matrices, rtol=1e-6, atol=1e-6)
    x = features(2, C, 8, 11, dtype=torch.float64)
    assert relative(shared(x), mixer(x)) <= 1e-6


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"axes": "ch+cw", "gain": "signed"}, (8, 11)),
        ({"axes": "cw", "local": False}, (8, 11)),
        ({"axes": "cw>ch", "residual": False, "form": "fft"}, (8, 11)),
        ({"ndim": 1, "size": 12}, (12,)),
        ({"ndim": 3, "size": (4, 6, 5), "axes": "cw>cd"}, (4, 6, 5)),
    ],
)
def test_axes_wrapper_and_form_are_kept(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    mixer = untied(4, **options).eval()
    shared = chasm.harmonise(mixer)
    assert not shared.training
    assert shared.extra_repr() == mixer.extra_repr().replace("untied", "shared")
    x = features(2, 4, *shape)
    with torch.no_grad():
        assert relative(shared(x), mixer(x)) <= 1e-5


def test_the_mixer_stays_as_it_is() -> None:
    mixer = untied(basis=0.4)
    before = {k: v.clone() for k, v in mixer.state_dict().items()}
    shared = chasm.harmonise(mixer)
    with torch.no_grad():
        for p in shared.parameters():
            p.add_(1)
    assert all(torch.equal(v, before[k]) for k, v in mixer.state_dict().items())


def test_the_gains_are_the_best_for_the_basis() -> None:
    """No other gains in this basis are nearer to the family; the basis is better than any of the mixer's own."""
    mixer = untied(basis=0.4, dtype=torch.float64)
    shared = chasm.harmonise(mixer)
    wanted, found = frequency_operators(mixer)["cw"], frequency_operators(shared)["cw"]
    distance = (wanted.matrices - found.matrices).square().sum((1, 2))
    for _ in range(20):
        table = shared.gain_table["cw"].detach().clone()
        with torch.no_grad():
            shared.gain_table["cw"].add_(1e-3 * torch.randn_like(table))
        other = frequency_operators(shared)["cw"].matrices
        shared.gain_table["cw"].data.copy_(table)
        assert ((wanted.matrices - other).square().sum((1, 2)) >= distance).all()
    chosen = energy_off_diagonal(wanted.matrices, found.bases[0])
    assert all(chosen < energy_off_diagonal(wanted.matrices, U) for U in (*wanted.bases, torch.eye(6).double()))


@pytest.mark.parametrize("basis", [0.0, 2.0])
def test_positive_gains_stay_positive(basis: float) -> None:
    mixer = untied(basis=basis)
    with torch.no_grad():
        for table in mixer.gain_table.values():
            table.copy_(-60 / mixer.step_scale * torch.rand_like(table))  # down to 1e-26, which rounding takes below 0
    for op in chasm.harmonise(mixer).operators(8, 11).values():
        assert torch.isfinite(op.gains).all()
        assert (op.gains > 0).all()


def test_a_harmonised_mixer_trains_and_keeps_its_dtype() -> None:
    shared = chasm.harmonise(untied(basis=0.4, dtype=torch.float64))
    assert {p.dtype for p in shared.parameters()} == {torch.float64}
    shared(features(1, 6, 8, 11, dtype=torch.float64)).square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in shared.parameters())


@pytest.mark.parametrize(
    ("mixer", "error", "message"),
    [
        (Residual(CHASM(4, bins=3, basis="untied")), TypeError, "pass its 'mixer'"),
        (chasm.create_mixer("gfnet", 4, (8, 8)), TypeError, "got GFNet"),
        (nn.Identity(), TypeError, "basis='untied', got Identity"),
        (CHASM(4, bins=3), ValueError, "it has one already"),
        (CHASM(4, bins=3, basis=None), ValueError, "got basis=None: it has none"),
    ],
)
def test_anything_else_is_refused(mixer: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chasm.harmonise(mixer)


# --- joint diagonalisation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("C", [1, 2, 5, 8])
def test_normal_matrices_that_commute_become_diagonal(C: int, dtype: torch.dtype) -> None:
    torch.manual_seed(C)
    U = orthogonal(C, dtype)
    M = (U * torch.randn(6, 1, C, dtype=dtype)) @ U.mH
    V = joint_basis(M, multiplicities(6))
    torch.testing.assert_close(V.mH @ V, torch.eye(C, dtype=dtype))
    assert energy_off_diagonal(M, V) <= 1e-20 * float(M.abs().square().sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_no_sweep_raises_the_energy_off_the_diagonals(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    M = torch.randn(5, 9, 9, dtype=dtype)  # not symmetric, not normal, nothing in common
    energies = [energy_off_diagonal(M, joint_basis(M, multiplicities(5), n)) for n in range(12)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(energies))
    assert energies[-1] < 0.9 * energies[0]


def test_no_basis_near_by_is_better() -> None:
    torch.manual_seed(1)
    M = frequency_operators(untied(basis=0.5, dtype=torch.float64))["ch"].matrices
    V = joint_basis(M, multiplicities(len(M)))
    least = energy_off_diagonal(M, V)
    for _ in range(30):
        A = torch.randn(6, 6).double()
        assert energy_off_diagonal(M, V @ torch.linalg.matrix_exp(1e-3 * (A - A.mT))) >= least


def test_a_matrix_with_an_empty_diagonal_is_turned() -> None:
    """At 0 degrees the energy of the diagonal is at its least here: a stationary point, but no optimum."""
    swap = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
    assert energy_off_diagonal(swap, joint_basis(swap, torch.ones(1))) <= 1e-20


def test_a_multiple_of_the_identity_turns_nothing() -> None:
    M = torch.eye(5, dtype=torch.float64).expand(4, 5, 5)
    assert torch.equal(joint_basis(M, multiplicities(4)), torch.eye(5, dtype=torch.float64))


def test_directions_with_equal_gains_are_not_turned() -> None:
    torch.manual_seed(4)
    M = torch.diag_embed(torch.rand(5, 6, dtype=torch.float64))
    M[:, 1, 1] = M[:, 0, 0]
    U = orthogonal(4)
    M[:, 2:, 2:] = U @ M[:, 2:, 2:] @ U.mT
    V = joint_basis(M, multiplicities(5))
    assert torch.equal(V[:, :2], torch.eye(6, dtype=torch.float64)[:, :2])
    assert energy_off_diagonal(M, V) <= 1e-20


def test_weights_decide_between_two_matrices() -> None:
    torch.manual_seed(2)
    U, W = orthogonal(4), orthogonal(4)
    M = torch.stack([(Q * torch.tensor([1.0, 2, 3, 4])) @ Q.mT for Q in (U, W)])
    V = joint_basis(M, torch.tensor([1.0, 1e-9]))
    assert (V.mT @ U).abs().max(0).values.min() > 1 - 1e-6


# --- the logarithm -----------------------------------------------------------------------------------------------


@few
@given(st.integers(1, 24), st.integers(0, 1000))
def test_every_orthogonal_basis_is_the_exponential_of_a_theta(C: int, seed: int) -> None:
    torch.manual_seed(seed)
    U = orthogonal(C)
    V = nearest_rotation(U)
    matched = (V.mT @ U).abs()
    torch.testing.assert_close(matched @ matched.mT, torch.eye(C).double())  # the same columns up to order and sign
    A = logarithm(V)
    torch.testing.assert_close(A, -A.mT)
    torch.testing.assert_close(torch.linalg.matrix_exp(A), V, rtol=0, atol=1e-12)
    row, column = torch.tril_indices(C, C, -1)
    torch.testing.assert_close(ops.orthogonal_basis(A[row, column]), V, rtol=0, atol=1e-12)


def test_a_basis_of_swapped_and_negated_channels_is_the_identity() -> None:
    torch.manual_seed(3)
    U = torch.eye(7, dtype=torch.float64)[torch.randperm(7)] * torch.tensor([1, -1, -1, 1, 1, 1, -1]).double()
    assert torch.equal(nearest_rotation(U), torch.eye(7, dtype=torch.float64))


def test_half_turns_have_a_logarithm() -> None:
    """A reflection of two directions has the eigenvalue -1 twice: its signs are chosen anew."""
    n = torch.ones(4, dtype=torch.float64) / 2
    m = torch.tensor([1.0, -1, 0, 0], dtype=torch.float64) / 2**0.5
    half_turn = torch.eye(4).double() - 2 * torch.outer(n, n) - 2 * torch.outer(m, m)
    V = nearest_rotation(half_turn)
    torch.testing.assert_close(torch.linalg.matrix_exp(logarithm(V)), V, rtol=0, atol=1e-12)
    torch.testing.assert_close((V.mT @ half_turn).abs(), (V.mT @ half_turn).abs().round(), rtol=0, atol=1e-12)
