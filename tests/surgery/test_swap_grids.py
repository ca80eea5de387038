"""The grid that tokens lie on: told, found in the network, or asked for."""

import copy

import pytest
import torch
from networks import Double, encoder
from torch import Tensor, nn

from chasm.surgery.grids import split_tokens
from chasm.surgery.swap import swap


class RollRows(nn.Module):
    """Stands for a mixer whose result depends on the grid."""

    def __init__(self, channels, size):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, 2)


def test_tokens_before_the_grid():
    assert split_tokens(16, None, (4, 4)) == 0
    assert split_tokens(21, 5, (4, 4)) == 5
    assert split_tokens(26, None, (3, 8)) == 2
    for N, prefix, grid, message in [
        (17, 0, (4, 4), "4 x 4 grid after 0 prefix tokens, got 17"),
        (20, None, (3, 8), "3 x 8 grid, got 20"),
        (26, 1, (3, 8), "after 1 prefix tokens"),
        (64, None, (4, 4), "4 x 4 grid, got 64"),  # 48 tokens are no class token: another map
    ]:
        with pytest.raises(ValueError, match=message):
            split_tokens(N, prefix, grid)


class Patches(nn.Module):
    """A transformer on the patches of an image, as ViT has it: the attention sees tokens, not the map."""

    def __init__(self, registers=1):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        self.registers = nn.Parameter(torch.randn(1, registers, 8))
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        z = self.embed(x).flatten(2).transpose(1, 2)
        z = torch.cat((self.registers.expand(len(z), -1, -1), z), 1)
        return z + self.attn(z, z, z, need_weights=False)[0]


@pytest.mark.parametrize("registers", [0, 1, 5])
def test_the_grid_of_tokens_is_that_of_their_map_at_every_call(registers):
    model = swap(Patches(registers), "attn", Double, example=torch.randn(2, 3, 16, 16))
    model = copy.deepcopy(model)  # the copy has its own source of the grid
    for size in ((16, 16), (8, 32), (64, 4), (24, 20)):  # the first three have 16 tokens each
        model(torch.randn(2, 3, *size))
        assert model.attn.mixer.seen.shape == (2, 8, size[0] // 4, size[1] // 4)
    model.embed = nn.Conv2d(3, 8, 4, stride=4)  # it no longer reports its size
    with pytest.raises(ValueError, match="did not run in this call"):
        model(torch.randn(2, 3, 8, 32))


def test_the_grid_of_tokens_survives_the_compiler_and_export():
    x = torch.randn(2, 3, 16, 16)
    model = swap(Patches(), "attn", RollRows, example=x).eval()
    want = [model(torch.ones(2, 3, *size)) for size in ((16, 16), (8, 32))]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for size, y in zip(((16, 16), (8, 32)), want, strict=True):
        assert torch.equal(compiled(torch.ones(2, 3, *size)), y)
    exported = torch.export.export(model, (torch.ones(2, 3, 8, 32),)).module()
    assert torch.allclose(exported(torch.ones(2, 3, 8, 32)), want[1], atol=1e-6)


class Named(nn.Module):
    """Attention that is told the grid, as SegFormer and PVT tell theirs."""

    def __init__(self, how):
        super().__init__()
        self.attn, self.how = nn.Identity(), how
        self.attn.forward = lambda x, *_, **__: x

    def forward(self, x):
        B, C, H, W = x.shape
        z = x.flatten(2).transpose(1, 2)
        args = {"numbers": (H, W), "pair": ((H, W),), "names": ()}[self.how]
        names = {"height": H, "width": W} if self.how == "names" else {}
        return self.attn(z, *args, **names).transpose(1, 2).reshape(B, C, H, W)


@pytest.mark.parametrize("how", ["numbers", "pair", "names"])
def test_the_grid_of_tokens_is_what_the_call_says(how):
    model = swap(Named(how), "attn", Double, example=torch.randn(1, 8, 4, 4))
    for size in ((4, 4), (2, 8), (3, 5)):
        x = torch.randn(1, 8, *size)
        assert torch.equal(model(x), 2 * x)
        assert torch.equal(model.attn.mixer.seen, x)
    with pytest.raises(ValueError, match="names the grid of its 16 tokens"):
        model.attn(torch.randn(1, 16, 8))


def test_a_grid_that_cannot_be_known_is_asked_for():
    x = torch.randn(1, 16, 8)
    with pytest.raises(ValueError, match=r"the 16 tokens at .layers.0.self_attn.: pass size=\(H, W\) or \(D, H, W\)"):
        swap(encoder(batch_first=True), nn.MultiheadAttention, "gfnet", example=x)
    with pytest.raises(ValueError, match="cannot tell the grid of the tokens"):
        swap(encoder(batch_first=True), nn.MultiheadAttention, "gfnet")
    fixed = swap(encoder(batch_first=True), nn.MultiheadAttention, "gfnet", size=(2, 8))
    with pytest.raises(ValueError, match="2 x 8 grid"):
        fixed(torch.randn(1, 9, 8))


@pytest.mark.parametrize("how", [{"size": 60, "ndim": 1}, {"ndim": 1}])
def test_a_sequence_is_one_axis(how):
    model = swap(encoder(batch_first=True), nn.MultiheadAttention, "chasm", example=torch.randn(1, 60, 8), **how)
    mixer = model.layers[0].self_attn.mixer
    assert (mixer.ndim, mixer.gain_table["cl"].shape) == (1, (31, 8))
    assert model(torch.randn(2, 60, 8)).shape == (2, 60, 8)
    if "size" not in how:
        assert model(torch.randn(2, 17, 8)).shape == (2, 17, 8)


def test_a_token_before_a_sequence_passes():
    """At every length: the sequence is what follows the token."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    swapped = swap(model, "self_attn", "chasm", channels=8, ndim=1, prefix_tokens=1).eval()
    for length in (9, 13):
        x = torch.randn(2, length, 8)
        changed = torch.cat((x[:, :1], torch.randn(2, length - 1, 8)), 1)
        a, b = (swapped.self_attn(z, z, z)[0] for z in (x, changed))
        assert torch.equal(a[:, 0], b[:, 0])
        assert not torch.equal(a[:, 1:], b[:, 1:])


def test_maps_of_one_and_three_axes():
    for conv, shape in ((nn.Conv1d, (2, 4, 10)), (nn.Conv3d, (2, 4, 6, 5, 4))):
        model = swap(nn.Sequential(conv(4, 4, 1), conv(4, 4, 1)), "1", "chasm", example=torch.randn(shape))
        assert model[1].mixer.ndim == len(shape) - 2
        assert model(torch.randn(shape)).shape == shape
        with pytest.raises(ValueError, match=rf"'1' has {len(shape) - 2} spatial axes and 'gfnet' mixes two"):
            swap(nn.Sequential(conv(4, 4, 1), conv(4, 4, 1)), "1", "gfnet", example=torch.randn(shape))


def test_tokens_of_a_volume():
    class Volume(Patches):
        def __init__(self):
            super().__init__(1)
            self.embed = nn.Conv3d(3, 8, 4, stride=4)

    model = swap(Volume(), "attn", "chasm", example=torch.randn(1, 3, 8, 12, 8))
    assert (model.attn.mixer.ndim, model.attn.prefix) == (3, 1)
    assert model(torch.randn(1, 3, 16, 4, 8)).shape == (1, 1 + 4 * 1 * 2, 8)
