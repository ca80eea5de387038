"""`chasm study`: list the studies of the paper, estimate their cost, run them, and print their state."""

from collections import Counter
from pathlib import Path
from typing import Any

import typer

from chasm.cli.errors import FAILED, INTERRUPTED
from chasm.common.extras import require
from chasm.common.text import counted

app = typer.Typer(no_args_is_help=True, help="Run the paper's tables and ablations, which are grids of runs.")

NAME = typer.Argument(..., help="A name of 'chasm study list'.")
SCALE = typer.Option(
    "tiny", help="tiny (drawn data), proxy (small stand-ins for the real data) or full (the paper's data)."
)
PROTOCOL = typer.Option(
    "default",
    help="default: every mixer as shipped. matched: one step size for all parameters, as in the paper. "
    "tuned: short runs choose the step size of spectral parameters on validation.",
)
SELECTION_STEPS = typer.Option(
    1000, min=1, help="Steps of the short runs of --protocol tuned; at most those of the study."
)
OUT = typer.Option(Path("runs"), help="Folder of the runs; studies share the runs they have in common.")
SEEDS = typer.Option(None, min=1, help="Number of seeds (0, 1, ..). Default: that of the study.")
PATHS = typer.Option([], "--path", help="Folder of the data: proxy=FOLDER, or cc359=FOLDER at full scale. Repeatable.")
ARM = typer.Option(
    [], "--arm", help="Add an arm of another study, or any mixer, as in 'chasm(bins=256)', to every grid. Repeatable."
)
ONLY = typer.Option(
    [], "--only", help="Take a part of the study: --only host=unet,arm=chasm,gfnet takes both arms. Repeatable."
)
SET = typer.Option(
    [],
    "--set",
    help="Change one key of every run: train.steps=500, or mixer.options.bins=256 where a mixer has it. Repeatable.",
)


@app.command("list")
def list_all() -> None:
    """Name every study, what it asks and how many runs it has."""
    require("train", "data")
    from chasm.studies import list_studies, make_plan

    for study in list_studies():
        name = study.name
        plan = make_plan(name, "full", "tuned")
        count = counted(len(plan.points), "run")
        if plan.open_selections:
            short = sum(len(selection.grid) for selection in plan.open_selections)
            count += f", tuned after {short} short ones"
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
    selection_steps: int = SELECTION_STEPS,
    out: Path = OUT,
    gpus: int = typer.Option(1, min=1, help="Devices to spread the runs over."),
    limit: float = typer.Option(20.0, "--probe", min=0, help="Seconds to spend on timing the models; 0 skips it."),
) -> None:
    """Print the grid of runs with the paper's numbers, and estimate its cost from a short measurement here."""
    require("train", "data")
    from chasm.studies.tuning import stage, with_selections

    plan = with_selections(_plan(name, scale, protocol, seeds, path, overrides, arm, only, selection_steps), out)
    study = plan.study
    typer.echo(f"{study.title} [{study.source}]\n{study.question}\n")
    for setting, host in dict.fromkeys(point[:2] for point in plan.points):
        own = f": {plan.setting_title(setting)}; {plan.host_label(host)}" if plan.own_parts else ""
        typer.echo(f"{setting} in {host}{own}")
        for one in dict.fromkeys(point[2] for point in plan.points if point[:2] == (setting, host)):
            _show_arm(plan, setting, host, one)
    if text := stage(plan):
        typer.echo(f"\n{text}")
    if study.kind == "cost":
        typer.echo(f"\n{counted(len(plan.runs), 'model')} to count; nothing is trained")
    elif limit > 0:
        typer.echo(f"\ntiming the models for {limit:g} s (--probe 0 leaves it out)", err=True)
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
    selection_steps: int = SELECTION_STEPS,
    at_once: int = typer.Option(
        1, min=1, help="Number of runs at the same time on this machine (several may share a GPU), or of SLURM tasks."
    ),
    ray: bool = typer.Option(False, "--ray", help="Run on a Ray cluster."),
    address: str = typer.Option(None, help="Address of the Ray cluster. Default: a cluster on this machine."),
    slurm: bool = typer.Option(False, "--slurm", help="Submit an array job to SLURM, and wait for it."),
    cpus: float = typer.Option(1.0, min=0, help="CPUs for each run under Ray or SLURM."),
    gpus: float = typer.Option(
        0.0, min=0, help="GPUs for each run under Ray or SLURM; with 0.25 under Ray four runs share one."
    ),
    minutes: int = typer.Option(60, help="Time limit of a SLURM task, 5 or more. A task saves before the limit."),
    partition: str = typer.Option(None, help="Partition of the SLURM cluster. Default: the cluster's."),
) -> None:
    """Run what is missing. An interrupted study goes on when it is started again, and failed runs are tried again."""
    require("train", "data")
    from chasm.studies.runner import run as run_study

    if ray and slurm:
        raise ValueError("--ray and --slurm are two places to run a study: choose one")
    plan = _plan(name, scale, protocol, seeds, path, overrides, arm, only, selection_steps)
    outcomes = run_study(
        plan,
        out,
        executor="ray" if ray else "slurm" if slurm else "local",
        at_once=at_once,
        address=address,
        cpus=cpus,
        gpus=gpus,
        minutes=minutes,
        partition=partition,
        say=typer.echo,
    )
    count = Counter(outcomes.values())
    if plan.study.sizes:
        typer.echo(f"scores at other sizes: chasm study sizes {name} --scale {scale} --protocol {protocol} --out {out}")
    typer.echo(", ".join(f"{n} {outcome}" for outcome, n in count.items()) or "nothing to do: all runs are done")
    if count["failed"]:
        raise typer.Exit(FAILED)
    if count["interrupted"]:
        typer.echo("interrupted: run the same command again to go on", err=True)
        raise typer.Exit(INTERRUPTED)


@app.command()
def status(
    name: str = NAME, scale: str = SCALE, protocol: str = PROTOCOL, out: Path = OUT, only: list[str] = ONLY
) -> None:
    """Print the state of every run, the error of failed runs, and the step sizes that --protocol tuned has chosen."""
    require("train", "data")
    from chasm.studies.state import state
    from chasm.studies.tuning import choice_text, stage

    plan = _started_plan(out, name, scale, protocol, only)
    count: Counter[str] = Counter()
    for run in plan.all_runs:
        folder = plan.folder(out, run)
        status, error = state(folder, run.config)
        trace = f" ({folder / 'traceback.txt'})" if (folder / "traceback.txt").is_file() else ""
        typer.echo(f"{status:12s} {run.key}" + (f": {error}{trace}" if error else ""))
        if not run.is_selection:
            count[status] += 1
    for selection in plan.open_selections:
        typer.echo(f"{selection.setting}.{selection.host}.{selection.arm}: step size {choice_text(selection)}")
    if text := stage(plan):
        typer.echo(text)
    if undecided := len(plan.points) - len(plan.runs):
        count["waiting for a step size"] = undecided
    typer.echo(f"{counted(len(plan.points), 'run')}: " + ", ".join(f"{n} {word}" for word, n in count.most_common()))


@app.command()
def sizes(
    name: str = NAME,
    size: list[int] = typer.Option(
        [], "--size", min=8, help="Height and width of the test images. Default: the sizes of the study. Repeatable."
    ),
    scale: str = SCALE,
    protocol: str = PROTOCOL,
    out: Path = OUT,
    only: list[str] = ONLY,
    device: str = typer.Option("cpu", help="Device to compute on: cpu, cuda, .."),
) -> None:
    """Score the finished runs of a study on images of other sizes, without training again. Reports show the scores."""
    from chasm.studies.transfer import sizes_of, transfer

    plan = _started_plan(out, name, scale, protocol, only)
    if not (size or plan.study.sizes):
        raise ValueError(f"study {name} declares no sizes: give them, as in --size 256")
    transfers = transfer(plan, out, size or sizes_of(plan), device)
    for one in transfers:
        scores = ", ".join(f"{metric} {value:.4g}" for metric, value in (one.mean or {}).items())
        typer.echo(f"{one.run} at {one.size} x {one.size}: {scores or one.error}")
    if not transfers:
        typer.echo("no run is finished: chasm study run comes first")
    if any(one.mean is None for one in transfers):
        raise typer.Exit(FAILED)


def _plan(
    name: str,
    scale: str,
    protocol: str,
    seeds: int | None,
    path: list[str],
    overrides: list[str],
    arms: list[str],
    only: list[str],
    selection_steps: int,
) -> Any:
    from chasm.common.files import expanded
    from chasm.studies import make_plan
    from chasm.studies.plan import part_of

    paths = {}
    for entry in path:
        key, equals, folder = entry.partition("=")
        if not equals:
            raise ValueError(f"--path {entry!r}: write it as name=folder")
        paths[key] = str(expanded(folder).resolve())
    seeds_chosen = range(seeds) if seeds else None
    plan = make_plan(name, scale, protocol, seeds_chosen, paths, overrides, arms, selection_steps)
    return part_of(plan, only)


def _started_plan(out: Path, name: str, scale: str, protocol: str, only: list[str]) -> Any:
    """Return a part of a study as it was last started in a folder, with the step sizes that are chosen by now."""
    from chasm.studies import load_plan
    from chasm.studies.plan import part_of
    from chasm.studies.tuning import with_selections

    return with_selections(part_of(load_plan(out, name, scale, protocol), only), out)


def _show_arm(plan: Any, setting: str, host: str, arm: str) -> None:
    """Print one line about an arm: what is in the slots, its step size and seeds, and the numbers of the paper."""
    from chasm.studies.statistics import DECIMALS
    from chasm.studies.tuning import choice_text

    place = (setting, host, arm)
    here = [run for run in (*plan.runs, *plan.selection_runs) if (run.setting, run.host, run.arm) == place]
    quotes = []
    for metric, quote in plan.quotes.get(place, {}).items():
        digits = DECIMALS.get(metric, 2)
        spread = f" ± {quote.spread:.{digits}f}" if quote.spread is not None else ""
        quotes.append(f"{metric} {quote.mean:.{digits}f}{spread}")
    seeds = [f"{point[4]}" for point in plan.points if point[:3] == place]
    runs = f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if plan.study.kind == "train" else ""
    for selection in plan.open_selections:
        if (selection.setting, selection.host, selection.arm) == place:
            runs += f", step size {choice_text(selection)}"
    mixer = here[0].config.mixer
    undecided = {"step_scale"} if here[0].is_selection else set()
    options = ", ".join(f"{k}={v}" for k, v in mixer.options.items() if k not in undecided)
    slot = f"{mixer.name}({options})" if options else mixer.name
    paper = f"paper: {', '.join(quotes)}" if quotes else ""
    typer.echo(f"  {plan.arm(arm).label:36s} {slot:34s} {runs:24s} {paper}".rstrip())


def _show_cost(plan: Any, gpus: int, limit: float) -> None:
    from chasm.studies.estimate import estimate

    cost = estimate(plan, gpus, limit)
    typer.echo(f"\nCost, timed on {cost.device}:")
    for (setting, host, arm), p in cost.probes.items():
        mark = "" if p.measured else "  (assumed)"
        step = f"{1000 * p.step:.1f} ms" if p.step < 1 else f"{p.step:.1f} s"
        typer.echo(f"  {setting} {host} {arm}: {step} a step, {p.parameters / 1e6:.2f}M parameters{mark}")
    steps = "steps unknown" if cost.steps is None else counted(cost.steps, "step")
    typer.echo(f"{counted(cost.runs, 'run')}, {steps}, {cost.disk / 2**30:.2f} GiB of disk")
    if cost.hours is not None and cost.wall_hours is not None:
        hours = [f"{h:,.0f}" if h >= 1000 else f"{h:.3g}" for h in (cost.hours, cost.wall_hours)]
        typer.echo(f"{hours[0]} device-hours; {hours[1]} hours on {counted(gpus, 'device')}")
    for note in cost.notes:
        typer.echo(f"note: {note}")
