"""A page to look at a reconstruction: one HTML file that needs neither a server nor the network."""

import base64
import html
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

import chasm
from chasm.common.files import json_safe, write_text
from chasm.data.records import Geometry
from chasm.reconstruct.trust import Consistency, Uncertainty
from chasm.reconstruct.volumes import SliceResult

MAX_BYTES = 48 * 2**20  # size of all images; a page of a longer volume shows every second slice, every third, ..
BYTES_PER_PIXEL = 1.8  # 12 bits, deflated a little, and as text
SHOWN_NOISE = 3  # a residual of this many times the noise of a sample is white
SHOWN_MAXIMUM = 99.7  # this percentile of the slice is white; the few brighter pixels are cut off
# name in a `SliceResult`, title, whether it is a difference with colours and a gain; the page computes the error
PANELS = (
    ("image", "Reconstruction", False),
    ("target", "Target", False),
    ("zero_filled", "Zero-filled", False),
    ("error", "Error", True),
    ("uncertainty", "Uncertainty", True),
    ("residual", "Residual", True),
)
TRUST = (
    "The residual is the part of the measured samples that the image does not explain. The best value is about 1 × the "
    "noise. With much more the image contradicts the measurement, with much less it follows the noise. The residual "
    "says nothing about what was not measured."
)

UNCERTAINTY = (
    " The uncertainty is the error that is expected in each pixel, {}. It does not include errors that the measured "
    "columns cannot show."
)


@dataclass
class Page:
    """Collects the slices of a volume as they come, and writes the page at the end.

    Attributes:
        total: number of slices in the volume.
    """

    total: int
    _slices: list[dict[str, Any]] = field(default_factory=list)
    _shape: tuple[int, ...] = ()
    _top: float = 0.0
    _seen: int = 0

    def add(self, result: SliceResult) -> None:
        """Keep a slice, unless the page would grow too large."""
        planes = {k: a for k, _, _ in PANELS if (a := getattr(result, k, None)) is not None}
        if not self._shape:
            self._shape = result.image.shape
        i, self._seen = self._seen, self._seen + 1
        if i % _stride(self.total, len(planes) * result.image.size):
            return
        shown = result.image if result.target is None else result.target
        self._top = max(self._top, float(np.percentile(shown, SHOWN_MAXIMUM)))
        against = result.consistency.against_noise
        stored = {name: _stored(plane) for name, plane in planes.items()}
        self._slices.append({"index": i, "against_noise": against, "planes": stored})

    def write(
        self,
        path: Path,
        *,
        case: str,
        subtitle: str,
        consistency: Consistency,
        uncertainty: Uncertainty | None,
        scores: Mapping[str, float],
        reference: Mapping[str, float],
        facts: Sequence[tuple[str, str]],
        notes: Sequence[str],
        geometry: Geometry | None = None,
    ) -> None:
        """Write the page.

        Args:
            path: the file to write.
            case: title of the page.
            subtitle: a line below the title.
            consistency: how well the volume explains what was measured.
            uncertainty: the expected error, if it is known.
            scores: metric -> value of the reconstruction; empty if there is no target.
            reference: metric -> value of the zero-filled image.
            facts: names and texts of other facts.
            notes: lines that the user should read first.
            geometry: position of the slices; it gives the shape of a pixel.
        """
        have = set(self._slices[0]["planes"]) | ({"error"} if "target" in self._slices[0]["planes"] else set())
        if len(self._slices) < self.total:
            shown = f"to stay small, the page shows {len(self._slices)} of {self.total} slices"
            notes = [*notes, shown]
        about_map = "" if uncertainty is None else UNCERTAINTY.format(uncertainty.calibration)
        content = {
            "case": case,
            "subtitle": subtitle,
            "height": self._shape[0],
            "width": self._shape[1],
            "aspect": _aspect(geometry),
            "total": self.total,
            "top": self._top or 1.0,
            "panels": [_panel(*panel, consistency.noise) for panel in PANELS if panel[0] in have],
            "numbers": [
                *_cards(scores, reference),
                _consistency_card(consistency),
                *([] if uncertainty is None else [_uncertainty_card(uncertainty)]),
            ],
            "facts": facts,
            "notes": notes,
            "trust": f"{TRUST} Here: {consistency}.{about_map}",
            "footer": f"Made by chasm {chasm.__version__}. This file holds everything it shows.",
            "slices": self._slices,
        }
        template = files("chasm.reconstruct").joinpath("page.html").read_text()
        text = json.dumps(json_safe(content), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        write_text(path, template.replace("__TITLE__", html.escape(case)).replace("__DATA__", text))


def _panel(key: str, text: str, difference: bool, noise: float) -> dict[str, Any]:
    """Describe a panel: a residual goes up to a fixed number of times the noise, other differences have a gain."""
    white = None
    if key == "residual" and noise > 0:
        text, white = f"{text}, to {SHOWN_NOISE} × noise", SHOWN_NOISE * noise
    return {"key": key, "label": text, "text": text, "difference": difference, "white": white}


def _stride(slices: int, pixels: int) -> int:
    return max(1, math.ceil(slices * pixels * BYTES_PER_PIXEL / MAX_BYTES))


def _stored(image: np.ndarray) -> dict[str, Any]:
    """Encode 12 bits of a magnitude image (H, W): differences along rows, low then high bytes, deflated, as text."""
    top = float(image.max())
    steps = np.round(np.clip(image / (top if top > 0 else 1), 0, 1) * 4095).astype(np.uint16)
    steps[:, 1:] -= steps[:, :-1].copy()
    low, high = (steps & 255).astype(np.uint8), (steps >> 8).astype(np.uint8)
    packed = zlib.compress(low.tobytes() + high.tobytes(), 6)
    return {"max": top, "data": base64.b64encode(packed).decode()}


def _aspect(geometry: Geometry | None) -> float:
    """Return the height of a pixel over its width."""
    if geometry is None:
        return 1.0
    columns, rows = np.linalg.norm(geometry.affine[:3, :2], axis=0)
    return float(rows / columns) if columns > 0 and rows > 0 else 1.0


def _cards(scores: Mapping[str, float], reference: Mapping[str, float]) -> list[tuple[str, str, str]]:
    under = {k: f"zero-filled {v:.4g}" for k, v in reference.items()}
    return [(k.upper(), f"{v:.4g}", under.get(k, "")) for k, v in scores.items()]


def _consistency_card(consistency: Consistency) -> tuple[str, str, str]:
    if math.isnan(consistency.residual):
        return "Residual", "unknown", str(consistency)
    if not consistency.noise > 0:
        return "Residual", f"{consistency.residual:.2g}", "of the signal; no noise is known"
    return "Residual", f"{consistency.against_noise:.2g} × noise", f"noise from {consistency.noise_from}"


def _uncertainty_card(uncertainty: Uncertainty) -> tuple[str, str, str]:
    return "Uncertainty", f"{uncertainty.relative:.1%}", f"of the maximum; {uncertainty.made_of}"
