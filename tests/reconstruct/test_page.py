"""The page of a reconstruction: one file, and what it holds. A browser opens it in tests/interop."""

import base64
import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import brains, call, columns, make_run

from chasm.data import Geometry, KSpaceScan, write_scan
from chasm.models import shipped_models
from chasm.reconstruct import page

pytestmark = pytest.mark.usefixtures("no_picture")


def content(file: Path) -> dict[str, Any]:
    """What the page shows."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', file.read_text(), re.DOTALL)
    return json.loads(found)


def image(stored: dict[str, Any], shape: tuple[int, int]) -> np.ndarray:
    """Undo the packing, as the script of the page does."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(stored["data"])), np.uint8).astype(np.uint16)
    low, high = raw.reshape(2, *shape)
    return np.cumsum(low | high << 8, axis=1, dtype=np.uint16) * stored["max"] / 4095


def test_it_holds_every_slice_and_needs_nothing_else(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", brains(3))
    words = ["--run", "tv", "-o", tmp_path / "out.h5", "--report", tmp_path / "see.html"]
    found = call(tmp_path / "scan.npy", *words)
    assert found.exit_code == 0, found.output
    assert f"page {tmp_path / 'see.html'}" in found.output
    text = (tmp_path / "see.html").read_text()
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", text)
    shown = content(tmp_path / "see.html")
    assert [panel["key"] for panel in shown["panels"]] == ["image", "target", "zero_filled", "error", "residual"]
    assert [s["index"] for s in shown["slices"]] == [0, 1, 2]
    with h5py.File(tmp_path / "out.h5") as f:
        for stored, wanted in zip(shown["slices"], f["reconstruction"], strict=True):
            got = image(stored["planes"]["image"], wanted.shape)
            np.testing.assert_allclose(got, wanted, atol=wanted.max() / 4095)
    # a page is replaced, also by that of another volume, and nothing else is
    assert call(tmp_path / "scan.npy", *words).exit_code == 0
    assert call(tmp_path / "scan.npy", "--run", "tv", "-o", tmp_path / "c.h5", *words[4:]).exit_code == 0
    (tmp_path / "mine.html").write_text("mine")
    found = call(tmp_path / "scan.npy", "--run", "tv", "-o", tmp_path / "b.h5", "--report", tmp_path / "mine.html")
    assert found.exit_code == 3
    assert "mine.html: chasm did not write this file" in found.output
    found = call(tmp_path / "scan.npy", "--run", "tv", "-o", tmp_path / "b.h5", "--report", tmp_path / "mine.pdf")
    assert "mine.pdf: expected a name that ends in .html" in found.output


def test_a_measured_scan_without_a_target(tmp_path: Path) -> None:
    """No target, no error; pixels have their shape; text from the data cannot become markup."""
    k = (writers.centred_fft(brains(2))[:, None] * columns(40)).astype(np.complex64)
    affine = np.diag([1.0, 2.5, 4.0, 1.0])
    write_scan(KSpaceScan(k, (48, 40), Geometry(affine)), tmp_path / "a<b>.mrd")
    run = make_run(tmp_path / "run", complex=True)
    found = call(tmp_path / "a<b>.mrd", "--run", run, "-o", tmp_path / "out.h5", "--report", tmp_path / "see.html")
    assert found.exit_code == 0, found.output
    text = (tmp_path / "see.html").read_text()
    assert "a<b>" not in text
    assert "<title>a&lt;b&gt;</title>" in text
    shown = content(tmp_path / "see.html")
    assert shown["case"] == "a<b>"
    assert [panel["key"] for panel in shown["panels"]] == ["image", "zero_filled", "residual"]
    assert shown["aspect"] == pytest.approx(2.5)
    assert [card[0] for card in shown["numbers"]] == ["Residual"]


def test_several_volumes_and_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_BYTES", 48 * 40 * 5 * 5)
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", brains(4))
    run = make_run(tmp_path / "run", complex=True)
    words = ["--run", run, "-o", tmp_path / "out.h5", "--report", tmp_path / "see.html"]
    found = call(tmp_path / "a.npy", tmp_path / "b.npy", *words)
    assert found.exit_code == 0, found.output
    shown = content(tmp_path / "see-out-b.html")
    assert [s["index"] for s in shown["slices"]] == [0, 2]
    assert "to stay small, the page shows 2 of 4 slices" in shown["notes"]
    assert call(tmp_path / "a.npy", tmp_path / "b.npy", *words[:-1], tmp_path / "out.html").exit_code == 0
    assert sorted(file.name for file in tmp_path.glob("out*.html")) == ["out-a.html", "out-b.html"]


def test_a_shipped_model_is_called_by_its_name(tmp_path: Path) -> None:
    """And not by the folder that it is installed in."""
    np.save(tmp_path / "scan.npy", brains(1))
    found = call(
        tmp_path / "scan.npy", "--run", "brain-x4", "-o", tmp_path / "out.h5", "--report", tmp_path / "see.html"
    )
    assert found.exit_code == 0, found.output
    assert ["Run", "brain-x4"] in content(tmp_path / "see.html")["facts"]
    assert str(shipped_models()["brain-x4"]) not in (tmp_path / "see.html").read_text()
