"""`chasm train` and `chasm eval`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer


def train(
    recipe: Path = typer.Argument(..., help="YAML recipe; see the recipes folder."),
    set_: list[str] = typer.Option([], "--set", help="Change one key: --set mixer.name=gfnet --set train.steps=1000."),
    out: Path | None = typer.Option(None, "--out", "-o", help="Run folder. Default: runs/NAME."),
    quiet: bool = typer.Option(False, help="No progress bar."),
    tensorboard: bool = typer.Option(False, help="Also write the log for TensorBoard, into the run folder."),
) -> None:
    """Train from a recipe; goes on by itself where an earlier call stopped.

    The run folder holds everything needed to repeat the run: config, environment, seed, log, metrics, weights.
    Ctrl-C finishes the step and saves; a second one ends at once. Several processes, on GPUs or on a CPU:
    torchrun --nproc_per_node 2 -m chasm train RECIPE (`accelerate launch --cpu` starts one, whatever it is told).
    """
    from chasm.train import load_recipe
    from chasm.train import train as run

    with _one_line_errors():
        config = load_recipe(recipe, set_)
        folder = out or Path("runs") / config.name
        try:
            metrics = run(config, folder, quiet=quiet, tensorboard=tensorboard)
        except KeyboardInterrupt:  # before the first step, while testing, or the second one
            typer.echo("stopped: the same command goes on from the last checkpoint", err=True)
            raise typer.Exit(130) from None
    if metrics:
        _print(metrics)
        typer.echo(f"run folder: {folder}")


def evaluate(
    run: Path = typer.Argument(..., help="Run folder."),
    split: str = typer.Option("test", help="train, val or test."),
    data: str | None = typer.Option(None, help="Another place of the same dataset."),
    as_json: bool = typer.Option(False, "--json", help="Print the whole record."),
) -> None:
    """Score a run's selected weights on a split, with the zero-filled (or bicubic) reference beside it."""
    import torch

    from chasm.train import evaluate as score

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with _one_line_errors():
        metrics = score(run, split, device=device, data_path=data)
    typer.echo(json.dumps(metrics, indent=2)) if as_json else _print(metrics)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Mistakes of the caller, of the data and of the disk end in one line and exit code 3; others keep their trace."""
    from chasm.train import NonFiniteError

    try:
        yield
    except (ValueError, OSError, NonFiniteError) as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(3) from None


def _print(metrics: dict[str, Any]) -> None:
    reference = metrics["reference"]
    for name, row in (("model", metrics), *([(reference["name"], reference)] if reference else [])):
        scores = "  ".join(f"{k} {row['mean'][k]:.4g} ± {row['std'][k]:.2g}" for k in row["mean"])
        typer.echo(f"{name}: {scores}")
    proxy = ", proxy data" if metrics["proxy"] else ""
    typer.echo(f"{metrics['split']} split, {len(metrics['cases'])} cases, protocol {metrics['protocol']}{proxy}")
