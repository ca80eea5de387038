"""An estimate of what a study will cost, from a few training steps of each model on this machine.

The seconds of a training step and of a scored batch are measured on random images. Runs, steps and bytes of
checkpoints are counted. Models that do not fit into the time limit get the mean of the other models of their host.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch

from chasm.common.devices import synchronize, usable_device
from chasm.common.provenance import device_name
from chasm.studies.factors import DATASETS, SETTINGS, image_size
from chasm.studies.plan import Plan, PlannedRun
from chasm.studies.tuning import assume_choices
from chasm.surgery.param_groups import param_groups
from chasm.train.config import RunConfig
from chasm.train.run import build_model, open_split
from chasm.train.step import add_gradients

DEFAULT_VALIDATIONS = 20  # per run, unless the config says otherwise
MAX_CPU_SIZE = 64  # height and width: a step of HiFi-Mamba on one image of 256 x 256 takes 6 GB, and minutes
MAX_PROBE_SECONDS = 2.0  # for one model; less where many models share the limit


@dataclass(frozen=True)
class Probe:
    """The cost of one model."""

    step: float  # seconds of a training step
    forward: float  # seconds of a scored batch
    parameters: int
    measured: bool = True  # False if the numbers are the mean of other models


@dataclass(frozen=True)
class Estimate:
    """The cost of a study."""

    runs: int
    steps: int | None  # steps of all runs; None if the number of slices is not known
    hours: float | None  # device hours of all runs; None if the number of slices is not known
    wall_hours: float | None  # hours with `gpus` devices and one run on each
    disk: int  # bytes of all run folders
    gpus: int  # number of devices that will run it
    device: str  # name of the device that was measured
    probes: dict[tuple[str, str, str], Probe]  # cost of each model, by setting, host and arm
    notes: list[str]  # lines that say what was assumed


def time_batch(config: RunConfig, modalities: int, size: int, device: torch.device, seconds: float) -> Probe:
    """Return the seconds of a full batch of the model of a config, timed on random images with `modalities` channels.

    A warm-up step that takes longer than `seconds` is the measurement.
    """
    t = config.train
    # On a CPU the time of large images is nearly proportional to their number and their pixels.
    is_reduced = device.type == "cpu" and size > MAX_CPU_SIZE
    batch, side = (1, MAX_CPU_SIZE) if is_reduced else (t.batch, size)
    task = config.task.create()
    model = build_model(config, task, (modalities, size, size)).to(device)
    optimizer = torch.optim.AdamW(param_groups(model, lr=t.lr, weight_decay=t.weight_decay))
    image = torch.rand(batch, modalities, side, side, device=device)
    label = torch.zeros(batch, side, side, dtype=torch.int64, device=device)

    def step() -> None:
        prepared = task.prepare(image, label)
        optimizer.zero_grad(set_to_none=True)
        add_gradients(model, task, [prepared], bf16=t.precision == "bf16")
        optimizer.step()

    @torch.no_grad()
    def forward() -> None:
        prepared = task.prepare(image, label)
        task.scores(model(prepared.input, **prepared.physics).float(), prepared)

    scale = t.batch / batch * (size / side) ** 2
    parameters = sum(p.numel() for p in model.parameters())
    return Probe(scale * _time(step, device, seconds), scale * _time(forward, device, seconds / 4), parameters)


def _time(work: Callable[[], None], device: torch.device, seconds: float) -> float:
    def clock() -> float:
        synchronize(device)
        return time.monotonic()

    started = clock()
    work()  # warm-up
    if (first := clock() - started) > seconds:
        return first  # a second one would take as long again
    started, n = clock(), 0
    while n == 0 or clock() - started < seconds:
        work()
        n += 1
    return (clock() - started) / n


def estimate(plan: Plan, gpus: int = 1, limit: float = 20.0) -> Estimate:
    """Return the cost of the runs of a plan, from probes of its models, on a GPU if there is one.

    Args:
        plan: the study's runs.
        gpus: number of devices that will run it.
        limit: seconds to time all models.
    """
    plan = assume_choices(plan)
    runs = plan.all_runs
    where = usable_device()
    name = device_name(where)
    notes: list[str] = []
    probes = _probes(plan, where, limit, notes)
    slices = {s: _slices(plan, s, notes) for s in dict.fromkeys(run.setting for run in runs)}
    steps, hours, disk = [], [], 0
    for run in runs:
        probe = probes[run.setting, run.host, run.arm]
        t, counts = run.config.train, slices[run.setting]
        n = t.steps
        if n is None and counts is not None:
            n = round((t.epochs or 0) * counts[0] / t.batch)
        steps.append(n)
        if n is not None:
            validations = n // t.val_every if t.val_every else min(DEFAULT_VALIDATIONS, n)
            scored = validations * counts[1] + counts[2] if counts else 0
            hours.append((n * probe.step + scored / t.batch * probe.forward) / 3600)
        copies = 3 + bool(t.ema)  # weights, two moments, and the average
        disk += probe.parameters * 4 * (2 * copies + 1) + 2**21  # two checkpoints, the best weights, logs and examples
    if None in steps:
        return Estimate(len(runs), None, None, None, disk, gpus, name, probes, notes)
    total, wall = sum(hours), max([sum(hours) / gpus, *hours])
    return Estimate(len(runs), sum(n for n in steps if n), total, wall, disk, gpus, name, probes, notes)


def _probes(plan: Plan, device: torch.device, limit: float, notes: list[str]) -> dict[tuple[str, str, str], Probe]:
    wanted: dict[tuple[str, str, str], PlannedRun] = {}
    for cell in plan.runs:
        wanted.setdefault((cell.setting, cell.host, cell.arm), cell)
    by_model: dict[tuple[str, str, str, int, int], Probe] = {}  # settings that differ only in their mask share a model
    models = {_model(cell, plan.scale) for cell in wanted.values()}
    seconds = min(MAX_PROBE_SECONDS, max(limit, 0) / (2 * len(models)))  # half of the time is set-up
    by_place: dict[tuple[str, str, str], Probe] = {}
    late, started, longest = [], time.monotonic(), 0.0
    # CHASM and the baseline of each host come first: when time runs out, the others get their mean.
    for place, cell in sorted(wanted.items(), key=lambda item: item[0][2] not in ("chasm", "baseline")):
        model = _model(cell, plan.scale)
        if model not in by_model:
            before = time.monotonic()
            is_late = before - started + longest > limit
            if is_late and any(other[:2] == place[:2] for other in by_place):
                late.append(place)
                continue
            *_, modalities, size = model
            by_model[model] = time_batch(cell.config, modalities, size, device, seconds)
            longest = max(longest, time.monotonic() - before)
        by_place[place] = by_model[model]
    for place in late:
        measured = [p for other, p in by_place.items() if other[:2] == place[:2] and p.measured]
        step, forward, parameters = (
            fmean(getattr(p, name) for p in measured) for name in ("step", "forward", "parameters")
        )
        by_place[place] = Probe(step, forward, round(parameters), measured=False)
    if late:
        notes.append(
            f"{len(late)} of {len(wanted)} models were not timed within {limit:g} s and get the mean of their host"
        )
    if device.type == "cpu" and plan.scale != "tiny":
        notes.append(
            f"timed with one image of {MAX_CPU_SIZE} x {MAX_CPU_SIZE} on a CPU, multiplied by batch and pixels: "
            "run this command on the GPU machine to learn its cost"
        )
    return by_place


def _model(cell: PlannedRun, scale: str) -> tuple[str, str, str, int, int]:
    """Return what decides the cost of a model: host, arm and task, and the channels and size of a raw image."""
    task = cell.config.task.name
    modalities = {"superres": 3, "segmentation": 1 if scale == "proxy" else 4}.get(task, 1)
    return cell.host, cell.arm, task, cell.config.data.depth or modalities, image_size(SETTINGS[cell.setting], scale)


def _slices(plan: Plan, setting: str, notes: list[str]) -> tuple[int, int, int] | None:
    """Return the number of slices for training, validation and test, counted if the data is there."""
    config = next(c.config for c in plan.runs if c.setting == setting)
    data = config.data
    if data.name == "embedded" or data.path is not None:
        train, val, test = (len(open_split(config, split)) for split in ("train", "val", "test"))
        return train, val, test
    dataset, is_full = DATASETS[SETTINGS[setting].dataset], plan.scale == "full"
    known = f"{dataset.slices:,} training slices assumed: give its path to count them"
    note = f"{dataset.title}: {known if is_full else 'number of slices not known: give its path'}"
    if note not in notes:
        notes.append(note)
    return (dataset.slices // (data.depth or 1), 0, 0) if is_full else None
