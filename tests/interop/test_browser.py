"""The page of a reconstruction in headless Chromium, where that is installed: `make interop`."""

import sys
from pathlib import Path

import numpy as np
import pytest
from programs import PHONE, found_in, needs

sys.path.insert(0, str(Path(__file__).parents[1] / "reconstruct"))
from runs import brains

from chasm.reconstruct import reconstruct

pytestmark = [pytest.mark.interop, needs("chromium")]
PROBE = """<script>
const pause = () => new Promise(done => setTimeout(done, 10));
const wait = async test => { for (let i = 0; i < 400 && !test(); i++) await pause(); };
const grey = key => { const c = document.querySelector(`[data-panel=${key}] canvas`);
  const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  return d.reduce((sum, value, i) => i % 4 ? sum : sum + value, 0); };
const shown = () => [...document.querySelectorAll("figure")].filter(f => f.offsetParent).map(f => f.dataset.panel);
const drawn = () => document.documentElement.dataset.drawn;
const key = k => document.dispatchEvent(new KeyboardEvent("keydown", {key: k, bubbles: true}));
onload = async () => {
  const seen = {};
  await wait(() => drawn() === "1"); seen.start = grey("image"); seen.error = grey("error");
  seen.over = document.documentElement.scrollWidth - innerWidth; seen.width = innerWidth;
  seen.rows = new Set([...document.querySelectorAll("figure")].map(f => f.getBoundingClientRect().top)).size;
  key("ArrowRight"); await wait(() => drawn() === "2"); seen.next = grey("image");
  key("Home"); await wait(() => drawn() === "0"); seen.first = document.getElementById("slice-text").textContent;
  key("End"); await wait(() => drawn() === "2");
  const before = grey("image"), slider = document.getElementById("window");
  slider.value = 20; slider.dispatchEvent(new Event("input"));
  await wait(() => grey("image") !== before); seen.windowed = grey("image") / before;
  key("2"); seen.alone = shown();
  key("Escape"); seen.together = shown().length;
  const root = document.documentElement, theme = root.dataset.theme;
  key("t"); seen.other = root.dataset.theme !== theme;
  key("r"); await wait(() => grey("image") === seen.next); seen.reset = grey("image") === seen.next;
  parent.postMessage(JSON.stringify(seen), "*"); document.title = JSON.stringify(seen);
};
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    np.save(folder / "scan.npy", brains(3, (64, 56)))
    reconstruct(folder / "scan.npy", "tv", folder / "out.h5", report=folder / "page.html")
    text = (folder / "page.html").read_text()
    (folder / "page.html").write_text(text.replace("</body>", PROBE))
    (folder / "phone.html").write_text(PHONE)
    return folder / "page.html"


@pytest.mark.parametrize(("name", "width", "rows"), [("page.html", 1280, 1), ("phone.html", 390, 3)])
def test_it_draws_and_obeys(page: Path, name: str, width: int, rows: int) -> None:
    seen = found_in(page.with_name(name))
    assert seen["width"] == width
    assert seen["over"] <= 0
    assert seen["rows"] == rows
    assert min(seen["start"], seen["next"], seen["error"]) > 0
    assert seen["start"] != seen["next"]
    assert seen["first"] == "0 / 2"
    assert seen["windowed"] != pytest.approx(1, abs=0.05)
    assert seen["alone"] == ["target"]
    assert seen["together"] == 5
    assert seen["other"]
    assert seen["reset"]
