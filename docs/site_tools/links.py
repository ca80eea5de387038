"""Links that work in a checkout and on the site: files outside docs/ are copied into it, and links follow."""

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
COPIES = {
    ROOT / "CHANGELOG.md": DOCS / "repository/changelog.md",
    ROOT / "CONTRIBUTING.md": DOCS / "repository/contributing.md",
    ROOT / "benchmarks/results/h200.md": DOCS / "repository/h200.md",
    ROOT / "benchmarks/results/operator_h200.md": DOCS / "repository/operator_h200.md",
}
ORIGINALS = {copy: original for original, copy in COPIES.items()}
TARGET = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")


def rewrite(app: Any, docname: str, source: list[str]) -> None:
    """Point the relative links of a page at where their targets lie on the site (a `source-read` handler of Sphinx).

    Args:
        app: the Sphinx application, which is not used.
        docname: the page, relative to docs/ and without its suffix.
        source: the text of the page, replaced in place.
    """
    page = DOCS / f"{docname}.md"
    if page.is_file():
        source[0] = moved(source[0], ORIGINALS.get(page, page), page)


def moved(text: str, original: Path, page: Path) -> str:
    """Return a text whose relative links work on a page of the site.

    Args:
        text: what the author wrote.
        original: the file it was written in: its links are relative to that.
        page: the page of the site that shows it.
    """

    def relocated(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(original.parent / link[1]))
        return os.path.relpath(COPIES.get(target, target), page.parent) if target.exists() else link[1]

    return TARGET.sub(relocated, text)
