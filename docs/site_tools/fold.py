"""Long tables of results are folded: a page shows what they hold, and a click opens one."""

from html import escape
from typing import Any

from docutils import nodes

PAGES = ("repository/operator_h200", "results/evidence/matched", "results/evidence/tuned")
MAX_OPEN_ROWS = 15


def long_tables(app: Any, tree: nodes.document, page: str) -> None:
    """Fold the long tables of a page of results (a `doctree-resolved` handler of Sphinx).

    Args:
        app: the Sphinx application, which is not used.
        tree: the page, changed in place.
        page: its name, without a suffix.
    """
    if page not in PAGES:
        return
    for table in list(tree.findall(nodes.table)):
        rows = sum(len(body) for body in table.findall(nodes.tbody))
        if rows > MAX_OPEN_ROWS:
            columns = [cell.astext() for head in table.findall(nodes.thead) for cell in head.findall(nodes.entry)]
            title = f"{rows} rows: {', '.join(filter(None, columns))}"
            opening = f'<details class="long-table"><summary>{escape(title)}</summary>'
            table.parent.replace(
                table, [nodes.raw("", opening, format="html"), table, nodes.raw("", "</details>", format="html")]
            )
