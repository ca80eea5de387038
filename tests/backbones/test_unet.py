"""The U-Net: parameters and multiply-adds against hand formulas, its heads, and where its slots sit."""

import pytest
import torch
from torch import nn

from chasm.backbones import base, create_backbone
from chasm.surgery.count import count, count_parameters


def by_hand(cin, cout, width=32, depth=4, shortcut=True):
    """3x3 convolutions without bias, 2x2 transposed convolutions, a 1x1 head with bias."""
    widths = [width * 2**level for level in range(depth + 1)]
    down = sum(9 * a * b + 9 * b * b for a, b in zip([cin, *widths], widths, strict=False))
    up = sum(4 * 2 * c * c + 9 * 2 * c * c + 9 * c * c + shortcut * 2 * c * c for c in widths[:-1])
    return down + up + width * cout + cout


@pytest.mark.parametrize(("shortcut", "expected"), [(False, 7_756_418), (True, 7_930_498)])
def test_parameters(shortcut, expected):
    assert by_hand(2, 2, shortcut=shortcut) == expected
    assert count_parameters(create_backbone("unet", dec_shortcut=shortcut))[0] == expected


@pytest.mark.parametrize(
    ("cin", "cout", "size", "options", "giga"),
    [
        (2, 2, 256, {}, 12.59),
        (2, 2, 256, {"dec_shortcut": False}, 12.05),
        (3, 3, 256, {}, 12.61),
        (4, 4, 240, {}, 11.1),
    ],
)
def test_multiply_adds(cin, cout, size, options, giga):
    with torch.device("meta"):
        model = create_backbone("unet", in_channels=cin, out_channels=cout, size=(size, size), **options)
        cost = count(model, torch.empty(1, cin, size, size))
    assert cost.paper / 1e9 == pytest.approx(giga, rel=0.005)


@pytest.mark.parametrize(("cin", "cout", "residual"), [(2, 2, True), (3, 3, True), (8, 4, False), (4, 4, False)])
def test_heads(cin, cout, residual):
    options = {"width": 4, "depth": 2, "levels": (1,)}
    options |= {} if cin != 4 else {"global_residual": False}  # magnitudes in, logits out
    model = create_backbone("unet", in_channels=cin, out_channels=cout, **options)
    x = torch.randn(2, cin, 15, 18)
    assert model(x).shape == (2, cout, 15, 18)
    assert count_parameters(model)[0] == by_hand(cin, cout, 4, 2)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    assert torch.equal(model(x), x if residual else torch.zeros(2, cout, 15, 18))


def test_residual_between_unequal_channels_is_refused():
    with pytest.raises(ValueError, match="global_residual=False"):
        create_backbone("unet", in_channels=8, out_channels=4, global_residual=True)


def test_levels_out_of_range_are_named():
    with pytest.raises(ValueError, match=r"0 to 2, got \[3, 4\]"):
        create_backbone("unet", depth=2)


@pytest.mark.parametrize("levels", [(0, 1, 2), (2, 3, 4), (4,)])
def test_slots_see_the_channels_and_size_of_their_levels(levels, monkeypatch):
    made = []
    monkeypatch.setattr(base, "create_slot", lambda m, c, s, **_: made.append((c, s)) or nn.Identity())
    create_backbone("unet", mixer="any", levels=levels)
    assert made == [(32 * 2**level, (256 // 2**level,) * 2) for level in levels]


def test_slot_feeds_both_skip_and_pooling():
    """A slot that takes away its input silences its level: the output no longer depends on the input."""

    class Minus(nn.Module):
        def forward(self, x):
            return -x

    model = create_backbone("unet", width=4, depth=2, levels=(0,), global_residual=False, size=(16, 16))
    a, b = torch.randn(2, 1, 2, 16, 16)
    assert not torch.equal(model(a), model(b))
    model.slots["0"] = Minus()
    assert torch.equal(model(a), model(b))
