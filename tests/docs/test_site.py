"""The site: code on its pages runs, commands on them exist, links lead somewhere, and every example has its place."""

import re
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

import chasm
from chasm.backbones.base import BACKBONES
from chasm.cli.app import app
from chasm.mixers import MIXERS, check_mixer
from helpers import site_tools

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^```(python|bash)\n(.*?)^```", re.M | re.S)


@pytest.fixture(scope="module")
def tools() -> SimpleNamespace:
    return site_tools("check", "commands", "generate", "links", "pictures")


@pytest.fixture(scope="module")
def sphinx_tools() -> SimpleNamespace:
    """Those that import Sphinx, which `make docs` installs and `make test` does not."""
    pytest.importorskip("sphinx")
    return site_tools("fold", "reference")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


@pytest.mark.parametrize("name", ["start", "use", "training", "extend"])
def test_code_on_a_page_runs_from_top_to_bottom(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # a page may write files
    for registry in (MIXERS, BACKBONES):  # a page may register classes of its own
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    code = "\n".join(blocks(DOCS / f"{name}.md", "python"))
    assert code
    shipped = MIXERS.list()
    exec(compile(code, f"{name}.md", "exec"), {})
    for own in set(MIXERS.list()) - set(shipped):
        assert not [check for check in check_mixer(own) if check.problem]


def commands() -> list[str]:
    lines = [
        line for page in (ROOT / "README.md", *PAGES) for text in blocks(page, "bash") for line in text.splitlines()
    ]
    return sorted({line.split("#")[0].strip() for line in lines if line.startswith("chasm ")})


@pytest.mark.parametrize("command", commands())
def test_commands_on_the_pages_exist_with_their_options(command: str) -> None:
    node: Any = typer.main.get_command(app)
    words = shlex.split(command.split(">")[0])[1:]
    while node and words:  # parses without running, and fails as the command would
        context = node.make_context("chasm", words)
        words = [*context._protected_args, *context.args] if hasattr(node, "commands") else []
        _, node, words = node.resolve_command(context, words) if words else ("", None, [])


def test_every_example_has_its_place_in_the_gallery(tools: SimpleNamespace) -> None:
    assert set(tools.generate.READING_ORDER) == {file.stem for file in (ROOT / "examples").glob("*.py")}
    assert 8 <= len(tools.generate.READING_ORDER) <= 10


def test_the_reference_of_commands_has_their_options(tools: SimpleNamespace) -> None:
    pages = tools.commands.command_pages()
    assert set(pages) >= {"train", "study", "reconstruct"}
    section = pages["study"].partition("## chasm study run\n")[2].partition("\n## ")[0]
    assert "| `--protocol` |" in section
    assert "Default: tiny." in section
    overview = tools.commands.overview()
    assert "130 means interrupted" in overview
    assert "| [`chasm train`](commands/train.md) | Train from a recipe, or resume a run that was stopped. |" in overview


def test_long_tables_of_results_are_folded(sphinx_tools: SimpleNamespace) -> None:
    from docutils import nodes, utils

    def page_with(rows: int) -> Any:
        tree = utils.new_document("page")
        head = nodes.thead("", nodes.row("", nodes.entry("", nodes.paragraph(text="a < b"))))
        body = nodes.tbody("", *(nodes.row("", nodes.entry("", nodes.paragraph(text=str(i)))) for i in range(rows)))
        tree += nodes.table("", nodes.tgroup("", head, body, cols=1))
        return tree

    folded, short, elsewhere = page_with(16), page_with(15), page_with(16)
    sphinx_tools.fold.long_tables(None, folded, "results/evidence/tuned")
    sphinx_tools.fold.long_tables(None, short, "results/evidence/tuned")
    sphinx_tools.fold.long_tables(None, elsewhere, "api/index")
    assert [type(node).__name__ for node in folded] == ["raw", "table", "raw"]
    assert folded[0].astext() == '<details class="long-table"><summary>16 rows: a &lt; b</summary>'
    assert len(short) == len(elsewhere) == 1


def test_classes_show_the_arguments_of_init(sphinx_tools: SimpleNamespace) -> None:
    shown = sphinx_tools.reference.of_init(
        None, "class", "chasm.CHASM", chasm.CHASM, None, "(*args: Any, **kwargs: Any)", None
    )
    assert shown[0].startswith("(channels: int, *, size: int | tuple[int, ...] | None = None, ")
    assert sphinx_tools.reference.of_init(None, "function", "chasm.swap", chasm.swap, None, "(*args)", None) is None


def test_the_reference_leaves_out_functions_and_classes_of_torch(sphinx_tools: SimpleNamespace) -> None:
    skip = sphinx_tools.reference.skip_foreign
    for foreign in (torch.nn.Conv3d, torch.nn.functional.avg_pool3d, torch.nn.functional.gelu):
        assert skip(None, "class", "x", foreign, False, None) is True
    assert skip(None, "class", "x", chasm.CHASM.forward, False, None) is None
    assert skip(None, "class", "x", 3, False, None) is None


def test_promises_count_their_tests(tools: SimpleNamespace) -> None:
    text = tools.generate.promises(ROOT / "tests")
    assert re.search(r"A run that is killed goes on .*: \d\d tests", text)
    assert "- killed and resumed is bit equal" in text


def test_links_out_of_docs_lead_to_copies(tools: SimpleNamespace) -> None:
    def moved(target: str, original: str, page: str) -> str:
        text: str = tools.links.moved(f"[x]({target})", ROOT / original, DOCS / page)
        return text.removeprefix("[x](").removesuffix(")")

    assert moved("../CHANGELOG.md", "docs/start.md", "start.md") == "repository/changelog.md"
    assert moved("readings.md#the-slot", "docs/start.md", "start.md") == "readings.md#the-slot"
    assert moved("../../docs/speed.md", "benchmarks/results/h200.md", "repository/h200.md") == "../speed.md"
    assert moved("no-such-file.md", "docs/start.md", "start.md") == "no-such-file.md"
    assert moved("https://example.org/a", "docs/start.md", "start.md") == "https://example.org/a"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_files_outside_the_site_lead_somewhere(name: str, tools: SimpleNamespace) -> None:
    targets = tools.links.TARGET.findall((ROOT / name).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(re.findall(r"^   (\w+)$", (DOCS / "api/index.md").read_text(), re.M))
    assert set(chasm.__all__) - {"__version__"} <= listed


def test_every_page_is_in_a_table_of_contents() -> None:
    tables = re.findall(r"^```{toctree}\n(.*?)^```", "\n".join(page.read_text() for page in PAGES), re.M | re.S)
    listed = [line for table in tables for line in table.splitlines()]
    counts = {page.stem: listed.count(page.stem) for page in PAGES if page.stem != "index"}
    wrong = {name: count for name, count in counts.items() if count != 1}
    assert not wrong, f"each page belongs into one toctree, as that of docs/more.md, once: {wrong}"


def test_the_check_finds_what_is_wrong_with_a_site(tools: SimpleNamespace, tmp_path: Path) -> None:
    good = '<h2 id="here">x</h2><a href="#here">x</a><a href="b.html#there">x</a><a href="https://example.org">x</a>'
    (tmp_path / "a.html").write_text(good)
    (tmp_path / "b.html").write_text('<p id="there">')
    assert tools.check.problems(tmp_path) == []
    bad = '<a href="gone.html">x</a><a href="b.html#gone">x</a><script src="https://cdn.example.org/x.js"></script>'
    (tmp_path / "c.html").write_text(bad)
    found = "\n".join(tools.check.problems(tmp_path))
    assert "c.html: gone.html does not exist" in found
    assert "c.html: b.html#gone has no such anchor" in found
    assert "c.html: loads https://cdn.example.org/x.js from another host" in found


def test_pictures_show_what_their_captions_say(tools: SimpleNamespace) -> None:
    n = tools.pictures.GRID
    column, whole = (
        [row[i * n : (i + 1) * n] for i in range(n)] for row in map(tools.pictures.response, ("ch", "ch>cw"))
    )
    middle = n // 2
    assert all(value == 0 for row in column for x, value in enumerate(row) if x != middle)
    assert sum(row[middle] > 0 for row in column) > n // 2
    assert sum(value > 0 for row in whole for value in row) > n * n // 2


def test_the_first_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(ROOT / "examples" / "first_mixer.py"))
