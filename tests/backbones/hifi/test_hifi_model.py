"""HiFi-Mamba: its parts against plain re-derivations, data consistency, counts, and checkpointing."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from chasm.backbones import create_backbone
from chasm.backbones.hifi.blocks import (
    BlockOptions,
    ChannelGate,
    DropPath,
    HiFiBlock,
    InvertedBottleneck,
)
from chasm.backbones.hifi.experts import MixtureOfExperts, MoEBlock
from chasm.backbones.hifi.layers import LOW_PASS, low_pass, low_pass_filters
from chasm.backbones.hifi.patches import PatchEmbed, ToImage
from chasm.backbones.hifi.ssm import ModulatedSSM
from chasm.backbones.measurement import Measurement
from chasm.mixers import batched_bases
from chasm.mri.fft import fft2c, ifft2c, to_channels, to_complex
from chasm.ops.selective_scan.reference import sequential_scan
from chasm.surgery.count import count, count_parameters

VERSIONS = ["hifi-mamba", "hifi-mamba-v1", "hifi-mamba-v2"]
SMALL = {"width": 16, "groups": 2, "blocks": 2, "size": (16, 24)}


def build(name="hifi-mamba", seed=0, **options):
    torch.manual_seed(seed)
    return create_backbone(name, **(SMALL | options))


def randomised(module):
    """Every parameter at random, so that a test sees each of them."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double().eval()


def filtered(x, kind):
    return low_pass(x, low_pass_filters(kind, x))


# Parts


def test_binomial_low_pass_is_the_filter_of_the_paper():
    """Reflect by 2, [1 4 6 4 1] / 16 along rows and then columns, every second sample, bilinear x2."""
    x = torch.randn(2, 3, 10, 12, dtype=torch.float64)
    taps = torch.tensor([1.0, 4, 6, 4, 1], dtype=torch.float64) / 16
    y = F.pad(x, (2, 2, 2, 2), mode="reflect")
    y = F.conv2d(y, taps.view(1, 1, 1, 5).repeat(3, 1, 1, 1), groups=3)
    y = F.conv2d(y, taps.view(1, 1, 5, 1).repeat(3, 1, 1, 1), groups=3, stride=2)
    expected = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
    torch.testing.assert_close(filtered(x, "binomial"), expected)


def test_haar_low_pass_is_the_orthonormal_band():
    x = torch.randn(2, 3, 10, 12, dtype=torch.float64)
    ll = (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 2
    expected = F.interpolate(ll, scale_factor=2, mode="bilinear", align_corners=False)
    torch.testing.assert_close(filtered(x, "haar"), expected)


@pytest.mark.parametrize(("lowpass", "gain"), [("binomial", 1), ("haar", 2)])
def test_constants_through_the_low_pass(lowpass, gain):
    x = torch.randn(1, 4, 1, 1).expand(1, 4, 8, 6)
    torch.testing.assert_close(filtered(x, lowpass), gain * x)


@pytest.mark.parametrize("lowpass", LOW_PASS)
def test_filters_are_exact_in_bfloat16(lowpass):
    for matrix in low_pass_filters(lowpass, torch.empty(1, 1, 4, 160)):
        assert torch.equal(matrix.bfloat16().float(), matrix)


def test_inverted_bottleneck():
    ib = randomised(InvertedBottleneck(4, 3))
    w1, g1, b1, w2, g2, b2, w3 = ib.parameters()
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    y = F.gelu(F.group_norm(F.conv2d(x, w1), 1, g1, b1))
    y = F.gelu(F.group_norm(F.conv2d(y, w2, padding=1, groups=12), 1, g2, b2))
    torch.testing.assert_close(ib(x), x + F.gelu(F.conv2d(y, w3)))


def test_gates():
    x = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    gate = randomised(ChannelGate(4, pooled=False))
    s = torch.sigmoid(gate.depthwise(F.gelu(gate.mix(x))))
    torch.testing.assert_close(gate(x), x * s)
    gate.pooled = True  # on a 1x1 map only the centre tap of the depthwise kernel meets data
    s = F.gelu(torch.einsum("oi,bi->bo", gate.mix.weight[..., 0, 0], x.mean((2, 3))) + gate.mix.bias)
    s = torch.sigmoid(s * gate.depthwise.weight[:, 0, 1, 1] + gate.depthwise.bias)
    torch.testing.assert_close(gate(x), x * s[..., None, None])


def ssm_by_hand(m, low, high):
    """The spec's steps on channels-last tokens, with linear maps as matrix products."""
    B_, _, H, W = low.shape
    a, b = (t.permute(0, 2, 3, 1) for t in (low, high))
    matrix = lambda layer: layer.weight.flatten(1)  # noqa: E731
    q, z = (a @ matrix(m.in_proj).T).chunk(2, -1)
    u = F.silu(F.conv2d(q.permute(0, 3, 1, 2), m.conv.weight, m.conv.bias, padding=1, groups=q.shape[-1]))
    tokens = u.permute(0, 2, 3, 1).reshape(B_, H * W, -1)
    rank, n, _ = m.splits
    delta, B, C = (tokens @ matrix(m.x_proj).T).split((rank, n, n), -1)
    r = (b @ matrix(m.cond_proj).T).reshape(B_, H * W, -1)
    B_cond, C_cond = (r @ matrix(m.cond_x_proj).T).chunk(2, -1)

    def mlp(layer, x):
        gate, value = (x @ matrix(layer.expand).T).split(6 * n, -1)
        return (F.gelu(gate) * value) @ matrix(layer.project).T

    def along_sequence(conv, x):  # taps at t - 6, t - 4, ..., t + 6 for a kernel of 7
        k = conv.weight.shape[-1]
        padded = F.pad(x, (0, 0, k - 1, k - 1))
        return sum(padded[:, 2 * i : 2 * i + H * W] * conv.weight[:, 0, i] for i in range(k))

    B, C = B + mlp(m.modulate_B, B_cond), C + mlp(m.modulate_C, C_cond)
    delta, B, C = (along_sequence(c, x) for c, x in zip(m.sequence_convs, (delta, B, C), strict=True))
    delta = F.softplus(delta @ m.delta_proj.weight[..., 0].T + m.delta_bias)
    y = sequential_scan(u.flatten(2), delta.mT, -torch.exp(m.A_log), B.mT, C.mT, m.D_skip).mT.reshape(B_, H, W, -1)
    return ((y * F.silu(z)) @ matrix(m.out_proj).T).permute(0, 3, 1, 2)


def test_ssm_follows_the_paper():
    ssm = randomised(ModulatedSSM(20, state=4))
    assert ssm.splits == (2, 4, 4)
    low, high = torch.randn(2, 2, 20, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(ssm(low, high), ssm_by_hand(ssm, low, high))


def test_ssm_starts_as_mamba_does():
    ssm = ModulatedSSM(48)
    torch.testing.assert_close(ssm.A_log[7].exp(), torch.arange(1.0, 17))
    assert torch.equal(ssm.cond_x_proj.weight, ssm.x_proj.weight[3:])
    tau = F.softplus(ssm.delta_bias)
    assert tau.min() > 0.9e-3
    assert tau.max() < 1.1e-1
    assert tau.max() / tau.min() > 20
    assert ssm.no_decay_parameters == ("A_log", "D_skip")


@pytest.mark.parametrize("options", [{}, {"lowpass": "haar", "gate": "full", "expansion": 6}])
def test_block_follows_the_paper(options):
    block = randomised(HiFiBlock(BlockOptions(width=8, state=4, **options), 0.3))
    x = torch.randn(2, 8, 4, 6, dtype=torch.float64)
    t = block.ib_low(x[:, 4:])
    low = filtered(t, options.get("lowpass", "binomial"))
    high = block.ib_0(x[:, :4] + t - low)

    def norm(layer, v):
        return F.layer_norm(v.permute(0, 2, 3, 1), (4,), layer.weight, layer.bias).permute(0, 3, 1, 2)

    scanned = ssm_by_hand(block.ssm, norm(block.norm_low, low), norm(block.norm_high, high))
    y = block.gate(torch.cat([block.ib_1(high), scanned], 1))
    filters = low_pass_filters(options.get("lowpass", "binomial"), x)
    torch.testing.assert_close(block(x, filters)[0], y)


def test_drop_path_keeps_the_mean_and_whole_samples():
    drop = DropPath(0.25)
    y = drop(torch.ones(4000, 2, 1, 1))
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert torch.equal(y[:, 0], y[:, 1])
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(drop.eval()(y), y)


# HiFi-MambaV2


def test_experts_by_hand_and_their_balance():
    moe = randomised(MixtureOfExperts(6))
    x = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    y, balance = moe(x)
    share, probability = torch.zeros(4), torch.zeros(4)
    for b in range(2):
        for i in range(4):
            for j in range(5):
                token = x[b, :, i, j]
                p = moe.router(token).softmax(0)
                e = int(p.argmax())
                torch.testing.assert_close(
                    y[b, :, i, j], moe.shared(token) + p[e] * moe.experts[e](token), rtol=1e-6, atol=1e-6
                )
                share[e] += 1 / 40
                probability += p.float() / 40
    assert len(share.nonzero()) > 1  # or the test says little
    assert balance.item() == pytest.approx(4 * (share * probability).sum().item(), rel=1e-5)


def test_experts_nobody_chose_have_zero_gradients():
    moe = MixtureOfExperts(6)
    moe.router.bias.data[2] = 50.0
    y, balance = moe(torch.randn(1, 6, 2, 2))
    y.sum().backward()
    assert balance.item() == pytest.approx(4)  # the worst case: one expert takes all
    assert moe.experts[2][0].weight.grad.any()
    assert not moe.experts[0][0].weight.grad.any()


def test_v2_block_follows_the_paper():
    block = randomised(MoEBlock(BlockOptions(width=8, state=4, kernel=11), 0.0))
    x = torch.randn(1, 8, 4, 6, dtype=torch.float64)
    normed = F.layer_norm(x.movedim(1, -1), (8,), block.norm.weight, block.norm.bias).movedim(-1, 1)
    se = block.squeeze_excite
    s = se.excite(F.relu(se.squeeze(normed.mean((2, 3), keepdim=True)))).sigmoid()
    g = normed * s
    t = block.ib_low(g[:, 4:])
    low = filtered(t, "binomial")
    residual = t - low
    high = g[:, :4] + residual
    lengths = (high.norm(dim=1) * residual.norm(dim=1)).unsqueeze(1)
    cosine = (high * residual).sum(1, keepdim=True) / (lengths + 1e-6)  # as in the authors' code
    w = torch.sigmoid(block.log_gamma.exp() * cosine)
    high = block.ib_0(w * residual + (1 - w) * high)
    low = block.ssm(block.norm_low(low), block.norm_high(high))
    y, balance = block.moe(block.merge(torch.cat([g, block.ib_1(high), low], 1)))
    out, loss = block(x, low_pass_filters("binomial", x))
    torch.testing.assert_close(out, block.gate(y), rtol=1e-12, atol=1e-12)
    assert loss == balance
    assert MoEBlock(BlockOptions(), 0.0).log_gamma.exp().item() == pytest.approx(2)


def test_balance_loss_is_weighted_and_averaged_over_groups_and_their_data_consistency():
    model = build("hifi-mamba-v2", width=32, drop_path=0.0, dropout=0.0)
    losses = []
    for group in model.groups:
        for block in group.blocks:
            block.register_forward_hook(lambda module, args, output: losses.append(output[1]))
    _, aux = model(torch.randn(1, 2, 16, 24), mask=torch.ones(16, 24), return_aux=True)
    assert len(losses) == 4
    torch.testing.assert_close(aux, 1e-3 * torch.stack(losses).mean() / 2)
    aux.backward()
    assert model.groups[0].blocks[0].moe.router.weight.grad.any()


# Data consistency


def centred_columns(width, kept, seed=0):
    """(1, 1, 1, W): the middle tenth and a random choice of the rest."""
    mask = torch.rand(1, 1, 1, width, generator=torch.Generator().manual_seed(seed)) < kept
    mask[..., width // 2 - width // 20 : width // 2 + width // 20 + 1] = True
    return mask


def zero_filled(image, mask):
    return to_channels(ifft2c(fft2c(to_complex(image)) * mask))


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


# The whole host


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_channels": 8}, "8 -> 2: use the unet"),
        ({"slot_per": "layer"}, "'group' or 'block', got 'layer'"),
        ({"lowpass": "har"}, "unknown lowpass 'har': did you mean 'haar'"),
        ({"gate": "ful"}, "unknown gate 'ful'"),
        ({"width": 15}, "even"),
        ({"kernel": 8}, "must be odd"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


UNUSED = 12 * (192 + 288) + 1056  # LayerNorm and delta rows in each block; the re-embedding after the last DC


@pytest.mark.parametrize(
    ("name", "options", "authors", "unused"),
    [
        ("hifi-mamba", {}, 1_534_716, UNUSED),
        ("hifi-mamba-v1", {}, 12 * 142_421 + 7 * 1_824 + 1_056 + 192, UNUSED),
        ("hifi-mamba", {"width": 128}, 2_529_232, 12 * (256 + 4 * 128) + 1152 + 256),
    ],
)
def test_parameters_plus_the_unused_ones_are_the_authors_count(name, options, authors, unused):
    assert count_parameters(create_backbone(name, **options))[0] + unused == authors


def test_parameters_of_one_block():
    block = HiFiBlock(BlockOptions(), 0.0)
    assert count_parameters(block.ib_0)[0] == 26_160
    assert count_parameters(block.ssm)[0] + 192 + 288 == 37_781
    assert count_parameters(block.gate)[0] == 10_272
    assert count_parameters(block)[0] + 192 + 288 == 126_725


@pytest.mark.parametrize(("name", "giga"), [("hifi-mamba", 24.87), ("hifi-mamba-v1", 29.8)])
def test_multiply_adds(name, giga):
    # All groups cost the same, in proportion to the pixels: the whole is one group plus five times what the second
    # adds, and 256 x 256 costs 16 times what 64 x 64 does.
    def paper(groups):
        model = create_backbone(name, groups=groups)
        with FakeTensorMode(allow_non_fake_inputs=True):
            return 16 * count(model, torch.empty(1, 2, 64, 64), mask=torch.empty(64, 64)).paper

    one, two = paper(1), paper(2)
    assert (one + 5 * (two - one)) / 1e9 == pytest.approx(giga, rel=0.01)


def test_each_version_has_its_parts():
    hosts = [create_backbone(name) for name in VERSIONS]
    assert [host.lowpass for host in hosts] == ["binomial", "haar", "binomial"]
    main, v1, v2 = (host.groups[5].blocks[1] for host in hosts)
    assert [b.gate.pooled for b in (main, v1, v2)] == [True, False, True]
    assert [b.ib_0.body[0].out_channels // 48 for b in (main, v1, v2)] == [5, 6, 5]
    assert [b.ssm.sequence_convs[0].kernel_size for b in (main, v1, v2)] == [(7,), (7,), (11,)]
    assert [b.drop_path.rate for b in (main, v1, v2)] == [0.3, 0.0, 0.3]
    assert [b.ssm.dropout.p for b in (main, v1, v2)] == [0.1, 0.0, 0.1]
    assert create_backbone("hifi-mamba").groups[0].blocks[0].drop_path.rate == 0


def test_slots_sit_before_data_consistency_or_after_every_gate():
    """A slot sees normalised features, and what it makes of them is added to the features as they were."""

    class Double(nn.Module):
        def forward(self, x):
            torch.testing.assert_close(x.mean(1), torch.zeros_like(x[:, 0]), rtol=0, atol=1e-5)
            torch.testing.assert_close(x.var(1, correction=0), torch.ones_like(x[:, 0]), rtol=0, atol=1e-3)
            return 2 * x

    def doubled(x):
        return x + 2 * F.layer_norm(x.movedim(1, -1), (16,)).movedim(-1, 1)

    x = torch.randn(1, 16, 8, 12)
    measurement = Measurement.of(torch.randn(1, 2, 16, 24), centred_columns(24, 0.3), None, None)
    group = build().groups[0].eval()
    filters = low_pass_filters("binomial", x)
    first, second = group.blocks
    after = x + first(x, filters)[0]
    after = doubled(after + second(after, filters)[0])
    y, _ = group(x, filters, measurement, [None, None, Double()], False)
    torch.testing.assert_close(y, after + group.consistency(after, measurement))
    after = x + doubled(first(x, filters)[0])
    after = after + doubled(second(after, filters)[0])
    y, _ = group(x, filters, measurement, [Double(), Double(), None], False)
    torch.testing.assert_close(y, after + group.consistency(after, measurement))
    assert len(build(mixer="gfnet").slots) == 2
    per_block = build(mixer="gfnet", slot_per="block")
    assert len(per_block.slots) == 4
    used = [slot for g in range(2) for slot in per_block.slots_of(g)]
    assert used == [*list(per_block.slots.values())[:2], None, *list(per_block.slots.values())[2:], None]


@pytest.mark.parametrize("name", VERSIONS)
def test_checkpointing_gives_bit_equal_gradients(name):
    """With dropout and drop path on, so the recomputation has to draw the same numbers; and with bases that are
    built once for all slots and gone by the time of the backward pass."""
    x, mask = torch.randn(2, 2, 16, 24), centred_columns(24, 0.3)
    gradients, outputs = [], []
    for checkpoint in (False, True):
        model = build(name, mixer="chasm", width=32, blocks=1, checkpoint=checkpoint, drop_path=0.5)
        torch.manual_seed(1)
        with batched_bases(model):
            y, aux = model(x, mask=mask, return_aux=True)
        (y.abs().mean() + aux).backward()
        outputs.append(y)
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert torch.equal(*outputs)
    assert all(g is not None for g in gradients[0].values())
    for key, value in gradients[0].items():
        assert torch.equal(gradients[1][key], value), key


def test_checkpointing_keeps_less_for_the_backward_pass():
    def saved(checkpoint):
        model = build(groups=4, checkpoint=checkpoint)
        return count(model, torch.randn(1, 2, 16, 24), mask=torch.ones(16, 24)).saved_bytes

    assert saved(True) < saved(False) / 10


def test_one_step_of_training_lowers_the_loss():
    model, mask = build(mixer="chasm", drop_path=0.0, dropout=0.0), centred_columns(24, 0.3)
    truth = torch.rand(2, 1, 16, 24)
    truth = torch.cat([truth, torch.zeros_like(truth)], 1)
    x = zero_filled(truth, mask)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(8):
        loss = (model(x, mask=mask) - truth).abs().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the full configuration on a GPU")
def test_memory_benchmark_runs_its_tiny_configuration(tmp_path, monkeypatch, capsys):
    script = Path(__file__).parents[3] / "benchmarks" / "hifi_memory.py"
    monkeypatch.setattr("sys.argv", [str(script), "--steps", "1", "--out", str(tmp_path / "new" / "memory.json")])
    runpy.run_path(str(script), run_name="__main__")
    report = json.loads((tmp_path / "new" / "memory.json").read_text())
    float32 = [row["loss"] for row in report["rows"] if row["precision"] == "float32"]
    assert [row["checkpoint"] for row in report["rows"]] == [False, True] * 2
    assert float32[0] == float32[1]  # training takes the same way with and without checkpointing
    assert "float32" in capsys.readouterr().out
