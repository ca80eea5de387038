"""`chasm reconstruct`: turn scans into volumes."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from chasm.cli.data import parse_options
from chasm.cli.errors import FAILED, show_error
from chasm.common.extras import require
from chasm.common.progress import ProgressBar
from chasm.common.text import counted

if TYPE_CHECKING:
    from chasm.reconstruct import Enlarged, Outcome

OUT = (
    "File to write. The suffix sets the format: .h5, .nii, .nii.gz, .npy, .dcm (a DICOM series for a PACS, with the "
    "patient and the position of the source) or .png. DICOM and PNG have one file for each slice. With several inputs, "
    "the name of each is added. Default: INPUT-reconstructed.h5 in the current folder, or INPUT-x4.png for "
    "photographs."
)
INPUT = (
    "One or more files or folders: k-space (ISMRMRD, BART .cfl, Siemens .dat, fastMRI, CC359, arrays with --as kspace) "
    "or images (NIfTI, DICOM, .npy, .png, ..). A super-resolution run takes photographs."
)
OPTION = (
    "How to read the files, as KEY=VALUE: axes=SCHW (the dimensions of an array: slices, coils, rows, columns), "
    "prewhiten=false, plane=sagittal (of NIfTI), volume=0 (of 4-D NIfTI). Repeatable."
)
RUN = (
    "Run folder, name of a model ('chasm models list') or owner/name on the Hub. Or a method without training: tv "
    "(compressed sensing with total variation), sense (regularised SENSE, for several coils) or zero-filled; write "
    "./tv for a folder of that name. Several runs (--run A --run B) are an ensemble: the volume is their mean, and "
    "their disagreement gives a map of the error to expect in each pixel (too small where they make the same errors)."
)
STRENGTH = (
    "Regularisation. For tv (default 0.003, in units of the largest zero-filled value; try 0.001 to 0.03) a larger "
    "value removes more noise and more fine detail. For sense (default 0.01, relative to the squared sensitivities) "
    "it damps more noise."
)
ACCELERATION = (
    "Undersample fully sampled data by this much, instead of by the run's mask. Without it tv, sense and zero-filled "
    "take fully sampled k-space as it is, and undersample images by 4."
)
MAPS = (
    "Coil sensitivities: lowres (low-resolution images over their root-sum-of-squares, as in training), "
    "espirit, or a file (BART .cfl, or .npy with the axes coils, H, W, optionally with slices and sets before them)."
)
SETS = "Sets of maps that espirit makes; 2 if the object is larger than the field of view. For tv and sense."
COMPRESS = "First combine the coils into this many virtual coils, which is faster (8 to 12 keep nearly all signal)."
UNCERTAINTY = (
    "Also write a map of the error to expect in each pixel, from this many draws (8 to 32). Turned copies of the image "
    "are measured and reconstructed again, and the result is calibrated on measured columns that are held out. This "
    "takes as long as N + 6 reconstructions."
)
REPORT = (
    "Also write a page to look at the result in a browser, with the reconstruction beside target, zero-filled, error, "
    "residual and uncertainty. It is one file that needs no network. With several volumes, the name of each is added."
)
MASK = "Mask of 0s and 1s (.npy or text). It replaces the run's mask, or says how undersampled k-space was measured."


def reconstruct(
    sources: list[Path] = typer.Argument(..., metavar="INPUT", help=INPUT),
    run: list[str] = typer.Option(..., "--run", metavar="RUN", help=RUN),
    out: Path | None = typer.Option(None, "--out", "-o", help=OUT),
    kind: str | None = typer.Option(
        None, "--as", help="What complex arrays (.npy, .npz) hold: image (default) or kspace."
    ),
    mask: Path | None = typer.Option(None, help=MASK),
    acceleration: float | None = typer.Option(None, help=ACCELERATION),
    strength: float | None = typer.Option(None, help=STRENGTH),
    option: list[str] = typer.Option([], "--option", "-O", help=OPTION),
    maps: str = typer.Option("lowres", "--maps", metavar="METHOD|FILE", help=MAPS),
    map_sets: int = typer.Option(1, "--map-sets", help=SETS),
    compress: int | None = typer.Option(None, "--compress", metavar="COILS", help=COMPRESS),
    uncertainty: int = typer.Option(0, "--uncertainty", metavar="N", help=UNCERTAINTY, show_default=False),
    complex_: bool = typer.Option(
        False, "--complex", help="Write complex values, not the magnitude: .nii, .nii.gz, .h5 or .npy."
    ),
    report: Path | None = typer.Option(None, "--report", metavar="PAGE.html", help=REPORT),
    force: bool = typer.Option(False, "--force", help="Replace files that no earlier reconstruction wrote."),
    device: str | None = typer.Option(None, help="cpu, cuda, .. Default: a GPU if there is one."),
    as_json: bool = typer.Option(False, "--json", help="Print the outcome as JSON."),
) -> None:
    """Reconstruct scans with a trained run, or without training, and write a volume and a side-by-side picture of each.

    Fully sampled input is undersampled by the run's mask (or --mask) and scored against itself. Undersampled k-space
    (with its mask in the file, or --mask) is reconstructed as it is, and scored if the file has a reconstruction.

    The line "data consistency" says how far the k-space of the image is from the measured samples, in units of their
    noise. It needs no target. The best value is about 1; an image with a much larger value contradicts the measurement,
    and one with a much smaller value follows the noise.

    A super-resolution run takes photographs instead, and writes each of them enlarged, as a PNG file.

    An input that is not there stops the command before it starts. One that fails later does not stop the others.
    """
    require("train", "data", "report")
    from chasm import reconstruct as logic
    from chasm.common.devices import usable_device

    settings = logic.Settings(
        kind=kind,
        mask=mask,
        acceleration=acceleration,
        options=parse_options(option),
        strength=strength,
        report=report,
        complex=complex_,
        maps=maps,
        map_sets=map_sets,
        compress=compress,
        uncertainty=uncertainty,
    )
    place = usable_device(device)
    outcomes: dict[Path, Any] = {}
    with ProgressBar() as bar:
        on_progress = lambda path, done, total: bar.update(done, total, path.name)  # noqa: E731
        results: Iterator[tuple[Path, Any]]
        if len(run) == 1 and logic.is_enlarger(run[0]):
            results = logic.enlarge_each(sources, run[0], out, settings, device=place, force=force, on_file=on_progress)
        else:
            results = logic.reconstruct_each(
                sources, run, out, settings, device=place, force=force, on_slice=on_progress
            )
        for path, outcome in results:
            outcomes[path] = outcome
            with bar.hidden():
                if isinstance(outcome, Exception):
                    show_error(outcome)
                elif as_json:
                    continue
                elif isinstance(outcome, logic.Enlarged):
                    _print_enlarged(outcome)
                else:
                    _print(outcome, path if len(sources) > 1 else None)
    failed = sum(isinstance(outcome, Exception) for outcome in outcomes.values())
    if as_json and (failed == 0 or len(outcomes) > 1):
        typer.echo(logic.as_json(outcomes))
    if failed:
        if len(outcomes) > 1:
            typer.echo(f"{failed} of {len(outcomes)} inputs failed", err=True)
        raise typer.Exit(FAILED)


def _print_enlarged(outcome: "Enlarged") -> None:
    before, after = (f"{width} x {height}" for height, width in (outcome.size, outcome.enlarged_size))
    for note in outcome.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{outcome.file}: {before} pixels enlarged to {after} in {outcome.seconds:.3g} s")


def _print(outcome: "Outcome", source: Path | None) -> None:
    """Print an outcome; `source` is named if there are several."""
    typer.echo(f"read as: {outcome.read_as}" if source is None else f"{source}: {outcome.read_as}")
    typer.echo(f"sampling: {outcome.sampling}")
    for note in outcome.notes:
        typer.echo(f"note: {note}")
    for volume in outcome.volumes:
        files = str(volume.files[0]) + (f" .. {volume.files[-1].name}" if len(volume.files) > 1 else "")
        what = counted(volume.slices, "slice") + (f" of {volume.case}" if len(outcome.volumes) > 1 else "")
        replaced = "; replaced an earlier file" if volume.replaced else ""
        page = f"; page {volume.page}" if volume.page else ""
        typer.echo(f"{files}: {what}; picture {volume.picture.name}{page}{replaced}")
        for name, scores in (("reconstruction", volume.scores), ("zero-filled", volume.reference)):
            if scores:
                values = "  ".join(f"{k} {v:.4g}" for k, v in scores.items())
                typer.echo(f"  {name}: {values} ({outcome.protocol})")
        typer.echo(f"  data consistency: {volume.consistency}")
        if volume.uncertainty is not None:
            typer.echo(f"  uncertainty: {volume.uncertainty}")
