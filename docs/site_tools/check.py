"""Check a built site: `python docs/site_tools/check.py build/site`. Reads files only, and opens no connection."""

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}  # fetched with the page


class Page(HTMLParser):
    """What a page links to, what it loads, and which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value for key, value in attrs if value}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag in LOADED and LOADED[tag] in values and values.get("rel") != "canonical":
            self.loads.add(values[LOADED[tag]])


@cache
def parsed(file: Path) -> Page:
    """Return the page of an HTML file."""
    return Page(file.read_text())


def problems(site: Path) -> list[str]:
    """Return a line for every local link without a target, and for everything that is loaded from another host.

    Args:
        site: the folder with the built pages.
    """
    found = []
    for file in sorted(f for f in site.rglob("*.html") if "_static" not in f.parts):
        page, name = parsed(file), file.relative_to(site)
        for target in sorted(page.loads):
            if urlsplit(target).scheme not in ("", "data") or target.startswith("//"):
                found.append(f"{name}: loads {target} from another host")
        for target in sorted(page.links | page.loads):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file():
                found.append(f"{name}: {target} does not exist")
            elif name.parts[0] == "_modules":
                continue  # Sphinx's source pages guess the anchor of an object that is public under two names
            elif parts.fragment and path.suffix == ".html" and unquote(parts.fragment) not in parsed(path).anchors:
                found.append(f"{name}: {target} has no such anchor")
    return found


if __name__ == "__main__":
    site = Path(sys.argv[1])
    lines = problems(site)
    print("\n".join(lines) or f"{len(list(site.rglob('*.html')))} pages: all local links lead somewhere")
    sys.exit(1 if lines else 0)
