"""Masks that keep points of a plane: their budget, their distances, and what they report."""

import numpy as np
import pytest
import torch

from chasm.mri import Sampling, create_mask, create_plane_mask, estimate_maps, fft2c
from chasm.mri.plane_masks import PLANE_KINDS, side_lobe


@pytest.mark.parametrize("kind", PLANE_KINDS)
@pytest.mark.parametrize("size", [(64, 64), (48, 65), (12, 32)])
@pytest.mark.parametrize("acceleration", [3, 4, 8])
def test_the_budget_is_met_and_the_centre_kept(kind, size, acceleration):
    mask = create_plane_mask(kind, size, acceleration, seed=2)
    budget = round(size[0] * size[1] / acceleration)
    assert mask.points <= budget
    assert mask.points > budget - 1 if kind != "radial-2d" else mask.points > budget - 2 * max(size)
    assert mask.acceleration == pytest.approx(size[0] * size[1] / mask.points)
    rows, columns = mask.block
    assert (rows, columns) == tuple(round(n * 0.32 / acceleration) for n in size)
    top, left = ((n - m + 1) // 2 for n, m in zip(size, (rows, columns), strict=True))
    assert mask.array[top : top + rows, left : left + columns].all()
    assert np.array_equal(mask.array, create_plane_mask(kind, size, acceleration, seed=2).array)
    assert not np.array_equal(mask.array, create_plane_mask(kind, size, acceleration, seed=3).array)


@pytest.mark.parametrize("acceleration", [4, 8, 12])
def test_points_of_a_poisson_disc_keep_their_distance(acceleration):
    mask = create_plane_mask("poisson-2d", (64, 64), acceleration, center_fraction=0)
    points = np.argwhere(mask.array)
    squared = ((points[:, None] - points) ** 2).sum(-1)
    nearest = squared[~np.eye(len(points), dtype=bool)].min()
    drawn = np.random.default_rng(0).permutation(64 * 64)[: len(points)]
    at_random = np.stack(np.unravel_index(drawn, (64, 64)), 1)
    by_chance = ((at_random[:, None] - at_random) ** 2).sum(-1)[~np.eye(len(points), dtype=bool)].min()
    assert nearest > by_chance
    assert nearest >= {4: 2, 8: 4, 12: 8}[acceleration]


def test_poisson_points_are_those_of_drawing_one_after_the_other():
    priority = 1 - np.random.default_rng(1).uniform(size=(20, 17))
    from chasm.mri.plane_masks import _draw_with_distance

    drawn: list[tuple[int, int]] = []
    for flat in np.argsort(-priority, axis=None):
        y, x = divmod(int(flat), 17)
        if all((y - b) ** 2 + (x - a) ** 2 >= 8 for b, a in drawn):
            drawn.append((y, x))
    assert sorted(drawn) == [tuple(p) for p in np.argwhere(_draw_with_distance(priority, 8)).tolist()]


def test_gaussian_points_lean_to_the_middle_and_radial_ones_lie_on_lines():
    gaussian = create_plane_mask("gaussian-2d", (96, 96), 8)
    y, x = (np.argwhere(gaussian.array) - 48).T
    assert np.hypot(y, x).mean() < 0.6 * np.hypot(*np.meshgrid(np.arange(-48, 48), np.arange(-48, 48))).mean()
    radial = create_plane_mask("radial-2d", (97, 97), 8, center_fraction=0)
    assert np.array_equal(radial.array, radial.array[::-1, ::-1])  # lines through the middle
    rings = [radial.array[48, 48 + r] + radial.array[48 + r, 48] for r in range(1, 3)]
    assert all(rings)


def test_coherence_of_columns_does_not_depend_on_how_they_are_written():
    for kind in ("equispaced", "random", "equispaced-plain"):
        mask = create_mask(kind, 64, 4)
        assert side_lobe(mask.tensor()[0, 0].expand(48, 64).numpy()) == pytest.approx(mask.coherence)
    structured = create_mask("equispaced", 128, 8).coherence
    assert all(create_plane_mask(kind, (128, 128), 8).coherence < structured / 3 for kind in PLANE_KINDS)
    every_second = np.zeros((32, 32))
    every_second[::2, ::2] = 1
    assert side_lobe(every_second) == pytest.approx(1)


def test_a_sampling_gives_points_or_columns():
    sampling = Sampling("poisson-2d", acceleration=4, seed=7)
    mask = sampling.on(24, 32)
    assert mask.tensor().shape == (1, 1, 24, 32)
    assert mask is sampling.on(24, 32)
    assert mask.report() == {
        "kind": "poisson-2d",
        "size": [24, 32],
        "points": 192,
        "acceleration": 4.0,
        "coherence": round(mask.coherence, 4),
        "nominal": 4,
        "center_size": [2, 3],
        "seed": 7,
    }
    assert Sampling("random", acceleration=4).on(24, 32) == create_mask("random", 32, 4)
    with pytest.raises(ValueError, match="poisson-2d mask keeps points and not columns"):
        sampling.mask(32)


def test_sensitivities_come_from_the_square_in_the_centre():
    mask = create_plane_mask("gaussian-2d", (48, 64), 4, center_fraction=0.25)
    assert mask.center == (26, 38)
    y = fft2c(torch.randn(1, 3, 48, 64, dtype=torch.complex64))
    assert torch.allclose(estimate_maps(mask.tensor() * y, mask.center), estimate_maps(y, mask.center), atol=0.05)


def test_mistakes_are_one_line():
    with pytest.raises(ValueError, match=r"unknown kind of a mask of points 'poison-2d'.*poisson-2d"):
        create_plane_mask("poison-2d", (8, 8))
    with pytest.raises(ValueError, match="leaves nothing of the x4 budget"):
        create_plane_mask("poisson-2d", (16, 16), 4, center_fraction=0.5)
    with pytest.raises(ValueError, match=r"center_fraction must lie in \[0, 1\]"):
        create_plane_mask("poisson-2d", (16, 16), 4, center_fraction=2)
    with pytest.raises(ValueError, match="acceleration > 1"):
        create_plane_mask("poisson-2d", (16, 16), 1)
