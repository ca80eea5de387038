"""The GFNet filter, SpectFormer which shares it, and the transforms all Fourier mixers share."""

import pytest
import torch
from spec_values import band_limited, check, circular_convolution, fill, golden_map, roll
from torch.nn import functional as F

from chasm.mixers import GFNet, SpectFormer, create_mixer
from chasm.mixers._spectral import _Map, _Spectrum, complex_of_pairs, irfft2
from chasm.mixers.gfnet import resize_filter
from chasm.surgery.count import count

SIZES = [(8, 10), (7, 9), (8, 9), (1, 1), (2, 3), (5, 2)]


def close(a, b, atol=1e-14):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def mixer(size, channels=3):
    torch.manual_seed(0)
    return GFNet(channels, size=size, dtype=torch.float64)


@pytest.mark.parametrize("size", SIZES)
def test_is_circular_convolution(size):
    m = mixer(size)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    kernel = torch.fft.irfft2(complex_of_pairs(m.filter).permute(2, 0, 1), s=size)  # (C, H, W)
    dense = torch.eye(3, dtype=torch.float64)[..., None, None] * kernel
    close(m(x), circular_convolution(x, dense))


@pytest.mark.parametrize("size", SIZES)
def test_safe_inverse_equals_the_library_and_the_hermitian_projection(size):
    H, W = size
    torch.manual_seed(0)
    Y = torch.randn(2, H, W // 2 + 1, dtype=torch.complex128)
    y = irfft2(Y, size, "ortho")
    close(y, torch.fft.irfft2(Y, s=size, norm="ortho"))
    close(y, _Map.apply(Y, size, "ortho", False))
    # K_eff(k) = (K(k) + conj K(-k)) / 2 in the columns that have no twin
    for k in {0, W // 2} if W % 2 == 0 else {0}:
        mirrored = Y[..., k][:, -torch.arange(H) % H].conj()
        Y[..., k] = (Y[..., k] + mirrored) / 2
    close(y, torch.fft.irfft2(Y, s=size, norm="ortho"))


@pytest.mark.parametrize("size", [(4, 6), (3, 5), (1, 1), (2, 2), (5, 1)])
@pytest.mark.parametrize("norm", ["ortho", "backward", "forward"])
def test_transforms_for_gpus_differentiate_like_the_librarys(size, norm):
    H, W = size
    torch.manual_seed(0)
    x = torch.randn(2, H, W, dtype=torch.float64, requires_grad=True)
    Y = torch.randn(2, H, W // 2 + 1, dtype=torch.complex128, requires_grad=True)
    pairs = (
        (x, lambda t: _Spectrum.apply(t, norm), lambda t: torch.fft.rfft2(t, norm=norm)),
        (Y, lambda t: _Map.apply(t, size, norm, False), lambda t: torch.fft.irfft2(t, size, norm=norm)),
    )
    for t, ours, library in pairs:
        close(ours(t), library(t), 1e-13)
        direction = torch.randn_like(ours(t))
        firsts = []
        for f in (ours, library):
            (g,) = torch.autograd.grad(f(t).abs().pow(3).sum(), t, create_graph=True)
            (second,) = torch.autograd.grad((f(t).conj() * direction).real.pow(3).sum() + g.abs().square().sum(), t)
            firsts.append((g, second))
        for a, b in zip(*firsts, strict=True):
            close(a, b, 1e-9 * b.abs().max().item())


@pytest.mark.parametrize("size", [(6, 8), (6, 7), (1, 2)])
@pytest.mark.parametrize("function", ["filter", "inverse"])
def test_no_imaginary_part_reaches_the_library_at_dc_and_nyquist(size, function, monkeypatch):
    seen = []
    library = torch.fft.irfft2
    monkeypatch.setattr(torch.fft, "irfft2", lambda X, *a, **kw: seen.append(X) or library(X, *a, **kw))
    torch.manual_seed(0)
    if function == "filter":
        mixer(size)(torch.randn(2, 3, *size, dtype=torch.float64))
    else:
        _Map.apply(torch.randn(2, size[0], size[1] // 2 + 1, dtype=torch.complex128), size, "ortho", False)
    (spectrum,) = seen
    half = torch.fft.ifft(spectrum, dim=-2)
    assert half[..., 0].imag.abs().max() < 1e-15
    if size[1] % 2 == 0:
        assert half[..., size[1] // 2].imag.abs().max() < 1e-15
    if size[1] > 2:
        assert half[..., 1].imag.abs().min() > 1e-9


@pytest.mark.parametrize("size", [(3, 4), (2, 3), (1, 1)])
def test_first_and_second_derivatives(size):
    m = mixer(size, 2)
    x = torch.randn(2, 2, *size, dtype=torch.float64, requires_grad=True)
    inputs = (x, m.filter.detach().clone().requires_grad_())

    def run(x, pairs):
        return torch.func.functional_call(m, {"filter": pairs}, (x,))

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)
    expected = torch.autograd.grad(run(*inputs).pow(3).sum(), inputs)
    for got, g in zip(torch.func.grad(lambda *t: run(*t).pow(3).sum(), (0, 1))(*inputs), expected, strict=True):
        close(got, g, 1e-12)


def test_moves_to_channels_last_with_its_model():
    m, x = mixer((8, 6)), torch.randn(2, 3, 8, 6, dtype=torch.float64)
    y = m(x)
    close(m.to(memory_format=torch.channels_last)(x), y)


def test_truncated_columns_are_zeros():
    Y = torch.randn(4, 3, dtype=torch.complex128)
    close(irfft2(Y, (4, 9), "backward"), torch.fft.irfft2(F.pad(Y, (0, 2)), s=(4, 9)))


def test_commutes_with_shifts():
    m = mixer((12, 10), 8)
    x = torch.randn(1, 8, 12, 10, dtype=torch.float64)
    close(m(roll(x)), roll(m(x)))


def test_golden():
    m = fill(GFNet(32, size=(8, 6)), "filter")
    check(m(golden_map()), -0.86574491, 6.73863707, -0.01133827, -0.04876619)
    check(m(golden_map(12, 10)), -3.74650715, 16.36889653, 0.07857699, 0.01315821)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(12, 6), (3, 2), (1, 1), (8, 4)])
def test_resizing_by_matrices_is_interpolation_of_the_planes(mode, size):
    K = torch.randn(8, 4, 5, 2, dtype=torch.float64)
    planes = K.permute(2, 3, 0, 1)
    expected = F.interpolate(planes, size, mode=mode, align_corners=True).permute(2, 3, 0, 1)
    close(resize_filter(K, size, mode), expected)


def test_default_size_and_resolution():
    assert GFNet(4).filter.shape == (14, 8, 4, 2)
    # Not resolution-invariant: a band-limited map gives other values on a finer grid.
    m = mixer((16, 16), 4)
    coarse, fine = (band_limited(n, 4) for n in (16, 32))
    close(fine[..., ::2, ::2], coarse)
    change = (m(fine)[..., ::2, ::2] - m(coarse)).norm() / m(coarse).norm()
    assert change > 0.05


@pytest.mark.parametrize("size", [(0, 4), (8,), (4, 4, 4)])
def test_bad_size_is_named(size):
    with pytest.raises(ValueError, match="size as two positive integers"):
        GFNet(4, size=size)


class TestSpectFormer:
    def test_is_gfnet_at_its_own_grid(self):
        m, g = SpectFormer(32, grid=(8, 6), dtype=torch.float64), fill(GFNet(32, size=(8, 6)), "filter")
        m.load_state_dict(g.state_dict())
        check(m(golden_map()), -0.86574491, 6.73863707, -0.01133827, -0.04876619)
        assert not torch.allclose(m(golden_map(12, 10)), g(golden_map(12, 10)))  # bilinear, not bicubic

    def test_resizes_bilinearly(self):
        m = SpectFormer(4, size=(20, 24), dtype=torch.float64)
        assert m.filter.shape == (14, 8, 4, 2)  # whatever the size of the host
        x = torch.randn(1, 4, 20, 24, dtype=torch.float64)
        planes = F.interpolate(m.filter.permute(2, 3, 0, 1), (20, 13), mode="bilinear", align_corners=True)
        K = torch.complex(*planes.unbind(1))
        close(m(x), torch.fft.irfft2(torch.fft.rfft2(x) * K, s=(20, 24)))

    def test_bad_grid_is_named(self):
        with pytest.raises(ValueError, match="grid as two positive integers"):
            SpectFormer(4, grid=(14, 0))


def test_spectformer_with_projections_costs_two_dense_products_more() -> None:
    x = torch.randn(1, 8, 16, 12)
    plain, dense = (create_mixer("spectformer", 8, (16, 12), projections=p) for p in (False, True))
    assert count(dense, x).paper - count(plain, x).paper == 2 * 8 * 8 * 16 * 12
    with torch.no_grad():
        dense.filter.copy_(plain.filter)
        for layer in (dense.enter, dense.leave):
            layer.weight.copy_(torch.eye(8)[:, :, None, None])
    torch.testing.assert_close(dense(x), plain(x))
