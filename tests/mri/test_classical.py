import shutil
import subprocess
from pathlib import Path

import numpy as np
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


def test_options_are_checked() -> None:
    A = Operator(create_mask("equispaced", 32, 4).tensor())
    with pytest.raises(ValueError, match="lam > 0"):
        total_variation(A, A.forward(phantom(32)), lam=0)


def _write_cfl(path: Path, array: np.ndarray) -> None:
    path.with_suffix(".hdr").write_text("# Dimensions\n" + " ".join(map(str, array.shape)) + "\n")
    array.astype(np.complex64).ravel(order="F").tofile(path.with_suffix(".cfl"))


def _read_cfl(path: Path) -> np.ndarray:
    dims = [int(n) for n in path.with_suffix(".hdr").read_text().splitlines()[1].split()]
    return np.fromfile(path.with_suffix(".cfl"), np.complex64).reshape(dims, order="F").squeeze()


@pytest.mark.skipif(shutil.which("bart") is None, reason="the BART toolbox is not installed")
def test_agrees_with_bart(tmp_path: Path) -> None:
    target = phantom()[1:]
    A = Operator(create_mask("random", 64, 3).tensor())
    y = A.forward(target)
    lam = 3e-3
    weight = lam * A.adjoint(y).abs().max().item()  # BART's is absolute once its own scaling is off (-w 1)
    _write_cfl(tmp_path / "k", y[0, 0, :, :, None, None].numpy())
    _write_cfl(tmp_path / "s", np.ones((64, 64, 1, 1)))
    command = ["bart", "pics", "-w", "1", "-i", "300", "-R", f"T:3:0:{weight:g}", "k", "s", "x"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    theirs = torch.from_numpy(_read_cfl(tmp_path / "x"))[None, None]
    ours = total_variation(A, y, lam, iterations=300)
    assert objective(A, y, ours, lam).item() <= 1.01 * objective(A, y, theirs, lam).item()
    assert abs(db(ours, target) - db(theirs, target)) < 0.5
