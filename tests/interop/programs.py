"""Other people's programs that the tests here compare with."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

# A headless browser that asks for nothing on a network.
CHROMIUM = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=20000",
)  # fmt: skip
PHONE = """<iframe src="page.html" style="width: 390px; height: 800px; border: 0"></iframe>
<script>onmessage = e => { document.title = e.data; };</script>"""  # a window of Chromium cannot be as narrow


def needs(*programs: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests where a program is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def chromium(file: Path, *flags: str, width: int = 1280) -> str:
    """Load a page in Chromium and return what that prints."""
    more = [f"--user-data-dir={file.parent / 'profile'}", f"--window-size={width},900", *flags]
    command = [*CHROMIUM, *more, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def found_in(file: Path, *flags: str, width: int = 1280) -> dict[str, Any]:
    """Return what a script of a page has put into the title of the page, as JSON."""
    text = chromium(file, "--dump-dom", *flags, width=width)
    found = re.search(r"<title>(\{.*?\})</title>", text)
    assert found, text[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return seen
