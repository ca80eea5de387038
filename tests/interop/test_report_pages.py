"""The pages of studies and of the paper in headless Chromium, where that is installed: `make interop`."""

import sys
from pathlib import Path
from typing import Any

import pytest
from programs import PHONE, chromium, found_in, needs

sys.path.insert(0, str(Path(__file__).parents[1] / "studies" / "report"))
from finished_runs import fill_plan, finish

from chasm.studies.plan import load_plan, make_plan
from chasm.studies.report import write_paper_page, write_report
from chasm.studies.results import collect

pytestmark = [pytest.mark.interop, needs("chromium")]
PROBE = """<script>onload = () => {
  const pictures = [...document.images], over = box => box.scrollWidth - box.clientWidth;
  const wide = [...document.querySelectorAll('.wide')];
  const seen = JSON.stringify({
    width: innerWidth, over: document.documentElement.scrollWidth - innerWidth,
    pictures: pictures.length, broken: pictures.filter(x => !x.naturalWidth).length,
    cut: Object.fromEntries(wide.filter(box => box.querySelector('table'))
      .map(box => [box.previousElementSibling.textContent, over(box)])),
    scrolls: wide.every(box => getComputedStyle(box).overflowX === 'auto')});
  parent.postMessage(seen, '*'); document.title = seen;
};</script></body>"""


def shown(page: Path, folder: Path, *, phone: bool = False) -> dict[str, Any]:
    """What Chromium makes of a page, which is nowhere wider than the window."""
    folder.mkdir(exist_ok=True)
    (folder / "page.html").write_text(page.read_text().replace("</body>", PROBE))
    (folder / "phone.html").write_text(PHONE)
    seen = found_in(folder / ("phone.html" if phone else "page.html"))
    assert seen["width"] == (390 if phone else 1280)
    assert seen["over"] <= 0
    assert seen["broken"] == 0
    assert seen["scrolls"]
    return seen


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with finished runs of studies."""
    root = tmp_path_factory.mktemp("studies")
    finish(root, "cc359", "host=hifi-mamba,arm=gfnet,fsel,chasm")
    finish(root, "random-mask", "arm=gfnet,fsel,chasm")
    finish(root, "seeds-basis")
    return root


@pytest.fixture(scope="module")
def paper(studies: Path) -> Path:
    """The page of the paper with these runs."""
    return write_paper_page([studies], studies / "out")[0]


def test_a_report_is_whole_and_prints_to_a_few_pages(tmp_path: Path) -> None:
    plan = make_plan("basis", scale="tiny")
    fill_plan(plan, tmp_path / "runs", "embedded brain")
    page = write_report(collect(plan, tmp_path / "runs"), tmp_path / "report", root=tmp_path / "runs")
    pictures = page.read_text().count("<img")
    assert pictures > 5
    assert shown(page, tmp_path / "wide")["pictures"] == pictures
    assert shown(page, tmp_path / "narrow", phone=True)["pictures"] == pictures
    chromium(page, f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    assert 1 <= (tmp_path / "page.pdf").read_bytes().count(b"/Type /Page\n") <= 12


def test_a_phone_shows_small_tables_whole_and_lets_wide_ones_scroll(paper: Path, tmp_path: Path) -> None:
    cut = shown(paper, tmp_path, phone=True)["cut"]
    assert [n for title, n in cut.items() if title.startswith("Table 3")] == [0, 0, 0]
    assert next(n for title, n in cut.items() if title.startswith("Table 1")) > 0


def test_a_desktop_shows_every_table_whole(paper: Path, studies: Path, tmp_path: Path) -> None:
    assert not any(shown(paper, tmp_path)["cut"].values())
    report = write_report(collect(load_plan(studies, "random-mask"), studies), tmp_path / "report")
    cut = shown(report, tmp_path)["cut"]
    assert cut["Random-mask falsification"] == 0
    assert not any(cut.values())
