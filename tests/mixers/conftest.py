"""What the tests of mixers share."""

import pytest
from torch import Tensor

import chasm


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of theta in every call that builds bases."""
    calls: list[tuple[int, ...]] = []
    original = chasm.ops.orthogonal_basis

    def counting(theta: Tensor) -> Tensor:
        calls.append(tuple(theta.shape))
        return original(theta)

    monkeypatch.setattr(chasm.ops, "orthogonal_basis", counting)
    return calls
