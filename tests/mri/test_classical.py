import pytest
import torch
from torch import Tensor

from chasm.mri import Operator, create_mask, rss
from chasm.mri.classical import objective, total_variation


def phantom(size: int = 64) -> Tensor:
    """(2, 1, H, W) in [0, 1]: ellipses in an ellipse, and the same upside down with a phase."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")

    def ellipse(cy: float, cx: float, ry: float, rx: float) -> Tensor:
        return (((y - cy) / ry).square() + ((x - cx) / rx).square() < 1).float()

    image = ellipse(0, 0, 0.9, 0.7) - 0.7 * ellipse(0, 0, 0.82, 0.62)
    for cy, cx, ry, rx, v in ((0, 0.25, 0.35, 0.12, 0.3), (0.1, -0.25, 0.4, 0.15, -0.2), (-0.45, 0, 0.15, 0.2, 0.4)):
        image = image + v * ellipse(cy, cx, ry, rx)
    image = image.clamp(0, 1).to(torch.complex64)
    return torch.stack([image, image.flip(0) * torch.exp(1j * (x + 0.5 * y))])[:, None]


def db(image: Tensor, target: Tensor) -> float:
    return -10 * (image - target).abs().square().mean().log10().item()


def coil_maps(size: int) -> Tensor:
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    maps = torch.stack([(1.3 + s * x + t * y) * torch.exp(1j * (s * y + t)) for s, t in ((1, 0), (-1, 0), (0, 1))])
    return (maps / rss(maps[None])[0])[None].to(torch.complex64)


@pytest.mark.parametrize("kind", ["equispaced", "random"])
def test_improves_clearly_on_zero_filled(kind: str) -> None:
    target = phantom()
    A = Operator(create_mask(kind, 64, 3).tensor())
    y = A.forward(target)
    found = total_variation(A, y)
    for i in range(2):  # each slice of the batch
        assert db(found[i], target[i]) > db(A.adjoint(y)[i], target[i]) + 4


def test_the_objective_falls_to_its_minimum() -> None:
    A = Operator(create_mask("random", 64, 3).tensor())
    y = A.forward(phantom())
    values = torch.stack([objective(A, y, total_variation(A, y, iterations=n), 3e-3) for n in (5, 10, 20, 40, 80)])
    assert (values[1:] < values[:-1]).all()
    start = objective(A, y, A.adjoint(y), 3e-3)
    assert (values[-1] < 0.9 * start).all()
    # the default iterations are enough, and the minimum is one: no direction leads further down
    assert (objective(A, y, total_variation(A, y), 3e-3) < 1.01 * values[-1]).all()
    found = total_variation(A, y, iterations=300)
    best = objective(A, y, found, 3e-3)
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        step = 0.01 * torch.randn(found.shape, dtype=found.dtype, generator=g)
        assert (objective(A, y, found + step, 3e-3) > best).all()
        assert (objective(A, y, found + 0.02 * (phantom() - found), 3e-3) > 0.9999 * best).all()


def test_scaling_the_data_scales_the_image() -> None:
    A = Operator(create_mask("equispaced", 64, 4).tensor())
    y = A.forward(phantom())
    torch.testing.assert_close(total_variation(A, 1000 * y) / 1000, total_variation(A, y), atol=1e-4, rtol=0)


def test_several_coils() -> None:
    target, maps = phantom(), coil_maps(64)
    A = Operator(create_mask("equispaced", 64, 4).tensor(), maps)
    y = A.forward(target)
    found = total_variation(A, y)
    assert db(found, target) > db(A.adjoint(y), target) + 4
    # uniform maps: the iterative solve agrees with the exact one
    one = Operator(A.mask, torch.ones(1, 1, 64, 64, dtype=torch.complex64))
    y1 = one.forward(target)
    exact = total_variation(Operator(A.mask), y1)
    assert db(total_variation(one, y1), exact) > 40


@pytest.mark.parametrize("factor", [1e5, 0.01, 1e-8])
def test_scaling_the_maps_scales_the_image(factor: float) -> None:
    """Maps from other programs have other norms: 1e5 gave NaN, and 0.01 lost 7 dB."""
    target, maps, mask = phantom(), coil_maps(64), create_mask("equispaced", 64, 4).tensor()
    y = Operator(mask, maps).forward(target)
    usual, scaled = (total_variation(Operator(mask, m), y) for m in (maps, factor * maps))
    torch.testing.assert_close(factor * scaled, usual, atol=1e-4, rtol=0)
    each = torch.cat([maps, factor * maps])  # one slice each: every slice has its own scale
    both = total_variation(Operator(mask, each), y)
    torch.testing.assert_close(torch.cat([both[:1], factor * both[1:]]), usual, atol=1e-4, rtol=0)


def test_options_are_checked() -> None:
    A = Operator(create_mask("equispaced", 32, 4).tensor())
    with pytest.raises(ValueError, match="lam > 0"):
        total_variation(A, A.forward(phantom(32)), lam=0)
