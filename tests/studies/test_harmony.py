"""Measures of how far operators share a basis: small cases by hand, and the mixers they are meant for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import chasm
from chasm import CHASM
from chasm.mixers import create_slot
from chasm.mixers.fno_d import FNOD
from chasm.studies.harmony import (
    axis_operators,
    basis_angles,
    commutators,
    measure_harmony,
    mixing_parts,
    off_diagonal_energy,
    unrelated_angle,
)
from chasm.surgery.harmonise import joint_basis

# diag(1, 0) and the swap of two channels: [A, B] = ((0, 1), (-1, 0)), and their eigenvectors are 45 degrees apart.
A = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
B = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
PAIR = torch.stack([A, B])


def moved(mixer: Any, theta: float = 0.3, gains: float = 0.5) -> Any:
    """A mixer away from its start."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            size = theta if "theta" in name else gains
            p.add_(size / getattr(mixer, "step_scale", 1) * torch.randn_like(p))
    return mixer


def test_commutators_by_hand() -> None:
    found = commutators(PAIR)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double())  # sqrt(2) / (1 sqrt(2))
    found = commutators(mixing_parts(PAIR))
    torch.testing.assert_close(found[0, 1], torch.tensor(math.sqrt(2)).double())  # diag(1, -1) / 2 has norm 1 / sqrt(2)
    assert torch.equal(commutators(torch.zeros(2, 3, 3)), torch.zeros(2, 2))


def test_the_mean_gain_hides_a_commutator_and_the_mixing_part_does_not() -> None:
    near_identity = 100 * torch.eye(2, dtype=torch.float64) + PAIR
    assert commutators(near_identity)[0, 1] < 1e-3
    torch.testing.assert_close(commutators(mixing_parts(near_identity)), commutators(mixing_parts(PAIR)))


def test_angles_by_hand() -> None:
    def rotation(degrees: float) -> Tensor:
        t = math.radians(degrees)
        return torch.tensor([[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]], dtype=torch.float64)

    bases = torch.stack([rotation(0), rotation(30), rotation(90)])  # a quarter turn only swaps the directions
    wanted = torch.tensor([[0.0, 30, 0], [30, 0, 30], [0, 30, 0]], dtype=torch.float64)
    torch.testing.assert_close(basis_angles(bases), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(basis_angles((1j * bases)[:, :, [1, 0]]), wanted, rtol=0, atol=1e-5)
    assert unrelated_angle(2) < unrelated_angle(16) < unrelated_angle(128) < 90


def test_energy_off_the_diagonal_by_hand() -> None:
    def left(*weights: float) -> float:
        w = torch.tensor(weights, dtype=torch.float64)
        return off_diagonal_energy(PAIR[: len(w)], joint_basis(PAIR[: len(w)], w), w)

    # The best basis is that of B, which has twice the energy: it leaves diag(1, -1) / 2 off the diagonal.
    assert left(1, 1) == pytest.approx(0.5)
    assert left(9, 1) == pytest.approx(2.0)  # now that of A
    assert left(1) == 0
    assert off_diagonal_energy(PAIR, torch.eye(2).double(), torch.tensor([1.0, 3.0])) == pytest.approx(6.0)


@pytest.mark.parametrize("options", [{}, {"gain": "signed"}, {"gain": "complex"}, {"basis": "identity"}])
def test_a_shared_basis_is_harmonious_by_construction(options: dict[str, Any]) -> None:
    for axis in measure_harmony(moved(CHASM(6, size=(8, 10), **options))).values():
        assert axis.commutators.max() < 1e-12
        assert axis.mixing_commutator < 1e-12
        assert max(axis.neighbour_angle, axis.distant_angle) < 1e-4
        assert max(axis.off_diagonal, axis.mixing_off_diagonal) < 1e-12


def test_an_untied_basis_is_not_and_its_harmonised_mixer_is() -> None:
    mixer = moved(CHASM(6, size=(8, 10), basis="untied", dtype=torch.float64))
    shared = chasm.harmonise(mixer)
    operators, projected = axis_operators(mixer), axis_operators(shared)
    for axis, found in measure_harmony(mixer).items():
        assert found.commutators.shape == (len(operators[axis].matrices),) * 2
        assert 0.01 < found.commutator < found.mixing_commutator
        assert 1 < found.neighbour_angle < 90
        assert 0.001 < found.off_diagonal < found.mixing_off_diagonal < 1
        # What the projection loses is what it leaves off the diagonals.
        lost = (operators[axis].matrices - projected[axis].matrices).square().sum((1, 2))
        weights = torch.tensor([1.0, *[2.0] * (len(lost) - 2), 1.0])
        total = (weights * operators[axis].matrices.square().sum((1, 2))).sum()
        assert (weights * lost).sum() / total == pytest.approx(found.off_diagonal, rel=1e-6)


def test_flat_gains_mix_nothing_in_any_basis() -> None:
    found = measure_harmony(moved(CHASM(6, size=(8, 10), basis="untied"), gains=0.0))["ch"]
    assert (found.mixing_commutator, found.mixing_off_diagonal) == (0.0, 0.0)
    assert found.off_diagonal < 1e-25


def test_bases_that_drift_are_nearer_between_neighbours() -> None:
    mixer = CHASM(6, size=(32, 32), basis="untied")
    torch.manual_seed(1)
    with torch.no_grad():
        for axis, theta in mixer.theta.items():
            theta.copy_(torch.linspace(0, 1, len(theta))[:, None] * torch.randn(theta.shape[1]) / mixer.step_scale)
            mixer.gain_table[axis].normal_(std=0.5 / mixer.step_scale)
    found = measure_harmony(mixer)["ch"]
    assert found.neighbour_angle < found.distant_angle / 3


@pytest.mark.parametrize(("axis", "dim"), [("ch", -2), ("cw", -1)])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_modes_of_an_fno_are_what_the_layer_does_to_a_wave(axis: str, dim: int, k: int) -> None:
    mixer = moved(FNOD(3, modes=(4, 5), dtype=torch.float64))
    M = axis_operators(mixer)[axis].matrices[k]
    n, amplitude = torch.arange(12, dtype=torch.float64), torch.randn(3, dtype=torch.complex128)
    wave = torch.exp(2j * math.pi * k * n / 12)
    lines = (amplitude[:, None] * wave).real  # (C, 12)
    x = lines[:, :, None].expand(3, 12, 14) if dim == -2 else lines[:, None].expand(3, 14, 12)
    y = mixer.spectral(x[None].contiguous())[0]
    wanted = ((M @ amplitude)[:, None] * wave).real
    torch.testing.assert_close(y.select(1 if dim == -1 else 2, 5), wanted, rtol=1e-10, atol=1e-10)


def test_an_fno_in_a_slot_is_measured() -> None:
    slot = moved(create_slot("fno-d", 4, (16, 16), modes=(6, 5)), gains=0.2)
    found = measure_harmony(slot)
    assert {axis: len(h.commutators) for axis, h in found.items()} == {"ch": 6, "cw": 5}
    for h in found.values():
        assert 0.1 < h.commutator < math.sqrt(2)
        assert 0.1 < h.off_diagonal < 1


def test_other_mixers_have_no_operators_to_measure() -> None:
    with pytest.raises(ValueError, match="expected CHASM or FNO-D"):
        measure_harmony(create_slot("gfnet", 4, (8, 8)))
    assert measure_harmony(CHASM(4, bins=3, basis=None)) == {}
    assert math.isnan(measure_harmony(CHASM(4, bins=1))["ch"].commutator)  # one frequency has no pairs
