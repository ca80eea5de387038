"""`chasm data`: list the formats, check a download, look at what is in it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from chasm.cli.errors import FAILED
from chasm.common.files import require_replaceable, write_atomic
from chasm.common.progress import ProgressBar
from chasm.common.text import counted

if TYPE_CHECKING:
    from chasm.data.check import CheckReport

app = typer.Typer(no_args_is_help=True, help="Datasets: list the formats, check a download, look at it.")
_FORCE_HELP = "Replace a file that chasm did not write."
_PREVIEW_TITLE = "chasm data preview"  # in every picture: which may be replaced by the next
_OPTION_HELP = "An option of the dataset as KEY=VALUE, e.g. seed=1. Repeatable."


@app.command("list")
def list_() -> None:
    """Name the datasets that can be read."""
    from chasm.data import DATASETS, list_datasets

    for name in list_datasets():
        try:
            summary = DATASETS.get(name).summary  # type: ignore[attr-defined]
        except ValueError as e:  # the package that brings it is broken: the others are listed
            summary = f"error: {e}"
        typer.echo(f"{name:10s} {summary}")


@app.command()
def check(
    path: Path = typer.Argument(..., help="The folder (or file) the dataset was downloaded to."),
    kind: str = typer.Option(..., "--as", help="Its format: a name of 'chasm data list'."),
    manifest: Path | None = typer.Option(None, help="Write file hashes, sizes and splits to this JSON file."),
    verify: Path | None = typer.Option(None, help="Compare with a manifest written earlier."),
    force: bool = typer.Option(False, "--force", help=_FORCE_HELP),
    jobs: int | None = typer.Option(None, min=1, help="Cases read at the same time; default: one per core."),
    option: list[str] = typer.Option([], "--option", "-O", help=_OPTION_HELP),
) -> None:
    """Read all of a dataset and report what is wrong with it. The exit code is 3 if anything is."""
    from chasm.data import check as checks

    if manifest is not None:
        require_replaceable(manifest.expanduser(), checks.is_manifest, force)
    with ProgressBar() as bar:
        report = checks.check(path, kind, jobs, bar.update, **parse_options(option))
    if verify is not None:
        checks.verify(report, verify)
    if manifest is not None:
        checks.write_manifest(report, manifest)
    _print(report)
    if not report.ok:
        raise typer.Exit(FAILED)


@app.command()
def preview(
    path: Path | None = typer.Argument(None, help="The folder (or file) of the dataset, where it has one."),
    kind: str = typer.Option(..., "--as", help="Its format: a name of 'chasm data list'."),
    out: Path = typer.Option(..., "--out", "-o", help="The picture to write (PNG, PDF or SVG)."),
    force: bool = typer.Option(False, "--force", help=_FORCE_HELP),
    split: str = typer.Option("train", help="Split to show: train, val or test."),
    count: int = typer.Option(4, "--slices", min=1, max=32, help="How many slices to show."),
    acceleration: float = typer.Option(4, min=1.01, help="Undersampling of MRI slices."),
    mask: str = typer.Option("equispaced", help="Mask of MRI slices: equispaced or random, or either with -plain."),
    option: list[str] = typer.Option([], "--option", "-O", help=_OPTION_HELP),
) -> None:
    """Draw a few slices: target, mask, zero-filled, error; of photographs: target, reduced, bicubic, error."""
    from chasm.cli.montage import montage
    from chasm.data import open_dataset
    from chasm.mri import Sampling

    out = out.expanduser()
    require_replaceable(out, lambda path: _PREVIEW_TITLE.encode() in path.read_bytes(), force)
    data = open_dataset(kind, path, split=split, **parse_options(option))
    rows = [len(data) * (2 * i + 1) // (2 * count) for i in range(min(count, len(data)))]
    figure = montage([data[i] for i in rows], data.domain, Sampling(mask, acceleration))
    figure.suptitle(f"{kind} {data.split}: {counted(len(data), 'slice')} of {counted(len(data.cases), 'case')}")
    form, title = out.suffix[1:] or "png", {"Title": _PREVIEW_TITLE}
    write_atomic(out, lambda p: figure.savefig(p, format=form, dpi=110, bbox_inches="tight", metadata=title))
    typer.echo(f"wrote {out}: {len(rows)} of {counted(len(data), 'slice')}")


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Read KEY=VALUE words. A value that is JSON (a number, true, null, a list) is decoded, others are text."""
    options = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            raise ValueError(f"option {pair!r}: expected KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except (ValueError, RecursionError):
            options[key] = value
    return options


def _print(report: "CheckReport") -> None:
    cases = sum(map(len, report.cases.values()))
    size = sum(max(f["size"], 0) for f in report.files.values())
    typer.echo(
        f"{report.dataset} at {report.root}: {counted(cases, 'case')}, "
        f"{counted(sum(report.slices.values()), 'slice')}, {counted(len(report.files), 'file')}, {_bytes(size)}"
    )
    if report.split_rule:
        typer.echo(f"splits: {report.split_rule}")
    for split, names in sorted(report.cases.items()):
        typer.echo(f"  {split:10s} {counted(len(names), 'case'):>13s} {counted(report.slices[split], 'slice'):>15s}")
    for shape, n in report.shapes.most_common(10):
        typer.echo(f"  {n} x {shape}")
    if len(report.shapes) > 10:
        typer.echo(f"  and {counted(len(report.shapes) - 10, 'more shape')}")
    for kind, (low, high) in sorted(report.ranges.items()):
        typer.echo(f"  values {low:.6g} to {high:.6g} {kind}".rstrip())
    for note in report.notes[:20]:
        typer.echo(f"note: {note}")
    if len(report.notes) > 20:
        typer.echo(f"and {counted(len(report.notes) - 20, 'more note')}")
    for finding in report.findings:
        typer.echo(f"wrong: {finding}")
    wrong = len(report.findings)
    typer.echo("sound" if report.ok else f"{counted(wrong, 'thing')} {'is' if wrong == 1 else 'are'} wrong")


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"
