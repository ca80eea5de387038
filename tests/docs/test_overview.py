"""The overview figure: the pictures are what their captions say, and the committed file is what the code draws."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from chasm.studies.report import overview
from helpers import site_tools

DOCS = Path(__file__).parents[2] / "docs"
COMMITTED = DOCS / "overview.png"
REDRAW = "redraw it with: python docs/site_tools/overview.py"
write_overview = site_tools("overview").overview.write_overview


def test_overview_is_drawn_small_and_wide(tmp_path: Path) -> None:
    path = write_overview(tmp_path / "overview.png")
    assert path.stat().st_size < 200_000
    with Image.open(path) as image:
        assert image.width == 1800
        pixels = np.asarray(image.convert("L"))
    assert pixels.min() < 60  # ink
    assert (pixels[:4] > 240).all()  # nothing runs over the margin
    assert (pixels[:, -4:] > 240).all()


def test_committed_overview_is_what_the_code_draws(tmp_path: Path) -> None:
    drawn = write_overview(tmp_path / "overview.png")
    with Image.open(drawn) as a, Image.open(COMMITTED) as b:
        assert a.size == b.size, REDRAW
        ours, theirs = (np.asarray(i.convert("L").reduce(10), dtype=float) for i in (a, b))
    assert np.abs(ours - theirs).mean() < 2, REDRAW


def test_vector_formats(tmp_path: Path) -> None:
    svg = write_overview(tmp_path / "overview.svg").read_text()
    assert svg.lstrip().startswith("<?xml")


def test_the_drawn_basis_is_orthogonal_and_the_gains_positive() -> None:
    U = overview._rotation(6, seed=11)
    np.testing.assert_allclose(U.T @ U, np.eye(6), atol=1e-12)
    gains = overview._gains(6)
    assert gains.shape == (len(overview.BINS), 6)
    assert (gains > 0).all()
    assert (gains <= 1).all()


@pytest.mark.parametrize("angle", [0.0, 0.7])
def test_an_ellipse_has_its_axes_along_the_directions_given(angle: float) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Ellipse

    ax = Figure().add_subplot()
    overview._ellipse(ax, 1, 2, angle, (4, 2), "red")
    shapes = [p for p in ax.patches if isinstance(p, Ellipse) and p.angle == np.rad2deg(angle) and p.width == 8]
    assert shapes
    ends = {tuple(np.round(text.xy, 6)) for text in ax.texts}
    assert tuple(np.round((1 + 4 * np.cos(angle), 2 + 4 * np.sin(angle)), 6)) in ends
