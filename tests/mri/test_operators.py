import pytest
import torch
from torch import Tensor

from chasm.mri import Operator, add_noise, create_mask, estimate_maps, fft2c, ifft2c, rss, zero_filled

SIZES = [(12, 16), (9, 15)]


def randc(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(seed))


def mask(width: int) -> Tensor:
    return create_mask("random", width, 3, center_fraction=0.2).tensor(dtype=torch.float64)


def smooth_maps(h: int, w: int, coils: int = 4) -> Tensor:
    """Gaussian-shaped sensitivities around the rim, each with its own phase ramp; squares sum to 1."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
    maps = []
    for q in range(coils):
        angle = torch.tensor(2 * torch.pi * q / coils)
        d2 = (y - angle.sin()).square() + (x - angle.cos()).square()
        maps.append(torch.exp(-d2 / 2) * torch.exp(1j * (0.7 * x * angle.sin() + angle)))
    stack = torch.stack(maps)[None].to(torch.complex128)
    return stack / rss(stack)


def dot(a: Tensor, b: Tensor) -> complex:
    return complex((a.conj() * b).sum())


@pytest.mark.parametrize(("h", "w"), SIZES)
@pytest.mark.parametrize("coils", [0, 4])
def test_adjoint_and_normal(h: int, w: int, coils: int) -> None:
    maps = torch.cat([smooth_maps(h, w, coils), smooth_maps(h, w, coils).flip(-1)]) if coils else None
    A = Operator(mask(w), maps)
    x = randc(2, 1 if coils else 3, h, w)
    y = randc(2, coils or 3, h, w, seed=1)
    assert dot(A.forward(x), y) == pytest.approx(dot(x, A.adjoint(y)), abs=1e-10)
    torch.testing.assert_close(A.normal(x), A.adjoint(A.forward(x)), atol=1e-12, rtol=0)
    # the norm is at most 1, what the solvers count on
    assert A.forward(x).abs().square().sum() <= x.abs().square().sum() * (1 + 1e-12)


def test_normal_takes_real_and_half_images() -> None:
    A = Operator(create_mask("equispaced", 16, 4).tensor())
    x = randc(1, 1, 8, 16).real
    expected = A.adjoint(A.forward(x.float()))
    torch.testing.assert_close(A.normal(x.float()), expected, atol=1e-6, rtol=0)
    assert A.normal(x.bfloat16()).dtype == torch.complex64


def test_normal_takes_a_mask_of_both_axes() -> None:
    m = (torch.rand(2, 1, 9, 15, generator=torch.Generator().manual_seed(2)) > 0.5).double()
    x = randc(2, 1, 9, 15)
    A = Operator(m)
    torch.testing.assert_close(A.normal(x), A.adjoint(A.forward(x)), atol=1e-12, rtol=0)


def test_zero_filled_keeps_the_measured_lines() -> None:
    x, m = randc(2, 1, 12, 16), mask(16)
    z = zero_filled(fft2c(x), m)
    torch.testing.assert_close(fft2c(z), m * fft2c(x), atol=1e-12, rtol=0)
    torch.testing.assert_close(zero_filled(fft2c(x), torch.ones(1, 1, 1, 16)), x, atol=1e-12, rtol=0)


def test_true_maps_recover_the_image_from_all_lines() -> None:
    maps, x = smooth_maps(12, 16), randc(1, 1, 12, 16)
    A = Operator(torch.ones(1, 1, 1, 16), maps)
    torch.testing.assert_close(A.adjoint(A.forward(x)), x, atol=1e-12, rtol=0)
    torch.testing.assert_close(rss(maps * x), x.abs(), atol=1e-12, rtol=0)


def test_estimated_maps_are_near_the_true_ones() -> None:
    h = w = 64
    y, x = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
    disc = ((y / 0.8).square() + (x / 0.7).square() < 1).double()[None, None]
    image = disc * (1 + 0.3 * torch.cos(5 * x + 3 * y))
    maps = smooth_maps(h, w)
    m = create_mask("equispaced", w, 4, center_fraction=0.2)
    k = m.tensor(dtype=torch.float64) * fft2c(maps * image)
    found = estimate_maps(k, m.center)
    inner = (disc * ((y / 0.7).square() + (x / 0.6).square() < 1))[0, 0] > 0
    # maps are known up to a phase common to all coils
    phase = (found * maps.conj()).sum(1, keepdim=True)
    aligned = found * (phase.conj() / phase.abs().clamp_min(1e-12))
    assert (aligned - maps).abs()[..., inner].max() < 0.06
    total = rss(found)
    assert torch.all((total - 1).abs().lt(1e-6) | (total == 0))
    assert total[..., 0, 0].item() == 0  # air
    # combined with them, all lines give the root-sum-of-squares image
    full = Operator(torch.ones(1, 1, 1, w), found).adjoint(fft2c(maps * image)).abs()
    assert (full - image)[..., inner].abs().max() < 0.02


def test_calibration_errors() -> None:
    with pytest.raises(ValueError, match="2 or more centre columns"):
        estimate_maps(randc(1, 2, 8, 8), (4, 5))


def test_noise_has_the_snr_it_names() -> None:
    y = fft2c(randc(2, 3, 64, 64)) * torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    m = create_mask("equispaced", 64, 4).tensor(dtype=torch.float64)
    noisy = add_noise(m * y, 20.0, m, torch.Generator().manual_seed(3))
    n = noisy - m * y
    assert torch.equal(n != 0, m.expand(n.shape) != 0)
    for b in range(2):
        snr = 10 * torch.log10((m * y)[b].abs().square().sum() / n[b].abs().square().sum())
        assert snr.item() == pytest.approx(20.0, abs=0.3)
    ratio = n.real.square().sum() / n.imag.square().sum()
    assert ratio.item() == pytest.approx(1.0, abs=0.1)
    again = add_noise(m * y, 20.0, m, torch.Generator().manual_seed(3))
    assert torch.equal(noisy, again)
    assert add_noise(y, 10.0).shape == y.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_runs_on_the_device_of_its_tensors() -> None:
    m = create_mask("equispaced", 64, 4, center_fraction=0.1)
    maps = smooth_maps(64, 64).to("cuda", torch.complex64)
    A = Operator(m.tensor("cuda"), maps)
    k = A.forward(randc(2, 1, 64, 64).to("cuda", torch.complex64))
    k = add_noise(k, 30.0, m.tensor("cuda"), torch.Generator("cuda").manual_seed(0))
    assert estimate_maps(k, m.center).device.type == "cuda"
    torch.testing.assert_close(ifft2c(k).norm(), k.norm())
