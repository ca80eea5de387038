"""The form that makes each axis one kernel: against float64, in the memory formats and sizes it takes."""

import math

import pytest
import torch
from torch import Tensor

import chasm
from chasm import ops
from chasm.ops import AxisOperator, reference
from chasm.ops.forms import fused
from chasm.ops.forms.fused import gain_table, hartley, scales
from chasm.ops.kernels.layout import is_channels_last
from helpers import DEVICE, HALF, INTERPRETED, gpu_test, kernel_test, pairwise

TOLERANCE = 1e-6 if INTERPRETED else 8e-3
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("poisoned")

FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


@pytest.mark.parametrize("n", [2, 6, 30, 128, 256])
def test_transforms_are_symmetric_orthogonal_and_diagonalise_gains(n):
    half, (transform, power, rest) = n // 2, scales(n)
    H = hartley(CPU, n, torch.float64)
    assert not H[:, half:].any()
    assert not H[:, :, half:].any()
    H = H[:, :half, :half]
    assert torch.equal(H, H.mT)
    whole = half * transform**2 * torch.eye(half, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(H @ H, whole, rtol=0, atol=1e-13)
    torch.manual_seed(0)
    gains, x = torch.rand(half + 1, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    k = 2 * torch.arange(half) + torch.arange(2)[:, None]
    g = gains[torch.minimum(k, n - k)] * power
    first, second = x[:half], x[half:]
    halves = (H @ (g * (H @ torch.stack([first + second, first - second])[..., None])[..., 0])[..., None])[..., 0]
    found = torch.cat([halves[0] + halves[1], halves[0] - halves[1]]) * rest
    torch.testing.assert_close(found, torch.fft.irfft(gains * torch.fft.rfft(x), n=n), rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [2, 64, 90, 128, 218, 256])
def test_the_mean_is_exact_in_bfloat16(n):
    transform, power, rest = scales(n)
    assert hartley(CPU, n, torch.bfloat16)[0, 0, : n // 2].eq(transform).all()
    for number in (transform, power):
        assert math.frexp(number)[0] == 0.5  # a power of two
    assert (rest == 1) == (n in (2, 64, 128, 256))
    assert 1 <= rest < 2


def test_gains_lie_as_results_do():
    """The register a thread of a Hopper warp keeps element (row, column) of a 16 x 8 result in, by the manual."""
    table = gain_table(torch.arange(129 * 128.0).view(129, 128), 256).view(2, 8, 8, 32, 8)
    for row, column in ((0, 0), (5, 77), (127, 127), (64, 9)):
        warp, lane = row // 16, row % 8 * 4 + column % 8 // 2
        register = column // 8 % 2 * 4 + row % 16 // 8 * 2 + column % 2
        for part in (0, 1):
            k = 2 * row + part
            assert table[part, column // 16, warp, lane, register] == (min(k, 256 - k) * 128 + column) * scales(256)[1]


def random_chain(C: int, size: tuple[int, int], dims: tuple[int, ...], based: bool = True) -> list[AxisOperator]:
    torch.manual_seed(C)
    found = []
    for dim in dims:
        U = ops.orthogonal_basis(torch.randn(C * (C - 1) // 2, dtype=torch.float64)) if based else None
        found.append(AxisOperator(dim, U, torch.rand(size[dim - 2] // 2 + 1, C, dtype=torch.float64) + 0.5))
    return found


def applied(x: Tensor, chain: list[AxisOperator], before_local: bool = False) -> Tensor:
    moved = [
        op._replace(U=None if op.U is None else op.U.float().to(DEVICE), gains=op.gains.float().to(DEVICE))
        for op in chain
    ]
    with torch.no_grad():
        chain = ops.prepare(ops.Chain("fused", x.dtype, moved), x.shape)
        if before_local:  # as the operator calls it when layers follow
            z = x if is_channels_last(x) else x.contiguous()
            return fused.Fused().forward(z, [op.dim for op in moved], chain.constants, False, True)[0]
        return ops.run(x, [chain])


def expected(x: Tensor, chain: list[AxisOperator]) -> Tensor:
    z = x.double().cpu()
    for op in chain:
        z = reference.axis_pass(z, torch.eye(z.shape[1], dtype=z.dtype) if op.U is None else op.U, op.gains, op.dim)
    return z


def assert_close(found: Tensor, exact: Tensor) -> None:
    error = (found.double().cpu() - exact).norm() / exact.norm()
    assert error <= TOLERANCE, float(error)


@kernel_test
@pytest.mark.parametrize(
    ("shape", "layout", "before_local"),
    pairwise(
        {
            "shape": [
                (16, (6, 10), (2, 3), True),
                (90, (2, 90), (3,), True),
                (96, (2, 218), (3,), True),
                (128, (1, 130), (3,), True),
                (20, (130, 1), (2,), True),  # few channels: the interpreter takes long for their circulants
                (40, (2, 5), (2,), True),
                (17, (8, 2), (2, 3), True),
                (64, (2, 6), (3, 2), True),
                (33, (4, 2), (3, 2), False),
            ],
            "layout": list(FORMATS),
            "before_local": [False, True],
        }
    ),
)
def test_chains(shape, layout, before_local):
    C, size, dims, based = shape
    chain = random_chain(C, size, dims, based)
    x = torch.randn(2, C, *size, generator=torch.Generator().manual_seed(1)).to(DEVICE, HALF)
    y = applied(x.contiguous(memory_format=FORMATS[layout]), chain, before_local)
    assert y.is_contiguous(memory_format=FORMATS["NCHW" if before_local else layout])
    assert_close(y, expected(x, chain))


@kernel_test
@pytest.mark.parametrize("layout", FORMATS)
def test_programs_that_take_several_rows(layout, monkeypatch):
    monkeypatch.setattr("chasm.ops.kernels.fused.multiprocessors", lambda x: 2)
    chain = random_chain(20, (6, 4), (2, 3))
    x = torch.randn(3, 20, 6, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE, HALF)
    assert_close(applied(x.contiguous(memory_format=FORMATS[layout]), chain), expected(x, chain))


@kernel_test
def test_other_strides_and_an_untouched_input():
    chain = random_chain(16, (4, 6), (2, 3))
    big = torch.randn(2, 20, 4, 12, generator=torch.Generator().manual_seed(1)).to(DEVICE, HALF)
    x = big[:, 2:18, :, ::2]
    before = x.clone()
    assert_close(applied(x, chain), expected(x, chain))
    assert torch.equal(x, before)


def mixers(C: int, size: tuple[int, int], form: str) -> tuple[chasm.CHASM, chasm.CHASM]:
    """One of that form, and the same in float64 by the paper's equations."""
    torch.manual_seed(0)
    mixer = chasm.CHASM(C, size=size, form=form).to(DEVICE).eval()
    plain = chasm.CHASM(C, size=size, form="reference").to(DEVICE, torch.float64)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    plain.load_state_dict(mixer.state_dict())
    return mixer, plain


def autocast() -> torch.autocast:
    return torch.autocast(DEVICE, torch.bfloat16, enabled=not INTERPRETED)


@kernel_test
@pytest.mark.parametrize("layout", FORMATS)
def test_a_mixer_in_eval(layout):
    mixer, plain = mixers(24, (6, 10), "fused")
    x = torch.randn(2, 24, 6, 10, generator=torch.Generator().manual_seed(1)).to(DEVICE, HALF)
    x = x.contiguous(memory_format=FORMATS[layout])
    with torch.no_grad(), autocast():
        assert mixer.explain(x).form == "fused"
        assert_close(mixer.core(x), plain.core(x.double()).cpu())
        y = mixer(x)
    assert_close(y, plain(x.double()).cpu())
    assert y.is_contiguous(memory_format=FORMATS[layout])
    with pytest.raises(ValueError, match="'fused' cannot run: it has no gradient; use 'auto'"):
        mixer(x)


@kernel_test
@pytest.mark.parametrize("layout", FORMATS)
def test_folded_models_take_it(layout):
    mixer, plain = mixers(32, (2, 10), "fused")
    folded = chasm.fold(mixer, size=(2, 10))
    x = torch.randn(1, 32, 2, 10, generator=torch.Generator().manual_seed(1)).to(DEVICE, HALF)
    x = x.contiguous(memory_format=FORMATS[layout])
    with torch.no_grad(), autocast():
        y = folded(x)
        assert {chain.form for chain in folded._chains(x, HALF)} == {"fused"}
    assert_close(y, plain(x.double()).cpu())
    assert y.is_contiguous(memory_format=FORMATS[layout])


@gpu_test
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("shape", [(8, 96, 256, 256), (8, 64, 128, 128), (4, 96, 218, 170), (2, 128, 256, 64)])
def test_real_sizes_on_a_gpu(shape, layout):
    chain = random_chain(shape[1], shape[2:], (2, 3))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, HALF)
    y = applied(x.contiguous(memory_format=FORMATS[layout]), chain)
    assert_close(y[-1:], expected(x[-1:], chain))
    assert y.isfinite().all()


def test_gain_tables_are_filled_with_zeros():
    assert float(gain_table(torch.ones(5, 32), 8).sum()) == 8 * 32 * scales(8)[1]
