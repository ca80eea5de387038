"""Copies between channels first and channels last, and the memory format of what a mixer returns."""

import pytest
import torch

import chasm
from chasm.ops.kernels.layout import channels_last, contiguous, is_channels_last
from helpers import CUDA, INTERPRETED

DEVICE = "cuda" if CUDA and not INTERPRETED else "cpu"
LAST = torch.channels_last

# Without a GPU they run twice: with torch here, and with the kernel in the interpreter.
pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.kernel]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 96, 9, 8), (3, 64, 8, 8), (2, 130, 1, 65)])
def test_copies(shape, dtype):
    x = torch.randn(shape).to(DEVICE, dtype)
    last = channels_last(x)
    assert last.is_contiguous(memory_format=LAST)
    assert torch.equal(last, x)
    first = contiguous(last)
    assert first.is_contiguous()
    assert torch.equal(first, x)
    assert contiguous(first) is first
    assert channels_last(last) is last
    nothing = x[:0].contiguous(memory_format=LAST)
    assert contiguous(nothing).shape == channels_last(nothing).shape == nothing.shape


def test_other_strides():
    x = torch.randn(2, 6, 4, 10, device=DEVICE)[:, ::2, :, ::2]
    assert not is_channels_last(x)
    assert torch.equal(contiguous(x), x)
    y = channels_last(x)
    assert is_channels_last(y)
    assert torch.equal(y, x)
    assert not is_channels_last(torch.randn(2, 3, 4, device=DEVICE))


@pytest.mark.parametrize(
    ("options", "training"),
    [
        ({}, True),
        ({}, False),
        ({"local": False}, True),
        ({"residual": False}, False),
        ({"basis": None}, True),
        ({"axes": "ch+cw"}, True),
    ],
    ids=str,
)
def test_a_mixer_returns_the_format_it_gets(options, training):
    torch.manual_seed(0)
    mixer = chasm.CHASM(8, size=(4, 6), **options).to(DEVICE).train(training)
    x = torch.randn(2, 8, 4, 6, device=DEVICE)
    results = []
    for layout in (torch.contiguous_format, LAST):
        z = x.contiguous(memory_format=layout).requires_grad_()
        y = mixer(z)
        assert y.is_contiguous(memory_format=layout)
        (g,) = torch.autograd.grad(y.square().sum(), z)
        assert g.is_contiguous(memory_format=layout)  # a layer that lies so expects gradients that do
        results.append((y, g))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
