"""`chasm demo`: the main job in a few minutes, on data that needs no download."""

from pathlib import Path
from typing import Any

import typer

# One protocol per task; the methods differ only in the slot. In runs this short the gains hardly move unless spectral
# parameters have a large step size (docs/results/evidence).
TASKS: dict[str, dict[str, Any]] = {
    "reconstruction": {
        "data": {"options": {"content": "brain", "size": 96, "cases": 30, "slices": 8}},
        "task": {"name": "reconstruction", "options": {"sampling": {"kind": "equispaced", "acceleration": 4}}},
    },
    "segmentation": {
        "data": {"options": {"content": "tumour", "size": 96, "cases": 30, "slices": 8}},
        "task": {"name": "segmentation", "options": {"sampling": {"kind": "equispaced", "acceleration": 4}}},
    },
    "photos": {
        "data": {"options": {"content": "photos", "size": 96, "slices": 16}},
        "task": {"name": "superres", "options": {}},
    },
}
METHODS: dict[str, dict[str, Any]] = {
    "Baseline": {"name": "identity"},
    "wrapper only": {"name": "chasm", "options": {"basis": None}},
    "GFNet": {"name": "gfnet"},
    "CHASM": {"name": "chasm"},
}


def demo(
    task: str = typer.Option("reconstruction", help="reconstruction, segmentation or photos."),
    out: Path = typer.Option(Path("demo"), "--out", "-o", help="Folder for the runs and the report."),
    steps: int = typer.Option(140, min=2, help="Training steps of each method."),
    seed: int = typer.Option(0, min=0, help="Seed of initial weights and of the order of slices."),
) -> None:
    """Train a small U-Net with four contents of its slots, and write a report.

    The slots hold nothing, CHASM's wrapper without the spectral part, GFNet, or CHASM. This takes minutes on a CPU and
    downloads nothing. All have the same data, mask, order of slices and initial weights of the host. The data is
    drawn (brains, tumours) or comes with scikit-image (photographs), so the result shows how it works, and not which
    mixer is best on real data.
    """
    from chasm.common.registry import suggest

    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: {suggest(task, TASKS)}")
    page = _compare(task, out, steps, seed)
    typer.echo(f"report: {page.resolve()}")


def _compare(task: str, out: Path, steps: int, seed: int) -> Path:
    """Score or train every method, and write the report on them."""
    from chasm.studies.report import report_runs
    from chasm.train import load_recipe, train
    from chasm.train.classical import evaluate_classical

    place = out / task / f"seed{seed}-{steps}steps"
    runs: dict[str, Path] = {}
    for number, (method, mixer) in enumerate(METHODS.items(), 1):
        config = load_recipe(
            {
                "name": f"demo {task}: {method}",
                "seed": seed,
                **TASKS[task],
                "backbone": {"name": "unet", "options": {"width": 16, "depth": 3, "levels": [0, 1, 2]}},
                "mixer": mixer,
                "train": {"steps": steps, "lr": 1e-3, "spectral_multiplier": 100, "val_every": max(steps // 4, 1)},
            }
        )
        if number == 1 and task == "reconstruction":
            typer.echo("compressed sensing (total variation)", err=True)
            runs["compressed sensing"] = place / "compressed-sensing"
            classical = evaluate_classical(config, runs["compressed sensing"])
            _line(classical["reference"]["name"], classical["reference"])
            _line("compr. sensing", classical)
        typer.echo(f"[{number}/{len(METHODS)}] {method}: {steps} steps", err=True)
        runs[method] = place / method.lower().replace(" ", "-")
        _line(method, train(config, runs[method]))
    command = f"chasm demo --task {task} --steps {steps} --seed {seed}"
    return report_runs(runs, out / task / "report.html", title=f"chasm demo: {task}", command=command)


def _line(name: str, row: dict[str, Any]) -> None:
    scores = "   ".join(f"{k} {row['mean'][k]:.3f}" for k in list(row["mean"])[:2])
    typer.echo(f"  {name:<15} {scores}   ({row['protocol']})", err=True)
