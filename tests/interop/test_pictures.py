"""The interactive pictures of docs/understand.md in headless Chromium, where that is installed: `make interop`."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from programs import PHONE, found_in, needs

pytestmark = [pytest.mark.interop, needs("chromium")]
DOCS = Path(__file__).parents[2] / "docs"
PROBE = """<script>
const box = name => document.getElementById("play-" + name);
const bytes = canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const values = canvas => [...bytes(canvas)].filter((_, i) => i % 4 === 0);
const press = (name, kind) => box(name).querySelector(`[data-kind=${kind}]`).click();
const move = (slider, value) => { slider.value = value; slider.dispatchEvent(new Event("input")); };
addEventListener("load", () => {
  const seen = {over: document.documentElement.scrollWidth - innerWidth, width: innerWidth};
  const [input, output] = [...box("one-gain").querySelectorAll("canvas")];
  press("one-gain", "keep"); seen.kept = Math.max(...values(input).map((v, i) => Math.abs(v - values(output)[i])));
  press("one-gain", "low"); const eight = values(output).join();
  move(box("one-gain").querySelector("input"), 2); seen.moved = values(output).join() !== eight;
  seen.pressed = [...box("one-gain").querySelectorAll("[aria-pressed=true]")].map(b => b.dataset.kind);
  const numbers = matrix => [...matrix.children].map(cell => Number(cell.textContent));
  const matrices = () => [...box("shared-basis").querySelectorAll(".matrix")].map(numbers);
  const turn = ([a, b, , d]) => Math.atan2(2 * b, a - d) / 2;
  const frequency = box("shared-basis").querySelector("input");
  const turns = [0, 1, 2].map(k => { move(frequency, k); return matrices().map(turn); });
  seen.shared = Math.max(...turns.map(t => Math.abs(t[1] - turns[0][1])));
  seen.free = Math.max(...turns.map(t => Math.abs(t[0] - turns[0][0])));
  const [pixel, column] = [...box("two-passes").querySelectorAll("canvas")], at = pixel.getBoundingClientRect();
  pixel.dispatchEvent(new MouseEvent("click", {clientX: at.left + 1, clientY: at.top + 1}));
  seen.pixel = values(pixel).indexOf(255);
  seen.columns = [...new Set(values(column).map((v, i) => v ? i % column.width : 0))];
  const [channels, size] = [...box("two-passes").querySelectorAll("input")]; move(channels, 8); move(size, 16);
  seen.counts = [...box("two-passes").querySelectorAll("[data-count]")].map(c => c.textContent);
  parent.postMessage(JSON.stringify(seen), "*"); document.title = JSON.stringify(seen);
});
</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures alone on a page, with their own script, style and data; and that page as wide as a phone."""
    sys.path.insert(0, str(DOCS))
    try:
        data = import_module("site_tools.pictures").as_script()
    finally:
        sys.path.remove(str(DOCS))
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "_static").mkdir()
    (folder / "_static/pictures-data.js").write_text(data)
    for name in ("pictures.js", "chasm.css"):
        (folder / "_static" / name).write_text((DOCS / "_static" / name).read_text())
    body = "\n".join(re.findall(r"^```{raw} html\n(.*?)^```", (DOCS / "understand.md").read_text(), re.M | re.S))
    head = '<meta charset="utf-8"><link rel="stylesheet" href="_static/chasm.css">'
    (folder / "page.html").write_text(f"<!doctype html>{head}{body}{PROBE}")
    (folder / "phone.html").write_text(PHONE)
    return folder


@pytest.mark.parametrize(("name", "width"), [("page.html", 1280), ("phone.html", 390)])
def test_they_do_what_the_page_says(folder: Path, name: str, width: int) -> None:
    seen = found_in(folder / name, "--allow-file-access-from-files")
    assert seen["width"] == width
    assert seen["over"] <= 0  # nothing is wider than the screen
    assert seen["kept"] <= 1  # gains of 1 change no pixel, up to rounding
    assert seen["moved"]
    assert seen["pressed"] == ["low"]
    assert seen["shared"] < 0.03  # the directions stay, up to the two digits of the matrix
    assert seen["free"] > 0.3
    assert seen["pixel"] == 0
    assert seen["columns"] == [0]  # the height pass stays in the column of the pixel
    assert seen["counts"] == ["9,216", "648", "200"]  # 16 * 9 * 8^2, 2 * 9 * (28 + 8), 8 * 7 + 2 * 9 * 8
