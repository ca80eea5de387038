"""Run what is missing of a study. An interrupted study goes on from where it was when it is started again."""

import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chasm.common.files import expanded
from chasm.common.signals import heeded_signals, restored_handlers
from chasm.common.text import counted
from chasm.data.base import DATASETS, FileDataset, existing
from chasm.data.records import SPLITS, in_split
from chasm.studies.executors import local, on_ray
from chasm.studies.factors import SETTINGS, image_size
from chasm.studies.plan import Plan, arms_left_out, missing_paths, save_plan
from chasm.studies.slurm import on_slurm
from chasm.studies.state import has_diverged, state
from chasm.studies.tuning import stage, with_selections
from chasm.studies.worker import Job, make_job

Say = Callable[[str], None]


def jobs_of(plan: Plan, root: str | Path) -> list[Job]:
    """Return the runs that are neither done nor under way. Failed ones are tried again.

    A selection run that diverged is not tried again, since that is its result.
    """
    jobs = []
    for run in plan.all_runs:
        folder = plan.folder(root, run)
        if state(folder, run.config)[0] in ("done", "running") or (run.is_selection and has_diverged(folder)):
            continue
        size = image_size(SETTINGS[run.setting], plan.scale)
        jobs.append(make_job(run.key, folder, run.config, run.kind, size))
    return jobs


def run(
    plan: Plan,
    root: str | Path,
    *,
    executor: str = "local",
    at_once: int = 1,
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    minutes: int = 60,
    partition: str | None = None,
    say: Say = print,
) -> dict[str, str]:
    """Run what is missing of a study, and return the outcome of each run that was tried, by key.

    Under the protocol `tuned` this goes in rounds: selection runs, those of extended grids, then the results.

    Args:
        plan: the study, or a part of it.
        root: folder of the runs.
        executor: "local", "ray" or "slurm".
        at_once: runs at a time on this machine, or tasks at a time under SLURM.
        address: address of the Ray cluster; None for one on this machine.
        cpus: CPUs of a run under Ray or SLURM.
        gpus: GPUs of a run under Ray or SLURM.
        minutes: time limit of a task under SLURM.
        partition: partition of the SLURM cluster.
        say: where messages go.

    Raises:
        ValueError: if a folder of data is missing, or a folder of a run holds another run.
    """
    if missing := missing_paths(plan):
        options = " ".join(f"--path {key}=FOLDER" for key in missing)
        raise ValueError(f"study {plan.study.name!r} at scale {plan.scale} reads files: give {options}")
    root = expanded(root)
    plan = with_selections(plan, root)
    _check_configs(plan, root)
    if left_out := arms_left_out(plan, root):
        options = " ".join(f"--arm {arm}" for arm in left_out)
        say(f"note: the report leaves out the runs of {', '.join(left_out)}: add {options} to keep them in it")
    _check_data(plan)
    save_plan(plan, root)
    outcomes: dict[str, str] = {}
    with _term_as_interrupt():
        while True:
            jobs = [job for job in jobs_of(plan, root) if job["key"] not in outcomes]
            if jobs or not outcomes:
                chosen = f" ({text})" if (text := stage(plan)) else ""
                say(f"{plan.study.name}: {counted(len(plan.points), 'run')}, {len(jobs)} to do{chosen}")
            if not jobs:
                return outcomes
            if executor == "ray":
                stream = on_ray(jobs, address, cpus, gpus)
            elif executor == "slurm":
                stream = on_slurm(
                    jobs, root / "slurm", at_once=at_once, cpus=cpus, gpus=gpus, minutes=minutes, partition=partition
                )
            else:
                stream = local(jobs, at_once)
            folders = {job["key"]: Path(job["folder"]) for job in jobs}
            configs = {run.key: run.config for run in plan.all_runs}
            try:
                for done, (key, outcome) in enumerate(stream, 1):
                    outcomes[key] = outcome
                    error = state(folders[key], configs[key])[1] if outcome == "failed" else None
                    say(f"[{done}/{len(jobs)}] {outcome:11s} {key}" + (f": {error}" if error else ""))
            finally:
                stream.close()
            plan = with_selections(plan, root)


def _check_data(plan: Plan) -> None:
    """Refuse folders without the cases that the runs read, in one line instead of one for every run."""
    if plan.study.kind != "train":
        return
    for data in {repr(run.config.data): run.config.data for run in plan.all_runs}.values():
        reader = DATASETS.get(data.name)
        if data.path is not None and issubclass(reader, FileDataset):
            known = inspect.signature(reader.find).parameters
            path = existing(data.path, ": check --path")
            cases, _ = reader.find(path, **{k: v for k, v in data.options.items() if k in known})
            for split in SPLITS:
                in_split(cases, split, path)


def _check_configs(plan: Plan, root: Path) -> None:
    """Refuse folders with another config, so that a forgotten --set does not mix two studies."""
    runs = plan.all_runs
    states = [(run.key, *state(plan.folder(root, run), run.config)) for run in runs]
    others = [(key, other) for key, status, other in states if status == "other config"]
    if others:
        key, other = others[0]
        raise ValueError(
            f"{len(others)} of {len(runs)} runs in {root} hold another config, such as {key}: {other}: "
            "repeat the --set, --path and --selection-steps they were started with, or choose another --out"
        )


@contextmanager
def _term_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, SIGUSR1 and SIGHUP, which schedulers send, stop the runs in the same way as Ctrl-C.

    Raises:
        KeyboardInterrupt: with the number of the signal.
    """
    received: list[int] = []

    def interrupt(number: int, *_: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    with restored_handlers():
        if threading.current_thread() is threading.main_thread():
            for number in set(heeded_signals()) - {signal.SIGINT}:
                signal.signal(number, interrupt)
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*received[:1]) from None
