"""Every formula against a count made by hand."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chasm.backbones import create_backbone
from chasm.common.cost import counted_as
from chasm.mixers import create_mixer
from chasm.ops.library import constant
from chasm.surgery.count import Cost, count, count_parameters


class Call(nn.Module):
    """A function as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def macs(function, *inputs) -> dict[str, int]:
    return count(Call(function), *inputs).macs


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 10, 12), 2 * 10 * 12 * 3 * 8 * 9),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), (1, 8, 6, 6), 36 * 8 * 9),  # depthwise
        (nn.Conv2d(4, 6, 3, stride=2), (1, 4, 9, 9), 4 * 4 * 4 * 6 * 9),  # 4 x 4 positions
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (1, 4, 5, 5), 25 * 4 * 6 * 4),  # every input position, once
        (nn.Conv1d(4, 4, 5, padding=2), (3, 4, 7), 3 * 7 * 16 * 5),
    ],
)
def test_convolution(layer, shape, expected):
    cost = count(layer, torch.randn(shape))
    assert cost.macs == {"conv": expected}
    assert cost.total == cost.paper == expected


def test_linear_and_products():
    assert count(nn.Linear(5, 7), torch.randn(2, 3, 5)).macs == {"matmul": 6 * 5 * 7}
    assert macs(torch.matmul, torch.randn(4, 5), torch.randn(5)) == {"matmul": 20}
    assert macs(torch.dot, torch.randn(5), torch.randn(5)) == {"matmul": 5}
    assert macs(torch.baddbmm, torch.randn(2, 3, 4), torch.randn(2, 3, 5), torch.randn(2, 5, 4)) == {
        "matmul": 2 * 3 * 4 * 5
    }


def test_a_complex_einsum_counts_four_and_once_by_the_paper():
    X, M = torch.randn(2, 9, 5, dtype=torch.complex64), torch.randn(9, 5, 5, dtype=torch.complex64)
    cost = count(Call(lambda X, M: torch.einsum("kcd,bkd->bkc", M, X)), X, M)
    assert cost.macs == {"matmul": 4 * 2 * 9 * 25}
    assert cost.paper == 2 * 9 * 25


def test_elementwise_products_count_only_when_complex():
    X, K, g = torch.randn(3, 5, dtype=torch.complex64), torch.randn(5, dtype=torch.complex64), torch.randn(5)
    assert macs(lambda: X * K) == {"complex product": 4 * 15}
    assert macs(lambda: g * X) == {"complex product": 2 * 15}
    assert macs(lambda: g * g) == macs(lambda: X * 0.5) == {}
    assert count(Call(lambda: X * K)).paper == 0


@pytest.mark.parametrize(
    ("transform", "shape", "expected"),
    [
        # n log2 n: half of the 2 n log2 n of n/2 log2 n butterflies with 4 multiply-adds each
        (torch.fft.rfft, (3, 16), 3 * 16 * 4),
        (lambda x: torch.fft.irfft(x + 0j, n=16), (3, 9), 3 * 16 * 4),
        (
            torch.fft.fft,
            (3, 8),
            3 * 8 * 3,
        ),  # torch transforms a real input as real, then fills the mirror image
        (lambda x: torch.fft.fft(x + 0j), (3, 8), 2 * 3 * 8 * 3),
        # 8 rows of 16 points, real; then 9 columns of 8 points, complex
        (torch.fft.rfft2, (5, 8, 16), 5 * (8 * 16 * 4 + 9 * 2 * 8 * 3)),
        (lambda x: torch.fft.irfft2(x + 0j, s=(8, 16)), (5, 8, 9), 5 * (8 * 16 * 4 + 9 * 2 * 8 * 3)),
        (lambda x: torch.fft.fft2(x + 0j), (8, 16), 2 * 8 * 16 * (3 + 4)),
        (torch.fft.rfft, (10,), round(10 * math.log2(10))),
        (torch.fft.rfft, (4, 1), 0),
    ],
)
def test_fft(transform, shape, expected):
    cost = count(Call(transform), torch.randn(shape))
    assert cost.macs.get("fft", 0) == cost.total == expected
    assert cost.paper == 0


def test_matrix_exponential():
    A = torch.zeros(2, 6, 6)
    assert macs(torch.linalg.matrix_exp, A) == {"matrix exponential": 5 * 2 * 6**3}
    A[0, 0, 0] = 3.0 * 4  # between 2 and 4 thresholds: two squarings
    assert macs(torch.linalg.matrix_exp, A) == {"matrix exponential": 7 * 2 * 6**3}
    assert macs(torch.linalg.matrix_exp, A.double()) == {"matrix exponential": 9 * 2 * 6**3}  # 12 / 1.09 < 16
    assert macs(torch.linalg.matrix_exp, A.to("meta")) == {"matrix exponential": 5 * 2 * 6**3}


def test_attention_is_apart_from_its_projections():
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
    x = torch.randn(3, 5, 8)
    for training in (True, False):  # with dropout torch falls back to plain products
        layer.train(training)
        cost = count(Call(lambda q: layer(q, q, q, need_weights=False)), x)
        assert cost.macs == {"matmul": 3 * 5 * 4 * 64, "attention": 2 * 3 * 25 * 8}
        assert cost.paper == 3 * 5 * 4 * 64
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_a_transformer_in_eval_is_not_one_opaque_operator():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    assert count(layer, torch.randn(3, 5, 8)).macs == {
        "matmul": 3 * 5 * (4 * 64 + 2 * 8 * 16),
        "attention": 2 * 3 * 25 * 8,
    }
    assert torch.backends.mha.get_fastpath_enabled()


class Scan(torch.autograd.Function):
    """Stands for an operator with arithmetic torch's counter cannot judge."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        with counted_as("scan", macs=x.shape[1] * 100):
            return (x @ x.mT @ x).clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def test_an_operator_states_its_own_cost_or_name():
    x = torch.randn(2, 6, 4, requires_grad=True)
    cost = count(Call(Scan.apply), x)
    assert cost.macs == {"scan": 600}
    assert cost.paper == 600

    def exponential(x):
        with counted_as("matrix exponential"):
            return x @ x

    cost = count(Call(exponential), torch.randn(4, 4))
    assert cost.macs == {"matrix exponential": 64}
    assert cost.paper == 0
    assert torch.equal(exponential(torch.eye(2)), torch.eye(2))  # nobody counts: nothing happens


def test_a_statement_does_not_break_compilation():
    def f(x):
        with counted_as("scan", macs=3):
            return x.sin() + 1

    compiled = torch.compile(f, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), f(torch.ones(3)))


def test_someone_elses_formula_is_kept():
    from torch.utils.flop_counter import flop_registry

    flop_registry[torch.ops.aten.cumsum] = lambda *args, out_val=None, **kwargs: 2 * 11
    try:
        assert macs(lambda x: x.cumsum(0), torch.randn(4)) == {"other": 11}
    finally:
        del flop_registry[torch.ops.aten.cumsum]


class Pairs(nn.Module):
    complex_parameters = ("filter", "list", "absent")

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.zeros(5, 2))
        self.list = nn.ParameterList([nn.Parameter(torch.zeros(3, 2))])
        self.absent = None
        self.native = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
        self.linear = nn.Linear(2, 1)
        self.tied = self.linear


def test_parameters_counted_both_ways():
    assert count_parameters(nn.Sequential(Pairs(), nn.Linear(2, 2))) == (
        5 + 3 + 4 + 3 + 6,
        10 + 6 + 8 + 3 + 6,
    )


def test_memory_saved_for_backward():
    x = torch.randn(4, 8)
    # the input for the weight's gradient; sigmoid keeps its result: 4 * 6 floats
    model = nn.Sequential(nn.Linear(8, 6), nn.Sigmoid())
    assert count(model, x).saved_bytes == 4 * (4 * 8 + 4 * 6)
    # and the weight for the input's gradient, but that is a parameter
    assert count(model, x.clone().requires_grad_()).saved_bytes == 4 * (4 * 8 + 4 * 6)
    # a square saves its input once although it is used twice; a view adds no storage
    assert count(Call(lambda x: x * x.view(8, 4).view(4, 8)), x.clone().requires_grad_()).saved_bytes == 4 * 32
    assert count(model.requires_grad_(False), x).saved_bytes == 0


def test_counting_leaves_no_trace():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    count(model, torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_making_a_constant_costs_nothing():
    def make(device: torch.device, n: int) -> Tensor:
        return torch.eye(n, device=device) @ torch.eye(n, device=device)

    found = macs(lambda x: constant(make, x, 5) @ x, torch.ones(5, 2))
    assert found == {"matmul": 5 * 5 * 2}


def test_meta_tensors_and_compiled_models():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU())
    expected = count(model, torch.randn(1, 2, 8, 8))
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(1, 2, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count(compiled, torch.randn(1, 2, 8, 8)) == expected
    assert count(model.to("meta"), torch.randn(1, 2, 8, 8, device="meta")) == expected


def test_a_chasm_block():
    C, H, W = 6, 8, 4
    K_h, K_w, N = 5, 3, 32
    block = create_mixer("chasm", C, (H, W), form="reference")
    cost = count(block, torch.randn(1, C, H, W))
    bins = K_h * W + K_w * H
    einsum = 2 * C * C * bins  # U^T and U on every coefficient of the two passes
    assert cost.macs["conv"] == N * (C * C + 9 * C)
    assert cost.macs["fft"] == 2 * C * N * (3 + 2)  # there and back, log2 of 8 and of 4
    assert cost.macs["complex product"] == 2 * C * bins  # the gains
    bases = 2 * 14 * C**3  # 6 + 8 products each; a table read at its own bins costs nothing
    named = sum(cost.macs[kind] for kind in ("conv", "fft", "complex product"))
    assert cost.total == named + 4 * einsum + bases
    assert cost.paper == cost.macs["conv"] + cost.macs["matmul"] - 3 * einsum
    assert cost.inference == cost.total - bases


@pytest.mark.parametrize("options", [{}, {"basis": "identity"}, {"axes": "ch+cw"}, {"gain": "complex", "local": False}])
def test_the_papers_rule_knows_neither_form_nor_device(options: dict[str, Any]) -> None:
    x = torch.randn(2, 6, 8, 4)
    block = create_mixer("chasm", 6, (8, 4), **options)
    literal = create_mixer("chasm", 6, (8, 4), form="reference", **options)
    assert count(block, x).paper == count(literal, x).paper == 2 * count(block, x[:1]).paper
    assert count(literal, x).paper == count(block.to("meta"), x.to("meta")).paper


def test_work_on_weights_does_not_grow_with_the_batch() -> None:
    block = create_mixer("chasm", 6, (8, 4), bins=3)
    one, four = (count(block, torch.randn(n, 6, 8, 4)) for n in (1, 4))
    assert one.total - one.inference == four.total - four.inference > 0
    assert four.inference == 4 * one.inference


def test_afno_counts_a_complex_product_once_by_the_paper() -> None:
    C, H, W = 8, 6, 4
    cost = count(create_mixer("afno", C, (H, W)), torch.randn(2, C, H, W))
    products = 2 * 2 * H * 3 * C * (C // 4)  # batch, layers, bins, inputs, outputs of a block
    assert cost.macs["matmul"] == 4 * products
    assert cost.paper == products


def test_a_model_with_experts_is_counted_without_data() -> None:
    options: dict[str, Any] = {"width": 16, "groups": 1, "blocks": 1, "state": 4, "size": (16, 16)}
    model = create_backbone("hifi-mamba-v2", mixer="identity", **options)
    x, mask = torch.randn(1, 2, 16, 16), torch.ones(1, 1, 1, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a scan without kernels is slow
        expected = count(model, x, mask=mask)
        assert count(model.to("meta"), x.to("meta"), mask=mask.to("meta")).macs == expected.macs


def test_prints_one_line():
    text = str(Cost(1000, 2000, {"fft": 3_000_000, "conv": 5_000_000}, 5_000_000, 2**20))
    assert "1,000" in text
    assert "8.00M (conv 5.00M, fft 3.00M)" in text
    assert "1.00 MiB" in text
