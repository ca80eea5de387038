import pytest
import torch
from spec_values import check, fill, golden_map, roll
from torch.nn import functional as F

from chasm.mixers import FFC
from chasm.mixers.ffc import FourierUnit


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@torch.no_grad()
def identity_unit(channels: int) -> FourierUnit:
    unit = FourierUnit(channels, dtype=torch.float64).eval()
    unit.conv.weight.copy_(torch.eye(2 * channels)[..., None, None])
    unit.norm.eps = 0.0
    return unit


def split_relu_map(x):
    X = torch.fft.rfft2(x, norm="ortho")
    return torch.fft.irfft2(torch.complex(F.relu(X.real), F.relu(X.imag)), s=x.shape[-2:], norm="ortho")


@pytest.mark.parametrize("size", [(12, 10), (7, 9)])
def test_identity_fourier_unit_is_the_split_relu(size):
    x = torch.randn(2, 8, *size, dtype=torch.float64)
    close(identity_unit(8)(x), split_relu_map(x), 1e-14)


def test_fourier_unit_interleaves_real_and_imaginary_channels():
    unit = identity_unit(2)
    with torch.no_grad():  # rows c0.re, c0.im, c1.re, c1.im: swap the two channels
        unit.conv.weight.copy_(torch.eye(4)[[2, 3, 0, 1]][..., None, None])
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    close(unit(x), split_relu_map(x.flip(1)), 1e-14)


def test_fourier_unit_is_not_shift_equivariant():
    torch.manual_seed(0)
    x = torch.randn(1, 8, 12, 10, dtype=torch.float64)
    unit = identity_unit(8)
    assert (unit(roll(x)) - roll(unit(x))).abs().max() > 0.5


def test_golden():
    unit = fill(FourierUnit(32), "conv.weight")
    check(unit(golden_map()), 12.48228568, 59.29433705, 0.65795004, -0.03275639)


@pytest.mark.parametrize("size", [(8, 6), (7, 6), (8, 5), (7, 5), (1, 1)])
def test_local_unit_sees_the_quadrants_and_is_tiled_back(size):
    H, W = size
    m = FFC(32, dtype=torch.float64).eval()
    u = torch.randn(2, 8, H, W, dtype=torch.float64)
    even = F.pad(u[:, :2], (0, W % 2, 0, H % 2), mode="replicate")
    h, w = (H + 1) // 2, (W + 1) // 2
    corners = [even[..., a : a + h, b : b + w] for b in (0, w) for a in (0, h)]  # tl, bl, tr, br
    out = m.local_fourier(torch.cat(corners, 1))
    close(m.local(m.local_fourier, u), torch.cat([torch.cat([out, out], 2)] * 2, 3)[..., :H, :W])


@pytest.mark.parametrize("lfu", [True, False])
def test_layer_is_four_paths_between_local_and_global_channels(lfu):
    torch.manual_seed(0)
    m = FFC(32, ratio=0.25 if lfu else 0.75, lfu=lfu, dtype=torch.float64)
    g = 8 if lfu else 24
    for norm in (m.norm_l, m.norm_g, m.norm_u):
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    m.eval()
    x = torch.randn(2, 32, 7, 6, dtype=torch.float64)
    x_l, x_g = x[:, :-g], x[:, -g:]
    u = F.relu(m.norm_u(F.conv2d(x_g, m.reduce.weight)))
    inner = u + m.fourier(u) + (m.local(m.local_fourier, u) if lfu else 0)
    spectral = F.conv2d(inner, m.expand.weight)
    y_l = F.conv2d(x_l, m.conv_ll.weight, padding=1) + F.conv2d(x_g, m.conv_gl.weight, padding=1)
    y_g = F.conv2d(x_l, m.conv_lg.weight, padding=1) + spectral
    close(m(x), torch.cat((F.relu(m.norm_l(y_l)), F.relu(m.norm_g(y_g))), 1))


def test_initialisation():
    torch.manual_seed(0)
    m = FFC(96)
    # Kaiming for ReLU by the fan out: 24 and 48 * 9
    assert m.reduce.weight.std().item() == pytest.approx((2 / 24) ** 0.5, rel=0.05)
    assert m.conv_ll.weight.std().item() == pytest.approx((2 / (48 * 9)) ** 0.5, rel=0.05)
    assert (m.norm_l.weight == 1).all()
    assert (m.norm_l.bias == 0).all()


@pytest.mark.parametrize(
    ("channels", "options", "message"),
    [
        (24, {}, "multiple of 8"),
        (16, {"ratio": 1.0}, "inside"),
        (16, {"ratio": 0.0}, "inside"),
        (16, {"ratio": 0.3}, "got 0.3\\*16 = 4.8"),
        (16, {"ratio": 0.3125, "lfu": False}, "multiple of 2"),
        (16, {"kernel_size": 2}, "odd kernel_size"),
    ],
)
def test_bad_options_are_named(channels, options, message):
    with pytest.raises(ValueError, match=message):
        FFC(channels, **options)
