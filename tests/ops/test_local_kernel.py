"""The kernels of the local block against float64: outputs and all gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, gelu

import chasm
from chasm import CHASM, ops
from chasm.mixers import _wrapper as mixers
from chasm.ops import local
from chasm.ops.local import obstacle
from helpers import DEVICE, INTERPRETED, gpu_test, kernel_test

NAMES = ("z", "x", "dw_weight", "dw_bias", "pw_weight", "pw_bias")
BFLOAT16 = 2e-2 if INTERPRETED else 1e-2  # the interpreter cuts off where a GPU rounds
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: BFLOAT16}


def make(batch: int, channels: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """z, x in the dtype, parameters in float32."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    z, x = (normal(batch, channels, height, width).to(dtype) for _ in range(2))
    dw, pw = normal(channels, 1, 3, 3) / 2, normal(channels, channels, 1, 1) / channels**0.5
    return [t.to(DEVICE) for t in (z, x, dw, normal(channels), pw, normal(channels))]


def oracle(z: Tensor, x: Tensor | None, dw: Tensor, dw_bias: Tensor, pw: Tensor, pw_bias: Tensor) -> Tensor:
    y = conv2d(gelu(conv2d(z, dw, dw_bias, padding=1, groups=z.shape[1])), pw, pw_bias)
    return y if x is None else x + y


def local_block(z: Tensor, x: Tensor | None, *parameters: Tensor) -> Tensor:
    """The layers alone, as a mixer without a core runs them."""
    return ops.run(z, [ops.Chain("none", z.dtype, [])], layers=parameters, residual=x)


def run(function, inputs: list[Tensor | None], grad: Tensor) -> dict[str, Tensor]:
    leaves = [t if t is None else t.detach().requires_grad_() for t in inputs]
    y = function(*leaves)
    given = [(name, t) for name, t in zip(NAMES, leaves, strict=True) if t is not None]
    gradients = torch.autograd.grad(y, [t for _, t in given], grad.to(y.dtype))
    return {"y": y.detach()} | {name: g for (name, _), g in zip(given, gradients, strict=True)}


def assert_matches_oracle(inputs: list[Tensor | None], tolerance: float, grad: Tensor | None = None) -> None:
    z = inputs[0]
    if grad is None:
        grad = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).to(z)
    found = run(local_block, inputs, grad)
    expected = run(oracle, [t if t is None else t.double() for t in inputs], grad.double())
    for name, want in expected.items():
        error = (found[name].double() - want).abs().max()
        assert error <= tolerance * want.abs().max(), (name, error.item(), want.abs().max().item())
    for name, t in zip(NAMES, inputs, strict=True):
        assert t is None or found[name].dtype == t.dtype


def grads(mixer, x: Tensor) -> list[Tensor]:
    """The output and the gradients of input and parameters."""
    x = x.detach().requires_grad_()
    y = mixer(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])]


def monkeypatch_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every call of the layers' kernels."""
    from chasm.ops.kernels import local_triton

    calls: list[int] = []
    original = local_triton.forward
    monkeypatch.setattr(local_triton, "forward", lambda *a: calls.append(1) or original(*a))
    return calls


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, poisoned: None, mended_interpreter: None):
    """In the interpreter with small blocks."""
    from chasm.ops.kernels import local_triton, products

    if INTERPRETED:
        for name, value in (("TILE", 128), ("FORWARD_ROWS", 4), ("BACKWARD_ROWS", 4)):
            monkeypatch.setattr(local_triton, name, value)
        blocks = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16}
        for name in ("_product_blocks", "_gram_blocks"):
            monkeypatch.setattr(products, name, lambda a: dict(blocks))
        monkeypatch.setattr(products, "multiprocessors", lambda x: 8)
    return local_triton


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(2, 5, 7, 7), (1, 17, 6, 35), (2, 3, 1, 1), (1, 3, 5, 2), (1, 16, 4, 32)])
def test_kernels_match_oracle(kernels, size, dtype):
    assert_matches_oracle(make(*size, dtype), TOLERANCE[dtype])


@kernel_test
def test_kernels_with_float16_and_no_residual(kernels):
    z, _, *parameters = make(2, 5, 6, 9, torch.float16)
    assert_matches_oracle([z, None, *parameters], TOLERANCE[torch.float16])


@kernel_test
def test_kernels_take_any_strides_and_mixed_types(kernels):
    z, x, *parameters = make(2, 5, 6, 9)
    last = torch.channels_last
    grad = torch.ones(6, 9, device=DEVICE).expand(2, 5, 6, 9)
    assert_matches_oracle([z.to(memory_format=last), x.to(memory_format=last), *parameters], 1e-5, grad)
    assert_matches_oracle([z.bfloat16(), x, *parameters], BFLOAT16)  # as under autocast
    parameters = [p.bfloat16() for p in parameters]
    assert_matches_oracle([z.bfloat16(), x.bfloat16(), *parameters], BFLOAT16)


@kernel_test
def test_kernels_with_large_values(kernels):
    """Far in the tails, where the exponential vanishes."""
    z, x, *parameters = make(1, 3, 4, 4)
    assert_matches_oracle([40 * z, x, *parameters], 1e-5)


@kernel_test
def test_kernels_give_gradients_where_they_are_wanted(kernels):
    inputs = make(1, 3, 4, 4)
    inputs[1].requires_grad_()
    inputs[4].requires_grad_()
    local_block(*inputs).sum().backward()
    assert [t.grad is not None for t in inputs] == [False, True, False, False, True, False]
    with torch.no_grad():
        assert not local_block(*inputs).requires_grad


@kernel_test
def test_kernels_refuse_a_second_derivative(kernels):
    leaves = [t.requires_grad_() for t in make(1, 3, 4, 4)]
    gradients = torch.autograd.grad(local_block(*leaves).square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)


@kernel_test
@pytest.mark.parametrize("options", [{}, {"basis": None}, {"residual": False}])
def test_kernels_in_the_mixer(kernels, monkeypatch, options):
    mixer = CHASM(3, size=4, **options).to(DEVICE)
    with torch.no_grad():  # at the start the gradient of theta is zero but for rounding
        for p in (*mixer.theta.values(), *mixer.gain_table.values()):
            p.add_(0.3 / mixer.step_scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).to(p))
    x = 3 * make(1, 3, 4, 5)[0]
    cost = chasm.count(mixer, x)
    found = grads(mixer, x)
    with torch.autocast(DEVICE, torch.bfloat16):
        low = mixer(x)
    calls = monkeypatch_calls(monkeypatch)
    with torch.no_grad():
        mixer(x)
    assert calls == [1]
    monkeypatch.setattr(mixers, "joined_parameters", lambda *_: [])
    expected = grads(mixer, x)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * b.abs().max().item())
    assert low.dtype == x.dtype
    assert (low - expected[0]).abs().max() < 5e-2
    assert chasm.count(mixer, x).macs == cost.macs
    assert chasm.count(mixer, x).saved_bytes > cost.saved_bytes


@kernel_test
def test_kernels_leave_changed_layers_alone(kernels, monkeypatch):
    calls = monkeypatch_calls(monkeypatch)
    x = make(1, 4, 5, 5)[0]
    hooked, listened, wrapped, exchanged, normed, other = (CHASM(4, size=5).to(DEVICE) for _ in range(6))
    hooked.refine.register_forward_hook(lambda *_: None)
    listened.fuse.register_full_backward_pre_hook(lambda *_: None)
    wrapped.fuse.forward = wrapped.fuse.forward  # as offloading libraries do
    exchanged.fuse = torch.nn.Conv2d(4, 4, 1, bias=False, device=DEVICE)
    torch.nn.utils.parametrizations.weight_norm(normed.fuse)
    for mixer, inputs in (
        *((m, x) for m in (hooked, listened, wrapped, exchanged, normed)),
        (other.double(), x.double()),
    ):
        mixer(inputs)
    assert calls == []


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors on a CPU")
def test_obstacles(monkeypatch):
    z = torch.zeros(1, 2, 3, 3)
    assert obstacle(z) == "it needs a CUDA tensor, got one on cpu"
    assert "got torch.float64" in obstacle(z.double())
    assert "got 3 axes" in obstacle(z[0])
    assert "got 4096x4096" in obstacle(torch.zeros(1, 1, 4096, 4096, device="meta"))
    monkeypatch.setattr(local, "IS_INTERPRETED", True)
    monkeypatch.setattr(local, "has_triton", lambda: False)
    assert obstacle(z) == "triton cannot be imported"


# ---- on a GPU

SIZES = [(8, 96, 256, 256), (8, 96, 128, 128), (8, 384, 32, 32), (4, 96, 218, 170), (2, 96, 63, 90), (1, 16, 7, 7)]


@gpu_test
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
def test_on_a_gpu(kernels, size, dtype):
    assert_matches_oracle(make(*size, dtype), TOLERANCE[dtype])


@gpu_test
def test_in_a_cuda_graph_and_again_the_same(assert_same_in_a_cuda_graph):
    assert_same_in_a_cuda_graph(local_block, lambda: make(2, 96, 63, 90, torch.bfloat16))
