"""The layers around the core on a CPU, against the same layers of torch."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, gelu

from chasm import CHASM
from chasm.ops import local_cpu


def plain(z: Tensor, x: Tensor, dw: Tensor, dw_bias: Tensor, pw: Tensor, pw_bias: Tensor) -> Tensor:
    return x + conv2d(gelu(conv2d(z, dw, dw_bias, padding=1, groups=z.shape[1])), pw, pw_bias)


def inputs(dtype: torch.dtype = torch.float64, B: int = 2, C: int = 3, H: int = 5, W: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    z, x = torch.randn(B, C, H, W, dtype=dtype), torch.randn(B, C, H, W, dtype=dtype)
    weights = [torch.randn(s, dtype=dtype) for s in ((C, 1, 3, 3), (C,), (C, C, 1, 1), (C,))]
    return [z.contiguous(memory_format=torch.channels_last), x, *weights]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_with_and_without_gradients(dtype: torch.dtype, tolerance: float) -> None:
    """float32 without gradients takes another operation for the convolution."""
    tensors = inputs(dtype)
    assert local_cpu.fits(*tensors[:2])
    want = plain(*[t.double() for t in tensors])
    for wanted in (False, True):
        got = local_cpu.local_block(*[t.requires_grad_(wanted) for t in tensors])
        assert got.requires_grad == wanted
        assert got.is_contiguous()
        assert (got - want).norm() <= tolerance * want.norm()


def test_gradients() -> None:
    tensors = [t.requires_grad_() for t in inputs()]
    weight = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    got = torch.autograd.grad((local_cpu.local_block(*tensors) * weight).sum(), tensors)
    want = torch.autograd.grad((plain(*tensors) * weight).sum(), tensors)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(local_cpu.local_block, [t.detach().requires_grad_() for t in tensors])


@pytest.mark.parametrize("wanted", range(6))
def test_a_gradient_asked_for_alone(wanted: int) -> None:
    tensors = inputs()
    tensors[wanted].requires_grad_()
    (got,) = torch.autograd.grad(local_cpu.local_block(*tensors).square().sum(), tensors[wanted])
    (want,) = torch.autograd.grad(plain(*tensors).square().sum(), tensors[wanted])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_a_second_derivative_is_refused() -> None:
    z, x, *weights = inputs()
    y = local_cpu.local_block(z, x, *[w.requires_grad_() for w in weights])
    (g,) = torch.autograd.grad(y.pow(3).sum(), weights[2], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative: use form="):
        torch.autograd.grad(g.square().sum(), weights)


def test_layouts_that_do_not_fit() -> None:
    z, x = inputs()[:2]
    assert not local_cpu.fits(z.contiguous(), x)
    assert not local_cpu.fits(z, x.contiguous(memory_format=torch.channels_last))
    assert not local_cpu.fits(z.float(), x)
    assert not local_cpu.fits(z.half(), x.half())


def test_the_mixer_goes_through_it_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = local_cpu.local_block

    def noting(*tensors: Tensor) -> Tensor:
        calls.append(1)
        return original(*tensors)

    monkeypatch.setattr(local_cpu, "local_block", noting)
    x = torch.randn(2, 4, 6, 5)
    CHASM(4, size=(6, 5))(x)
    assert calls == [1]
    for mixer in (CHASM(4, size=(6, 5), form="circulant"), CHASM(4, size=(6, 5), residual=False), CHASM(4, basis=None)):
        mixer(x)
    hooked = CHASM(4, size=(6, 5))
    assert hooked.refine is not None
    hooked.refine.register_forward_hook(lambda *_: None)
    hooked(x)
    with torch.autocast("cpu", torch.bfloat16):
        CHASM(4, size=(6, 5))(x)
    assert calls == [1]
