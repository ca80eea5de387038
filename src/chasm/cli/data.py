"""`chasm data`: list the formats, check a download, look at what is in it, convert k-space."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from chasm.cli.errors import FAILED
from chasm.common.extras import require
from chasm.common.files import expanded, holds, require_replaceable, write_atomic
from chasm.common.progress import ProgressBar
from chasm.common.text import counted, printable

if TYPE_CHECKING:
    from chasm.data.check import CheckReport

app = typer.Typer(no_args_is_help=True, help="List data formats, check a download, preview it, convert k-space.")
_FORCE_HELP = "Replace a file that chasm did not write."
_PREVIEW_TITLE = "chasm data preview"  # written into every picture, so that a later preview may replace it
_CONVERT_HELP = "The suffix sets the format: .mrd ISMRMRD, .cfl BART, .h5 fastMRI, .npy or .npz with axes SCHW."
_OPTION_HELP = "An option of the dataset as KEY=VALUE, for example seed=1. Repeatable."


@app.command("list")
def list_() -> None:
    """List the datasets that chasm can read."""
    require("data")
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
    kind: str | None = typer.Option(None, "--as", help="Its format: a name of 'chasm data list'. Default: guessed."),
    manifest: Path | None = typer.Option(None, help="Write file hashes, sizes and splits to this JSON file."),
    verify: Path | None = typer.Option(None, help="Compare with a manifest written earlier."),
    force: bool = typer.Option(False, "--force", help=_FORCE_HELP),
    jobs: int | None = typer.Option(None, min=1, help="Cases to read at the same time. Default: one per core."),
    option: list[str] = typer.Option([], "--option", "-O", help=_OPTION_HELP),
) -> None:
    """Read all of a dataset and report what is wrong with it. The exit code is 3 if anything is wrong."""
    require("data")
    from chasm.data import check as checks
    from chasm.data.guess import guess_dataset

    if manifest is not None:
        require_replaceable(expanded(manifest), checks.is_manifest, force)
    with ProgressBar() as bar:
        report = checks.check(path, kind or guess_dataset(path), jobs, bar.update, **parse_options(option))
    if verify is not None:
        checks.verify(report, verify)
    if manifest is not None:
        checks.write_manifest(report, manifest)
    _print(report, guessed=kind is None)
    if not report.ok:
        raise typer.Exit(FAILED)


@app.command()
def convert(
    source: Path = typer.Argument(..., metavar="IN", help="ISMRMRD, BART, Siemens .dat, fastMRI, CC359 or an array."),
    out: Path = typer.Argument(..., metavar="OUT", help=_CONVERT_HELP),
    force: bool = typer.Option(False, "--force", help="Replace existing files."),
    option: list[str] = typer.Option([], "--option", "-O", help="axes=SCHW: how to read an array, as in OUT."),
) -> None:
    """Convert measured k-space from one format to another. Only Cartesian data can be read."""
    require("data")
    from chasm.common.registry import suggest
    from chasm.data import read_scans, write_scan
    from chasm.data.kspace import FORMAT_NAMES, kspace_format

    options = parse_options(option)
    for name in options:
        if name != "axes":
            raise ValueError(f"convert has no option {name!r}: {suggest(name, ['axes'])}")
    if out.suffix.lower() not in FORMAT_NAMES:
        raise ValueError(f"{out}: expected a name that ends in {', '.join(FORMAT_NAMES)}: the suffix says the format")
    scans = read_scans(source, options.get("axes"))
    read_as = "array" if "axes" in options else kspace_format(source)
    files = {volume: out.with_name(f"{out.stem}-{volume}{out.suffix}") if volume else out for volume in scans}
    inputs = _with_header(source)
    for file in [part for written in files.values() for part in _with_header(written)]:
        if any(file.exists() and file.samefile(part) for part in inputs):
            raise ValueError(f"{file}: is the input, which would be lost: give another name")
        if file.exists() and not force:
            raise ValueError(f"{file}: is there and would be lost: give another name, or --force")
        require_replaceable(file, lambda _: True)  # a device never is
    for volume, scan in scans.items():
        file = files[volume]
        written = write_scan(scan, file)
        slices, coils, h, w = written.kspace.shape
        shape = f"{h} x {w}, image {written.size[0]} x {written.size[1]}"
        what = f"{read_as} -> {FORMAT_NAMES[out.suffix.lower()]}, {counted(slices, 'slice')}, {counted(coils, 'coil')}"
        typer.echo(f"{file}: {what}, {shape}")
        for note in written.notes:
            typer.echo(f"note: {note}")


@app.command()
def preview(
    path: Path | None = typer.Argument(None, help="The folder (or file) of the dataset, if it has one."),
    kind: str = typer.Option(..., "--as", help="Its format: a name of 'chasm data list'."),
    out: Path = typer.Option(..., "--out", "-o", help="The picture to write (PNG, PDF or SVG)."),
    force: bool = typer.Option(False, "--force", help=_FORCE_HELP),
    split: str = typer.Option("train", help="Split to show: train, val or test."),
    count: int = typer.Option(4, "--slices", min=1, max=32, help="How many slices to show."),
    acceleration: float = typer.Option(4, min=1.01, help="Undersampling of MRI slices."),
    mask: str = typer.Option("equispaced", help="Mask of MRI slices: equispaced or random, or either with -plain."),
    option: list[str] = typer.Option([], "--option", "-O", help=_OPTION_HELP),
) -> None:
    """Draw a few slices with mask, zero-filled image and error, or photographs with their bicubic enlargement."""
    require("data", "report")
    from chasm.cli.montage import montage
    from chasm.data import open_dataset
    from chasm.mri import Sampling

    out = expanded(out)
    require_replaceable(out, lambda path: holds(path, _PREVIEW_TITLE.encode()), force)
    data = open_dataset(kind, path, split=split, **parse_options(option))
    rows = [len(data) * (2 * i + 1) // (2 * count) for i in range(min(count, len(data)))]
    figure = montage([data[i] for i in rows], data.domain, Sampling(mask, acceleration))
    figure.suptitle(f"{kind} {data.split}: {counted(len(data), 'slice')} of {counted(len(data.cases), 'case')}")
    form, title = out.suffix[1:] or "png", {"Title": _PREVIEW_TITLE}
    write_atomic(out, lambda p: figure.savefig(p, format=form, dpi=110, bbox_inches="tight", metadata=title))
    typer.echo(f"wrote {out}: {len(rows)} of {counted(len(data), 'slice')}")


def _with_header(file: Path) -> list[Path]:
    """Return the file, or both files of a BART pair."""
    file = expanded(file)
    return [file.with_suffix(s) for s in (".cfl", ".hdr")] if file.suffix.lower() in (".cfl", ".hdr") else [file]


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


def _print(report: "CheckReport", guessed: bool) -> None:
    cases = sum(map(len, report.cases.values()))
    size = sum(max(f["size"], 0) for f in report.files.values())
    typer.echo(
        f"{report.dataset}{' (guessed; --as names another)' if guessed else ''} at {report.root}: "
        f"{counted(cases, 'case')}, "
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
        typer.echo(f"note: {printable(note)}")
    if len(report.notes) > 20:
        typer.echo(f"and {counted(len(report.notes) - 20, 'more note')}")
    for finding in report.findings:
        typer.echo(f"wrong: {printable(finding)}")
    wrong = len(report.findings)
    typer.echo("sound" if report.ok else f"{counted(wrong, 'thing')} {'is' if wrong == 1 else 'are'} wrong")


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"
