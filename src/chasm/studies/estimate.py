"""What a study will cost, before it is started: a few training steps of each model on the machine at hand.

Measured: seconds of a training step and of a scored batch, on random images. Counted: runs, steps, bytes of
checkpoints. Models the time limit leaves no room for get the mean of those measured in the same host.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from chasm.common.provenance import device_name
from chasm.data import open_dataset
from chasm.studies.factors import DATASETS, SETTINGS, image_size
from chasm.studies.plan import Plan, PlannedRun
from chasm.studies.tuning import assume_choices
from chasm.surgery.param_groups import param_groups
from chasm.train.config import RunConfig
from chasm.train.run import build_model
from chasm.train.step import add_gradients

VALIDATIONS = 20  # per run, unless the config says otherwise


@dataclass(frozen=True)
class Probe:
    step: float  # seconds of a training step
    forward: float  # seconds of a scored batch
    parameters: int
    measured: bool = True


@dataclass(frozen=True)
class Estimate:
    runs: int
    steps: int | None  # of all runs; None where the number of slices is not known
    hours: float | None  # of one device
    wall_hours: float | None  # on `gpus` devices, one run on each
    disk: int  # bytes
    gpus: int
    device: str
    probes: dict[tuple[str, str, str], Probe]  # (setting, host, arm)
    notes: list[str]


def probe(config: RunConfig, modalities: int, size: int, device: torch.device, seconds: float = 2.0) -> Probe:
    """Time the model of a config on random images: at least one step after a warm-up, then as many as fit."""
    t = config.train
    # A CPU takes as long as there are images, and one is quicker to wait for; small ones are mostly overhead.
    batch = 1 if device.type == "cpu" and size > 64 else t.batch
    task = config.task.create()
    model = build_model(config, task, (modalities, size, size)).to(device)
    optimizer = torch.optim.AdamW(param_groups(model, lr=t.lr, weight_decay=t.weight_decay))
    image = torch.rand(batch, modalities, size, size, device=device)
    label = (
        torch.zeros(batch, size, size, dtype=torch.int64, device=device) if config.task.name == "segmentation" else None
    )

    def step() -> None:
        prepared = task.prepare(image, label)
        optimizer.zero_grad(set_to_none=True)
        add_gradients(model, task, [prepared], bf16=t.precision == "bf16")
        optimizer.step()

    @torch.no_grad()
    def forward() -> None:
        prepared = task.prepare(image, label)
        task.scores(model(prepared.input, **prepared.physics).float(), prepared)

    scale = t.batch / batch
    parameters = sum(p.numel() for p in model.parameters())
    return Probe(scale * _time(step, device, seconds), scale * _time(forward, device, seconds / 4), parameters)


def _time(work: Callable[[], None], device: torch.device, seconds: float) -> float:
    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic()

    work()  # warm-up
    started, n = clock(), 0
    while n == 0 or clock() - started < seconds:
        work()
        n += 1
    return (clock() - started) / n


def estimate(
    plan: Plan, gpus: int = 1, limit: float = 60.0, device: torch.device | str | None = None, seconds: float = 2.0
) -> Estimate:
    """Probe the models of a plan for about `limit` seconds in all, and add up."""
    plan = assume_choices(plan)
    runs = [*plan.selection_runs, *plan.runs]
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = device_name(where)
    notes: list[str] = []
    probes = _probes(plan, where, limit, seconds, notes)
    slices = {s: _slices(plan, s, notes) for s in dict.fromkeys(run.setting for run in runs)}
    steps, hours, disk = [], [], 0
    for run in runs:
        found = probes[run.setting, run.host, run.arm]
        t, counts = run.config.train, slices[run.setting]
        n = t.steps if t.steps is not None else None if counts is None else round((t.epochs or 0) * counts[0] / t.batch)
        steps.append(n)
        if n is not None:
            validations = n // t.val_every if t.val_every else min(VALIDATIONS, n)
            scored = validations * counts[1] + counts[2] if counts else 0
            hours.append((n * found.step + scored / t.batch * found.forward) / 3600)
        copies = 3 + bool(t.ema)  # weights, two moments, and the average
        disk += found.parameters * 4 * (2 * copies + 1) + 2**21  # two checkpoints, the best weights, logs and examples
    known = None not in steps
    total = sum(hours) if known else None
    wall = None if total is None else max(total / gpus, max(hours, default=0.0))
    all_steps = sum(s for s in steps if s is not None) if known else None
    return Estimate(len(runs), all_steps, total, wall, disk, gpus, name, probes, notes)


def _probes(
    plan: Plan, device: torch.device, limit: float, seconds: float, notes: list[str]
) -> dict[tuple[str, str, str], Probe]:
    wanted: dict[tuple[str, str, str], PlannedRun] = {}
    for cell in plan.runs:
        wanted.setdefault((cell.setting, cell.host, cell.arm), cell)
    by_model: dict[Any, Probe] = {}  # settings that differ in the mask alone share a model
    found: dict[tuple[str, str, str], Probe] = {}
    late, started = [], time.monotonic()
    # CHASM and the Baseline of every host first: they stand for the others when time runs out.
    for place, cell in sorted(wanted.items(), key=lambda item: item[0][2] not in ("chasm", "baseline")):
        size, modalities = image_size(SETTINGS[cell.setting], plan.scale), _modalities(cell, plan.scale)
        model = (cell.host, cell.arm, size, modalities, cell.config.task.name)
        if model not in by_model:
            first_of_host = not any(k[1] == cell.host and k[0] == cell.setting for k in found)
            if time.monotonic() - started > limit and not first_of_host:
                late.append((place, cell))
                continue
            by_model[model] = probe(cell.config, modalities, size, device, seconds)
        found[place] = by_model[model]
    for place, _ in late:
        near = [p for k, p in found.items() if k[:2] == place[:2] and p.measured]
        mean = [sum(getattr(p, f) for p in near) / len(near) for f in ("step", "forward", "parameters")]
        found[place] = Probe(mean[0], mean[1], round(mean[2]), measured=False)
    if late:
        notes.append(
            f"{len(late)} of {len(wanted)} models not timed within {limit:g} s: the mean of their host is taken"
        )
    if device.type == "cpu" and plan.scale != "tiny":
        notes.append("timed with one image on a CPU and multiplied by the batch: for a GPU, ask there")
    return found


def _modalities(cell: PlannedRun, scale: str) -> int:
    if cell.config.task.name == "superres":
        return 3
    return 4 if cell.config.task.name == "segmentation" and scale != "proxy" else 1


def _slices(plan: Plan, setting: str, notes: list[str]) -> tuple[int, int, int] | None:
    """Slices for training, validation and test: counted where the data is at hand."""
    data = next(c.config.data for c in plan.runs if c.setting == setting)
    if data.name == "embedded" or data.path is not None:
        train, val, test = (
            len(open_dataset(data.name, data.path, split=s, **data.options)) for s in ("train", "val", "test")
        )
        return train, val, test
    dataset = DATASETS[SETTINGS[setting].dataset]
    if plan.scale == "full":
        note = f"{dataset.title}: {dataset.slices:,} training slices assumed: give its path to count them"
        if note not in notes:
            notes.append(note)
        return dataset.slices, 0, 0
    note = f"{dataset.title}: number of slices not known: give its path"
    if note not in notes:
        notes.append(note)
    return None
