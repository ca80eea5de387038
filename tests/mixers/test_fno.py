"""The FNO spectral convolution and the two mixers made of it: FNO-D and DiffFNO."""

import pytest
import torch
from spec_values import band_limited, check, circular_convolution, golden_map, roll, wave
from torch.nn import functional as F

import chasm
from chasm.mixers import FNOD, DiffFNO
from chasm.mixers._spectral import complex_of_pairs
from chasm.mixers.fno_d import SpectralConv, deform_map


def close(a, b, atol=1e-13):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def conv(channels=8, modes=(3, 4), gain=1.0):
    torch.manual_seed(0)
    m = SpectralConv(channels, channels, modes, dtype=torch.float64)
    with torch.no_grad():
        for p in m.parameters():
            p.normal_().mul_(gain)
    return m


def embedded(m, H, W):
    """The full (I, O, H, W//2+1) spectrum of the weights, rows written one by one."""
    m1, m2 = m.modes
    full = torch.zeros(*m.r_pos.shape[:2], H, W // 2 + 1, dtype=torch.complex128)
    for k in range(min(m1, (H + 1) // 2)):
        full[:, :, k, :m2] = complex_of_pairs(m.r_pos)[:, :, k, : W // 2 + 1]
    for k in range(1, min(m1, H // 2) + 1):
        full[:, :, -k, :m2] = complex_of_pairs(m.r_neg)[:, :, -k, : W // 2 + 1]
    return full


# from more bins than modes down to fewer
SIZES = [(12, 10), (7, 9), (6, 6), (5, 4), (3, 3), (2, 1), (1, 2), (1, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_identity_weights_mask_the_spectrum(size):
    m = conv()
    eye = torch.eye(8, dtype=torch.float64)[..., None, None]
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.stack((eye.expand(p.shape[:-1]), torch.zeros(p.shape[:-1])), -1))
    x = torch.randn(2, 8, *size, dtype=torch.float64)
    kept = embedded(m, *size)[0, 0]
    close(m(x), torch.fft.irfft2(torch.fft.rfft2(x) * kept, s=size), 1e-15)
    if size == (12, 10):
        assert kept.real.sum() == 2 * 3 * 4
        # Row -m1 of column 0 is kept without its twin, so this is not a projector.
        assert (m(m(x)) - m(x)).abs().max() > 0.01
    if size[0] <= 6 and size[1] <= 6:
        close(m(x), x)  # every row and column kept exactly once


@pytest.mark.parametrize("size", SIZES)
def test_is_dense_circular_convolution(size):
    m = conv()
    x = torch.randn(2, 8, *size, dtype=torch.float64)
    kernel = torch.fft.irfft2(embedded(m, *size), s=size).transpose(0, 1)  # (O, I, H, W)
    close(m(x), circular_convolution(x, kernel), 1e-12)


def test_commutes_with_shifts():
    x = torch.randn(1, 8, 12, 10, dtype=torch.float64)
    close(conv()(roll(x)), roll(conv()(x)))


def test_resolution_invariant_on_band_limited_maps():
    m = conv(4, (3, 3))
    coarse, fine = band_limited(16, 4), band_limited(32, 4)
    close(m(fine)[..., ::2, ::2], m(coarse))
    block = FNOD(4, modes=(3, 3), dtype=torch.float64)
    block.spectral = m
    close(block(fine)[..., ::2, ::2], block(coarse))


def test_small_maps_train_both_weights():
    m = conv(4, (16, 16))
    m(torch.randn(1, 4, 16, 16, dtype=torch.float64)).square().sum().backward()
    assert (m.r_pos.grad[:, :, :8, :9] != 0).any(-1).all()
    assert (m.r_neg.grad[:, :, 8:, :9] != 0).any(-1).all()
    assert (m.r_pos.grad[:, :, 8:] == 0).all()


def test_golden():
    m = SpectralConv(32, 32, (3, 3), dtype=torch.float64)
    with torch.no_grad():
        for j, p in enumerate((m.r_pos, m.r_neg)):  # cos as real, sin as imaginary part
            shape = p.shape[:-1]
            p.copy_(torch.stack((wave(shape, j), wave(shape, j, -torch.pi / 2)), -1))
    check(m(golden_map()), 0.18430201, 310.09094435, 0.09302002, -0.16365073)


def test_initialisation():
    m = SpectralConv(8, 4, (3, 3))
    for p in m.parameters():
        assert p.min() >= 0
        assert 0.8 / 32 < p.max() < 1 / 32


def test_fno_d_is_the_layer_of_its_formula():
    m = FNOD(8, deform=False, modes=(3, 4), dtype=torch.float64)
    m.spectral = conv()
    x = torch.randn(2, 8, 7, 9, dtype=torch.float64)
    v = m.spectral(x) + F.conv2d(x, m.bypass.weight, m.bypass.bias)
    close(m(x), F.conv2d(F.gelu(v), m.project.weight, m.project.bias))


@pytest.mark.parametrize("size", [(12, 10), (1, 5), (1, 1)])
def test_fno_d_starts_as_the_plain_layer(size):
    m = FNOD(8, modes=(3, 4))
    m.spectral = conv().float()  # so that the sampled map matters
    plain = FNOD(8, modes=(3, 4), deform=False)
    plain.load_state_dict({k: v for k, v in m.state_dict().items() if not k.startswith("offset")})
    x = torch.randn(2, 8, *size)
    close(m(x), plain(x), 1e-5)
    close(deform_map(x, m.offset(x)), x, 2e-6)


def test_deformation_samples_at_pixel_offsets():
    m = FNOD(4)
    with torch.no_grad():
        m.offset.bias.copy_(torch.tensor([1.0, 0.0]))  # channel 0 is along W
    x = torch.randn(2, 4, 12, 10)
    close(deform_map(x, m.offset(x))[..., :-1], x[..., 1:], 1e-5)
    with torch.no_grad():
        m.offset.bias.copy_(torch.tensor([0.0, -2.0]))
    u = deform_map(x, m.offset(x))
    close(u[..., 2:, :], x[..., :-2, :], 1e-5)
    close(u[..., 1, :], x[..., 1, :], 1e-5)  # row -1 is reflected into row 1
    with torch.no_grad():
        m.offset.bias.copy_(torch.tensor([0.5, 0.0]))
    close(deform_map(x, m.offset(x))[..., :-1], (x[..., 1:] + x[..., :-1]) / 2, 1e-5)


def test_deformed_map_feeds_the_spectral_branch_only():
    m = FNOD(8, modes=(3, 4), dtype=torch.float64)
    m.spectral = conv()
    torch.nn.init.normal_(m.offset.weight)
    x = torch.randn(1, 8, 6, 7, dtype=torch.float64)
    v = m.spectral(deform_map(x, m.offset(x))) + m.bypass(x)
    close(m(x), m.project(F.gelu(v)))


class TestDiffFNO:
    def mixer(self, **options):
        torch.manual_seed(0)
        return DiffFNO(16, modes=(3, 4), **options)

    def test_zero_rho_is_the_plain_branch_and_the_gate_selects(self):
        m = self.mixer()
        x = torch.randn(2, 16, 9, 8)
        a, b = m.branches(x)
        close(a, F.gelu(m.spectral(x) + m.bypass(x)), 0)
        torch.nn.init.zeros_(m.gate.weight)
        for bias, branch in ((50.0, a), (-50.0, b)):
            torch.nn.init.constant_(m.gate.bias, bias)
            close(m(x), branch, 0)

    def test_rho_scales_the_mode_weights(self):
        m = self.mixer(dtype=torch.float64)
        torch.nn.init.normal_(m.rho)
        x = torch.randn(2, 16, 5, 9, dtype=torch.float64)  # fewer rows than modes: rho is cut as well
        scaled = SpectralConv(16, 16, (3, 4), dtype=torch.float64)
        with torch.no_grad():
            scaled.r_pos.copy_(m.spectral.r_pos * (1 + m.rho[0])[..., None])
            scaled.r_neg.copy_(m.spectral.r_neg * (1 + m.rho[1])[..., None])
        close(m.branches(x)[0], F.gelu(scaled(x) + m.bypass(x)))

    def test_attention_by_rows_of_the_score_matrix(self):
        attention = self.mixer(dtype=torch.float64).attention
        for p in (attention.k_weight, attention.k_bias, attention.v_weight, attention.v_bias):
            torch.nn.init.normal_(p)
        x = torch.randn(2, 16, 5, 6, dtype=torch.float64)
        q, k, v = attention.project(x)
        y = ((q @ k.mT) @ v / 30).mT.reshape(2, 16, 5, 6)
        close(attention(x), y)

    def test_heads_and_normalisation(self):
        attention = self.mixer(heads=4, dtype=torch.float64).attention
        x = torch.randn(1, 16, 3, 3, dtype=torch.float64)
        q, k, v = attention.project(x)
        head, raw = 2, attention.qkv(x)[0].flatten(1)  # (48, 9); a head is 12 channels: q, k, v of 4
        close(q[0, head].mT, raw[24:28])
        for t, got in ((raw[28:32], k), (raw[32:36], v)):
            close(got[0, head].mT, (t - t.mean(0)) / (t.std(0, unbiased=True) + 1e-5))

    def test_residual_is_the_identity_of_the_attention_branch(self):
        m, bare = self.mixer(), self.mixer(residual=False)
        x = torch.randn(1, 16, 6, 6)
        (a, b), (a_bare, b_bare) = m.branches(x), bare.branches(x)
        close(a, a_bare, 0)
        close(b, b_bare + x, 0)

    @pytest.mark.parametrize("channels", [12, 8])
    def test_bad_heads_are_named(self, channels):
        with pytest.raises(ValueError, match="heads that divide channels"):
            DiffFNO(channels)


@pytest.mark.parametrize("cls", [FNOD, DiffFNO])
@pytest.mark.parametrize("modes", [(0, 4), (4,), (4, 4, 4)])
def test_bad_modes_are_named(cls, modes):
    with pytest.raises(ValueError, match="modes as two positive integers"):
        cls(16, modes=modes)


@pytest.mark.parametrize("name", ["fno-d", "difffno"])
def test_positions_and_norms_are_float32_under_autocast(name):
    """Offsets in pixels, and keys and values that a norm divides by small deviations, do not survive bfloat16."""
    torch.manual_seed(0)
    mixer, x = chasm.create_mixer(name, 16, (8, 8)), 40 * torch.randn(1, 16, 8, 8)
    if name == "fno-d":
        torch.nn.init.normal_(mixer.offset.weight)
    exact = mixer.offsets(x) if name == "fno-d" else mixer.attention(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = mixer.offsets(x) if name == "fno-d" else mixer.attention(x)
    assert torch.equal(found, exact)
