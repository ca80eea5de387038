"""Writes docs/overview.png, the figure of the method in the README and on the site."""

from pathlib import Path

from matplotlib import rc_context
from PIL import Image

from chasm.studies.report.overview import overview_figure


def write_overview(path: Path) -> Path:
    """Draw the figure to `path` (PNG, PDF or SVG by suffix), 1800 pixels wide, and return the path."""
    with rc_context({"font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans", "svg.hashsalt": "chasm"}):
        overview_figure().savefig(path, dpi=150)
    if path.suffix == ".png":  # flat colours: a palette is a third of the size and looks the same
        with Image.open(path) as image:
            small = image.convert("RGB").quantize(256, kmeans=1, dither=Image.Dither.NONE)
        small.save(path, optimize=True)
    return path


if __name__ == "__main__":
    write_overview(Path(__file__).parents[1] / "overview.png")
