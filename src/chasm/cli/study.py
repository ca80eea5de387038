"""`chasm study`: the tables and ablations of the paper as grids of runs: list, estimate cost, run, see the state."""

from collections import Counter
from pathlib import Path
from typing import Any

import typer

from chasm.cli.errors import FAILED
from chasm.common.text import counted

app = typer.Typer(no_args_is_help=True, help="The paper's tables and ablations as grids of runs.")

NAME = typer.Argument(..., help="A name of 'chasm study list'.")
SCALE = typer.Option("tiny", help="tiny (drawn data), proxy (small stand-ins for the real data) or full (the paper's).")
PROTOCOL = typer.Option(
    "default",
    help="default: every mixer as shipped. matched: one step size for all parameters, as in the paper. "
    "tuned: the step size of spectral parameters chosen on validation.",
)
OUT = typer.Option(Path("runs"), help="Folder of the runs; studies share the runs they have in common.")
SEEDS = typer.Option(None, help="Number of seeds (0, 1, ..) instead of the study's own.")
PATHS = typer.Option([], "--path", help="Folder of the data: proxy=FOLDER; at full scale cc359=FOLDER, .. Repeatable.")
ARM = typer.Option([], "--arm", help="Add this to every grid: an arm of another study, or any mixer. Repeatable.")
ONLY = typer.Option(
    [], "--only", help="A part of the study: --only host=unet,arm=chasm,gfnet. Values are alternatives. Repeatable."
)
SET = typer.Option([], "--set", help="Change one key of every run: --set train.steps=500. Repeatable.")


@app.command("list")
def list_studies() -> None:
    """Name every study, what it asks and how many runs it has."""
    from chasm.studies import STUDIES, make_plan

    for name, study in STUDIES.items():
        runs = [len(make_plan(name, "full", protocol).points) for protocol in ("default", "tuned")]
        count = counted(runs[0], "run") + (f", {runs[1]} tuned" if runs[1] != runs[0] else "")
        typer.echo(f"{name:12s} {study.title} [{study.source}; {count}]\n{'':12s} {study.question}")


@app.command()
def show(
    name: str = NAME,
    scale: str = SCALE,
    protocol: str = PROTOCOL,
    seeds: int = SEEDS,
    path: list[str] = PATHS,
    overrides: list[str] = SET,
    arm: list[str] = ARM,
    only: list[str] = ONLY,
    gpus: int = typer.Option(1, min=1, help="Devices to spread the runs over."),
    limit: float = typer.Option(60.0, "--probe", min=0, help="Seconds to spend on timing the models. 0: do not time."),
) -> None:
    """Print the grid of runs with the paper's numbers, and its cost, estimated from a short measurement here."""
    plan = _plan(name, scale, protocol, seeds, path, overrides, arm, only)
    study = plan.study
    typer.echo(f"{study.title} [{study.source}]\n{study.question}\n")
    for place in dict.fromkeys((c.setting, c.host) for c in plan.cells):
        typer.echo(f"{place[0]} in {place[1]}")
        here = [c for c in plan.cells if (c.setting, c.host) == place]
        for one in dict.fromkeys(c.arm for c in here):
            _show_arm(plan, [c for c in here if c.arm == one])
    if study.kind == "cost":
        typer.echo(f"\n{counted(len(plan.cells), 'model')} to count; nothing is trained")
    elif limit > 0:
        _show_cost(plan, gpus, limit)


@app.command()
def run(
    name: str = NAME,
    scale: str = SCALE,
    protocol: str = PROTOCOL,
    out: Path = OUT,
    seeds: int = SEEDS,
    path: list[str] = PATHS,
    overrides: list[str] = SET,
    arm: list[str] = ARM,
    only: list[str] = ONLY,
    at_once: int = typer.Option(1, min=1, help="Runs at once on this machine; several may share a GPU."),
    ray: bool = typer.Option(False, "--ray", help="Run on a Ray cluster instead."),
    address: str = typer.Option(None, help="Address of the Ray cluster. Default: one on this machine."),
    cpus: float = typer.Option(1.0, help="CPUs of a run under Ray."),
    gpus: float = typer.Option(0.0, help="GPUs of a run under Ray; 0.25 lets four share one."),
) -> None:
    """Run what is missing. It can be interrupted and started again; failed runs are recorded and tried again."""
    from chasm.studies.runner import run as run_study

    plan = _plan(name, scale, protocol, seeds, path, overrides, arm, only)
    outcomes = run_study(
        plan,
        out,
        executor="ray" if ray else "local",
        at_once=at_once,
        address=address,
        cpus=cpus,
        gpus=gpus,
        say=typer.echo,
    )
    count = Counter(outcomes.values())
    typer.echo(", ".join(f"{n} {outcome}" for outcome, n in count.items()) or "nothing to do: all runs are done")
    if count["failed"]:
        raise typer.Exit(FAILED)


@app.command()
def status(
    name: str = NAME, scale: str = SCALE, protocol: str = PROTOCOL, out: Path = OUT, only: list[str] = ONLY
) -> None:
    """Print the state of every run, and what went wrong."""
    from chasm.studies import load_plan
    from chasm.studies.plan import part_of
    from chasm.studies.state import state

    plan = part_of(load_plan(out, name, scale, protocol), only)
    states = [state(plan.folder(out, cell), cell.config) for cell in plan.cells]
    for cell, (word, error) in zip(plan.cells, states, strict=True):
        trace = plan.folder(out, cell) / "traceback.txt"
        where = f": {error}" + (f" ({trace})" if trace.is_file() else "") if error else ""
        typer.echo(f"{word:12s} {cell.key}{where}")
    count = Counter(word for word, _ in states)
    typer.echo(f"{counted(len(states), 'run')}: " + ", ".join(f"{n} {word}" for word, n in count.most_common()))


def _plan(
    name: str,
    scale: str,
    protocol: str,
    seeds: int | None,
    path: list[str],
    overrides: list[str],
    arms: list[str],
    only: list[str],
) -> Any:
    from chasm.studies import make_plan
    from chasm.studies.plan import part_of

    paths = {}
    for entry in path:
        key, equals, folder = entry.partition("=")
        if not equals:
            raise ValueError(f"--path {entry!r}: write it as name=folder")
        paths[key] = str(Path(folder).expanduser().resolve())
    return part_of(make_plan(name, scale, protocol, range(seeds) if seeds else None, paths, overrides, arms), only)


def _show_arm(plan: Any, cells: list[Any]) -> None:
    from chasm.studies.vocabulary import get_arm

    first = cells[0]
    quotes = plan.study.quotes.get((first.setting, first.host, first.arm), {})
    printed = ", ".join(f"{m} {q.mean:g}" + (f" ± {q.spread:g}" if q.spread else "") for m, q in quotes.items())
    seeds = sorted({c.seed for c in cells})
    factors = (
        f"step size x {'/'.join(str(m) for m in sorted({c.multiplier for c in cells}))}, " if len(cells) > 1 else ""
    )
    runs = f"{factors}seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if plan.study.kind == "train" else ""
    mixer = first.config.mixer
    options = ", ".join(f"{k}={v}" for k, v in mixer.options.items())
    slot = f"{mixer.name}({options})" if options else mixer.name
    typer.echo(
        f"  {get_arm(first.arm).label:36s} {slot:34s} {runs:24s} {'paper: ' + printed if printed else ''}".rstrip()
    )


def _show_cost(plan: Any, gpus: int, limit: float) -> None:
    from chasm.studies.estimate import estimate

    cost = estimate(plan, gpus, limit)
    typer.echo(f"\nCost, timed on {cost.device}:")
    for (setting, host, arm), p in cost.probes.items():
        mark = "" if p.measured else "  (assumed)"
        typer.echo(
            f"  {setting} {host} {arm}: {1000 * p.step:.1f} ms a step, {p.parameters / 1e6:.2f}M parameters{mark}"
        )
    steps = "steps unknown" if cost.steps is None else counted(cost.steps, "step")
    typer.echo(f"{counted(cost.runs, 'run')}, {steps}, {cost.disk / 2**30:.2f} GiB of disk")
    if cost.hours is not None and cost.wall_hours is not None:
        typer.echo(f"{cost.hours:.3g} device-hours; {cost.wall_hours:.3g} hours on {counted(gpus, 'device')}")
    for note in cost.notes:
        typer.echo(f"note: {note}")
