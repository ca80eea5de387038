"""`chasm reconstruct`: a scan in, a volume out."""

from pathlib import Path

import typer

from chasm.words import counted

OUT = (
    "Ends in .h5, .nii, .nii.gz or .png (one file per slice, grey from 0 to the maximum of the volume). "
    "Default: INPUT-reconstructed.h5, here."
)
MASK = "Mask of 0s and 1s (.npy or text): instead of the run's own, or the one undersampled k-space was measured with."


def reconstruct(
    source: Path = typer.Argument(
        ..., metavar="INPUT", help="fastMRI .h5, CC359 .npy or .h5, or images (file or folder)."
    ),
    run: Path = typer.Option(..., "--run", help="Run folder, as 'chasm train' left it."),
    out: Path | None = typer.Option(None, "--out", "-o", help=OUT),
    kind: str | None = typer.Option(
        None, "--as", help="What complex arrays (.npy, .npz) are: image (default) or kspace."
    ),
    mask: Path | None = typer.Option(None, help=MASK),
    device: str | None = typer.Option(None, help="cpu, cuda, .. Default: cuda where there is one."),
    as_json: bool = typer.Option(False, "--json", help="Print the outcome as JSON."),
) -> None:
    """Reconstruct a scan with a trained run, slice by slice, and write a side-by-side picture beside the volume.

    Fully sampled input is undersampled by the run's mask (or --mask) and scored against itself. Undersampled k-space
    (with its mask in the file, or --mask) is reconstructed as it is, and scored if the file has a reconstruction.
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from chasm import reconstruct as logic

    console = Console(stderr=True)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
            task = bar.add_task("slices", total=None)
            outcome = logic.reconstruct(
                source,
                run,
                out,
                kind=kind,
                mask=mask,
                device=place,
                on_slice=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except (ValueError, OSError) as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(3) from None
    except KeyboardInterrupt:
        typer.echo("interrupted: no file is left half written; the same call starts again", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(logic.as_json(outcome))
        return
    typer.echo(f"read as: {outcome.read_as}")
    typer.echo(f"sampling: {outcome.sampling}")
    for note in outcome.notes:
        typer.echo(f"note: {note}")
    for volume in outcome.volumes:
        files = str(volume.files[0]) + (f" .. {volume.files[-1].name}" if len(volume.files) > 1 else "")
        what = counted(volume.slices, "slice") + (f" of {volume.case}" if len(outcome.volumes) > 1 else "")
        replaced = "; replaced an earlier file" if volume.replaced else ""
        typer.echo(f"{files}: {what}; picture {volume.picture.name}{replaced}")
        for name, scores in (("reconstruction", volume.scores), ("zero-filled", volume.reference)):
            if scores:
                values = "  ".join(f"{k} {v:.4g}" for k, v in scores.items())
                typer.echo(f"  {name}: {values} ({outcome.protocol})")
