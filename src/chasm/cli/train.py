"""`chasm train` and `chasm eval`."""

import json
import os
from pathlib import Path
from typing import Any

import typer

from chasm.common.extras import require
from chasm.common.text import counted


def _print_schema(wanted: bool) -> None:
    if wanted:
        require("train", "data")
        from chasm.train.config import recipe_schema

        typer.echo(json.dumps(recipe_schema(), indent=2))
        raise typer.Exit


def train(
    recipe: str = typer.Argument(..., help="Name of a recipe above, or a YAML file of your own."),
    set_: list[str] = typer.Option([], "--set", help="Change one key: --set train.steps=1000. Repeatable."),
    out: Path | None = typer.Option(
        None,
        "--out",
        "-o",
        help="Run folder. Default: runs/NAME, or runs/NAME-MIXER if --set changes the mixer.",
    ),
    show: bool = typer.Option(False, "--show", help="Print the recipe with --set and all defaults; train nothing."),
    schema: bool = typer.Option(
        False, "--schema", is_eager=True, callback=_print_schema, help="Print the JSON schema of recipes, for editors."
    ),
    quiet: bool = typer.Option(False, help="Print important messages only, without a progress bar."),
    track: list[str] = typer.Option(
        [], help="Also send the log to tensorboard, wandb, mlflow, trackio or another tracker. Repeatable."
    ),
) -> None:
    """Train from a recipe, or resume a run that was stopped.

    These recipes come with chasm:

    - demo: drawn brains, x4 undersampling, a small HiFi-Mamba; minutes on a CPU

    - folder: your own images, x4 undersampling, a small U-Net: chasm train folder --set data.path=FOLDER

    - cc359_x8: the paper's main setting, CC359, x8, HiFi-Mamba

    - fastmri_x4: multi-coil fastMRI k-space, x4, VarNet

    - brats_x4: tumour segmentation from x4 undersampled BraTS slices, U-Net

    - ade20k_x4: 4x image reconstruction of ADE20K photographs, U-Net

    - brain_x4: complex brain slices, x4, a small unrolled network (varnet); a model that comes with chasm

    - brain_x8: complex brain slices, x8, the same network; a model that comes with chasm

    - knee_x4: complex knee slices, x4, the same network; a model that comes with chasm

    - photo_x4: photographs, 4x super-resolution, a small U-Net; a model that comes with chasm

    - volume_x4: volumes of a drawn head, x4 in the plane of slices and columns, a small 3-D U-Net

    All recipes but demo and volume_x4 need data: --set data.path=FOLDER.

    'chasm train demo --show > mine.yaml' writes a copy to edit.

    The run folder holds everything needed to repeat the run: config, environment, seed, log, metrics, weights; and
    the model card (README.md): data and licence, mask, scores with intervals, what it is not for.
    Ctrl-C finishes the step and saves; a second Ctrl-C ends at once.

    To use several processes, on GPUs or on a CPU: torchrun --nproc_per_node 2 -m chasm train RECIPE
    ('accelerate launch --cpu' starts only one process).
    """
    # Before torch is imported: a thread that spins while it waits takes a busy core from the thread it waits for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    require("train", "data")
    from chasm.train import load_recipe
    from chasm.train import train as run
    from chasm.train.config import dump

    config = load_recipe(recipe, set_)
    if show:
        typer.echo(dump(config), nl=False)
        return
    folder = out or Path("runs") / _name(recipe, config)
    done = (folder / "metrics.json").is_file()
    metrics = run(config, folder, quiet=quiet, trackers=track)
    if metrics:
        from chasm.publish import write_run_card

        _print(metrics)
        is_archived = done and not os.access(folder, os.W_OK)
        if not is_archived and not write_run_card(folder, replace=not done):
            typer.echo(f"{folder / 'README.md'}: not a card of chasm, and left as it is: the run has no card")
        typer.echo(f"run folder: {folder}" + (" (already done: nothing was computed)" if done else ""))


def evaluate(
    run: str = typer.Argument(..., help="Run folder, or name of a model."),
    split: str = typer.Option("test", help="train, val or test."),
    data: str | None = typer.Option(None, help="Folder of the dataset. Default: that of the training."),
    set_: list[str] = typer.Option(
        [],
        "--set",
        help="Score under other conditions, as changes of the run's recipe: data.options.part=.., or "
        "task.options.snr_db=20 for noise. Repeatable.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the whole record as JSON."),
) -> None:
    """Score a run, with the weights that validation selected, and the zero-filled (or bicubic) reference."""
    require("train", "data")
    from chasm.common.devices import usable_device
    from chasm.common.files import json_safe
    from chasm.train import evaluate as score

    metrics = score(run, split, device=usable_device(), data_path=data, changes=set_)
    typer.echo(json.dumps(json_safe(metrics), indent=2)) if as_json else _print(metrics)


def _name(recipe: str, config: Any) -> str:
    """Return the name of the recipe, with the mixer if it is not the recipe's, so that runs do not collide."""
    from chasm.train import load_recipe

    try:
        own = load_recipe(recipe).mixer.name
    except ValueError:  # the recipe is complete only with its --set
        own = config.mixer.name
    return str(config.name) if config.mixer.name == own else f"{config.name}-{config.mixer.name}"


def _print(metrics: dict[str, Any]) -> None:
    reference = metrics["reference"]
    for name, row in (("model", metrics), *([(reference["name"], reference)] if reference else [])):
        several = len(metrics["cases"]) > 1  # one case has no spread
        scores = [
            f"{k} {_number(v)}" + (f" ± {_number(row['std'][k], 2)}" if several else "") for k, v in row["mean"].items()
        ]
        typer.echo(f"{name}: {'  '.join(scores)}")
    proxy = ", proxy data" if metrics["proxy"] else ""
    cases = counted(len(metrics["cases"]), "case")
    typer.echo(f"{metrics['split']} split, {cases}, protocol {metrics['protocol']}{proxy}")
    if metrics.get("blank_slices"):
        typer.echo(f"not scored: {counted(metrics['blank_slices'], 'blank slice')}")


def _number(value: float | None, digits: int = 4) -> str:
    """A score as text; one that is not finite is None in JSON."""
    return "not finite" if value is None else f"{value:.{digits}g}"
