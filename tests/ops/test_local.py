"""The layers around the core on a CPU, against the same layers of torch."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, gelu

from chasm import CHASM
from chasm.ops import local


def plain(z: Tensor, x: Tensor | None, dw: Tensor, dw_bias: Tensor, pw: Tensor, pw_bias: Tensor) -> Tensor:
    y = conv2d(gelu(conv2d(z, dw, dw_bias, padding=1, groups=z.shape[1])), pw, pw_bias)
    return y if x is None else x + y


def inputs(dtype: torch.dtype = torch.float64, B: int = 2, C: int = 3, H: int = 5, W: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    z, x = torch.randn(B, C, H, W, dtype=dtype), torch.randn(B, C, H, W, dtype=dtype)
    weights = [torch.randn(s, dtype=dtype) for s in ((C, 1, 3, 3), (C,), (C, C, 1, 1), (C,))]
    return [z.contiguous(memory_format=torch.channels_last), x, *weights]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_with_and_without_a_backward(dtype: torch.dtype, tolerance: float, residual: bool) -> None:
    """float32 without a backward takes another operation for the convolution."""
    z, x, *parameters = inputs(dtype)
    y = x if residual else None
    want = plain(*(None if t is None else t.double() for t in (z, y, *parameters)))  # type: ignore[arg-type]
    for keep in (False, True):
        got, kept = local.forward(z, y, parameters, keep)
        assert len(kept) == (local.count_saved(z) if keep else 0)
        assert got.is_contiguous()
        assert (got - want).norm() <= tolerance * want.norm()


def test_gradients() -> None:
    z, x, *parameters = [t.requires_grad_() for t in inputs()]
    g = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    want = torch.autograd.grad(plain(z, x, *parameters), [z, *parameters], g)
    with torch.no_grad():
        _, kept = local.forward(z, x, parameters, True)
        got = local.backward(g, kept, parameters)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_gradients_have_the_strides_of_their_parameters() -> None:
    """DDP warns where they differ."""
    mixer = CHASM(4, size=(6, 5))
    mixer(torch.randn(2, 4, 6, 5)).sum().backward()
    for parameter in mixer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


def test_the_mixer_goes_through_it_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = local.forward

    def noting(*args: object) -> object:
        calls.append(1)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(local, "forward", noting)
    x = torch.randn(2, 4, 6, 5)
    CHASM(4, size=(6, 5))(x)
    CHASM(4, size=(6, 5), residual=False)(x)
    CHASM(4, size=(6, 5)).double()(x.double())
    assert len(calls) == 3
    for mixer in (CHASM(4, size=(6, 5), form="reference"), CHASM(4, axes="ch+cw"), CHASM(4, basis=None)):
        mixer(x)
    CHASM(4, size=(6, 5))(x.contiguous(memory_format=torch.channels_last))
    hooked = CHASM(4, size=(6, 5))
    assert hooked.refine is not None
    hooked.refine.register_forward_hook(lambda *_: None)
    hooked(x)
    with torch.autocast("cpu", torch.bfloat16):
        CHASM(4, size=(6, 5))(x)
    assert len(calls) == 3
