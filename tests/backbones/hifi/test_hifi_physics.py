"""HiFi-Mamba and the measurement: data consistency with one coil and several, at any size."""

import pytest
import torch
from hifi_cases import VERSIONS, build, centred_columns, zero_filled

from chasm.backbones.hifi.patches import PatchEmbed, ToImage
from chasm.backbones.measurement import Measurement
from chasm.mri.fft import fft2c, ifft2c, to_complex


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("size", [(16, 24), (37, 53), (50, 34)])
def test_measured_lines_are_kept_at_any_size(name, size):
    model = build(name)
    mask = centred_columns(size[1], 0.3)
    x = zero_filled(torch.randn(2, 2, *size), mask)
    y = model(x, mask=mask)
    lines = mask.expand(2, 1, *size)
    torch.testing.assert_close(fft2c(to_complex(y))[lines], fft2c(to_complex(x))[lines], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(y, x, atol=1e-3)  # the other lines did change


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 1, 24), torch.ones(16, 24), torch.ones(2, 1, 16, 24).bool()])
def test_full_mask_returns_the_input(mask):
    x = torch.randn(2, 2, 16, 24)
    torch.testing.assert_close(build()(x, mask=mask), x, rtol=1e-5, atol=1e-6)


def test_empty_mask_returns_the_features_as_an_image():
    model = build().eval()
    features = {}
    model.norm.register_forward_hook(lambda module, args, output: features.update(last=output))
    y = model(torch.randn(2, 2, 16, 24), mask=torch.zeros(16, 24))
    vectors = torch.einsum("oc,bchw->bhwo", model.head.linear.weight[..., 0, 0], features["last"])
    expected = torch.zeros(2, 2, 16, 24)
    for i in range(8):
        for j in range(12):
            patch = vectors[:, i, j].reshape(2, 2, 2, 2)  # (B, row, column, channel)
            expected[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = patch.permute(0, 3, 1, 2)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def coil_maps(coils, size):
    maps = torch.randn(1, coils, *size, dtype=torch.complex64, generator=torch.Generator().manual_seed(5))
    return maps / maps.abs().square().sum(1, keepdim=True).sqrt()


def test_multi_coil_full_mask_returns_the_coil_combination():
    truth, maps = torch.randn(2, 2, 15, 22), coil_maps(3, (15, 22)).expand(2, -1, -1, -1)
    measured = fft2c(maps * to_complex(truth))
    y = build()(torch.randn(2, 2, 15, 22), mask=torch.ones(15, 22), maps=maps, measured=measured)
    torch.testing.assert_close(y, truth, rtol=1e-4, atol=1e-5)


def test_multi_coil_step_by_hand():
    """Replace each coil's measured lines, then combine with the conjugate maps."""
    image, maps = torch.randn(1, 2, 8, 10), coil_maps(3, (8, 10))
    measured = torch.randn(1, 3, 8, 10, dtype=torch.complex64)
    mask = centred_columns(10, 0.3)
    y = Measurement.of(image, mask, maps, measured).enforce(image)
    expected = torch.zeros(1, 8, 10, dtype=torch.complex64)
    for coil in range(3):
        k = fft2c(maps[:, coil] * torch.complex(image[:, 0], image[:, 1]))
        lines = mask[0].expand_as(k)
        k[lines] = measured[:, coil][lines]
        expected += maps[:, coil].conj() * ifft2c(k)
    torch.testing.assert_close(to_complex(y)[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_one_coil_with_a_map_of_ones_is_the_single_coil_case():
    model, mask = build().eval(), centred_columns(24, 0.3)
    x = zero_filled(torch.randn(1, 2, 16, 24), mask)
    ones = torch.ones(1, 1, 16, 24, dtype=torch.complex64)
    y = model(x, mask=mask, maps=ones, measured=fft2c(to_complex(x)))
    torch.testing.assert_close(y, model(x, mask=mask), rtol=1e-4, atol=1e-5)


def test_data_consistency_is_float32_under_autocast():
    model, mask = build(), centred_columns(24, 0.3)
    x = zero_filled(torch.randn(2, 2, 16, 24), mask)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, mask=mask)
    assert y.dtype == torch.float32
    lines = mask.expand(2, 1, 16, 24)
    torch.testing.assert_close(fft2c(to_complex(y))[lines], fft2c(to_complex(x))[lines], rtol=1e-5, atol=1e-5)


def test_padding_of_features_does_not_move_the_image():
    embed, to_image = PatchEmbed(6, 2), ToImage(6, 2)
    features = embed(torch.randn(1, 2, 13, 18))
    assert features.shape == (1, 6, 8, 10)
    assert to_image(features, (13, 18)).shape == (1, 2, 13, 18)
    assert torch.equal(to_image(features, (16, 20))[..., :13, :18], to_image(features, (13, 18)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass the sampling mask"),
        ({"mask": torch.ones(1, 1, 16, 23)}, r"broadcast to \(2, 1, 16, 24\), got \(1, 1, 16, 23\)"),
        ({"mask": torch.ones(2, 16, 24)}, "mask must broadcast"),
        ({"mask": torch.ones(1, 2, 1, 16, 24)}, "mask must broadcast"),
        ({"mask": torch.ones(16, 24), "maps": torch.ones(2, 3, 16, 24) + 0j}, "pass measured"),
        (
            {
                "mask": torch.ones(16, 24),
                "maps": torch.ones(2, 3, 16, 24) + 0j,
                "measured": torch.ones(2, 1, 16, 24) + 0j,
            },
            r"measured must be complex \(2, 3, 16, 24\), got torch.complex64 \(2, 1, 16, 24\)",
        ),
        ({"mask": torch.ones(16, 24), "measured": torch.ones(2, 1, 16, 24)}, "must be complex"),
    ],
)
def test_incomplete_physics_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build()(torch.randn(2, 2, 16, 24), **arguments)
