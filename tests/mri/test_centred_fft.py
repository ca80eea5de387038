import numpy as np
import pytest
import torch

from chasm.mri.fft import fft2c, ifft2c, resize_in_kspace, to_channels, to_complex


@pytest.mark.parametrize("size", [(8, 8), (5, 8), (7, 9)])
def test_centred_and_orthonormal(size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, *size)) + 1j * rng.normal(size=(2, *size))
    axes = (-2, -1)
    expected = np.fft.fftshift(np.fft.fft2(np.fft.ifftshift(x, axes=axes), norm="ortho"), axes=axes)
    k = fft2c(torch.from_numpy(x))
    assert k.dtype == torch.complex128
    np.testing.assert_allclose(k.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(ifft2c(k).numpy(), x, atol=1e-12)
    assert k.abs().square().sum().item() == pytest.approx(np.sum(np.abs(x) ** 2))


def test_a_constant_has_its_energy_at_the_centre() -> None:
    for h, w in [(6, 8), (5, 7)]:
        k = fft2c(torch.ones(h, w))
        assert k.abs().argmax().item() == (h // 2) * w + w // 2


@pytest.mark.parametrize("size", [4, 7, 8, 12, 15, 32])
def test_a_smooth_image_is_the_same_wave_on_every_grid(size: int) -> None:
    """A wave over the field of view, centred at index N // 2, sampled with more or fewer pixels than 8 x 9."""

    def wave(h: int, w: int) -> torch.Tensor:
        rows, columns = ((torch.arange(n, dtype=torch.float64) - n // 2) / n for n in (h, w))
        return 3 + torch.cos(2 * torch.pi * rows + 0.3)[:, None] + torch.sin(2 * torch.pi * columns)

    resized = resize_in_kspace(wave(8, 9), size)
    torch.testing.assert_close(resized, wave(size, size), atol=1e-12, rtol=0)
    torch.testing.assert_close(resize_in_kspace(1j * wave(8, 9), size), 1j * wave(size, size), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    x = torch.randn(2, 12, 18, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        k = fft2c(x)
        back = ifft2c(k)
    assert k.dtype == torch.complex64
    torch.testing.assert_close(back.real, x.float(), atol=1e-5, rtol=0)


def test_channels_round_trip_and_order() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.complex64)
    c = to_channels(x)
    assert c.shape == (2, 6, 4, 5)
    assert torch.equal(c[:, 2], x[:, 1].real)
    assert torch.equal(c[:, 3], x[:, 1].imag)
    assert torch.equal(to_complex(c), x)
    assert to_complex(c.bfloat16()).dtype == torch.complex64


def test_gradient_passes() -> None:
    x = torch.randn(1, 1, 4, 6, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(fft2c, (x,))
    assert torch.autograd.gradcheck(ifft2c, (x,))
