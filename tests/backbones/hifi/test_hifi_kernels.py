"""The kernels of the HiFi-Mamba host against float64, outputs and all gradients, and the layers that use them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, gelu, group_norm
from torch.utils.checkpoint import checkpoint

import chasm
from chasm.backbones.hifi import layers
from chasm.backbones.hifi.blocks import InvertedBottleneck
from chasm.backbones.hifi.kernels import norm as norm_module
from chasm.backbones.hifi.kernels.depthwise import depthwise
from chasm.backbones.hifi.kernels.norm import NormGELU, norm_gelu
from helpers import DEVICE, INTERPRETED, gpu_test, kernel_test, pairwise

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, poisoned: None, mended_interpreter: None) -> None:
    """In the interpreter with small blocks."""
    if INTERPRETED:
        from chasm.backbones.hifi.kernels import depthwise_triton, norm_triton

        monkeypatch.setattr(norm_triton, "TILE", 32)
        monkeypatch.setattr(norm_triton, "MAX_PARTS", 6)
        for name, size in {"BLOCK_W": 4, "BLOCK_C": 4, "ROWS": 3, "WEIGHT_ROWS": 4}.items():
            monkeypatch.setattr(depthwise_triton, name, size)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_matches(
    ours: Callable[..., Tensor], oracle: Callable[..., Tensor], inputs: list[Tensor], tolerance: float,
    grad: Tensor | None = None,
) -> None:  # fmt: skip
    """Output and every gradient, relative to the largest entry; and the dtypes of torch."""
    grad = normal(*inputs[0].shape, seed=9, dtype=inputs[0].dtype) if grad is None else grad
    leaves = [t.detach().requires_grad_() for t in inputs]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    y, expected = ours(*leaves), oracle(*wide)
    assert y.dtype == inputs[0].dtype
    found = [y, *torch.autograd.grad(y, leaves, grad)]
    for i, want in enumerate([expected, *torch.autograd.grad(expected, wide, grad.double())]):
        error = (found[i].double() - want).abs().max()
        assert error <= tolerance * want.abs().max(), (i, error.item(), want.abs().max().item())
    assert [g.dtype for g in found[1:]] == [t.dtype for t in inputs]


SMALL = [(2, 5, 7, 7), (1, 3, 5, 63), (1, 2, 6, 90), (1, 1, 3, 218), (2, 3, 1, 1)]


def norm_oracle(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gelu(group_norm(x, 1, weight, bias, 1e-5))


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The operator on the positions of a map (B, C, H, W)."""
    y, _ = norm_gelu(x.flatten(2).mT, weight, bias, 1e-5)
    return y.mT.reshape(x.shape)


def norm_inputs(size: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Channels of unlike mean and deviation; parameters in float32, as under autocast."""
    C = size[1]
    spread, centre = (normal(1, C, 1, 1, seed=s) for s in (1, 2))
    return [(normal(*size) * spread.exp() + centre).to(dtype), 1 + normal(C, seed=3) / 2, normal(C, seed=4)]


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SMALL)
def test_kernels_of_the_norm(size, dtype):
    assert_matches(norm, norm_oracle, norm_inputs(size, dtype), TOLERANCE[dtype])


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_the_norm_with_a_large_mean(dtype):
    """And one that is far off at the start of a row, where a running shift would be taken."""
    _, weight, bias = norm_inputs((2, 3, 9, 20), dtype)
    x = 100 + normal(2, 3, 9, 20)
    assert_matches(norm, norm_oracle, [x.to(dtype), weight, bias], TOLERANCE[dtype])
    x[:, :, 0, 0] = 0
    assert_matches(norm, norm_oracle, [x.to(dtype), weight, bias], TOLERANCE[dtype])


@kernel_test
def test_kernels_of_the_norm_with_any_strides_and_types():
    x, weight, bias = norm_inputs((2, 4, 6, 9), torch.float16)
    last, half = torch.channels_last, TOLERANCE[torch.float16]
    assert_matches(norm, norm_oracle, [x.to(memory_format=last), weight, bias], half)
    part, _ = normal(2, 8, 6, 9).chunk(2, 1)
    grad = torch.ones(6, 9, device=DEVICE).expand(2, 4, 6, 9)
    assert_matches(norm, norm_oracle, [part, weight, bias], 1e-5, grad)
    assert_matches(norm, norm_oracle, [t.bfloat16() for t in (x, weight, bias)], TOLERANCE[torch.bfloat16])


@kernel_test
def test_kernels_of_the_norm_give_gradients_where_they_are_wanted():
    x, weight, bias = norm_inputs((1, 3, 4, 4), torch.float32)
    bias.requires_grad_()
    norm(x, weight, bias).sum().backward()
    assert bias.grad is not None
    assert x.grad is None
    assert NormGELU(3).to(DEVICE)(x[:0]).shape == (0, 3, 4, 4)


@kernel_test
def test_parts_of_the_norm_cover_maps_whose_products_exceed_32_bits():
    from norm_parts import store_parts

    P, parts = 2**30 + 5, 7
    ends = torch.zeros(parts, 2, dtype=torch.int32, device=DEVICE)
    store_parts[(parts,)](ends, P, parts, ROWS=1)
    first, end = ends.tolist()[0][0], ends.tolist()[-1][1]
    assert (first, end) == (0, P)
    assert torch.equal(ends[1:, 0], ends[:-1, 1])
    assert (ends[:, 1] - ends[:, 0]).aminmax() == (P // parts, P // parts + 1)


def depthwise_oracle(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return conv2d(x, weight, bias, padding=1, groups=len(weight))


def depthwise_3x3(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The operator on a map (B, C, H, W)."""
    return depthwise(x.movedim(1, -1), weight, bias).movedim(-1, 1)


def depthwise_inputs(size: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Parameters in float32, as under autocast."""
    return [normal(*size, dtype=dtype), normal(size[1], 1, 3, 3, seed=3), normal(size[1], seed=4)]


@kernel_test
@pytest.mark.parametrize(
    ("size", "dtype", "has_bias"),
    pairwise(
        {
            "size": [(2, 5, 7, 7), (1, 3, 4, 9), (1, 1, 9, 2), (2, 2, 1, 1)],
            "dtype": [torch.float32, torch.bfloat16],
            "has_bias": [True, False],
        }
    ),
)
def test_kernels_of_the_depthwise_convolution(size, dtype, has_bias):
    inputs = depthwise_inputs(size, dtype)[: 3 if has_bias else 2]
    assert_matches(depthwise_3x3, depthwise_oracle, inputs, TOLERANCE[dtype])


@kernel_test
def test_kernels_of_the_depthwise_convolution_with_any_strides():
    _, weight, bias = depthwise_inputs((2, 4, 6, 9), torch.float32)
    part, _ = normal(2, 8, 6, 9).chunk(2, 1)
    grad = torch.ones(6, 9, device=DEVICE).expand(2, 4, 6, 9)
    last = weight.to(memory_format=torch.channels_last)
    assert_matches(depthwise_3x3, depthwise_oracle, [part, last, bias], 1e-5, grad)
    assert_matches(depthwise_3x3, depthwise_oracle, [part, last, normal(8)[::2]], 1e-5, grad)
    with pytest.raises(RuntimeError, match="channels"):
        depthwise_3x3(part, weight[:3], None)


@kernel_test
def test_kernels_keep_the_contract_of_an_operator():
    x, weight, bias = norm_inputs((2, 3, 4, 6), torch.float32)
    inputs = [t.requires_grad_() for t in (x.flatten(2).mT.contiguous().detach(), weight, bias)]
    torch.library.opcheck(norm_gelu, (*inputs, 1e-5))
    x, *parameters = depthwise_inputs((2, 3, 4, 6), torch.float32)
    torch.library.opcheck(depthwise, tuple(t.requires_grad_() for t in (x.movedim(1, -1), *parameters)))


@kernel_test
def test_a_single_position_needs_no_kernel(monkeypatch):
    """The channel gates of a host have one each, in every block: a product is one launch, and autograd's is cheaper."""
    monkeypatch.setattr(layers, "depthwise", None)
    layer, x = layers.Depthwise(4).to(DEVICE), normal(2, 4, 1, 1)
    torch.testing.assert_close(layer(x), depthwise_oracle(x, layer.weight, layer.bias))


def block(width: int = 2, expansion: int = 3) -> InvertedBottleneck:
    """Every parameter at random."""
    module = InvertedBottleneck(width, expansion).to(DEVICE)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(0.5 * normal(*p.shape, seed=i))
    return module


def results(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of input and parameters."""
    x = x.detach().requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def leave_out_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (norm_module, layers):
        monkeypatch.setattr(module, "has_kernels", lambda x: False)


@kernel_test
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernels_in_the_inverted_bottleneck(monkeypatch, layout):
    """With them and without: results and autocast."""
    module, x = block(), normal(2, 2, 5, 6).contiguous(memory_format=layout)
    found = results(module, module, x)
    with torch.autocast(DEVICE, torch.bfloat16):
        low = results(module, module, x)
    leave_out_kernels(monkeypatch)
    expected = results(module, module, x)
    for a, b, c in zip(found, expected, low, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * b.abs().max().item())
        torch.testing.assert_close(c, b, rtol=0, atol=5e-2 * b.abs().max().item())


@kernel_test
def test_kernels_under_checkpointing_and_what_they_cost(monkeypatch):
    """Checkpointing computes the same numbers again, counts the same multiply-adds, and keeps less memory."""
    module, x = block(), normal(1, 2, 4, 5)
    again = results(lambda t: checkpoint(module, t, use_reentrant=False), module, x)
    assert all(map(torch.equal, results(module, module, x), again))
    cost = chasm.count(module, x)
    leave_out_kernels(monkeypatch)
    plain = chasm.count(module, x)
    assert plain.macs == cost.macs
    assert plain.saved_bytes > cost.saved_bytes


@kernel_test
@pytest.mark.parametrize("layer", [layers.Depthwise, NormGELU])
def test_kernels_leave_transforms_of_torch_to_torch(monkeypatch, layer):
    """Forward mode would be zero without a word, and there are no gradients of single samples."""
    module, x, direction = layer(3).to(DEVICE), normal(2, 3, 4, 5), normal(2, 3, 4, 5, seed=1)
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, sample[None]).square().sum()

    def transformed() -> list[Tensor]:
        _, tangent = torch.func.jvp(module, (x,), (direction,))
        return [tangent, *torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x).values()]

    found = transformed()
    for module_with_kernels in (norm_module, layers):
        monkeypatch.setattr(module_with_kernels, "has_kernels", lambda x: False)
    torch.testing.assert_close(found, transformed())
    assert found[0].abs().max() > 0


@kernel_test
@pytest.mark.parametrize("channels", [3, 6])
def test_kernels_leave_a_wrong_number_of_channels_an_error(channels):
    with pytest.raises(RuntimeError):
        NormGELU(4).to(DEVICE)(normal(1, channels, 4, 4))


# ---- on a GPU

SIZES = [(8, 240, 128, 128), (8, 96, 128, 128), (4, 96, 218, 170), (2, 96, 63, 90), (1, 16, 7, 7)]


@gpu_test
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
def test_norm_on_a_gpu(size, dtype):
    assert_matches(norm, norm_oracle, norm_inputs(size, dtype), TOLERANCE[dtype])


@gpu_test
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
def test_depthwise_convolution_on_a_gpu(size, dtype):
    assert_matches(depthwise_3x3, depthwise_oracle, depthwise_inputs(size, dtype), TOLERANCE[dtype])


@gpu_test
def test_norm_in_a_cuda_graph_on_a_gpu(assert_same_in_a_cuda_graph):
    assert_same_in_a_cuda_graph(norm, lambda: norm_inputs((2, 96, 63, 90), torch.bfloat16))


@gpu_test
def test_a_compiled_bottleneck_on_a_gpu():
    module, x = block(8, 5), normal(2, 8, 16, 24)
    torch.testing.assert_close(torch.compile(module, fullgraph=True)(x), module(x), rtol=1e-4, atol=1e-4)
