"""One axis of CHASM as a basis and its gains, and a chain of axes as channel matrices between the gains."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from chasm.ops.precision import exact_product


class AxisOperator(NamedTuple):
    """One axis of CHASM: M(k) = U diag(gains[k]) U^T along dimension `dim` of (B, C, *spatial)."""

    dim: int
    U: Tensor | None  # (C, C) shared, (K, C, C) untied, None for the identity basis
    gains: Tensor  # (K, C) real, or complex with real DC and Nyquist


def channel_operators(op: AxisOperator) -> Tensor:
    """M(k) = U diag(lambda_k) U^T for every frequency, (K, C, C)."""
    if op.U is None:
        return torch.diag_embed(op.gains)
    return exact_product(op.U * op.gains[:, None, :], op.U.mT)


def merge(bases: Sequence[Tensor]) -> Tensor:
    """U_1 .. U_m -> (m + 1, C, C): A_0 = U_1^T, A_j = U_{j+1}^T U_j, A_m = U_m.

    These are the channel matrices before, between and after the gains of a chain: where two passes meet, their bases
    become one product.
    """
    between = [exact_product(V.mT, U) for U, V in pairwise(bases)]
    return torch.stack([bases[0].mT, *between, bases[-1]])


def merge_adjoint(d: Sequence[Tensor], bases: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of U_1 .. U_m for the gradients d of A_0 .. A_m."""
    found = []
    for j, U in enumerate(bases):
        before = d[0].mT if j == 0 else exact_product(bases[j - 1], d[j].mT)
        after = d[-1] if U is bases[-1] else exact_product(bases[j + 1], d[j + 1])
        found.append(before + after)
    return found
