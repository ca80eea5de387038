"""Run the cells of a study on this machine, several at once, or over a Ray cluster.

An executor takes jobs and yields (key, outcome) as each ends: "done", "failed", "running" (another process works on the
cell) or "interrupted". Closing the generator stops the cells that are running; each saves a checkpoint first.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

from chasm.common.signals import STOP_SIGNALS, delayed_signals, restored_handlers
from chasm.studies.state import failed
from chasm.studies.worker import PROGRAM, Job

MAX_SAVE_SECONDS = 60  # a stopped run that takes longer is killed


def visible_gpus() -> list[str]:
    """Return a value of CUDA_VISIBLE_DEVICES for each GPU, without starting CUDA in this process."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [g.strip() for g in named.split(",") if g.strip() not in ("", "-1")]
    return [str(i) for i in range(torch.cuda.device_count())]


def environment_of(slot: int, at_once: int, gpus: Sequence[str], threads: int | None = None) -> dict[str, str]:
    """Return the environment variables of the worker in a slot, which gets its share of the cores and one of the GPUs.

    Threads that wait for each other sleep instead of spinning, unless the caller's environment says otherwise. On a
    core that another process uses, a spinning thread would delay the thread that it waits for.
    """
    count = str(threads or max(1, (os.cpu_count() or 1) // at_once))
    variables = {"OMP_WAIT_POLICY": "passive", **os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return variables


def local(
    jobs: Sequence[Job],
    at_once: int = 1,
    gpus: Sequence[str] | None = None,
    *,
    threads: int | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> Generator[tuple[str, str], None, None]:
    """Run each cell in its own process, and yield (key, outcome) as each ends.

    Args:
        jobs: the cells, in the order in which they start.
        at_once: number of workers that run at once.
        gpus: values of CUDA_VISIBLE_DEVICES, which the workers take in turn; several may share one. None for all GPUs.
        threads: threads of each worker; None for its share of the cores.
        on_poll: called many times a second while workers run, to show their progress.
    """
    gpus = visible_gpus() if gpus is None else gpus
    waiting, running = list(reversed(jobs)), dict[int, WorkerProcess]()
    try:
        while waiting or running:
            for slot in range(at_once):
                if waiting and slot not in running:
                    job = waiting.pop()
                    try:
                        running[slot] = WorkerProcess(job, environment_of(slot, at_once, gpus, threads))
                    except OSError:  # the folder cannot be created or written; `state` says so
                        yield job["key"], "failed"
            for slot, process in list(running.items()):
                outcome = process.poll()
                if outcome is not None:
                    del running[slot]
                    yield process.job["key"], outcome
            on_poll()
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.stop()
        deadline = time.monotonic() + MAX_SAVE_SECONDS
        for process in running.values():
            process.end(deadline)


class WorkerProcess:
    """A worker process. Its output goes to output.txt in the folder of its cell, in case it dies."""

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self.job = job
        self.folder = Path(job["folder"])
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "output.txt").unlink(missing_ok=True)
        with open(self.folder / "output.txt", "xb") as output:  # a new file: a link is not followed
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM],  # -P: import nothing from the current folder
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only this process, which stops the workers
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once; `poll` says why
            self.process.stdin.write(json.dumps(job).encode() + b"\n")  # stays open: the worker stops when it closes

    def poll(self) -> str | None:
        """Return how the run ended; None while it works."""
        code = self.process.poll()
        if code is None:
            return None
        assert self.process.stdin is not None
        self.process.stdin.close()
        if any(code in (128 + number, -number) for number in STOP_SIGNALS):
            return "interrupted"
        known = {0: "done", 1: "failed", 2: "running"}
        if code in known and (code != 1 or (self.folder / "failed.json").is_file()):
            return known[code]
        last = (self.folder / "output.txt").read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        hint = " (often: out of memory)" if code == -getattr(signal, "SIGKILL", 9) else ""
        failed(self.folder, f"the worker ended with code {code}{hint}; its last output: {last[0]}")
        return "failed"

    def stop(self) -> None:
        """Ask the worker to save and stop."""
        if self.process.poll() is not None:
            return
        if os.name == "nt":
            assert self.process.stdin is not None
            self.process.stdin.close()  # the worker saves when it sees that; a signal would end it at once
        else:
            self.process.send_signal(signal.SIGTERM)

    def end(self, deadline: float) -> None:
        """Wait for the worker until a time of `time.monotonic`, then kill it."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


def on_ray(
    jobs: Sequence[Job], address: str | None = None, cpus: float = 1, gpus: float = 0
) -> Generator[tuple[str, str], None, None]:
    """Run each cell as a Ray task, in its own process as `local` does, and yield (key, outcome) as each ends.

    The folder of the runs and the data must have the same paths on all machines. Without an address, Ray is started on
    this machine. A fraction of a GPU lets several cells share one.
    """
    # Under `uv run` Ray would copy the current folder to its workers, which do not need it.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ImportError:
        raise ValueError("the ray executor needs ray: pip install 'chasm-mixer[cluster]'") from None
    started = not ray.is_initialized()
    if started:
        # Ray installs handlers of its own, which would end this process.
        # Ray's own processes belong to the process group of this one. SIGHUP or SIGUSR1 to the group would end them,
        # and then nothing could tell the cells to save. SIGTERM stays: ray.shutdown ends them with it.
        # Ray's workers import from the folder that is current now: choose that of this Python, which is trusted.
        delayed = set(STOP_SIGNALS) - {signal.SIGTERM, signal.SIGINT}
        with restored_handlers(), delayed_signals(delayed), chdir(sys.prefix):
            ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    task: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0, max_calls=1)(_run_in_task)
    keys = {task.remote(job, max(1, int(cpus)), os.getcwd()): job for job in jobs}
    waiting = list(keys)
    try:
        while waiting:
            (ready,), waiting = ray.wait(waiting, num_returns=1)
            job = keys[ready]
            try:
                yield job["key"], ray.get(ready)
            except ray.exceptions.TaskCancelledError:
                yield job["key"], "interrupted"
            except ray.exceptions.RayError as e:  # the worker or its machine died
                failed(Path(job["folder"]), f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")
                yield job["key"], "failed"
    finally:
        try:
            for reference in waiting:
                ray.cancel(reference)
            if waiting:  # a cancelled task ends when its cell has saved
                ray.wait(waiting, num_returns=len(waiting), timeout=MAX_SAVE_SECONDS + 10)
        finally:
            if started:
                ray.shutdown()


def _run_in_task(job: Job, threads: int, folder: str) -> str:
    """Run one cell inside a Ray task. Cancelling the task raises KeyboardInterrupt here, and the cell saves.

    Relative paths of data begin in `folder`, where the study was started, if this machine has it.
    """
    try:
        with suppress(OSError):
            os.chdir(folder)
        return dict(local([job], threads=threads))[job["key"]]
    except KeyboardInterrupt:
        return "interrupted"
