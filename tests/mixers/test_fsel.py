import pytest
import torch
from spec_values import check, fill, golden_map
from torch.nn import functional as F

from chasm.mixers import FSEL
from chasm.mixers.fsel import EntangledFFN, FrequencyAttention, SpatialAttention, mirrored, whole
from chasm.surgery.count import count

GATE = ("0.weight", "0.bias", "3.weight", "3.bias")


def close(a, b, atol=1e-13):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, 32, 6, 5, dtype=torch.float64)


def frequency(axes="official"):
    torch.manual_seed(0)
    return FrequencyAttention(32, 8, axes, dtype=torch.float64).eval()


def heads(Z):
    return Z.reshape(2, 8, 4, 30)


def test_attention_is_that_of_the_spectra(x):
    m = frequency()
    torch.nn.init.uniform_(m.tau, 0.5, 3)
    unit = F.normalize(heads(torch.fft.fft2(x)), dim=-1)
    scores = m.tau * (unit @ unit.mT)
    close(scores.imag.softmax(-1), torch.full_like(scores.real, 1 / 4))  # what is left is the mean of the head
    weights = m.attention(x.movedim(1, -1)).reshape(2, 8, 4, 8, 4).movedim(3, 1)  # (B, head, head, c, c)
    close(weights.diagonal(dim1=1, dim2=2).movedim(-1, 1), scores.real.softmax(-1))
    close(weights.sum((1, -1)), torch.ones(2, 8, 4, dtype=torch.float64))  # and nothing from other heads


def test_scores_are_correlations_with_the_reversed_map(x):
    unit = F.normalize(heads(torch.fft.fft2(x)), dim=-1)
    scores = unit @ unit.mT
    assert scores.imag.abs().max() < 1e-14
    reversed_map = x[:, :, -torch.arange(6) % 6][..., -torch.arange(5) % 5]  # index n -> -n
    close(mirrored(x, -2, -1), reversed_map, 0)
    unit, reversed_unit = (heads(F.normalize(t.flatten(2), dim=-1)) for t in (x, reversed_map))
    close(scores.real, unit @ reversed_unit.mT)


@pytest.mark.parametrize("size", [(6, 5), (5, 6), (1, 1), (3, 2), (1, 4), (4, 1)])
def test_whole_spectrum_from_its_half(size):
    x = torch.randn(2, *size, dtype=torch.float64)
    Z = torch.fft.fft2(x)
    for part in (Z.real, Z.abs()):
        close(whole(part[..., : size[1] // 2 + 1], size[1]), part)


def test_open_gate_leaves_magnitudes(x):
    m = frequency()
    with torch.no_grad():
        m.gate[3].weight.zero_()
        m.gate[3].bias.fill_(1000.0)
    close(m.local(x), x.abs())


def test_training_normalises_over_all_bins(x):
    m = frequency().train()
    Z = torch.fft.fft2(x)
    expected = torch.fft.ifft2(m.gate(Z.real) * Z).abs()
    before = m.gate[1].running_var.clone()
    m.gate[1].reset_running_stats()
    close(m.local(x), expected)
    close(m.gate[1].running_var, before)


@pytest.mark.parametrize("axes", ["official", "spatial"])
def test_frequency_attention_channel_by_channel(x, axes):
    m = frequency(axes)
    torch.nn.init.uniform_(m.tau, 0.5, 3)
    Z = torch.fft.fft2(x)
    maps = []
    for h in range(8):
        z = Z[:, 4 * h : 4 * h + 4].flatten(2)
        n = z / z.abs().square().sum(-1, keepdim=True).sqrt()
        scores = m.tau[h] * torch.einsum("bin,bjn->bij", n, n)
        y = torch.einsum("bij,bjn->bin", scores.real.softmax(-1) + 1j * scores.imag.softmax(-1), z)
        if axes == "spatial":
            y = torch.fft.ifftn(y.reshape(2, 4, 6, 5), dim=(2, 3))
        else:  # the published axes: channel in head, and the flattened map
            y = torch.fft.ifftn(y, dim=(1, 2)).reshape(2, 4, 6, 5)
        maps.append(y.abs())
    local = torch.fft.ifft2(m.gate(Z.real) * Z).abs()
    expected = F.conv2d(torch.cat((*maps, local), 1), m.project.weight)
    close(m(x), expected)


def test_axes_differ(x):
    m = FSEL(32, dtype=torch.float64).eval()
    other = FSEL(32, inverse_axes="spatial", dtype=torch.float64).eval()
    other.load_state_dict(m.state_dict())
    assert m.frequency.inverse_axes == "official"
    assert not torch.allclose(m(x), other(x), atol=1e-3)


def test_spatial_attention_by_its_formula(x):
    m = SpatialAttention(32, 8, dtype=torch.float64)
    torch.nn.init.uniform_(m.tau, 0.5, 3)

    def pair(p, t):
        return torch.cat((F.conv2d(t, p.conv3.weight, padding=1, groups=16),
                          F.conv2d(t, p.conv5.weight, padding=2, groups=16)), 1)  # fmt: skip

    q, k, v = (pair(b[1], F.conv2d(x, b[0].weight, b[0].bias)).reshape(2, 8, 4, 30) for b in (m.q, m.k, m.v))
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    y = ((m.tau * (q @ k.mT)).softmax(-1) @ v).reshape(2, 32, 6, 5)
    close(m(x), F.conv2d(torch.cat((y, pair(m.local, x)), 1), m.project.weight))


def test_golden_frequency_attention():
    m = fill(frequency("spatial"), "project.weight", *(f"gate.{p}" for p in GATE))
    check(m(golden_map()), -0.37986695, 5.65142055, 0.01466065, -0.04700245)


def test_golden_entangled_ffn():
    gates = [f"{gate}.{p}" for gate in ("gate_in", "gate_cat") for p in GATE]
    m = fill(EntangledFFN(32, "ortho"), "depthwise.weight", "grouped.weight", "project.weight", *gates)
    check(m(golden_map()), 0.02900333, 1.07102337, -0.01335499, 0.04901389)


def test_entangled_ffn_keeps_its_scale():
    torch.manual_seed(0)
    m = EntangledFFN(32, "ortho")
    small, large = (m(torch.randn(2, 32, n, n)).std().item() for n in (16, 64))
    assert large == pytest.approx(small, rel=0.3)


def test_assemblies(x):
    m = FSEL(32, dtype=torch.float64).eval()
    mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
    torch.nn.init.normal_(m.norm.weight)
    torch.nn.init.normal_(m.norm.bias)
    z = (x - mean) / (var + 1e-5).sqrt() * m.norm.weight[:, None, None] + m.norm.bias[:, None, None]
    close(m(x), x + m.frequency(z) + m.spatial(z), 1e-12)
    extra = FSEL(32, part="f+effn", dtype=torch.float64).eval()
    u = x + extra.frequency(x)
    close(extra(x), u + extra.effn(u))
    bare = FSEL(32, part="f+effn", residual=False, dtype=torch.float64).eval()
    bare.load_state_dict(extra.state_dict())
    close(bare(x) + x, extra(x))


def test_products_between_heads_are_not_counted(x):
    cost = count(FSEL(32, heads=8, dtype=torch.float64).eval(), x)
    assert cost.macs["matmul"] == 4 * x.numel() * 4  # scores and weighted sums, twice, over 4 channels each


@pytest.mark.parametrize(
    ("channels", "options", "message"),
    [
        (8, {}, "channels >= 16"),
        (20, {}, "that heads divide"),
        (32, {"inverse_axes": "oficial"}, "unknown inverse_axes 'oficial': did you mean 'official'"),
        (32, {"part": "f+efn"}, "did you mean 'f\\+effn'"),
    ],
)
def test_bad_options_are_named(channels, options, message):
    with pytest.raises(ValueError, match=message):
        FSEL(channels, **options)


@pytest.mark.parametrize("where", ["spatial.local.conv3", "frequency.gate"])
def test_hooks_and_exchanged_convolutions_are_not_passed_by(where):
    torch.manual_seed(0)
    m, x = FSEL(16), torch.randn(2, 16, 5, 6)
    m.eval()
    expected, seen = m(x), []
    m.get_submodule(where).register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(m(x), expected)
    assert seen
    torch.nn.utils.spectral_norm(m.spatial.local.conv5)
    m(x).sum().backward()
    assert m.spatial.local.conv5.weight_orig.grad is not None


def test_the_published_norm_scales_the_spectra_of_the_effn() -> None:
    torch.manual_seed(0)
    ours, published = (FSEL(32, part="f+effn", norm=norm).eval() for norm in ("ortho", "backward"))
    published.load_state_dict(ours.state_dict())
    x = torch.randn(1, 32, 6, 8)
    spectra = []
    for mixer in (ours, published):
        assert mixer.effn is not None
        mixer.effn.gate_in[0].register_forward_pre_hook(lambda _, inputs: spectra.append(inputs[0]))
        mixer(x)
    torch.testing.assert_close(spectra[1], spectra[0] * 48**0.5)
