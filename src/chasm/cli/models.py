"""`chasm models`: list, show and copy the trained models of the package, and make one from a run."""

from pathlib import Path
from typing import Any

import typer

app = typer.Typer(no_args_is_help=True, help="List, show and copy trained models, or pack a run of your own.")

OTHER = (
    "Also score on other data, given as changes of the run's recipe: --other data.options.part=raw_complex. Write "
    "several changes in quotes, with spaces between them; split=NAME scores that split instead of test. Repeatable."
)


@app.command("list")
def list_(pattern: str = typer.Argument("*", help="Names to list, as a pattern like 'brain*'.")) -> None:
    """List the models that come with chasm. 'chasm reconstruct SCAN --run NAME' uses one."""
    from chasm.common.files import read_json
    from chasm.common.tables import print_table
    from chasm.models import RECORD, list_models, shipped_models

    names = list_models(pattern)
    if not names:
        reason = "no model comes with this version" if not shipped_models() else f"no model is named like {pattern!r}"
        typer.echo(f"{reason}: 'chasm models pack' makes one from your own run")
        return
    rows = [_row(name, read_json(shipped_models()[name] / RECORD)) for name in names]
    print_table(["model", "task", "trained on", "parameters", "test"], rows, right=["parameters"])


@app.command()
def show(
    name: str = typer.Argument(..., help="Name of a model, run or model folder, or owner/name on the Hub."),
) -> None:
    """Print the card of a model: its data and licence, mask, scores and limits."""
    from chasm.models import check_model, find_model, read_card

    folder = find_model(name)
    check_model(folder)
    typer.echo(f"{read_card(folder)}\n\nfolder: {folder}")


@app.command()
def get(
    name: str = typer.Argument(..., help="Name of a model, or owner/name on the Hub."),
    out: Path | None = typer.Option(None, "--out", "-o", help="New folder. Default: NAME in the current folder."),
) -> None:
    """Copy a model into a folder of its own, as a start for your own work."""
    import shutil

    from chasm.models import MODEL_FILES, check_model, find_model

    source = find_model(name)
    check_model(source)
    folder = out or Path(name.rpartition("/")[2])
    if folder.exists():
        raise FileExistsError(f"{folder}: already there: give another --out")
    folder.mkdir(parents=True)
    try:
        for file in MODEL_FILES:
            if (source / file).is_file():
                shutil.copyfile(source / file, folder / file)
        check_model(folder)
    except Exception:
        shutil.rmtree(folder)
        raise
    typer.echo(f"{folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}")


@app.command()
def pack(
    run: Path = typer.Argument(..., help="Folder of a finished run, or of a model that gets new scores and card."),
    name: str = typer.Argument(..., help="Name of the model."),
    out: Path | None = typer.Option(None, "--out", "-o", help="Model folder. Default: NAME in the current folder."),
    other: list[str] = typer.Option([], "--other", help=OTHER),
    data: str | None = typer.Option(None, help="Folder of the data of --other. Default: that of the training."),
    licence: str | None = typer.Option(None, help="Terms of the training data, if chasm does not know them."),
    page: bool = typer.Option(False, "--page", help="Also write the network for 'chasm app' (a minute or two)."),
) -> None:
    """Turn a finished run into a model folder: safetensors, config, checksums, and a card with its scores.

    The card comes from the records of the run. Data that states no licence is refused.
    """
    from chasm.common.devices import usable_device
    from chasm.publish import pack as make

    device = usable_device()
    folder = make(run, name, out, others=other, data_path=data, licence=licence, page=page, device=device)
    size = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"{folder}: {size / 2**20:.1f} MiB; read {folder / 'README.md'} before you give it away")


def _row(name: str, record: dict[str, Any]) -> list[str]:
    scores = record["scores"][0]
    metric, value = next(iter(scores["values"].items()))
    task = record["task"]
    how = f" x{task['mask']['nominal']:g}" if "mask" in task else f" x{task['factor']}" if "factor" in task else ""
    return [
        name,
        task["name"] + how,
        "; ".join(terms["source"].split(" (")[0] for terms in record["trained_on"]),
        f"{record['parameters']['model']:,}",
        f"{metric} {value['mean']:.4g} [{value['low']:.4g}, {value['high']:.4g}]",
    ]
