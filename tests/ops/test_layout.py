"""Copies between channels first and channels last, and the memory format of what a mixer returns."""

import os

import pytest
import torch

import chasm
from chasm.ops.kernels.layout import channels_last, contiguous, like

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA and not INTERPRETED else "cpu"
LAST = torch.channels_last

# Without a GPU twice: by torch, and in the interpreter.
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 96, 9, 8), (3, 64, 8, 8), (2, 130, 1, 65)])
def test_copies(shape, dtype):
    x = torch.randn(shape).to(DEVICE, dtype)
    last = like(x, x.contiguous(memory_format=LAST))
    assert last.is_contiguous(memory_format=LAST)
    assert torch.equal(last, x)
    first = contiguous(last)
    assert first.is_contiguous()
    assert torch.equal(first, x)
    assert contiguous(first) is first
    assert like(last, last) is last
    assert like(x, x) is x
    nothing = x[:0].contiguous(memory_format=LAST)
    assert contiguous(nothing).shape == like(nothing, last).shape == nothing.shape


def test_other_strides():
    x = torch.randn(2, 6, 4, 10, device=DEVICE)[:, ::2, :, ::2]
    assert not channels_last(x)
    assert torch.equal(contiguous(x), x)
    y = like(x, x.contiguous(memory_format=LAST))
    assert channels_last(y)
    assert torch.equal(y, x)
    assert not channels_last(torch.randn(2, 3, 4, device=DEVICE))


def test_gradients_lie_as_their_layer_does():
    x = torch.randn(2, 3, 4, 5, device=DEVICE, dtype=torch.float64)
    x = x.contiguous(memory_format=LAST).requires_grad_()
    seen = []
    z = x * 1
    z.register_hook(lambda g: seen.append(g.stride()))
    y = like(contiguous(z) ** 3, x)
    y.register_hook(lambda g: seen.append(g.stride()))
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(g, 3 * x**2)
    (g,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(g, 6 * x)
    if CUDA or INTERPRETED:
        assert seen[1] == x.stride()


@pytest.mark.parametrize("options", [{}, {"local": False}, {"residual": False}, {"basis": None}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_a_mixer_returns_the_format_it_gets(options, training):
    torch.manual_seed(0)
    mixer = chasm.CHASM(8, size=(4, 6), **options).to(DEVICE).train(training)
    x = torch.randn(2, 8, 4, 6, device=DEVICE)
    results = []
    for layout in (torch.contiguous_format, LAST):
        z = x.contiguous(memory_format=layout).requires_grad_()
        y = mixer(z)
        assert y.is_contiguous(memory_format=layout)
        results.append((y, *torch.autograd.grad(y.square().sum(), z)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernel is tested directly")
def test_the_kernel_in_the_interpreter(passed_in_the_interpreter):
    assert passed_in_the_interpreter(__file__) == 22
