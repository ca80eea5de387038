"""The parts of HiFi-Mamba follow the paper: low-pass filters, gates, the state-space layer, experts, blocks."""

import pytest
import torch
import torch.nn.functional as F
from hifi_cases import randomised

from chasm.backbones.hifi.blocks import (
    BlockOptions,
    ChannelGate,
    DropPath,
    HiFiBlock,
    InvertedBottleneck,
)
from chasm.backbones.hifi.experts import MixtureOfExperts, MoEBlock
from chasm.backbones.hifi.layers import LOW_PASS, low_pass, low_pass_filters
from chasm.backbones.hifi.ssm import ModulatedSSM
from chasm.ops.selective_scan.reference import sequential_scan


def filtered(x, kind):
    return low_pass(x, low_pass_filters(kind, x))


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


@pytest.mark.parametrize("name", [name for name, _ in ModulatedSSM(16).named_modules() if name])
def test_every_layer_of_the_ssm_heeds_its_hooks(name):
    """Pruning, weight norms, LoRA and quantisation change a layer by hooks, or by another layer in its place."""
    ssm = randomised(ModulatedSSM(16, state=4))
    low, high = torch.randn(2, 1, 16, 2, 3, dtype=torch.float64)
    expected, layer = ssm(low, high), ssm.get_submodule(name)
    if not isinstance(layer, torch.nn.ModuleList):
        unchanged = layer.register_forward_hook(lambda layer, inputs, y: y + 0)
        torch.testing.assert_close(ssm(low, high), expected)
        unchanged.remove()
        layer.register_forward_hook(lambda layer, inputs, y: y + 1)
        assert not torch.allclose(ssm(low, high), expected)


def test_a_layer_in_the_place_of_one_of_the_ssm_is_called():
    ssm = randomised(ModulatedSSM(16, state=4))
    low, high = torch.randn(2, 1, 16, 2, 3, dtype=torch.float64)
    expected = ssm(low, high)
    for name in ("modulate_B.expand", "sequence_convs.1", "delta_proj"):
        ssm.set_submodule(name, torch.nn.Sequential(ssm.get_submodule(name)))
    torch.testing.assert_close(ssm(low, high), expected)


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
    torch.testing.assert_close(block(x, filters, is_added=False)[0], y)
    torch.testing.assert_close(block.eval()(x, filters)[0], x + y)


def test_drop_path_keeps_the_mean_and_whole_samples():
    drop = DropPath(0.25)
    y = drop(torch.ones(4000, 2, 1, 1))
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert torch.equal(y[:, 0], y[:, 1])
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(drop.eval()(y), y)


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
    out, loss = block(x, low_pass_filters("binomial", x), is_added=False)
    torch.testing.assert_close(out, block.gate(y), rtol=1e-12, atol=1e-12)
    assert loss == balance
    assert MoEBlock(BlockOptions(), 0.0).log_gamma.exp().item() == pytest.approx(2)
