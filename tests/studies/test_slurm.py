"""Cells as an array job: by submitit on this machine, which submits, watches and requeues as it does under SLURM."""

import pytest
from test_running import TINY, broken, endless, job, wait_for

from chasm.studies import slurm
from chasm.studies.slurm import Cell, on_slurm
from chasm.studies.state import state, working_on


def test_cells_run_and_their_outcomes_are_read_from_their_folders(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.1)
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
    with pytest.raises(ValueError, match="needs sbatch and srun, which are not here"):
        next(on_slurm([job(tmp_path / "good")], tmp_path))
    with pytest.raises(ValueError, match=r"whole GPUs, got --gpus 0\.5"):
        next(on_slurm([job(tmp_path / "good")], tmp_path, gpus=0.5, cluster="local"))


def test_the_job_script_asks_for_what_was_asked(tmp_path, monkeypatch):
    """With an sbatch of our own, which keeps the script it is given."""
    pytest.importorskip("submitit")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/script.sh\necho Submitted batch job 12\n')
    for name in ("sacct", "srun"):
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
    (tools / "scancel").write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/cancelled\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.0)
    monkeypatch.setattr("submitit.slurm.slurm.SlurmJob.done", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    cells = [job(tmp_path / str(i)) for i in range(3)]
    with pytest.raises(KeyboardInterrupt):
        list(on_slurm(cells, tmp_path / "slurm", at_once=2, cpus=4, gpus=1, minutes=240, partition="gpu"))
    script = (tmp_path / "script.sh").read_text()
    for line in ("--array=0-2%2", "--cpus-per-task=4", "--gpus-per-node=1", "--time=240", "--partition=gpu"):
        assert line in script
    assert "--signal=USR2@" in script
    assert len((tmp_path / "cancelled").read_text().splitlines()) == 3
