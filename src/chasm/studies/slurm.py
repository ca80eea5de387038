"""Run the cells of a study as an array job of SLURM. submitit writes the job script, submits it and watches it."""

import getpass
import math
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from chasm.common.extras import how_to_install
from chasm.studies.executors import MAX_SAVE_SECONDS, WorkerProcess, environment_of, visible_gpus
from chasm.studies.state import failed, state
from chasm.studies.worker import Job
from chasm.train.config import RunConfig

MAX_REQUEUES = 1000  # after time limits; only a cell that never saves can need so many
MIN_MINUTES = 5  # a task is told to save 90 to 150 seconds before its limit, and needs some time to start
POLL_SECONDS = 5.0


def on_slurm(
    jobs: Sequence[Job],
    folder: Path,
    *,
    at_once: int = 1,
    cpus: float = 1,
    gpus: float = 0,
    minutes: int = 60,
    partition: str | None = None,
    cluster: str = "slurm",
) -> Generator[tuple[str, str], None, None]:
    """Submit one array job with a task for each cell, and yield (key, outcome) as each ends.

    The folder of the runs and the data must have the same paths on all machines. A task that meets its time limit or is
    preempted saves and goes back to the queue. Closing the generator cancels the tasks that are left; they save, too.
    Logs and job scripts go to `folder`. With cluster="local" the tasks run on this machine, for tests.
    """
    try:
        import submitit
    except ImportError:
        raise ValueError(f"--slurm needs submitit: {how_to_install('submitit')}") from None
    if cluster == "slurm" and not all(map(shutil.which, ("sbatch", "srun", "squeue"))):
        raise ValueError("--slurm needs sbatch, srun and squeue, which are not all here: run it on a login node")
    if gpus != int(gpus):
        raise ValueError(f"SLURM gives whole GPUs, got --gpus {gpus:g}: several runs can share one with --at-once")
    if minutes < MIN_MINUTES:
        raise ValueError(f"expected --minutes {MIN_MINUTES} or more, got {minutes}: a task saves before its time limit")
    threads = max(1, math.ceil(cpus))
    executor = submitit.AutoExecutor(
        folder=folder,
        cluster=cluster,
        slurm_max_num_timeout=MAX_REQUEUES,
        **{f"{cluster}_python": f"{shlex.quote(sys.executable)} -P"},  # -P: import nothing from the current folder
    )
    executor.update_parameters(
        name="chasm",
        timeout_min=minutes,
        cpus_per_task=threads,
        gpus_per_node=int(gpus),
        slurm_array_parallelism=at_once,
        slurm_signal_delay_s=MAX_SAVE_SECONDS + 30,
        **({"slurm_partition": partition} if partition else {}),
    )
    waiting = dict(zip(executor.map_array(Cell(), jobs, [threads] * len(jobs)), jobs, strict=True))
    absent: set[Any] = set()
    try:
        while waiting:
            gone = _not_in_the_queue(waiting) if cluster == "slurm" else {task for task in waiting if task.done()}
            # A task may leave the queue before its result is visible, so it must be absent twice.
            ended = [task for task in waiting if task.paths.result_pickle.exists() or task in gone & absent]
            absent = gone
            for task in ended:
                job = waiting.pop(task)
                yield job["key"], _outcome(job, task)
            time.sleep(POLL_SECONDS if waiting else 0)
    finally:
        for task in waiting:
            task.cancel(check=False)


class Cell:
    """A task that runs one cell in its own process. submitit calls `checkpoint` shortly before the time limit."""

    process: WorkerProcess | None = None

    def __call__(self, job: Job, threads: int) -> str:
        """Run the cell to its end, and return the outcome."""
        self.process = WorkerProcess(job, environment_of(0, 1, visible_gpus(), threads))
        while (outcome := self.process.poll()) is None:
            time.sleep(0.2)
        return outcome

    def checkpoint(self, job: Job, threads: int) -> Any:
        """Stop the cell, which saves, and return what to submit again."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None:
            self.process.stop()
            self.process.end(time.monotonic() + MAX_SAVE_SECONDS)
        return DelayedSubmission(Cell(), job, threads)


def _not_in_the_queue(tasks: Iterable[Any]) -> set[Any]:
    """Return the tasks that neither wait nor run, according to squeue, which needs no accounting."""
    command = ["squeue", "--noheader", "--all", "--array", "--format=%i", f"--user={getpass.getuser()}"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return set()  # the controller does not answer: ask again later
    return {task for task in tasks if task.job_id not in listed}


def _outcome(job: Job, task: Any) -> str:
    """Return the outcome of a task that has ended, read from the folder of its cell."""
    folder = Path(job["folder"])
    outcome = state(folder, RunConfig.model_validate(job["config"]))[0]
    if outcome in ("done", "failed", "running"):
        return outcome
    failed(folder, f"SLURM job {task.job_id} ended as {task.state}; its log is {task.paths.stderr}")
    return "failed"
