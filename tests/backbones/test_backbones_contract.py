"""What every host promises, whatever its architecture and whatever sits in its slots."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chasm.backbones import base, create_backbone, list_backbones
from chasm.backbones.base import extend, pad_to_multiple
from chasm.mixers import list_mixers

HIFI = {"width": 16, "groups": 2, "blocks": 1}
SMALL = {
    "hifi-mamba": HIFI,
    "hifi-mamba-v1": HIFI,
    "hifi-mamba-v2": HIFI | {"width": 32},
    "unet": {"width": 8, "depth": 2, "levels": (1, 2)},
    "unet-3d": {"width": 8, "depth": 2, "levels": (1, 2)},
    "varnet": {"cascades": 2, "width": 8, "depth": 2, "levels": (1, 2)},
    "vit": {"width": 32, "depth": 3, "heads": 2, "patch": 4, "head_width": 8, "slot_blocks": (1, 3)},
}
NAMES = sorted(SMALL)


def build(name, mixer="identity", seed=0, size=(16, 24), **options):
    torch.manual_seed(seed)
    return create_backbone(name, mixer=mixer, size=size, **(SMALL[name] | options))


def host_state(model):
    return {name: value for name, value in model.state_dict().items() if not name.startswith("slots.")}


def column_mask(width, seed=0):
    return (torch.rand(1, 1, 1, width, generator=torch.Generator().manual_seed(seed)) < 0.5).float()


def test_every_backbone_is_covered_here():
    assert list_backbones() == NAMES


def test_unknown_names_and_options_suggest_near_ones():
    with pytest.raises(ValueError, match=r"unknown backbone 'u-net'.*unet"):
        create_backbone("u-net")
    with pytest.raises(ValueError, match=r"no option 'level'.*levels"):
        create_backbone("unet", level=(1,))
    with pytest.raises(ValueError, match="unknown mixer"):
        create_backbone("unet", mixer="gfnett")


def test_one_number_is_a_square_image():
    options = {"mixer": "gfnet", "width": 8, "depth": 1, "levels": [0]}
    one, two = (create_backbone("unet", size=size, **options) for size in (32, (32, 32)))
    assert one.slots["0"].filter.shape == two.slots["0"].filter.shape
    for size in (0, (32,), (32, 32, 32), 2.5, "32"):
        with pytest.raises(ValueError, match="expected a positive whole number, or"):
            create_backbone("unet", size=size)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_input_shape_is_one_clear_line(name):
    with pytest.raises(ValueError, match=r"expects \(B, 2, H, W\), got \(1, 3, 16, 16\)"):
        build(name)(torch.randn(1, 3, 16, 16), mask=torch.ones(16, 16))


@pytest.mark.filterwarnings("ignore:std")  # of no values
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_comes_back_empty(name):
    model = build(name, "chasm").eval()
    assert model(torch.randn(0, 2, 16, 24), mask=column_mask(24)).shape == (0, 2, 16, 24)


@pytest.mark.parametrize("name", NAMES)
def test_one_call_serves_all_hosts(name):
    model = build(name).eval()
    x = torch.randn(2, 2, 16, 24)
    maps = torch.full((2, 3, 16, 24), 3**-0.5, dtype=torch.complex64)
    measured = torch.randn(2, 3, 16, 24, dtype=torch.complex64)
    y, aux = model(x, mask=column_mask(24), maps=maps, measured=measured, return_aux=True)
    assert y.shape == x.shape
    assert aux.shape == ()
    assert (aux > 0) == (name == "hifi-mamba-v2")
    assert torch.equal(model(x, mask=column_mask(24), maps=maps, measured=measured), y)
    assert torch.equal(model(x, column_mask(24), maps, measured), y)


def test_a_noise_level_is_not_taken_for_a_mask():
    with pytest.raises(ValueError, match="expects a mask tensor after x, got float: for deepinv's model"):
        build("unet")(torch.randn(1, 2, 16, 16), 0.1)


@pytest.mark.parametrize("name", NAMES)
def test_identity_slot_is_bitwise_the_host_without_slots(name):
    bare, identity = build(name, mixer=None), build(name, mixer="identity")
    x, mask = torch.randn(2, 2, 16, 24), column_mask(24)
    assert not bare.slots
    assert bare.state_dict().keys() == identity.state_dict().keys()
    torch.manual_seed(1)
    expected = bare(x, mask=mask)
    torch.manual_seed(1)
    assert torch.equal(identity(x, mask=mask), expected)


@pytest.mark.parametrize("name", ["hifi-mamba", "unet", "varnet", "vit"])
@pytest.mark.parametrize("mixer", list_mixers())
def test_same_seed_gives_the_same_host_whatever_the_mixer(name, mixer):
    baseline = build(name, mixer=None)
    state = torch.get_rng_state()
    model = build(name, mixer=mixer)
    assert torch.equal(torch.get_rng_state(), state)
    expected = host_state(baseline)
    for key, value in host_state(model).items():
        assert torch.equal(value, expected.pop(key)), key
    replaced = ("blocks.0.attention.", "blocks.2.attention.") if name == "vit" and mixer != "identity" else ()
    assert all(key.startswith(replaced) for key in expected)


def test_host_weights_do_not_depend_on_where_the_slots_are():
    a, b = build("unet", "gfnet", levels=(0,)), build("unet", "gfnet", levels=(0, 1, 2))
    for key, value in host_state(b).items():
        assert torch.equal(value, host_state(a)[key]), key
    assert torch.equal(a.slots["0"].state_dict().popitem()[1], b.slots["0"].state_dict().popitem()[1])


def test_slots_follow_the_seed_and_differ_from_each_other():
    def weights(seed):
        model = build("hifi-mamba", "fno-d", seed=seed)
        return [torch.cat([p.detach().flatten() for p in s.parameters()]) for s in model.slots.values()]

    first, again, other = weights(0), weights(0), weights(1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("hifi-mamba", [(16, (8, 12))] * 2),
        ("unet", [(16, (8, 12)), (32, (4, 6))]),
        ("varnet", [(16, (8, 16)), (32, (4, 8))] * 2),  # padded to multiples of 16
        ("vit", [(32, (4, 6))] * 2),
    ],
)
@pytest.mark.parametrize("size", [(16, 24), (13, 21)])  # the second is padded to the first
def test_mixers_are_made_for_the_feature_map_they_see(name, places, size, monkeypatch):
    made, seen = [], []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append((x.shape[1], tuple(x.shape[-2:])))
            return x

    def create_slot(mixer, channels, size, *, host_residual, **options):
        made.append((mixer, channels, size, host_residual, options))
        return Spy()

    monkeypatch.setattr(base, "create_slot", create_slot)
    model = build(name, "spy", size=size, mixer_options={"bins": 3})
    assert made == [("spy", *place, True, {"bins": 3}) for place in places]
    model(torch.randn(1, 2, *size), mask=torch.ones(1, 1, *size))
    assert seen == places


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(16, 24), (37, 53), (50, 30), (3, 2)])
def test_any_size_comes_back(name, size):
    model = build(name, "gfnet").eval()
    y = model(torch.randn(1, 2, *size), mask=column_mask(size[1]))
    assert y.shape == (1, 2, *size)
    assert y.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name):
    model = build(name, "chasm")
    for parameter in model.slots.parameters():  # some start at zero, and switch off what stands before them
        nn.init.normal_(parameter, std=0.02)
    y, aux = model(torch.randn(4, 2, 16, 24), mask=column_mask(24), return_aux=True)
    (y.square().mean() + aux).backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []


@pytest.mark.parametrize("name", NAMES)
def test_bf16_autocast_is_finite_and_near_float32(name):
    model = build(name, "gfnet").eval()
    x, mask = torch.randn(1, 2, 16, 24), column_mask(24)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, mask=mask)
    y.float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    expected = model(x, mask=mask)
    assert (y.float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", NAMES)
def test_double_precision_stays_double(name):
    y = build(name).double()(torch.randn(1, 2, 16, 24, dtype=torch.float64), mask=torch.ones(16, 24))
    assert y.dtype == torch.float64


@pytest.mark.parametrize(("before", "after"), [(2, 2), (0, 5), (3, 0)])
def test_extend_reflects_as_torch_does(before, after):
    x = torch.randn(2, 3, 6, 7)
    assert torch.equal(extend(x, 3, before, after), F.pad(x, (before, after, 0, 0), mode="reflect"))
    assert torch.equal(extend(x, 2, before, after), F.pad(x, (0, 0, before, after), mode="reflect"))


def test_padding_replicates_where_reflection_is_too_long():
    x = torch.randn(1, 2, 3, 8)
    assert torch.equal(pad_to_multiple(x, 8, 8), F.pad(x, (0, 0, 0, 5), mode="replicate"))
    assert pad_to_multiple(x, 1, 1) is x
