"""The constants of a form are computed in float64, whatever TF32 does to products of float32."""

from typing import Any

import pytest
import torch
from test_forms import axes_of, features, operators_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chasm import ops
from chasm.common.cost import Tally, measuring
from chasm.ops.forms import fft


class MatrixProducts(TorchDispatchMode):
    """Collects the dtypes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "matmul", "einsum"):
            self.dtypes.update(a.dtype for a in args if isinstance(a, Tensor))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("basis", "gain"), [("shared", "positive"), ("untied", "positive"), ("shared", "complex")])
def test_constants_are_made_in_products_that_tf32_does_not_reach(basis: str, gain: str) -> None:
    """Merged bases, interpolated tables and matrices per frequency, in float32: seen without a GPU."""
    axes = axes_of(3, (2, 3), basis, gain)
    mine = [a._replace(**{k: getattr(a, k).detach().float() for k in ("theta", "table", "phase")}) for a in axes]
    x = features(1, 3, 6, 5).float()
    operators = operators_of(x.shape, mine)
    with MatrixProducts() as seen, measuring(Tally()):  # while somebody counts, arithmetic can be seen
        prepared = ops.prepare(ops.Chain("fft", torch.float32, operators), x.shape)
        if basis == "untied":
            fft.channel_operators(operators[0])
    assert seen.dtypes == {torch.float64}
    assert all(t.dtype in (torch.float32, torch.complex64) for t in prepared.constants)
