"""What the tests of mixers share."""

from typing import Any

import pytest
from torch import Tensor

import chasm


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of theta in every call that builds bases."""
    calls: list[tuple[int, ...]] = []

    def count(module: Any, name: str) -> None:
        original = getattr(module, name)

        def counting(theta: Tensor) -> Any:
            calls.append(tuple(theta.shape))
            return original(theta)

        monkeypatch.setattr(module, name, counting)

    count(chasm.ops, "orthogonal_basis")
    count(chasm.ops.basis, "forward")  # what the operator calls
    return calls
