"""U-Net and ViT with data consistency, against the formula written down with DFT matrices in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chasm.backbones import Backbone, create_backbone
from chasm.mri import Sampling
from chasm.mri.fft import fft2c, to_channels, to_complex
from chasm.tasks import Reconstruction
from chasm.train import load_recipe
from chasm.train.run import build_model

HOSTS: dict[str, dict[str, Any]] = {
    "unet": {"width": 4, "depth": 2, "levels": (1, 2)},
    "vit": {"width": 8, "depth": 2, "heads": 2, "patch": 4, "head_width": 4, "slot_blocks": (2,)},
}
SIZE = (13, 18)
each_host = pytest.mark.parametrize("name", HOSTS)


def build(name: str, data_consistency: bool = True, **options: Any) -> Backbone:
    torch.manual_seed(0)
    options = {"mixer": "gfnet", "size": SIZE} | HOSTS[name] | options
    return create_backbone(name, data_consistency=data_consistency, **options).eval()


def columns(seed: int = 0) -> Tensor:
    return (torch.rand(1, 1, 1, SIZE[1], generator=torch.Generator().manual_seed(seed)) < 0.4).float()


def dft(n: int) -> np.ndarray:
    """The centred orthonormal transform along one axis: zero position and zero frequency at n // 2."""
    at = np.arange(n) - n // 2
    return np.exp(-2j * np.pi * np.outer(at, at) / n) / np.sqrt(n)


def by_hand(image: Tensor, kspace: Tensor, mask: Tensor, maps: Tensor) -> Tensor:
    """sum_q conj(S_q) F^-1(measured_q where the mask is set, else F(S_q image)): (B, 2, H, W), slice by slice."""
    rows, cols = (dft(n) for n in image.shape[-2:])
    kept = np.broadcast_to(mask.numpy() > 0, (1, 1, *image.shape[-2:]))[0, 0]
    result = np.zeros((len(image), 2, *image.shape[-2:]))
    for b, (re, im) in enumerate(image.double().numpy()):
        for coil in range(maps.shape[1]):
            s = maps[b, coil].to(torch.complex128).numpy()
            k = rows @ (s * (re + 1j * im)) @ cols.T
            k[kept] = kspace[b, coil].to(torch.complex128).numpy()[kept]
            part = np.conj(s) * (rows.conj().T @ k @ cols.conj())
            result[b] += np.stack([part.real, part.imag])
    return torch.from_numpy(result)


def coil_maps(coils: int, dtype: torch.dtype = torch.complex128) -> Tensor:
    maps = torch.randn(2, coils, *SIZE, dtype=dtype, generator=torch.Generator().manual_seed(5))
    return maps / maps.abs().square().sum(1, keepdim=True).sqrt()


@each_host
def test_one_coil_by_hand(name: str) -> None:
    x, mask = torch.randn(2, 2, *SIZE, dtype=torch.float64), columns()
    model, plain = (build(name, on).double() for on in (True, False))
    ones = torch.ones(2, 1, *SIZE, dtype=torch.complex128)
    rows, cols = (torch.from_numpy(dft(n)) for n in SIZE)
    kspace = rows @ to_complex(x) @ cols.T
    expected = by_hand(plain(x).detach(), kspace, mask, ones)
    torch.testing.assert_close(model(x, mask=mask), expected, rtol=1e-10, atol=1e-10)


@each_host
def test_many_coils_by_hand(name: str) -> None:
    x, mask, maps = torch.randn(2, 2, *SIZE, dtype=torch.float64), columns(), coil_maps(3)
    measured = torch.randn(2, 3, *SIZE, dtype=torch.complex128)
    model, plain = (build(name, on).double() for on in (True, False))
    expected = by_hand(plain(x).detach(), measured, mask, maps)
    torch.testing.assert_close(model(x, mask=mask, maps=maps, measured=measured), expected, rtol=1e-10, atol=1e-10)


@each_host
def test_it_is_off_by_default_and_adds_no_weights(name: str) -> None:
    torch.manual_seed(0)
    default = create_backbone(name, mixer="gfnet", size=SIZE, **HOSTS[name]).eval()
    with_step = build(name)
    for key, value in with_step.state_dict().items():
        assert torch.equal(value, default.state_dict()[key])
    assert len(with_step.state_dict()) == len(default.state_dict())
    x = torch.randn(1, 2, *SIZE)
    assert torch.equal(default(x, mask=columns()), default(x))  # the mask is ignored
    assert not torch.allclose(default(x), with_step(x, mask=columns()), atol=1e-3)


def test_two_images_share_a_mask() -> None:
    """Four channels are two complex images, each with k-space of its own."""
    model, x = build("unet", in_channels=4, out_channels=4), torch.randn(2, 4, *SIZE)
    kept = columns().expand(2, 2, *SIZE) > 0
    y = model(x, mask=columns())
    torch.testing.assert_close(fft2c(to_complex(y))[kept], fft2c(to_complex(x))[kept], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(y, x, atol=1e-3)


@each_host
def test_measured_lines_are_kept_in_float32_under_autocast(name: str) -> None:
    model, x, mask = build(name).train(), torch.randn(2, 2, *SIZE), columns()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, mask=mask)
    assert y.dtype == torch.float32
    kept = mask.expand(2, 1, *SIZE) > 0
    torch.testing.assert_close(fft2c(to_complex(y))[kept], fft2c(to_complex(x))[kept], rtol=1e-5, atol=1e-5)
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_it_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    model = build("unet", mixer="identity", depth=1, levels=())
    x, maps = torch.randn(2, 2, *SIZE), coil_maps(2, torch.complex64)
    physics = {"mask": columns(), "maps": maps, "measured": columns() * fft2c(maps * to_complex(x))}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, **physics), model(x, **physics), rtol=1e-5, atol=1e-5)


@each_host
@pytest.mark.parametrize("coils", [1, 3])
def test_tasks_hand_over_what_was_measured(name: str, coils: int) -> None:
    """With complex data of one or many coils; the output agrees with all that was measured, so far as maps allow."""
    task = Reconstruction(Sampling(acceleration=2, center_fraction=0.25), complex=True)
    image = coil_maps(coils, torch.complex64) if coils > 1 else torch.randn(2, 1, *SIZE, dtype=torch.complex64)
    batch = task.prepare(image)
    y = build(name)(batch.input, **batch.physics)
    ones = torch.ones(2, 1, *SIZE, dtype=torch.complex64)
    maps = ones if batch.maps is None else batch.maps
    measured = fft2c(to_complex(batch.input)) if batch.measured is None else batch.measured
    plain = build(name, data_consistency=False)(batch.input).detach()
    expected = by_hand(plain, measured, batch.mask, maps).float()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(y, to_channels(to_complex(plain)), atol=1e-3)


def test_a_recipe_turns_it_on() -> None:
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in HOSTS["unet"].items()}
    content = {"backbone": {"name": "unet", "options": options}, "train": {"steps": 1}}
    config = load_recipe(content, ["backbone.options.data_consistency=true"])
    model = build_model(config, config.task.create(), (1, *SIZE))
    with pytest.raises(ValueError, match="pass the sampling mask"):
        model(torch.randn(1, 2, *SIZE))


@each_host
@pytest.mark.parametrize(("into", "out"), [(8, 4), (3, 3)])
def test_other_images_are_refused(name: str, into: int, out: int) -> None:
    with pytest.raises(ValueError, match=f"in_channels={into} and out_channels={out}: pass data_consistency=False"):
        build(name, in_channels=into, out_channels=out)
