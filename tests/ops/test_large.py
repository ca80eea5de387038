"""On a large card: maps of more than 2^31 numbers, and widths beyond those of the other tests."""

import copy

import pytest
import torch
from torch import Tensor

from chasm import CHASM, fold

FREE = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def wants(gigabytes: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(gigabytes * 2**30 > FREE, reason=f"needs a GPU with {gigabytes} GB of free memory")


def mixer_of(channels: int, n: int) -> CHASM:
    torch.manual_seed(channels)
    mixer = CHASM(channels, size=(n, n)).cuda()
    with torch.no_grad():
        for p in mixer.parameters():  # the identity at the start would hide much
            p.add_(0.1 * torch.randn_like(p) / max(1.0, p.shape[-1] ** 0.5))
    return mixer


def far(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@wants(110)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "nhwc"])
def test_each_of_many_images_comes_out_as_among_few(layout: torch.memory_format) -> None:
    few, times = 8, 180
    mixer, shape = mixer_of(96, 128), (few, 96, 128, 128)
    assert torch.Size(shape).numel() * times > 2**31
    x, g = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def many(t: Tensor) -> Tensor:
        return t.repeat(times, 1, 1, 1).to(memory_format=layout)

    def step(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        x.requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = mixer(x)
        gx, *others = torch.autograd.grad(y, [x, *mixer.parameters()], g)
        return y.detach(), gx, others

    want_y, want_gx, want = step(x.to(memory_format=layout), g.to(memory_format=layout))
    y, gx, got = step(many(x), many(g))
    for found, wanted in ((y, want_y), (gx, want_gx)):
        for part in found.split(few):
            assert far(part, wanted) < 2e-3
    for (name, _), found, wanted in zip(mixer.named_parameters(), got, want, strict=True):
        assert far(found / times, wanted) < 2e-2, name


@wants(60)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "nhwc"])
@pytest.mark.parametrize("folded", [False, True])
def test_inference_of_many_images(layout: torch.memory_format, folded: bool) -> None:
    few, times = 8, 180
    mixer = mixer_of(96, 128).eval()
    model = fold(torch.nn.Sequential(mixer), size=(128, 128)) if folded else mixer
    x = torch.randn(few, 96, 128, 128, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        want = model(x.to(memory_format=layout))
        y = model(x.repeat(times, 1, 1, 1).to(memory_format=layout))
    for part in y.split(few):
        assert far(part, want) < 2e-3


@wants(60)
@pytest.mark.parametrize("channels", [1536, 2048])
def test_wide_maps_against_float64(channels: int) -> None:
    mixer = mixer_of(channels, 32)
    oracle = copy.deepcopy(mixer).double()
    oracle.form = "fft"
    x, g = (torch.randn(2, channels, 32, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        assert mixer.explain(x).form == "triton"
        y = mixer(x)
    wide = x.detach().double().requires_grad_()
    want_y = oracle(wide)
    assert far(y, want_y) < 1e-2
    got = torch.autograd.grad(y, [x, *mixer.parameters()], g)
    want = torch.autograd.grad(want_y, [wide, *oracle.parameters()], g.double())
    names = ["x", *(name for name, _ in mixer.named_parameters())]
    for name, found, wanted in zip(names, got, want, strict=True):
        assert far(found, wanted) < 4e-2, name
