"""Fake results of the operators have the shapes and strides of the true ones: the compiler plans with them."""

from typing import Any

import pytest
import torch

import chasm
from chasm.ops import block
from helpers import DEVICE, INTERPRETED, kernel_test, pairwise

CASES = pairwise(
    {
        "form": ["triton", "fft"],
        "channels_last": [False, True],
        "size": [(6, 4), (5, 7), (4, 4)],
        "axes": ["ch>cw", "ch+cw"],
        "basis": ["shared", "identity"],
        "gain": ["positive", "complex"],
        "residual": [True, False],
        "local": [True, False],
    }
)


def check(device: str, form: str, channels_last: bool, size: tuple[int, int], dtype: torch.dtype, **options: Any):
    channels = 4 if INTERPRETED else 16
    mixer = chasm.CHASM(channels, size=size, form=form, device=device, **options)
    x = torch.randn(2, channels, *size, device=device).requires_grad_()
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    with pytest.MonkeyPatch.context() as patch:
        for operator in (block._BLOCK, block._GRADIENT):

            def record(*args: Any, operator: Any = operator, function: Any = operator.function) -> Any:
                calls.append((operator.op, args))
                return function(*args)

            patch.setattr(operator, "function", record)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
            y = mixer(x.contiguous(memory_format=memory_format))
        y.square().sum().backward()
    assert {op for op, _ in calls} == {block._BLOCK.op, block._GRADIENT.op}
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils="test_faketensor")


@kernel_test
@pytest.mark.parametrize(("form", "channels_last", "size", "axes", "basis", "gain", "residual", "local"), CASES)
def test_of_kernels(form, channels_last, size, axes, basis, gain, residual, local):
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    check(DEVICE, form, channels_last, size, dtype, axes=axes, basis=basis, gain=gain, residual=residual, local=local)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"gain": "complex", "axes": "cw"}, {"basis": "identity", "residual": False}], ids=str
)
def test_on_a_cpu(channels_last, options):
    check("cpu", "fft", channels_last, (12, 10), torch.float32, **options)
