"""VarNet: equal to the public E2E-VarNet restated here with the same weights, its counts, slots and odd inputs."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chasm.backbones import VarNet, create_backbone
from chasm.backbones.measurement import Measurement
from chasm.backbones.varnet import centre_columns
from chasm.data.embedded import Embedded
from chasm.mri import Sampling, rss
from chasm.mri.fft import ifft2c, to_channels, to_complex
from chasm.surgery.count import count_parameters
from chasm.tasks import Reconstruction

SIZE = (21, 36)
SMALL: dict[str, Any] = {"size": SIZE, "cascades": 3, "width": 2, "levels": (2, 4)}


def build(**options: Any) -> VarNet:
    torch.manual_seed(0)
    model = create_backbone("varnet", **(SMALL | options)).eval()
    assert isinstance(model, VarNet)
    nn.init.uniform_(model.eta, 0.5, 1.5)
    return model


def columns() -> Tensor:
    mask = torch.rand(1, 1, 1, SIZE[1], generator=torch.Generator().manual_seed(0)) < 0.3
    mask[..., 16:20] = True
    return mask


def coil_maps(coils: int) -> Tensor:
    maps = torch.randn(2, coils, *SIZE, dtype=torch.complex128, generator=torch.Generator().manual_seed(5))
    return maps / rss(maps)


# The public model: complex numbers as a last axis of two, one U-Net per cascade, coil images by root-sum-of-squares.


def centred(x: Tensor, transform: Any) -> Tensor:
    """A centred orthonormal transform over the last two axes but one, of (..., H, W, 2)."""
    axes = (-2, -1)
    y = transform(torch.fft.ifftshift(torch.view_as_complex(x.contiguous()), dim=axes), norm="ortho")
    return torch.view_as_real(torch.fft.fftshift(y, dim=axes))


def product(a: Tensor, b: Tensor) -> Tensor:
    re = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
    return torch.stack([re, a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]], -1)


def public_unet(weights: dict[str, Tensor], x: Tensor, depth: int = 4) -> Tensor:
    def activated(x: Tensor) -> Tensor:
        centre, spread = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True, unbiased=False)
        y = (x - centre) / (spread + 1e-5).sqrt()
        return torch.where(y > 0, y, 0.2 * y)

    def block(name: str, x: Tensor) -> Tensor:
        for conv in ("conv1", "conv2"):
            x = activated(F.conv2d(x, weights[f"{name}.{conv}.weight"], padding=1))
        return x

    stack = []
    for level in range(depth):
        x = block(f"down.{level}", x)
        stack.append(x)
        x = F.avg_pool2d(x, kernel_size=2, stride=2)
    x = block(f"down.{depth}", x)
    for step in range(depth):
        x = activated(F.conv_transpose2d(x, weights[f"expand.{step}.weight"], stride=2))
        x = block(f"up.{step}", torch.cat([x, stack.pop()], dim=1))
    return F.conv2d(x, weights["head.weight"], weights["head.bias"])


def public_refinement(weights: dict[str, Tensor], image: Tensor) -> Tensor:
    """(B, 1, H, W, 2) -> same: normalised, zero-padded on both sides to multiples of 16."""
    x = image.permute(0, 4, 1, 2, 3).flatten(1, 2)
    mean, std = (f(dim=-1)[:, :, None, None] for f in (x.flatten(2).mean, x.flatten(2).std))
    h, w = x.shape[-2:]
    pads = [(math.floor(n / 2), math.ceil(n / 2)) for n in (-w % 16, -h % 16)]
    y = public_unet(weights, F.pad((x - mean) / std, pads[0] + pads[1]))
    y = y[..., pads[1][0] : pads[1][0] + h, pads[0][0] : pads[0][0] + w]
    return (y * std + mean).unflatten(1, (2, 1)).permute(0, 2, 3, 4, 1)


def public_varnet(model: VarNet, kspace: Tensor, mask: Tensor, maps: Tensor) -> Tensor:
    """Masked k-space (B, Q, H, W, 2) -> (B, H, W)."""
    weights = model.state_dict()
    current = kspace.clone()
    dc_weights = [torch.tensor(0.7), *weights["eta"]]  # the first has no effect
    for cascade, dc_weight in enumerate(dc_weights):
        own = f"refinements.{cascade}.unet."
        unet = {name.removeprefix(own): value for name, value in weights.items() if name.startswith(own)}
        conjugate = maps * torch.tensor([1.0, -1.0])
        image = product(centred(current, torch.fft.ifft2), conjugate).sum(1, keepdim=True)
        term = centred(product(public_refinement(unet, image), maps), torch.fft.fft2)
        soft = torch.where(mask[..., None], current - kspace, torch.zeros(())) * dc_weight
        current = current - soft - term
    coils = centred(current, torch.fft.ifft2)
    return coils.square().sum(-1).sum(1).sqrt()


def public_sensitivities(model: VarNet, kspace: Tensor, mask: Tensor) -> Tensor:
    """Masked k-space (B, Q, H, W, 2) -> maps of that shape, from the symmetric centre of the mask (B, 1, 1, W)."""
    low = mask[:, 0, 0].to(torch.int8)
    middle = low.shape[1] // 2
    left, right = torch.argmin(low[:, :middle].flip(1), dim=1), torch.argmin(low[:, middle:], dim=1)
    count = torch.max(2 * torch.min(left, right), torch.ones_like(left))
    first = torch.div(low.shape[1] - count + 1, 2, rounding_mode="trunc")
    kept = torch.zeros_like(kspace)
    for i, (begin, n) in enumerate(zip(first.tolist(), count.tolist(), strict=True)):
        kept[i, :, :, begin : begin + n] = kspace[i, :, :, begin : begin + n]
    own = "sensitivity_net.refinement.unet."
    weights = {k.removeprefix(own): v for k, v in model.state_dict().items() if k.startswith(own)}
    images = centred(kept, torch.fft.ifft2)
    maps = public_refinement(weights, images.flatten(0, 1).unsqueeze(1)).unflatten(0, images.shape[:2]).squeeze(2)
    return maps / maps.square().sum(-1).sum(1, keepdim=True).sqrt().unsqueeze(-1)


@torch.no_grad()
def test_learned_sensitivities_equal_those_of_the_public_network() -> None:
    """Two slices have masks of their own. The output is that image, with the phase that belongs to the given maps."""
    model, given = build(sensitivities="learned", sensitivity_width=3).double(), coil_maps(3)
    mask = columns().repeat(2, 1, 1, 1)
    mask[1, ..., 14:22], mask[1, ..., 13] = True, False
    kspace = torch.where(mask, torch.randn(2, 3, *SIZE, dtype=torch.complex128), 0)
    maps = public_sensitivities(model, torch.view_as_real(kspace), mask)
    learned = model.learned_maps(kspace, mask)
    torch.testing.assert_close(torch.view_as_real(learned), maps, rtol=1e-9, atol=1e-9)
    zero_filled = torch.randn(2, 2, *SIZE, dtype=torch.float64)
    own = to_complex(model(zero_filled, mask=mask, maps=learned, measured=kspace))
    expected = public_varnet(model, torch.view_as_real(kspace), mask, maps)
    coils = ifft2c(model.restore(Measurement(mask, kspace, learned, SIZE)))
    torch.testing.assert_close(rss(coils)[:, 0], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(own, (learned.conj() * coils).sum(1, keepdim=True))

    found = to_complex(model(zero_filled, mask=mask, maps=given, measured=kspace))
    torch.testing.assert_close(found.abs(), own.abs())
    turned = own * torch.polar(torch.ones_like(own.real), (given.conj() * learned).sum(1, keepdim=True).angle())
    torch.testing.assert_close(found, turned)


@torch.no_grad()
def test_learned_sensitivities_see_the_centre_only() -> None:
    model, mask = build(sensitivities="learned"), columns()
    kspace = torch.randn(1, 3, *SIZE, dtype=torch.complex64)
    other = torch.where(centre_columns(mask), kspace, torch.randn_like(kspace))
    first, second = (model.learned_maps(k, mask) for k in (kspace, other))
    assert torch.equal(first, second)
    assert centre_columns(torch.ones(1, 1, 1, 7, dtype=torch.bool)).all()
    with pytest.raises(ValueError, match="are given, not learned"):
        build().learned_maps(kspace, mask)


def test_learned_sensitivities_are_not_used_for_one_coil() -> None:
    plain, learned = build(), build(sensitivities="learned")
    learned.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(1, 2, *SIZE)
    assert torch.equal(plain(x, mask=columns()), learned(x, mask=columns()))


def test_a_network_learns_sensitivities() -> None:
    """Trained on images only, the maps of heads it has not seen come close to the true ones, but for their phase."""
    task = Reconstruction(Sampling(acceleration=3, center_fraction=0.2), complex=True)
    data = Embedded("train", size=SIZE, cases=20, slices=1)
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in SIZE), indexing="ij")
    angles = torch.arange(4) * torch.pi / 2
    true = torch.stack([torch.exp(-((x - a.cos()) ** 2 + (y - a.sin()) ** 2) + 1j * (a + 2 * x)) for a in angles])
    true = true / rss(true[None])[0]
    images = torch.stack([data[i].image * true for i in range(10)])
    seen, unseen = task.prepare(images[:8]), task.prepare(images[8:])
    model = build(sensitivities="learned", cascades=2, width=4, depth=2, levels=()).train()

    @torch.no_grad()
    def agreement() -> float:
        assert unseen.measured is not None
        assert unseen.mask is not None
        learned = model.learned_maps(unseen.measured, unseen.mask)
        cosine, weight = (learned.conj() * true).sum(1, keepdim=True).abs(), unseen.target.square()
        return float((cosine * weight).sum() / weight.sum())

    before, losses = agreement(), []
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        optimiser.zero_grad()
        loss = task.loss(model(seen.input, **seen.physics), seen)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert before < 0.72
    assert agreement() > 0.8


@pytest.mark.parametrize("coils", [1, 3])
def test_equals_the_public_network_with_the_same_weights(coils: int) -> None:
    model, mask, maps = build().double(), columns(), coil_maps(coils)
    kspace = torch.where(mask, torch.randn(2, coils, *SIZE, dtype=torch.complex128), 0)
    with torch.no_grad():
        expected = public_varnet(model, torch.view_as_real(kspace), mask, torch.view_as_real(maps))
        found = model.restore(Measurement(mask, kspace, maps, SIZE))
        torch.testing.assert_close(rss(ifft2c(found))[:, 0], expected, rtol=1e-9, atol=1e-9)

        zero_filled = torch.randn(2, 2, *SIZE, dtype=torch.float64)  # not looked at, since the k-space is given
        y = to_complex(model(zero_filled, mask=mask, maps=maps, measured=kspace))
        torch.testing.assert_close(y, (maps.conj() * ifft2c(found)).sum(1, keepdim=True))


def test_one_coil_without_maps_is_the_magnitude_of_the_public_output() -> None:
    model, mask = build().double(), columns()
    kspace = torch.where(mask, torch.randn(2, 1, *SIZE, dtype=torch.complex128), 0)
    x = torch.view_as_real(ifft2c(kspace))[:, 0].movedim(-1, 1)
    ones = torch.view_as_real(torch.ones(2, 1, *SIZE, dtype=torch.complex128))
    with torch.no_grad():
        y = to_complex(model(x, mask=mask)).abs()[:, 0]
        torch.testing.assert_close(y, public_varnet(model, torch.view_as_real(kspace), mask, ones))


def test_parameters() -> None:
    """Twelve U-Nets of width 18, and a weight between any two."""
    widths = [18, 36, 72, 144, 288]
    down = sum(9 * a * b + 9 * b * b for a, b in zip([2, *widths[:-1]], widths, strict=True))
    up = sum(4 * 2 * c * c + 9 * 2 * c * c + 9 * c * c for c in widths[:-1])
    unet = down + up + 2 * 18 + 2
    assert count_parameters(create_backbone("varnet"))[0] == 12 * unet + 11 == 29_452_067
    assert count_parameters(create_backbone("varnet", sensitivities="learned"))[0] - 29_452_067 == 484_898


def test_unmeasured_entries_do_not_count() -> None:
    model, mask, maps = build(), columns(), coil_maps(2).to(torch.complex64)
    measured, x = torch.randn(2, 2, *SIZE, dtype=torch.complex64), torch.randn(2, 2, *SIZE)
    other = torch.where(mask, measured, 7.0)
    first, second = (model(x, mask=mask, maps=maps, measured=k) for k in (measured, other))
    assert torch.equal(first, second)


def test_every_cascade_has_slots_of_its_own() -> None:
    model = build(mixer="gfnet")
    seen: list[tuple[str, tuple[int, ...]]] = []
    for name, slot in model.slots.items():
        slot.register_forward_hook(lambda module, args, output, name=name: seen.append((name, args[0].shape[1:])))
    x = torch.randn(1, 2, *SIZE)
    y = model(x, mask=columns())
    places = {2: (8, 8, 12), 4: (32, 2, 3)}  # padded to 32 x 48
    assert seen == [(f"{100 * c + level}", shape) for c in range(3) for level, shape in places.items()]
    with torch.no_grad():
        for parameter in model.slots["104"].parameters():
            parameter.add_(0.5)
    assert not torch.allclose(model(x, mask=columns()), y)


def test_a_blank_slice_and_an_image_without_imaginary_part_train() -> None:
    model = build().train()
    x = torch.zeros(2, 2, *SIZE)
    x[1, 0] = torch.rand(SIZE)
    y = model(x, mask=torch.ones(1, 1, 1, SIZE[1]))
    y.square().mean().backward()
    assert y.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_scaling_the_measurement_scales_the_image() -> None:
    model, x = build().double(), torch.randn(1, 2, *SIZE, dtype=torch.float64)
    torch.testing.assert_close(model(1e-5 * x, mask=columns()), 1e-5 * model(x, mask=columns()))


def test_fourier_transforms_are_float32_under_autocast() -> None:
    model, x = build().train(), torch.randn(2, 2, *SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, mask=columns())
    assert y.dtype == torch.float32
    expected = model(x, mask=columns())
    assert 0 < (y - expected).norm() < 0.05 * expected.norm()


@torch.no_grad()
def test_all_cascades_share_one_compiled_graph() -> None:
    torch.compiler.reset()
    model, x, graphs = build(mixer="gfnet", depth=1, levels=(1,)), torch.randn(1, 2, *SIZE), []
    expected = model(x, mask=columns())

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(model(x, mask=columns()), expected)
    assert len(graphs) == 1


def test_multi_coil_batches_of_the_task_train() -> None:
    task = Reconstruction(Sampling(acceleration=2, center_fraction=0.2), complex=True)
    batch = task.prepare(coil_maps(3).to(torch.complex64))
    model = build().train()
    task.loss(model(batch.input, **batch.physics), batch).backward()
    assert batch.measured is not None
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_channels": 8}, "8 -> 2: use the unet"),
        ({"cascades": 0}, "1 or more"),
        ({"levels": (5,)}, "0 to 4"),
        ({"sensitivities": "learned", "align_phase": True}, "align_phase needs sensitivities that are given"),
        ({"sensitivities": "espirit"}, "unknown sensitivities 'espirit': .*given, learned"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize("coils", [1, 3])
def test_a_network_that_aligns_the_phase_treats_all_phases_alike(coils: int) -> None:
    maps = coil_maps(coils) if coils > 1 else None
    k = torch.randn(2, coils, *SIZE, dtype=torch.complex128, generator=torch.Generator().manual_seed(1)) * columns()
    weights = 1 if maps is None else maps.conj()

    def output(network: VarNet, turn: complex) -> Tensor:
        x = to_channels((weights * ifft2c(k * turn)).sum(1, keepdim=True))
        return to_complex(network(x, mask=columns(), maps=maps, measured=None if maps is None else k * turn))

    turn = 0.6 + 0.8j
    for align_phase in (True, False):
        network = build(align_phase=align_phase).double()
        with torch.no_grad():
            found, expected = output(network, turn), output(network, 1) * turn
        assert ((found - expected).abs().amax() < 1e-10) == align_phase


def test_a_blank_slice_trains_with_an_aligned_phase() -> None:
    model = build(align_phase=True).train()
    x = torch.cat([torch.zeros(1, 2, *SIZE), torch.randn(1, 2, *SIZE)])
    y = model(x, mask=columns())
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
