"""What tests of several folders share."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"  # of tests of kernels
HALF = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter cannot multiply bfloat16
KERNEL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
gpu_test = pytest.mark.skipif(not CUDA, reason="needs a GPU")


def kernel_test(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of Triton kernels. Without a GPU test_kernels_in_the_interpreter runs it in another process."""
    skip = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="runs inside test_kernels_in_the_interpreter")
    return pytest.mark.kernel(skip(test))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers in float64 on the device of the kernels."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare in the norm, relative to that of what is expected."""
    error = (found.double() - expected).norm() / expected.norm()
    assert error <= tolerance, float(error)


def pairwise(factors: Mapping[str, Sequence[Any]], possible: Callable[..., bool] = lambda **_: True) -> list[Any]:
    """Cases in which every possible pair of values of any two factors occurs: far fewer than the full product.

    Args:
        factors: the values of each factor, by name.
        possible: called with a value for every factor, says whether they go together.

    Returns:
        Tuples of values in the order of the factors, the same ones in every run.

    >>> cases = pairwise({"a": [0, 1, 2], "b": "xy", "c": [True, False]})
    >>> len(cases), {(a, b) for a, b, _ in cases} == {(a, b) for a in (0, 1, 2) for b in "xy"}
    (6, True)
    """
    names = list(factors)
    rows = [row for row in product(*(range(len(factors[n])) for n in names)) if possible(**_values(factors, row))]
    pairs = {row: {(i, j, row[i], row[j]) for i, j in combinations(range(len(names)), 2)} for row in rows}
    missing, found = set().union(*pairs.values()), []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))  # the first of the best
        missing -= pairs[best]
        found.append(tuple(_values(factors, best).values()))
    return found


def _values(factors: Mapping[str, Sequence[Any]], row: Sequence[int]) -> dict[str, Any]:
    return {name: factors[name][i] for name, i in zip(factors, row, strict=True)}


def site_tools(*names: str) -> SimpleNamespace:
    """Import modules of docs/site_tools, which the build of the site uses and which are not part of the package."""
    docs = str(Path(__file__).parents[1] / "docs")
    sys.path.insert(0, docs)
    try:
        return SimpleNamespace(**{name: import_module(f"site_tools.{name}") for name in names})
    finally:
        sys.path.remove(docs)
