"""Results for people and programs: provenance, CSV, Markdown, tables on a terminal."""

import csv
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
TITLES = {
    "shape": "shape",
    "dtype": "dtype",
    "mode": "mode",
    "mixer": "mixer",
    "form": "form",
    "layout": "layout",
    "time_ms": "ms",
    "times_literal": "x literal",
    "times_floor": "x floor",
    "peak_mib": "MiB",
    "error": "error",
}
LEGEND = """\
ms: median (CPU: fastest; there only ratios mean something). x literal: how many times faster than the paper-literal \
eager block of the same dtype and pass (of a graph too: torch's matrix exponential waits for the host, no graph \
holds it). x floor: how many times the time of moving the least number of maps. MiB: peak above the inputs. error: \
relative to float64, of the output / the largest of the gradients."""


def provenance(device: torch.device) -> dict[str, str]:
    """Where, with what and how: what every published number carries. Lines of a header, by name."""
    gpu = device.type == "cuda"
    card = torch.cuda.get_device_name(device) if gpu else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    found = {"device": card, "torch": torch.__version__}
    if gpu:
        found["CUDA"] = str(torch.version.cuda)
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "not installed"
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if words[0] == "__main__.py":
        words[0] = "chasm"
    return {**found, "commit": commit(), "date": time.strftime("%Y-%m-%d"), "command": shlex.join(words)}


def commit() -> str:
    """Of the source tree, and whether it was modified. A copy without git can say it in CHASM_COMMIT."""

    def git(*words: str) -> str:
        here = str(Path(__file__).parent)
        try:
            run = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return ""
        return run.stdout.strip() if run.returncode == 0 else ""

    head = git("rev-parse", "--short=10", "HEAD")
    if not head:
        return os.environ.get("CHASM_COMMIT", "unknown")
    return f"{head}, modified" if git("status", "--porcelain", "--untracked-files=no") else head


def cell(field: str, row: Row) -> str:
    value = row.get(field)
    if field == "shape" and value is not None:
        return "x".join(map(str, value))
    if field == "time_ms":
        return significant(value) if value is not None else row.get("note", "-")
    if field == "error":
        if value is None:
            return "-"
        gradient = row.get("grad_error")
        return f"{value:.0e} / {gradient:.0e}" if row.get("worst_gradient") else f"{value:.0e}"
    if value is None:
        return "-"
    if field == "share":
        return f"{100 * value:.1f} %"
    if field == "times_literal":
        return f"{value:.1f}x"
    if field == "times_floor":
        return f"{value:.1f}"
    if field == "peak_mib":
        return f"{value:,.0f}"
    if isinstance(value, float):
        return significant(value)
    return str(value)


def significant(value: float) -> str:
    """Three digits that count."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def markdown(rows: Sequence[Row], titles: dict[str, str]) -> str:
    lines = [list(titles.values()), ["---"] * len(titles)]
    lines += [[cell(field, row).replace("|", r"\|") for field in titles] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def header(title: str, facts: dict[str, str]) -> str:
    return "\n".join([f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items())])


def write(out: Path | None, text: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """OUT.md and OUT.csv."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(text.rstrip() + "\n")
    with open(out.with_suffix(".csv"), "w", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([_plain(row.get(c)) for c in columns])


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def show(rows: Sequence[Row], titles: dict[str, str], caption: str = "") -> None:
    """A table on the terminal; plain text where there is none."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=caption, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for field, name in titles.items():
        number = field in ("times_literal", "times_floor", "peak_mib", "ratio", "share", "forward_ms", "calls")
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(field, row) for field in titles), style="red" if row.get("note") else None)
    console.print(table)


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """tick(what) moves a bar on the terminal's error stream; silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, description=what, advance=1)
