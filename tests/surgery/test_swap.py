"""Mixers inside networks this package did not write."""

import copy

import pytest
import torch
from networks import Double, encoder
from torch import nn

from chasm import CHASM, fold
from chasm.mixers import Mixer, Residual
from chasm.surgery.swap import swap
from chasm.surgery.swapped import Swapped


class MapNet(nn.Module):
    """A residual block around a token mixer, and a plain stack with a layer that changes the shape."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.token_mixer = nn.AvgPool2d(3, 1, 1)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 16, 2, 2)
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))

    def forward(self, x):
        x = self.norm(self.stem(x))
        x = x + self.token_mixer(x)
        return self.body(self.down(x))


IMAGE = torch.randn(2, 3, 12, 10)


def test_convnet_by_name_type_and_function():
    x = IMAGE
    for select, names in [
        ("body.*[02]", ["body.0", "body.2"]),
        (nn.AvgPool2d, ["token_mixer"]),
        ((nn.AvgPool2d, nn.ReLU), ["token_mixer", "body.1"]),
        (["token_mixer", nn.ReLU], ["token_mixer", "body.1"]),
        (lambda name, m: isinstance(m, nn.Conv2d) and m.in_channels == m.out_channels, ["body.0", "body.2"]),
    ]:
        model = swap(MapNet(), select, "gfnet", example=x)
        assert [n for n, m in model.named_modules() if isinstance(m, Swapped)] == names
        y = model(x)
        assert y.shape == (2, 16, 6, 5)
        y.sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_places_are_built_for_the_channels_and_size_they_have():
    model = swap(MapNet(), (nn.AvgPool2d, nn.ReLU), Double, example=IMAGE)
    assert (model.token_mixer.mixer.channels, model.token_mixer.mixer.size) == (8, (12, 10))
    assert (model.body[1].mixer.channels, model.body[1].mixer.size) == (16, (6, 5))
    given = swap(MapNet(), nn.AvgPool2d, Double, channels=8, size=(4, 4))
    assert (given.token_mixer.mixer.channels, given.token_mixer.mixer.size) == (8, (4, 4))


def test_the_copy_is_the_model_elsewhere():
    host = MapNet()
    before = copy.deepcopy(host.state_dict())
    model = swap(host, nn.AvgPool2d, Double, example=IMAGE)
    assert isinstance(host.token_mixer, nn.AvgPool2d)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())  # running statistics too
    assert swap(host, nn.AvgPool2d, Double, example=IMAGE, inplace=True) is host
    assert isinstance(host.token_mixer, Swapped)
    h = host.norm(host.stem(IMAGE))
    assert torch.allclose(host.train()(IMAGE), host.body(host.down(h + 2 * h)), atol=1e-5)


def test_device_dtype_and_mode_are_kept():
    host = MapNet().double().eval()
    host.body.train()
    model = swap(host, (nn.AvgPool2d, nn.ReLU), "gfnet", example=IMAGE.double())
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert not model.token_mixer.mixer.training
    assert not model.training
    assert model.body[1].mixer.training
    assert swap(MapNet().to("meta"), nn.ReLU, "gfnet", channels=16).body[1].mixer.filter.is_meta


def test_identity_paths_follow_the_host():
    def mixer_of(name, **options) -> nn.Module:
        return swap(MapNet(), "token_mixer", name, example=IMAGE, **options).token_mixer.mixer

    assert isinstance(mixer_of("gfnet"), Mixer)
    assert isinstance(mixer_of("gfnet", host_residual=False), Residual)
    assert mixer_of("afno").residual is False
    assert mixer_of("afno", host_residual=False, blocks=2).residual is True


def test_maps_with_channels_last():
    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Identity()

        def forward(self, x):
            return self.mix(x)

    x = torch.randn(2, 6, 4, 8)
    model = swap(Host(), "mix", Double, example=x, layout="channels_last")
    assert torch.equal(model(x), 2 * x)
    assert (model.mix.mixer.channels, model.mix.mixer.size) == (8, (6, 4))
    assert torch.equal(model.mix.mixer.seen, x.permute(0, 3, 1, 2))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_transformer(norm_first, batch_first, training):
    host = encoder(norm_first=norm_first, batch_first=batch_first).train(training)
    x = torch.randn(3, 17, 8)  # a class token and a 4 x 4 grid
    run = (lambda m: m(x)) if batch_first else (lambda m: m(x.transpose(0, 1)).transpose(0, 1))
    example = x if batch_first else x.transpose(0, 1)
    model = swap(host, nn.MultiheadAttention, Double, example=example, size=(4, 4))
    with torch.no_grad():  # torch's fast path wants eval mode without gradients
        y = run(model)
    attention = model.layers[0].self_attn
    assert (attention.mixer.channels, attention.mixer.size) == (8, (4, 4))
    layer = model.layers[0]
    z = layer.norm1(x) if norm_first else x
    # row by row: token 1 + 4 r + c is pixel (r, c)
    assert torch.allclose(attention.mixer.seen, z[:, 1:].transpose(1, 2).reshape(3, 8, 4, 4), atol=1e-6)
    expected = x
    for layer in model.layers:
        update = torch.zeros_like(x)
        if norm_first:
            update[:, 1:] = 2 * layer.norm1(expected)[:, 1:]
            expected = expected + update
            expected = expected + layer.linear2(torch.relu(layer.linear1(layer.norm2(expected))))
        else:
            update[:, 1:] = 2 * expected[:, 1:]
            expected = layer.norm1(expected + update)
            expected = layer.norm2(expected + layer.linear2(torch.relu(layer.linear1(expected))))
    assert torch.allclose(y, expected, atol=1e-5)


def test_a_transformer_needs_no_example():
    model = swap(encoder(batch_first=True), "layers.*.self_attn", "gfnet", size=(4, 4))
    assert model.layers[1].self_attn.mixer.filter.shape == (4, 3, 8, 2)
    assert model(torch.randn(2, 16, 8)).shape == model(torch.randn(2, 16, 8)).shape == (2, 16, 8)
    again = nn.TransformerEncoder(model.layers[0], 2, enable_nested_tensor=False)  # clones of a swapped layer
    assert again.eval()(torch.randn(2, 16, 8)).shape == (2, 16, 8)


def test_class_tokens_pass_unchanged_with_and_without_a_host_residual():
    x = torch.randn(2, 5, 8)
    host = nn.Sequential(nn.Identity())
    branch = swap(host, "0", Double, example=x, layout="tokens", size=(2, 2))(x)
    assert torch.equal(branch[:, 0] + x[:, 0], x[:, 0])
    whole = swap(host, "0", Double, example=x, size=2, host_residual=False)(x)
    assert torch.equal(whole[:, 0], x[:, 0])
    assert torch.equal(whole[:, 1:], 2 * x[:, 1:])


def test_layers_tell_where_the_channels_are():
    x = torch.randn(2, 6, 5, 8)
    last = swap(nn.Sequential(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))), "0", Double, example=x)
    assert (last[0].layout, last[0].mixer.channels, last[0].mixer.size) == ("channels_last", 8, (6, 5))
    first = swap(nn.Sequential(nn.Sequential(nn.GroupNorm(2, 6), nn.Conv2d(6, 6, 1))), "0", Double, example=x)
    assert (first[0].layout, first[0].mixer.channels, first[0].mixer.size) == ("channels_first", 6, (5, 8))


def test_examples_by_keyword_and_mixers_by_class():
    class ByName(MapNet):
        def forward(self, *, pixel_values):
            return super().forward(pixel_values)

    model = swap(ByName(), "token_mixer", CHASM, example={"pixel_values": IMAGE}, gain="signed")
    assert isinstance(model.token_mixer.mixer, CHASM)
    assert (model.token_mixer.mixer.gain, model.token_mixer.mixer.residual) == ("signed", False)
    assert fold(model, example={"pixel_values": IMAGE})(pixel_values=IMAGE).shape == (2, 16, 6, 5)


def test_what_a_mixer_cannot_honour_is_refused_or_dropped():
    host = encoder(batch_first=True).eval()
    x, padding = torch.randn(2, 16, 8), torch.zeros(2, 16, dtype=torch.bool)
    padding[1, 12:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(16)
    model = swap(host, nn.MultiheadAttention, "gfnet", example=x, size=4)
    with torch.no_grad():
        with pytest.raises(ValueError, match="key_padding_mask"):
            model(x, src_key_padding_mask=padding)
        with pytest.raises(ValueError, match="attn_mask"):
            model(x, mask=causal)
        model = swap(host, nn.MultiheadAttention, "gfnet", example=x, size=4, ignore_extra=True)
        assert torch.equal(model(x, src_key_padding_mask=padding), model(x))

    decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    crossed = swap(decoder, "multihead_attn", "gfnet", size=(4, 4))
    with pytest.raises(ValueError, match="called with key, value, which"):
        crossed(x, torch.randn(2, 16, 8))


def test_what_the_example_shows_is_refused_at_once():
    x = torch.randn(2, 16, 8)
    decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(ValueError, match="'multihead_attn' is called with key, value, which a mixer cannot use"):
        swap(decoder, "multihead_attn", "gfnet", size=4, example=(x, torch.randn(2, 16, 8)))


def test_what_changes_nothing_is_ignored():
    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.Identity()
            self.attn.forward = lambda x, attention_mask=None, **_: x

        def forward(self, x, mask=None, **more):
            return self.attn(x, mask, **more)

    x = torch.randn(2, 16, 8)
    model = swap(Host(), "attn", "gfnet", example=x, size=4)
    want = model(x)
    hidden = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    for mask in (hidden, hidden.float(), torch.zeros(2, 16)):  # the same everywhere
        assert torch.equal(model(x, mask), want)
    more = {"num_items_in_batch": torch.tensor(2), "position_ids": torch.arange(16)[None], "rope": torch.randn(16, 4)}
    assert torch.equal(model(x, **more), want)
    exported = torch.export.export(model, (x, hidden)).module()
    assert torch.equal(exported(x, hidden), want)
    hidden = hidden.clone()
    hidden[:, :, :, 3] = False
    with pytest.raises(ValueError, match="called with attention_mask"):
        model(x, hidden)
    with pytest.raises(RuntimeError, match="mask that hides something"):
        exported(x, hidden)


def test_a_padded_batch_does_not_reach_for_weights_that_are_gone():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    host = nn.TransformerEncoder(layer, 1).eval()  # nested tensors on
    x, padding = torch.randn(2, 16, 8), torch.zeros(2, 16, dtype=torch.bool)
    padding[1, 12:] = True
    model = swap(host, nn.MultiheadAttention, "gfnet", example=x, size=4, ignore_extra=True)
    with torch.no_grad():
        assert model(x, src_key_padding_mask=padding).shape == x.shape


def test_a_module_in_two_places_stays_one():
    shared = nn.Conv2d(4, 4, 1)
    model = swap(nn.Sequential(shared, nn.ReLU(), shared), nn.Conv2d, "gfnet", channels=4, size=(4, 4))
    assert model[0] is model[2]


def test_the_outermost_match_is_replaced():
    model = swap(MapNet(), "body*", Double, example=IMAGE)
    assert isinstance(model.body, Swapped)
    assert [name for name, _ in model.body.named_children()] == ["mixer"]


def test_nothing_matched_says_what_there_is():
    with pytest.raises(ValueError, match=r"did you mean 'token_mixer'.*Conv2d \(4\)"):
        swap(MapNet(), "token_mixr", "gfnet", example=IMAGE)
    with pytest.raises(ValueError, match=r"names: stem, token_mixer.*types: Conv2d"):
        swap(MapNet(), nn.Linear, "gfnet", example=IMAGE)
    with pytest.raises(ValueError, match="types: none"):
        swap(nn.ReLU(), "*", "gfnet")


@pytest.mark.parametrize(
    ("select", "options", "message"),
    [
        ("down", {"example": IMAGE}, r"'down' maps \(2, 8, 12, 10\) to \(2, 16, 6, 5\)"),
        ("token_mixer", {}, "cannot tell the channels of 'token_mixer'"),
        ("token_mixer", {"example": IMAGE, "layout": "tokens"}, "expected tokens"),
        ("token_mixer", {"example": IMAGE, "layout": "nchw"}, "unknown layout 'nchw'"),
        ("token_mixer", {"example": IMAGE, "ndim": 3}, "'token_mixer' has 2 spatial axes, got ndim=3"),
        ("token_mixer", {"example": IMAGE, "ndim": 4}, "expected 1, 2 or 3 spatial axes"),
        ("token_mixer", {"example": IMAGE, "size": (4, 4, 4)}, r"size=\(4, 4, 4\): expected"),
        ("token_mixer", {"example": IMAGE, "size": 2.5}, "size=2.5: expected a positive whole number"),
        ("token_mixer", {"example": IMAGE, "mixer": "gfnt"}, "did you mean 'gfnet'"),
        ("token_mixer", {"example": IMAGE, "blocks": 3}, "no option 'blocks'"),
        ("token_mixer", {"example": IMAGE, "mixer": Double, "blocks": 3}, "go with a mixer's name"),
        ("token_mixer", {"example": IMAGE, "mixer": nn.Identity()}, "got one Identity, and every place needs its own"),
        ("token_mixer", {"example": IMAGE, "mixer": 3}, "expected a name, a class or a function .*, got 3"),
        ("token_mixer", {"example": IMAGE, "mixer": lambda c, size: None}, "returned NoneType for 'token_mixer'"),
        (nn.Identity(), {"example": IMAGE}, "expected a pattern of names, a type or a list of these, got Identity"),
        ([3], {"example": IMAGE}, "expected a pattern .*, got int"),
    ],
)
def test_errors(select, options, message):
    with pytest.raises(ValueError, match=message):
        swap(MapNet(), select, options.pop("mixer", "gfnet"), **options)


def test_errors_about_places():
    with pytest.raises(ValueError, match=r"select its attention, '0.self_attn'"):
        swap(nn.Sequential(nn.TransformerEncoderLayer(8, 2)), "0", "gfnet")
    unused = nn.ModuleDict({"used": nn.Identity(), "unused": nn.Identity()})
    unused.forward = unused["used"].forward  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="'unused' is not called on the example"):
        swap(unused, "unused", "gfnet", example=IMAGE, inplace=True)


def test_compiles_and_round_trips():
    x = torch.randn(1, 17, 8)
    model = swap(encoder(batch_first=True), nn.MultiheadAttention, "identity", example=x, size=4)
    attention = model.layers[0].self_attn
    compiled = torch.compile(attention, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x, x, x, need_weights=False)[0], attention(x, x, x)[0])
    other = swap(encoder(batch_first=True), nn.MultiheadAttention, "identity", example=x, size=4)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
