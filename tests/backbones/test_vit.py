"""The ViT: parameters and multiply-adds against hand formulas, and what a mixer replaces."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chasm.backbones import create_backbone
from chasm.backbones.vit import Block
from chasm.surgery.count import count, count_parameters

SIZES = {"size": (16, 24), "width": 32, "depth": 3, "heads": 2, "patch": 4, "head_width": 8}
SMALL = SIZES | {"slot_blocks": (1, 3)}


def test_parameters_by_hand():
    D, patch, head = 256, 8, 32
    block = (3 * D * D + 3 * D) + (D * D + D) + (8 * D * D + 5 * D) + 4 * D
    embed = 2 * patch**2 * D + D + 32 * 32 * D
    pixels = D * patch**2 * head + patch**2 * head
    convs = 2 * (9 * head * head + head) + 9 * head * 2 + 2
    expected = embed + 12 * block + 2 * D + pixels + convs
    assert expected == 10_318_210
    assert count_parameters(create_backbone("vit"))[0] == expected


def test_multiply_adds():
    with torch.device("meta"):
        base = count(create_backbone("vit"), torch.empty(1, 2, 256, 256))
        free = count(create_backbone("vit", mixer="gfnet"), torch.empty(1, 2, 256, 256))
    assert base.paper / 1e9 == pytest.approx(11.48, rel=0.005)
    assert base.macs["attention"] == 12 * 2 * 1024**2 * 256  # listed apart: 6.44 G
    assert free.paper / 1e9 == pytest.approx(10.94, rel=0.005)  # a mixer without products


def test_baseline_keeps_attention_and_a_mixer_replaces_it():
    baseline, mixed = create_backbone("vit", **SMALL), create_backbone("vit", mixer="gfnet", **SMALL)
    assert not baseline.slots
    assert all(block.attention is not None for block in baseline.blocks)
    assert [block.attention is None for block in mixed.blocks] == [True, False, True]
    assert list(mixed.slots) == ["1", "3"]


def test_block_adds_the_only_identity_path():
    """X + mixer(LN X), on the (B, C, H, W) view of raster-ordered tokens."""
    torch.manual_seed(0)
    block, mixer = Block(8, 2, 4), nn.Conv2d(8, 8, 3, padding=1)
    x = torch.randn(2, 15, 8)
    view = F.layer_norm(x, (8,)).transpose(1, 2).reshape(2, 8, 3, 5)
    y = x + mixer(view).flatten(2).transpose(1, 2)
    expected = y + block.mlp(F.layer_norm(y, (8,)))
    torch.testing.assert_close(block(x, (3, 5), mixer), expected)


def test_mixers_come_without_their_own_identity_path():
    """A mixer that owns one is built with it off, one that has none is not wrapped in another."""
    model = create_backbone("vit", mixer="chasm", **SMALL)
    assert not model.slots["1"].residual
    model = create_backbone("vit", mixer="gfnet", **SMALL)
    assert type(model.slots["1"]).__name__ != "Residual"


def test_position_table_is_used_as_it_is_at_its_size_and_interpolated_elsewhere(monkeypatch):
    calls = []
    interpolate = F.interpolate
    monkeypatch.setattr(F, "interpolate", lambda *a, **k: calls.append(k) or interpolate(*a, **k))
    model = create_backbone("vit", **SMALL).eval()
    model(torch.randn(1, 2, 16, 24))
    assert not calls
    # With a constant table and input all tokens agree at any size, and so do pixels far from the border.
    nn.init.constant_(model.position, 0.5)
    small, large = model(torch.zeros(1, 2, 16, 24)), model(torch.zeros(1, 2, 24, 40))
    assert calls == [{"size": (6, 10), "mode": "bicubic", "align_corners": False}]
    torch.testing.assert_close(large[..., 4:20, 4:36].mean((2, 3)), small[..., 4:12, 4:20].mean((2, 3)))


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match=r"1 to 3, got \[0, 4\]"):
        create_backbone("vit", **SIZES, slot_blocks=(0, 4))
    with pytest.raises(ValueError, match="multiple of heads, got 30 and 4"):
        create_backbone("vit", width=30, heads=4)
