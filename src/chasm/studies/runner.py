"""Run what is missing of a study. Interrupt it at any time and start it again: it goes on where it was."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chasm.common.extensions import loaded
from chasm.common.text import counted
from chasm.studies.executors import local, on_ray
from chasm.studies.plan import Plan, arms_left_out, missing_paths, save_plan
from chasm.studies.state import state
from chasm.studies.vocabulary import SETTINGS, image_size
from chasm.studies.worker import Job

Say = Callable[[str], None]


def jobs_of(plan: Plan, root: str | Path) -> list[Job]:
    """The cells that are not done and that nobody is working on; failed ones are tried again."""
    found = []
    for cell in plan.cells:
        folder = plan.folder(root, cell)
        if state(folder, cell.config)[0] in ("done", "running"):
            continue
        job: Job = {
            "key": cell.key,
            "folder": str(folder.resolve()),
            "with": list(loaded()),
            "kind": cell.kind,
            "config": cell.config.model_dump(mode="json"),
            "size": [image_size(SETTINGS[cell.setting], plan.scale)] * 2,
        }
        found.append(job)
    return found


def run(
    plan: Plan,
    root: str | Path,
    *,
    executor: str = "local",
    at_once: int = 1,
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    say: Say = print,
) -> dict[str, str]:
    """Run the missing cells; key -> outcome. A failed cell is recorded and the rest goes on."""
    if missing := missing_paths(plan):
        words = " ".join(f"--path {key}=FOLDER" for key in missing)
        raise ValueError(f"study {plan.study.name!r} at scale {plan.scale} reads files: give {words}")
    root = Path(root).expanduser()
    _check_configs(plan, root)
    if left_out := arms_left_out(plan, root):
        words = " ".join(f"--arm {arm}" for arm in left_out)
        say(f"note: runs of {', '.join(left_out)} stay, but leave the report: add {words} to keep them in it")
    save_plan(plan, root)
    jobs = jobs_of(plan, root)
    say(f"{plan.study.name}: {counted(len(plan.cells), 'run')}, {len(jobs)} to do")
    outcomes: dict[str, str] = {}
    folders = {job["key"]: Path(job["folder"]) for job in jobs}
    configs = {cell.key: cell.config for cell in plan.cells}
    stream = on_ray(jobs, address, cpus, gpus) if executor == "ray" else local(jobs, at_once)
    with _term_as_interrupt():
        try:
            for key, outcome in stream:
                outcomes[key] = outcome
                error = state(folders[key], configs[key])[1] if outcome == "failed" else None
                say(f"[{len(outcomes)}/{len(jobs)}] {outcome:11s} {key}" + (f": {error}" if error else ""))
        finally:
            stream.close()  # type: ignore[attr-defined]
    return outcomes


def _check_configs(plan: Plan, root: Path) -> None:
    """A forgotten --set must not turn finished runs into another study's."""
    found = [(cell.key, state(plan.folder(root, cell), cell.config)) for cell in plan.cells]
    others = [(key, other) for key, (word, other) in found if word == "other config"]
    if others:
        key, other = others[0]
        raise ValueError(
            f"{len(others)} of {len(found)} runs in {root} hold another config, such as {key}: {other}: "
            "repeat the --set, --path and --seeds they were started with, or choose another --out"
        )


@contextmanager
def _term_as_interrupt() -> Iterator[None]:
    """SIGTERM, as schedulers send it, stops the runs in order just as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
