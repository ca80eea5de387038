"""Gain table -> gains at the bins of an axis: against the paper's loop and against torch's own interpolation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import interpolate, softplus

from chasm.ops import UNIT_GAIN, complex_gains, positive_gains, reference, signed_gains, table_at
from chasm.ops.gains import impulse_response, impulse_response_adjoint

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 90, 218, 255, 256]


def table_of(B: int, C: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(B)
    return torch.randn(B, C, dtype=dtype)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_many_bins_as_frequencies_is_the_table_bit_for_bit(n: int, dtype: torch.dtype) -> None:
    table = table_of(n // 2 + 1, dtype=dtype)
    assert torch.equal(table_at(table, n), table)
    assert torch.equal(signed_gains(table, n), table)
    assert torch.equal(positive_gains(table, n), softplus(table))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("B", [1, 2, 3, 5, 33, 64, 130])
def test_against_the_loop_and_torchs_interpolation(n: int, B: int) -> None:
    K = n // 2 + 1
    table = table_of(B, dtype=torch.float64).requires_grad_()
    got = table_at(table, n)
    assert got.shape == (K, 3)
    torch.testing.assert_close(got, reference.interpolate(table, K), rtol=0, atol=1e-12)
    theirs = interpolate(table.mT[None], K, mode="linear", align_corners=True)[0].mT
    torch.testing.assert_close(got, theirs, rtol=0, atol=1e-12)
    weight = torch.randn_like(got)
    (a,) = torch.autograd.grad((got * weight).sum(), table, retain_graph=True)
    (b,) = torch.autograd.grad((theirs * weight).sum(), table)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    torch.testing.assert_close(table_at(table.detach().float(), n).double(), got, rtol=0, atol=2e-6)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(n=st.integers(1, 700), B=st.integers(1, 400))
def test_rows_are_weights_and_end_points_meet(n: int, B: int) -> None:
    """Interpolation keeps constants and straight lines, and never leaves the range of the table."""
    K = n // 2 + 1
    line = torch.stack([torch.ones(B), torch.linspace(-1, 1, B), table_of(B, 1)[:, 0]], 1).double()
    got = table_at(line, n)
    torch.testing.assert_close(got[:, 0], torch.ones(K).double(), rtol=0, atol=1e-12)
    assert torch.equal(got[0], line[0])
    if K > 1:
        torch.testing.assert_close(got[-1], line[-1], rtol=0, atol=1e-12)
        if B > 1:
            expected = torch.linspace(-1, 1, K).double()
            torch.testing.assert_close(got[:, 1], expected, rtol=0, atol=1e-6)
    assert got[:, 2].max() <= line[:, 2].max() + 1e-12
    assert got[:, 2].min() >= line[:, 2].min() - 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_initial_gain_is_one_to_rounding(dtype: torch.dtype) -> None:
    for B, n in ((5, 8), (4, 31), (64, 9)):
        gains = positive_gains(torch.full((B, 2), UNIT_GAIN, dtype=dtype), n)
        torch.testing.assert_close(gains, torch.ones_like(gains), rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tables_are_read_in_float32(dtype: torch.dtype) -> None:
    table = table_of(9, dtype=dtype)
    for n in (16, 40, 5):
        assert table_at(table, n).dtype == torch.float32
        assert torch.equal(table_at(table, n), table_at(table.float(), n))
        assert positive_gains(table, n).dtype == torch.float32
        assert complex_gains(table, table, n).dtype == torch.complex64


def test_autocast_does_not_round_the_gains() -> None:
    table, phase = table_of(9), table_of(9) * 2
    for n in (16, 33, 6):
        plain = table_at(table, n), positive_gains(table, n), complex_gains(table, phase, n)
        with torch.autocast("cpu", torch.bfloat16):
            inside = table_at(table, n), positive_gains(table, n), complex_gains(table, phase, n)
        for a, b in zip(plain, inside, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("n", LENGTHS)
def test_positive_signed_and_complex_against_the_reference(n: int) -> None:
    for B in (n // 2 + 1, 4):
        table, phase = table_of(B, dtype=torch.float64), 3 * table_of(B + 7, dtype=torch.float64)[:B]
        for got, kind in (
            (positive_gains(table, n), "positive"),
            (signed_gains(table, n), "signed"),
            (complex_gains(table, phase, n), "complex"),
        ):
            torch.testing.assert_close(got, reference.gains(table, n, kind, phase), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", LENGTHS)
def test_complex_gains_are_real_at_dc_and_nyquist_only(n: int) -> None:
    table, phase = table_of(6), torch.full((6, 3), 0.7)
    gains = complex_gains(table, phase, n)
    K = n // 2 + 1
    real = [0, K - 1] if n % 2 == 0 else [0]
    assert (gains[real].imag == 0).all()
    assert (gains[real].real > 0).all()
    inside = [k for k in range(K) if k not in real]
    assert (gains[inside].imag != 0).all()
    torch.testing.assert_close(gains.abs(), positive_gains(table, n), rtol=1e-6, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_table_is_exact_on_a_gpu_with_tf32_on() -> None:
    table = table_of(65).cuda()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert torch.equal(table_at(table, 128), table)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("n", [1, 2, 7, 90, 218, 600])
def test_impulse_response_and_its_adjoint(n: int, kind: torch.dtype) -> None:
    """As irfft has them; flat gains give exactly the impulse."""
    gains = torch.rand(n // 2 + 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kind.is_complex:
        gains = complex_gains(gains, 1 - gains, n)
    gains = gains.to(kind).requires_grad_()
    expected = torch.fft.irfft(gains.mT, n=n)
    found = impulse_response(gains.detach(), n)
    tolerance = 1e-6 if kind == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected)
    (want,) = torch.autograd.grad(expected, gains, weight)
    got = impulse_response_adjoint(weight, gains.detach())
    torch.testing.assert_close(got.to(kind), want, rtol=0, atol=10 * tolerance)
    if not kind.is_complex:
        flat = impulse_response(torch.full((n // 2 + 1, 3), 0.7, dtype=kind), n)
        assert torch.equal(flat, 0.7 * torch.eye(n, dtype=kind)[0].expand(3, n))
