"""`chasm demo`: train a small network four times on drawn data, and write a report."""

import os
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from chasm.common.extras import require

if TYPE_CHECKING:
    from chasm.train.config import RunConfig

_UNET = {
    "backbone": {"name": "unet", "options": {"width": 16, "depth": 3, "levels": [0, 1, 2]}},
    "train": {"steps": 140, "lr": 1e-3, "val_every": 35},
}
# One recipe for each task: the name of a shipped recipe, or its content. The methods differ only in the slot.
TASKS: dict[str, str | dict[str, Any]] = {
    "reconstruction": "demo",
    "segmentation": {
        "data": {"options": {"content": "tumour", "size": 96, "cases": 30, "slices": 8}},
        "task": {"name": "segmentation", "options": {"sampling": {"kind": "equispaced", "acceleration": 4}}},
        **_UNET,
    },
    "photos": {
        "data": {"options": {"content": "photos", "size": 96, "slices": 16}},
        "task": {"name": "superres", "options": {}},
        **_UNET,
    },
}
METHODS: dict[str, str] = {  # what each puts into the slots
    "Baseline": "{name: identity}",
    "wrapper only": "{name: chasm, options: {basis: null}}",
    "GFNet": "{name: gfnet}",
    "CHASM": "{name: chasm}",
}
QUESTIONS = {
    "reconstruction": "A small HiFi-Mamba with data consistency restores drawn brains from a quarter of their k-space. "
    "Which mixer in its slots does best?",
    "segmentation": "A small U-Net finds drawn tumours in images from a quarter of their k-space. Which mixer in its "
    "slots does best?",
    "photos": "A small U-Net enlarges photographs. Which mixer in its slots does best?",
}


def demo(
    task: str = typer.Option("reconstruction", help="reconstruction, segmentation or photos."),
    out: Path = typer.Option(Path("demo"), "--out", "-o", help="Folder of the runs and the report."),
    steps: int | None = typer.Option(None, min=2, help="Training steps of each method. Default: depends on the task."),
    seed: int = typer.Option(0, min=0, help="Seed of the initial weights and of the order of slices."),
) -> None:
    """Train a small network with nothing, CHASM's wrapper alone, GFNet, and CHASM in its slots, and write a report.

    The demo takes minutes on a CPU and needs no download. Reconstruction trains a small HiFi-Mamba with data
    consistency, and the other tasks a small U-Net. All methods share the data, the mask, the order of slices and the
    initial weights of the network. The data is drawn (brains, tumours) or comes with scikit-image (photographs). It
    shows that the software works, not which mixer wins on real data. Every core trains one method at a time.
    """
    require("train", "data", "report")
    from chasm.common.registry import suggest

    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: {suggest(task, TASKS)}")
    page, run = _compare(task, out, steps, seed)
    typer.echo(f"report: {page.resolve()}")
    if task == "reconstruction":
        typer.echo(f"try it on your own image, in the browser: chasm app {run}")


def _compare(task: str, out: Path, steps: int | None, seed: int) -> tuple[Path, Path]:
    """Score or train every method, and write the report on them; return the page and the folder of CHASM's run."""
    from chasm.studies.report import report_runs
    from chasm.studies.state import state

    configs = {method: _config(task, method, steps, seed) for method in METHODS}
    steps = configs["CHASM"].train.steps
    place = out / task / f"seed{seed}-{steps}steps"
    folders = {method: place / method.lower().replace(" ", "-") for method in METHODS}
    for method, folder in folders.items():
        word, other = state(folder, configs[method])
        if word == "other config":
            raise ValueError(f"{folder} holds a run with another config: {other}: choose another --out, or remove it")
    runs = dict(folders)
    if task == "reconstruction":
        runs = {"compressed sensing": place / "compressed-sensing", **folders}
        _score_classical(configs["Baseline"], runs["compressed sensing"])
    _train(configs, folders)
    command = f"chasm demo --task {task} --steps {steps} --seed {seed}"
    title = f"chasm demo: {task}"
    page = report_runs(runs, out / task / "report.html", title, question=QUESTIONS[task], command=command)
    return page, folders["CHASM"]


def _config(task: str, method: str, steps: int | None, seed: int) -> "RunConfig":
    from chasm.train.config import load_recipe, shipped_recipes

    recipe = TASKS[task]
    changes = [f"name='demo {task}: {method}'", f"seed={seed}", f"mixer={METHODS[method]}"]
    if steps is not None:
        changes += [f"train.steps={steps}", f"train.val_every={max(steps // 7, 1)}"]
    return load_recipe(shipped_recipes()[recipe] if isinstance(recipe, str) else recipe, changes)


def _score_classical(config: "RunConfig", folder: Path) -> None:
    import torch

    from chasm.train.classical import evaluate_classical

    torch.set_num_threads(1)  # as the runs have it
    metrics = evaluate_classical(config, folder)
    typer.echo(_line(metrics["reference"]["name"], metrics["reference"]), err=True)
    typer.echo(_line("compressed sensing", metrics), err=True)


def _train(configs: dict[str, "RunConfig"], folders: dict[str, Path]) -> None:
    """Train every method that is not done yet, each in a process of its own with one thread.

    The maps are small: a second thread would save little, and on a busy machine threads that wait for each other
    take many times as long as one.
    """
    from chasm.common.files import read_json
    from chasm.common.progress import ProgressBar
    from chasm.studies.executors import local
    from chasm.studies.state import state
    from chasm.studies.worker import make_job

    missing = [method for method in configs if state(folders[method], configs[method])[0] != "done"]
    jobs = [make_job(method, folders[method], configs[method]) for method in missing]
    at_once = max(1, min(len(jobs), os.cpu_count() or 1))
    total = sum(configs[method].train.steps or 0 for method in missing)

    def show_progress() -> None:
        bar.update(sum(_steps_done(folders[method]) for method in missing), total, "steps of all methods")

    with ProgressBar(total) as bar, closing(local(jobs, at_once, threads=1, on_poll=show_progress)) as outcomes:
        if jobs:
            bar.say(f"training {', '.join(missing)}: {at_once} at once, {total // len(jobs)} steps each")
        for method, outcome in outcomes:
            if outcome != "done":
                error = state(folders[method], configs[method])[1]
                raise ValueError(f"{method}: {error or f'{outcome}: run the same command again to go on'}")
            bar.say(_line(method, read_json(folders[method] / "metrics.json")))


def _steps_done(folder: Path) -> int:
    """The last step that a run has logged."""
    log = folder / "log.jsonl"
    steps = re.findall(r'"step": (\d+)', log.read_text()) if log.is_file() else []
    return int(steps[-1]) if steps else 0


def _line(name: str, row: dict[str, Any]) -> str:
    scores = "   ".join(f"{k} {row['mean'][k]:.3f}" for k in list(row["mean"])[:2])
    return f"  {name:<18} {scores}   ({row['protocol']})"
