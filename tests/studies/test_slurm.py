"""Cells as an array job: by submitit on this machine, which submits, watches and requeues as it does under SLURM."""

import sys
from types import SimpleNamespace

import pytest
from test_running import TINY, broken, endless, job, wait_for

from chasm.studies import slurm
from chasm.studies.slurm import Cell, on_slurm
from chasm.studies.state import state, working_on


def test_cells_run_and_their_outcomes_are_read_from_their_folders(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.1)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "chasm.py").write_text("raise RuntimeError('imported from the current folder')\n")
    monkeypatch.chdir(tmp_path / "here")
    jobs = [job(tmp_path / "good"), broken(tmp_path / "bad")]
    outcomes = dict(on_slurm(jobs, tmp_path / "slurm", at_once=2, cluster="local"))
    assert outcomes == {"good": "done", "bad": "failed"}
    assert state(tmp_path / "good", TINY) == ("done", None)
    assert "nonsense" in state(tmp_path / "bad", TINY)[1]


def test_before_its_time_limit_a_cell_saves_and_is_submitted_again(tmp_path):
    submitit = pytest.importorskip("submitit")
    cell, task = Cell(), endless(tmp_path / "long")
    cell.process = slurm.WorkerProcess(task, slurm.environment_of(0, 1, [], 1))
    log = tmp_path / "long/log.jsonl"
    wait_for(lambda: log.exists() and log.stat().st_size > 0)  # it is at work
    again = cell.checkpoint(task, 1)  # submitit calls it in a signal handler
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert again.args == (task, 1)
    assert list((tmp_path / "long/checkpoints").glob("0*"))
    with working_on(tmp_path / "long"):
        pass  # it has ended


def test_what_is_missing_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="needs sbatch, srun and squeue, which are not all here"):
        next(on_slurm([job(tmp_path / "good")], tmp_path))
    with pytest.raises(ValueError, match="--minutes 5 or more, got 2"):
        next(on_slurm([job(tmp_path / "good")], tmp_path, minutes=2, cluster="local"))
    with pytest.raises(ValueError, match=r"whole GPUs, got --gpus 0\.5"):
        next(on_slurm([job(tmp_path / "good")], tmp_path, gpus=0.5, cluster="local"))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """SLURM's commands, as far as they are needed: sbatch keeps its script, and squeue lists tasks 1 and 2 of the job.

    As on a cluster without accounting, sacct fails.
    """
    pytest.importorskip("submitit")
    tools = tmp_path / "bin"
    tools.mkdir()
    scripts = {
        "sbatch": f'cp "$1" {tmp_path}/script.sh\necho Submitted batch job 12',
        "squeue": f"cat {tmp_path}/queue",
        "scancel": f"echo $@ >> {tmp_path}/cancelled",
        "sacct": "exit 1",
        "srun": "exit 0",
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "queue").write_text("12_1\n12_2\n")
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.0)
    return tmp_path


def test_the_job_script_asks_for_what_was_asked(cluster):
    cells = [job(cluster / str(i)) for i in range(3)]
    outcomes = on_slurm(cells, cluster / "slurm", at_once=2, cpus=4, gpus=1, minutes=240, partition="gpu")
    next(outcomes)
    outcomes.close()
    script = (cluster / "script.sh").read_text()
    for line in ("--array=0-2%2", "--cpus-per-task=4", "--gpus-per-node=1", "--time=240", "--partition=gpu"):
        assert line in script
    assert "--signal=USR2@" in script
    assert f"{sys.executable} -P -u -m submitit" in script
    assert (cluster / "cancelled").read_text().split() == ["12_1", "12_2"]


def test_a_task_that_left_the_queue_without_a_result_has_failed(cluster):
    cells = [job(cluster / str(i)) for i in range(3)]
    outcomes = on_slurm(cells, cluster / "slurm")
    assert next(outcomes) == ("0", "failed")
    assert "SLURM job 12_0 ended" in state(cluster / "0", TINY)[1]
    (cluster / "queue").unlink()  # squeue fails: that says nothing about a task
    assert not slurm._not_in_the_queue([SimpleNamespace(job_id="12_0")])
    outcomes.close()
