"""Cells are run once, resumed, and kept apart: locks, failures, interruption, this machine and a local Ray."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import typer

from chasm.cli.errors import one_line_errors
from chasm.common.locks import BusyError
from chasm.studies import collect, executors, load_plan, make_plan, runner, worker
from chasm.studies.executors import environment_of, local, on_ray, visible_gpus
from chasm.studies.plan import save_plan
from chasm.studies.report import write_report
from chasm.studies.runner import jobs_of, run
from chasm.studies.state import clear_failure, failed, state, working_on
from chasm.studies.worker import PROGRAM, run_cell
from chasm.train.config import dump

TINY = make_plan("parameters").runs[0].config


@pytest.fixture
def in_process(monkeypatch):
    """Cells without the start of a process each, and nothing to count."""
    monkeypatch.setattr(worker, "count_model", lambda config, size: {"status": "done"})
    monkeypatch.setattr(runner, "local", lambda jobs, at_once: ((j["key"], run_cell(j)) for j in jobs))


def job(folder, kind="cost", **config):
    changed = {**TINY.model_dump(mode="json"), **config}
    return {
        "key": folder.name,
        "folder": str(folder),
        "with": [],
        "kind": kind,
        "config": changed,
        "size": [32, 32],
        "command": ["chasm"],
    }


def broken(folder):
    return job(folder, mixer={"name": "nonsense", "options": {}})


def endless(folder):
    train = {**TINY.train.model_dump(mode="json"), "steps": 10**6}
    data = {"name": "embedded", "options": {"size": 32, "cases": 10, "slices": 1}}
    return job(folder, "train", train=train, data=data)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_states_of_a_cell(tmp_path):
    folder = tmp_path / "cell"
    assert state(folder, TINY) == ("missing", None)
    with working_on(folder):
        assert state(folder, TINY) == ("running", None)
        with pytest.raises(BusyError), working_on(folder):
            pass
    assert state(folder, TINY) == ("interrupted", None)
    failed(folder, ValueError("two\nlines"))
    assert state(folder, TINY) == ("failed", "ValueError: two lines")
    clear_failure(folder)
    assert state(folder, TINY) == ("interrupted", None)
    (folder / "metrics.json").write_text("{}")
    word, error = state(folder, TINY)
    assert word == "failed"
    assert "config.yaml: not there, so the scores may be of any config" in error
    (folder / "config.yaml").write_text(dump(TINY))
    assert state(folder, TINY) == ("done", None)


def test_an_arm_that_is_left_out_is_named(tmp_path, in_process):
    said = []
    run(make_plan("parameters", arms=["chasm-signed"]), tmp_path, say=said.append)
    assert not any("report" in line for line in said)
    run(make_plan("parameters", arms=["chasm-signed"]), tmp_path, say=said.append)
    assert not any("report" in line for line in said)
    run(make_plan("parameters"), tmp_path, say=said.append)
    assert [line for line in said if "leaves out the runs of chasm-signed: add --arm chasm-signed" in line]


def test_a_folder_with_another_config_is_not_mistaken_for_this_run(tmp_path):
    (tmp_path / "config.yaml").write_text(dump(TINY.model_copy(update={"seed": 7})))
    assert state(tmp_path, TINY) == ("missing", None)  # a start that failed: nothing is lost
    (tmp_path / "metrics.json").write_text("{}")
    assert state(tmp_path, TINY) == ("other config", "seed (is 7, not 0)")
    (tmp_path / "metrics.json").unlink()
    (tmp_path / "checkpoints" / "00000003").mkdir(parents=True)
    assert state(tmp_path, TINY)[0] == "other config"


def test_a_forgotten_set_is_refused_and_the_plan_is_kept(tmp_path, in_process):
    plan = make_plan("seeds-basis", seeds=(0,), overrides=["train.steps=77"])
    save_plan(plan, tmp_path)
    for cell in plan.runs:
        folder = plan.folder(tmp_path, cell)
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text("{}")
        (folder / "config.yaml").write_text(dump(cell.config))
    with pytest.raises(ValueError, match=r"2 of 2 runs in .*: train\.steps \(is 77, not 6\): repeat the --set") as e:
        run(make_plan("seeds-basis", seeds=(0,)), tmp_path)
    assert "\n" not in str(e.value)
    assert load_plan(tmp_path, "seeds-basis") == plan
    assert run(plan, tmp_path, say=lambda _: None) == {}
    more = make_plan("seeds-basis", seeds=(0, 1), overrides=["train.steps=77"])
    assert [j["key"][-2:] for j in jobs_of(more, tmp_path)] == ["s1", "s1"]


def test_a_cell_whose_place_cannot_be_used_fails_and_the_rest_goes_on(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert dict(local([job(tmp_path / "file"), broken(tmp_path / "next")], gpus=[])) == {
        "file": "failed",
        "next": "failed",
    }
    word, error = state(tmp_path / "file", TINY)
    assert word == "failed"
    assert "not a folder that can be written" in error
    (tmp_path / "cell" / "lock").mkdir(parents=True)  # no file that anybody could hold
    assert state(tmp_path / "cell", TINY)[0] != "running"


def test_scores_that_cannot_be_read_are_a_failure_that_names_the_file(tmp_path):
    (tmp_path / "metrics.json").write_text("")
    (tmp_path / "config.yaml").write_text(dump(TINY))
    word, error = state(tmp_path, TINY)
    assert word == "failed"
    assert "metrics.json: not JSON" in error


def test_done_cells_are_skipped_and_shared_between_studies(tmp_path, in_process):
    said = []
    first = run(make_plan("parameters"), tmp_path, say=said.append)
    assert set(first.values()) == {"done"}
    assert len(first) == 9
    assert run(make_plan("parameters"), tmp_path, say=said.append) == {}
    flops = run(make_plan("flops"), tmp_path, say=said.append)
    assert len(flops) == 27 - 9
    assert "flops: 27 runs, 18 to do" in said


def test_costs_beside_those_of_the_paper(tmp_path):
    plan = make_plan("parameters")
    for todo in jobs_of(plan, tmp_path):
        if todo["key"].split(".")[2] in ("baseline", "gfnet", "chasm"):
            assert run_cell(todo) == "done"
    found = collect(plan, tmp_path)
    rows = {r.arm: r for r in found.rows}
    assert rows["gfnet"].scores["core_mparams"].mean == 0.79872
    assert rows["gfnet"].paper["core_mparams"].mean == 0.80
    assert rows["baseline"].scores["core_mparams"].mean == 0.0
    assert rows["chasm"].scores["gmacs"].mean > rows["baseline"].scores["gmacs"].mean
    assert found.settings["cc359-x8"].metrics[0] == "gmacs_paper"
    json.dumps(found.to_json(), allow_nan=False)
    text = write_report(found, tmp_path / "report").with_suffix(".md").read_text()
    assert "3 models counted; nothing was trained." in text
    for fact in ("hardware", "versions", "command"):
        assert f"| {fact} | " in text


def test_a_failed_cell_is_tried_again(tmp_path, in_process):
    plan = make_plan("parameters")
    for cell in plan.runs[1:]:
        folder = plan.folder(tmp_path, cell)
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text("{}")
        (folder / "config.yaml").write_text(dump(cell.config))
    failed(plan.folder(tmp_path, plan.runs[0]), "power cut")
    assert [j["key"] for j in jobs_of(plan, tmp_path)] == [plan.runs[0].key]
    assert run(plan, tmp_path, say=lambda _: None) == {plan.runs[0].key: "done"}
    assert state(plan.folder(tmp_path, plan.runs[0]), plan.runs[0].config) == ("done", None)


def test_a_worker_that_dies_without_a_word(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho last words\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(executors.sys, "executable", str(script))
    assert dict(local([job(tmp_path / "cell")], gpus=[])) == {"cell": "failed"}
    _, error = state(tmp_path / "cell", TINY)
    assert error == "the worker ended with code -9 (often: out of memory); its last output: last words"


@pytest.mark.parametrize("code", [129, 130, 138, 143])
def test_a_worker_that_was_told_to_stop_is_interrupted_not_failed(code, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(executors.sys, "executable", str(script))
    assert dict(local([job(tmp_path / "cell")], gpus=[])) == {"cell": "interrupted"}
    assert not (tmp_path / "cell/failed.json").exists()


def test_two_runs_of_a_study_train_and_compare(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["somewhere/chasm", "study", "run", "seeds-basis"])
    plan = make_plan("seeds-basis", seeds=(0,), overrides=["train.steps=2", "data.options.cases=10"])
    assert set(run(plan, tmp_path, at_once=2, say=lambda _: None).values()) == {"done"}
    found = collect(plan, tmp_path)
    assert found.counts == {"done": 2}
    assert {r.arm for r in found.rows} == {"chasm-untied", "chasm"}
    (pair,) = [c for c in found.comparisons if c.metric == "psnr"]
    assert pair.cases == len(found.rows[0].scores["psnr"].cases) == 2
    assert found.runs[0].environment.seed == 0
    assert found.runs[0].environment.command == "chasm study run seeds-basis"
    assert (plan.folder(tmp_path, plan.runs[0]) / "output.txt").read_text() == ""
    assert jobs_of(plan, tmp_path) == []


def test_a_failure_does_not_stop_the_rest_and_stopping_interrupts_it(tmp_path):
    stream = local([endless(tmp_path / "long"), broken(tmp_path / "bad")], at_once=2, gpus=[])
    assert next(stream) == ("bad", "failed")
    _, error = state(tmp_path / "bad", TINY)
    assert error.startswith("ValueError: unknown mixer 'nonsense'")
    assert "\n" not in error
    assert "Traceback" in (tmp_path / "bad/traceback.txt").read_text()
    log = tmp_path / "long/log.jsonl"
    wait_for(lambda: log.exists() and log.stat().st_size > 0)  # it has made steps, and so listens to signals
    stream.close()
    assert not (tmp_path / "long/failed.json").exists()
    assert list((tmp_path / "long/checkpoints").glob("0*")), "its place is saved"
    with working_on(tmp_path / "long"):
        pass  # nobody holds it any more


def test_a_worker_ends_with_whoever_started_it(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE)
    process.stdin.write(json.dumps(endless(tmp_path / "cell")).encode() + b"\n")
    process.stdin.flush()
    try:
        wait_for(lambda: (tmp_path / "cell/log.jsonl").exists())
        process.stdin.close()  # as the system does when the other end dies
        assert process.wait(60) in (143, -signal.SIGTERM)
    finally:
        process.kill()


def test_a_worker_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("yaml", "torch", "json"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w')")
    assert list(local([broken(tmp_path / "cell")])) == [("cell", "failed")]
    assert not (tmp_path / "imported").exists()
    assert "nonsense" in state(tmp_path / "cell", TINY)[1]


def test_gpus_and_threads_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    found = [environment_of(slot, 4, ["0", "1", "2"]) for slot in range(4)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in found] == ["0", "1", "2", "0"]
    assert {e["OMP_NUM_THREADS"] for e in found} == {"4"}
    assert environment_of(0, 64, [])["OMP_NUM_THREADS"] == "1"
    assert environment_of(0, 4, [], threads=1)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert visible_gpus() == ["3", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []


def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environment_of(0, 2, [])["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert environment_of(0, 2, [])["OMP_WAIT_POLICY"] == "active"


def test_data_must_be_there_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="--path cc359=FOLDER"):
        run(make_plan("basis", "full"), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["no such folder", "an empty folder"])
def test_a_wrong_path_is_said_once_before_any_worker_starts(what, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "local", lambda *_: pytest.fail("a worker was started"))
    if what == "an empty folder":
        (tmp_path / "data").mkdir()
    plan = make_plan("basis", "full", paths={"cc359": str(tmp_path / "data")})
    with pytest.raises((ValueError, OSError), match=r"data: (no such file .*--path|split 'train' has no)"):
        run(plan, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_on_a_local_ray(tmp_path):
    ray = pytest.importorskip("ray")
    try:
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    except Exception as e:
        pytest.skip(f"Ray does not start here: {e}")
    try:
        stream = on_ray([job(tmp_path / "good"), broken(tmp_path / "bad"), endless(tmp_path / "long")])
        outcomes = dict([next(stream), next(stream)])
        wait_for(lambda: (tmp_path / "long/log.jsonl").exists())
        stream.close()
    finally:
        ray.shutdown()
    assert outcomes == {"good": "done", "bad": "failed"}
    assert state(tmp_path / "good", TINY) == ("done", None)
    assert "nonsense" in state(tmp_path / "bad", TINY)[1]
    assert list((tmp_path / "long/checkpoints").glob("0*")), "its place is saved"
    with working_on(tmp_path / "long"):
        pass  # it has ended before the stream was closed


def test_ray_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")

    def init(**options):
        raise InterruptedError(os.getcwd())  # what Ray puts in front of the search path of its workers

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterruptedError) as started:
        next(on_ray([job(tmp_path / "run")]))
    assert str(started.value) == sys.prefix
    assert os.getcwd() == str(tmp_path)


def test_ray_does_not_keep_the_handlers_of_the_stop_signals():
    before = signal.getsignal(signal.SIGTERM)
    with executors.restored_handlers():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as ray.init does
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_study_that_is_told_to_stop_exits_with_the_number_of_the_signal(number, code, tmp_path, monkeypatch):
    def stream(jobs, at_once):
        try:
            os.kill(os.getpid(), number)
            yield jobs[0]["key"], "done"
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # Ray raises one of its own, which does not know the signal

    monkeypatch.setattr(runner, "local", stream)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        with pytest.raises(typer.Exit) as stopped, one_line_errors():
            run(make_plan("parameters"), tmp_path, say=lambda _: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.value.exit_code == code
