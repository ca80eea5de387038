"""The kernels of the basis under the compiler, which runs them on fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from chasm.ops import basis

pytest.importorskip("triton")


def test_the_compiler_can_run_the_kernels_of_a_basis_on_fake_tensors(monkeypatch):
    """On a GPU it does so for every compiled model. Here the kernels are only said to exist."""
    monkeypatch.setattr(basis, "_has_kernels", lambda theta: True)
    theta = torch.randn(2, 10)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(theta)
        U, kept = basis.forward(fake)
        gradient = basis.backward(U, fake, kept)
    assert U.shape == (2, 5, 5)
    assert gradient.shape == theta.shape
