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
        source[0] = TARGET.sub(lambda match: relocated(match[1], page), source[0])


def relocated(target: str, page: Path) -> str:
    """Return the link of a page to a file of the repository, as it has to be written on the site.

    Args:
        target: the link as the author wrote it, relative to the original of the page.
        page: the page as the site has it.
    """
    path = Path(os.path.normpath(ORIGINALS.get(page, page).parent / target))
    return os.path.relpath(COPIES.get(path, path), page.parent) if path.exists() else target
