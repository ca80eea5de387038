"""A free matrix per frequency: what it computes, what it contains, and where it starts."""

import pytest
import torch

from chasm.mixers import CHASM, FreeOperator


def moved(operator: str, C: int = 4) -> FreeOperator:
    torch.manual_seed(0)
    mixer = FreeOperator(C, size=(6, 8), operator=operator, dtype=torch.float64)
    with torch.no_grad():
        for table in mixer.table:
            table.normal_(std=0.02)
    return mixer


@pytest.mark.parametrize("operator", ["symmetric", "any"])
def test_it_applies_its_matrices_and_the_wrapper(operator: str) -> None:
    mixer, x = moved(operator), torch.randn(2, 4, 6, 8, dtype=torch.float64)
    z = x
    for dim, M in enumerate(mixer.matrices(6, 8), 2):
        X = torch.fft.rfft(z, dim=dim).movedim(dim, -1)
        Z = torch.stack([torch.einsum("cd,bd...->bc...", M[k].to(X.dtype), X[..., k]) for k in range(len(M))], -1)
        z = torch.fft.irfft(Z.movedim(-1, dim), n=x.shape[dim], dim=dim)
    expected = x + mixer.fuse(torch.nn.functional.gelu(mixer.refine(z)))
    torch.testing.assert_close(mixer(x), expected)


def test_symmetric_matrices_are_positive_and_share_no_basis() -> None:
    M = moved("symmetric").matrices(6, 8)[0]
    torch.testing.assert_close(M, M.mT)
    assert torch.linalg.eigvalsh(M).min() > 0
    assert (M[1] @ M[2] - M[2] @ M[1]).norm() > 1e-3


def test_it_contains_every_untied_chasm() -> None:
    torch.manual_seed(1)
    chasm = CHASM(4, size=(6, 8), basis="untied", dtype=torch.float64)
    free = FreeOperator(4, size=(6, 8), operator="any", dtype=torch.float64, step_scale=1)
    with torch.no_grad():
        for p in (*chasm.theta.values(), *chasm.gain_table.values()):
            p.normal_(std=0.02)
        for table, op in zip(free.table, chasm.operators(6, 8).values(), strict=True):
            assert op.U is not None
            table.copy_(((op.U * op.gains[:, None]) @ op.U.mT - torch.eye(4)).flatten(1))
        for name in ("refine", "fuse"):
            getattr(free, name).load_state_dict(getattr(chasm, name).state_dict())
    x = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(free(x), chasm(x))


@pytest.mark.parametrize(("operator", "entries"), [("symmetric", 10), ("any", 16)])
def test_it_starts_at_the_identity_and_has_so_many_numbers(operator: str, entries: int) -> None:
    mixer = FreeOperator(4, bins=(5, 7), operator=operator)
    assert [tuple(table.shape) for table in mixer.table] == [(5, entries), (7, entries)]
    for M in mixer.matrices(8, 9):
        torch.testing.assert_close(M, torch.eye(4).expand_as(M))


def test_an_unknown_operator_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"unknown operator 'sym': did you mean 'symmetric'\?"):
        FreeOperator(4, operator="sym")
