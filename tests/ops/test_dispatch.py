"""Which form is chosen, and what is said about it: nothing is computed."""

import itertools
from typing import Any

import pytest
import torch

from chasm import CHASM, ops
from chasm.common.tracing import is_transformed
from chasm.ops import choose_form
from chasm.ops.dispatch import fused_obstacle, triton_obstacle
from chasm.ops.kernels import IS_INTERPRETED

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BASES, GAINS = ("shared", "identity", "untied"), ("positive", "signed", "complex")

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter takes any dtype, anywhere")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where triton is installed, on a large card."""
    monkeypatch.setattr("chasm.ops.dispatch.has_triton", lambda: True)
    monkeypatch.setattr("chasm.ops.dispatch.has_large_blocks", lambda device: True)
    monkeypatch.setattr("chasm.ops.dispatch.is_blackwell", lambda device: False)


def chosen(shape: Any, dims: Any = (2, 3), **options: Any) -> ops.Choice:
    defaults: dict[str, Any] = {
        "basis": "shared", "gain": "positive", "device": CUDA, "dtype": torch.bfloat16, "grad": False,
    }  # fmt: skip
    return choose_form(torch.Size(shape), dims, **{**defaults, **options})


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "meta"])
@pytest.mark.parametrize(("basis", "gain"), list(itertools.product(BASES, GAINS)))
def test_the_automatic_choice_is_possible_and_gives_a_reason(device: str, basis: str, gain: str) -> None:
    for longest, grad, dtype in itertools.product((1, 64, 256, 1000), (True, False), (torch.float32, torch.bfloat16)):
        options: dict[str, Any] = {"basis": basis, "gain": gain, "device": torch.device(device), "grad": grad}
        form, reason = chosen((2, 32, longest, 6), dtype=dtype, **options)
        assert form != "reference"
        assert reason
        assert "\n" not in reason
        assert chosen((2, 32, longest, 6), dtype=dtype, form=form, **options) == (form, "forced by the user")


@pytest.mark.parametrize(
    ("shape", "options", "form"),
    [
        ((8, 96, 256, 256), {}, "fused"),
        ((8, 32, 6, 96), {}, "fused"),
        ((8, 32, 6, 94), {}, "triton"),
        ((8, 32, 6, 94), {"channels_last": True}, "fused"),
        ((8, 32, 6, 6), {"channels_last": True}, "fused"),
        ((8, 96, 256, 256), {"grad": True}, "triton"),
        ((8, 96, 256, 256), {"gain": "complex"}, "triton"),
        ((8, 96, 256, 256), {"dtype": torch.float16}, "triton"),
        ((8, 96, 256, 256), {"dtype": torch.float32}, "fft"),
        ((8, 24, 256, 256), {}, "triton"),
        ((8, 96, 256, 255), {}, "triton"),
        ((8, 96, 258, 256), {}, "triton"),
        ((8, 96, 256, 256), {"dims": (2,)}, "triton"),  # nothing but a pass of "triton" where channels come first
        ((8, 96, 256, 256), {"dims": (2,), "channels_last": True}, "fused"),
        ((1, 3, 512, 2048), {}, "triton"),
        ((1, 3, 512, 2049), {}, "fft"),
        ((1, 3, 4000, 4), {}, "fft"),
        ((1, 3, 64), {"dims": (2,)}, "fft"),
        ((1, 3, 8, 8, 8), {"dims": (2, 3, 4)}, "fft"),
        ((1, 3, 8, 8), {"basis": "untied"}, "fft"),
        ((1, 3, 8, 8), {"device": torch.device("mps")}, "fft"),
        ((1, 3, 128, 8), {"device": CPU, "dtype": torch.float32, "grad": True}, "fft"),
        ((1, 3, 129, 8), {"device": CPU}, "fft"),
        ((1, 3, 8, 8), {"device": CPU, "transformed": True}, "reference"),
        ((1, 3, 8, 8), {"transformed": True}, "reference"),
        ((1, 3, 8, 8), {"transformed": True, "basis": "untied"}, "fft"),
    ],
)
def test_what_auto_takes(shape: tuple[int, ...], options: dict[str, Any], form: str) -> None:
    assert chosen(shape, **options).form == form


def test_small_cards_take_the_kernels_but_for_the_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chasm.ops.dispatch.has_large_blocks", lambda device: False)
    for channels_last in (False, True):
        assert chosen((8, 96, 256, 256), channels_last=channels_last).form == "triton"
    with pytest.raises(ValueError, match="more shared memory than this card has; use 'auto'"):
        chosen((8, 96, 256, 256), form="fused")


def test_a_b200_takes_the_form_triton_for_its_tensor_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chasm.ops.dispatch.is_blackwell", lambda device: True)
    assert chosen((8, 96, 256, 256)).form == "triton"
    with pytest.raises(ValueError, match="more tensor memory than this card has; use 'auto'"):
        chosen((8, 96, 256, 256), form="fused")


def test_circulants_do_not_outweigh_features() -> None:
    """One of 2,048 takes 8 MB a channel, and in training 16 more; a row of 2,048 takes 4 KB."""
    for dims in ((2, 3), (3,)):
        assert chosen((1, 3, 8, 2048), dims).form == "fft"
        assert chosen((63, 3, 8, 2048), dims).form == "fft"
        assert chosen((64, 3, 8, 2048), dims).form == "triton"
        assert chosen((1, 3, 8, 512), dims).form == "triton"
    assert chosen((1, 3, 8, 2048), (2,)).form == "triton"


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("triton", {"basis": "untied"}, "form 'triton' needs one basis .*, got an untied one: use 'fft'"),
        ("fused", {"gain": "complex"}, "form 'fused' needs real gains, got complex ones: use"),
        ("fused", {"grad": True}, "form 'fused' cannot run: it has no gradient; use 'auto'"),
        ("fft", {"transformed": True}, "form 'fft' cannot run: torch.func, .* plain torch operations only; use 'auto'"),
        ("triton", {"device": CPU}, "form 'triton' cannot run: it needs bfloat16 or float16 on a CUDA device, got"),
        ("tritton", {}, "unknown form 'tritton': did you mean 'triton'"),
    ],
)
def test_an_impossible_form_is_refused(form: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        chosen((1, 32, 6, 8), form=form, **options)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("shape", "device", "dtype", "reason"),
    [
        ((1, 32, 8), "cuda", torch.bfloat16, "2-D features"),
        ((1, 32, 7, 8), "cuda", torch.bfloat16, "even axes up to 256"),
        ((1, 32, 8, 258), "cuda", torch.bfloat16, "even axes up to 256"),
        ((1, 129, 8, 8), "cuda", torch.bfloat16, "16 to 128 channels"),
        ((1, 8, 8, 8), "cuda", torch.bfloat16, "16 to 128 channels"),
        ((1, 32, 8, 8), "cuda", torch.float16, "needs bfloat16 (the mean of a map could overflow in float16), got"),
        ((1, 32, 8, 8), "cuda", torch.float32, "needs bfloat16 (the"),
        ((1, 32, 8, 8), "cpu", torch.bfloat16, "on a CUDA device, got torch.bfloat16 on cpu"),
    ],
)
def test_what_the_fused_form_does_not_take(shape: Any, device: str, dtype: torch.dtype, reason: str) -> None:
    dims = list(range(2, len(shape)))
    assert reason in (fused_obstacle(torch.Size(shape), dims, torch.device(device), dtype) or "")
    with pytest.raises(ValueError, match=r"form 'fused' cannot run: .*use 'auto'"):
        chosen(shape, dims, device=torch.device(device), dtype=dtype, form="fused")


def test_why_the_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def obstacle(*shape: int, dims: Any = (2, 3), device: torch.device = CUDA) -> str:
        return triton_obstacle(torch.Size(shape), dims, device, torch.bfloat16) or ""

    assert "needs bfloat16 or float16 on a CUDA device" in obstacle(2, 6, 7, 10, device=CPU)
    assert "up to 2048" in obstacle(1, 6, 2049, 10)
    assert obstacle(1, 6, 2049, 10, dims=[3]) == ""
    assert "32 bits" in obstacle(1, 2**12, 2**10, 2**9, dims=[3])
    assert "2-D features" in obstacle(1, 6, 8, dims=[2])
    monkeypatch.setattr("chasm.ops.dispatch.has_triton", lambda: False)
    assert obstacle(2, 6, 7, 10) == "triton cannot be imported"


def test_transforms_leave_no_place_for_operators() -> None:
    """Inside them tensors have no memory of their own, or a tangent that a kernel would lose."""
    x = torch.ones(2)
    seen = []

    def look(t: torch.Tensor) -> torch.Tensor:
        seen.append(is_transformed(t))
        return t.sum()

    torch.func.grad(look)(x)
    torch.vmap(look)(x[None])
    with torch.autograd.forward_ad.dual_level():
        look(x)
    assert seen == [True] * 3
    assert not is_transformed(x)


@pytest.mark.parametrize("form", [form for form in ops.FORMS if form != "reference"])
def test_forms_asked_for_inside_them_are_refused(form: str) -> None:
    module = CHASM(16, size=4, form=form).requires_grad_(False)
    x = torch.ones(2, 16, 4, 4)
    refused = pytest.raises(ValueError, match=f"form '{form}' cannot run: torch.func, .*use 'auto'")
    with torch.autograd.forward_ad.dual_level(), refused:
        module(torch.autograd.forward_ad.make_dual(x, x))
    with refused:
        torch.vmap(module)(x[:, None])
    with refused:
        torch.export.export(module, (x,))
