"""HiFi-Mamba as a whole: parameters, multiply-adds, slots, checkpointing, training."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hifi_cases import VERSIONS, build, centred_columns, zero_filled
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from chasm.backbones import create_backbone
from chasm.backbones.hifi.blocks import (
    BlockOptions,
    HiFiBlock,
)
from chasm.backbones.hifi.layers import low_pass_filters
from chasm.backbones.measurement import Measurement
from chasm.mixers import batched_bases
from chasm.surgery.count import count, count_parameters


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
    assert [b.drop_path.rate.item() for b in (main, v1, v2)] == pytest.approx([0.3, 0.0, 0.3])
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
    after = doubled(second(first(x, filters)[0], filters)[0])
    y, _ = group(x, filters, measurement, [None, None, Double()], False)
    torch.testing.assert_close(y, after + group.consistency(after, measurement))
    after = x + doubled(first(x, filters, is_added=False)[0])
    after = after + doubled(second(after, filters, is_added=False)[0])
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
