"""A run that is killed, told to stop, or finds its newest checkpoint damaged goes on as if nothing had happened."""

import json
import os
import resource
import shutil
import signal
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from small import (
    HIFI,
    _one_thread,  # noqa: F401
    assert_same_run,
    at_step,
    checkpoint,
    code,
    die,
    interrupt_twice,
    process,
    recipe,
    record,
    run,
    run_signalled,
)

from chasm.train import RunConfig, checkpoints, load_run, train
from chasm.train.checkpoints import Checkpoints
from chasm.train.run import environment

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "backbone": HIFI,
        "batch": 2,
        "ema": 0.9,
        "accumulate": 2,
        "clip": 0.1,
        "flips": True,
        "vary": True,
        "resident": False,
    },
    "changing, worker": {"data": {"changing": True, "cases": 6}, "workers": 1, "save_every": 4},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The uninterrupted run of each case."""
    done: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp("whole") / "run"
            assert code(run, recipe(**CASES[name]), done[name]) == 0
        return done[name]

    return get


@pytest.fixture
def stopped(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A run that was told to stop in its step 4; the process that did it is shared by the tests."""
    made = tmp_path_factory.getbasetemp() / "stopped run"
    if not made.exists():
        assert code(run_signalled, recipe(), made, 4, signal.SIGTERM) == 143
    return shutil.copytree(made, tmp_path / "run")


@pytest.mark.parametrize("name", CASES)
def test_killed_and_resumed_is_bit_equal(name: str, whole: Any, tmp_path: Path) -> None:
    config = recipe(**CASES[name])
    assert code(run_signalled, config, tmp_path, 5, signal.SIGKILL) == -signal.SIGKILL
    tensors, record = checkpoint(tmp_path)
    assert record["step"] < 5  # there is something to do again
    assert not (tmp_path / "metrics.json").exists()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) > len(record["log"])
    assert code(run, config, tmp_path) == 0
    assert_same_run(whole(name), tmp_path)
    assert any(k.startswith("ema.") for k in tensors) == (name == "everything")


def test_dropout_was_active(whole: Any) -> None:
    """Else the cases above would pass without the random state."""
    early, late = (checkpoint(whole("everything"), step)[0]["rng.cpu"] for step in (4, 6))
    assert not torch.equal(early, late)


@pytest.mark.parametrize(
    ("name", "group", "number"),
    [
        ("everything", False, signal.SIGTERM),
        ("everything", False, signal.SIGHUP),
        ("changing, worker", True, signal.SIGTERM),
        ("changing, worker", True, signal.SIGINT),
        ("changing, worker", True, signal.SIGUSR1),
    ],
)
def test_a_signal_saves_and_the_run_resumes_bit_equal(
    name: str, group: bool, number: int, whole: Any, tmp_path: Path
) -> None:
    """To the process alone, and to its group: loader workers must not take the run down with them."""
    config = recipe(**CASES[name])
    assert code(run_signalled, config, tmp_path, 4, number, group) == 128 + number
    assert checkpoint(tmp_path)[1]["step"] == 5  # the step in progress was finished
    assert code(run, config, tmp_path) == 0
    assert_same_run(whole(name), tmp_path)


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for quiet, step in ((True, 2), (False, 4)):
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as e, at_step(step, lambda: os.kill(os.getpid(), signal.SIGINT)):
            train(recipe(), tmp_path, quiet=quiet)
        assert e.value.code == 130
        assert capsys.readouterr().err.endswith(f"stopped at step {step + 1}: run the same command again to go on\n")
        assert signal.getsignal(signal.SIGINT) is before
    train(recipe(), tmp_path, quiet=True)
    assert f"resuming {tmp_path} at step 5 of 6" in capsys.readouterr().err


def interrupted_twice(config: RunConfig, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), at_step(4, interrupt_twice):
        run(config, folder)


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    assert code(interrupted_twice, recipe(), tmp_path) == 0
    assert checkpoint(tmp_path)[1]["step"] == 4  # the last save before it


def test_sigterm_in_the_last_step(whole: Any, tmp_path: Path) -> None:
    assert code(run_signalled, recipe(), tmp_path, 5, signal.SIGTERM) == 143
    assert code(run, recipe(), tmp_path) == 0
    assert_same_run(whole("plain"), tmp_path)


def run_killed_in_save(config: RunConfig, folder: Path, moment: str) -> None:
    """SIGKILL in the save of step 4: with the tensors half written, before the folder is put in place, or after."""

    def before(place: Any, name: str, after: bool = False) -> None:
        original = getattr(place, name)

        def at_step_4(*args: Any, **kwargs: Any) -> Any:
            path = str(args[1] if name == "save_file" else args[0])
            if ".00000004.partial" not in path or (name == "replace" and Path(path).name != ".00000004.partial"):
                return original(*args, **kwargs)
            if name == "save_file":
                Path(path).write_bytes(b"half a file")
            if after:
                original(*args, **kwargs)
            return die()

        setattr(place, name, at_step_4)

    if moment == "tensors":
        before(checkpoints, "save_file")
    else:
        before(checkpoints.os, "replace", after=moment == "moved")
    run(config, folder)


@pytest.mark.parametrize(("moment", "left"), [("tensors", 2), ("before the move", 2), ("moved", 4)])
def test_killed_during_a_save(moment: str, left: int, whole: Any, tmp_path: Path) -> None:
    assert code(run_killed_in_save, recipe(), tmp_path, moment) == -signal.SIGKILL
    found = Checkpoints(tmp_path / "checkpoints", pytest.fail).newest()
    assert found is not None
    assert found[1].step == left  # nothing lost, and the partial one is not taken for a checkpoint
    (tmp_path / ".chasm-0.partial").write_text("half of another file")
    assert code(run, recipe(), tmp_path) == 0
    assert not list(tmp_path.rglob(".*.partial"))
    assert_same_run(whole("plain"), tmp_path)
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_newest_checkpoint(damage: str, whole: Any, tmp_path: Path, capsys: Any) -> None:
    assert code(run_signalled, recipe(), tmp_path, 5, signal.SIGKILL) == -signal.SIGKILL
    state = tmp_path / "checkpoints" / "00000004" / "state.safetensors"
    content = bytearray(state.read_bytes())
    if damage == "truncated":
        state.write_bytes(content[: len(content) // 2])
    else:
        content[-5] ^= 1
        state.write_bytes(content)
    train(recipe(), tmp_path, quiet=True)
    said = capsys.readouterr().err
    assert "00000004 is damaged" in said
    assert "resuming" in said
    assert "at step 2 of 6" in said
    assert_same_run(whole("plain"), tmp_path)


def test_best_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """The file on disk may hold weights of a step that is still to come; after a resume it may never come again."""
    config = recipe(save_every=3, val_every=1)
    assert code(run_signalled, config, tmp_path, 4, signal.SIGKILL) == -signal.SIGKILL
    tensors, record = checkpoint(tmp_path)
    assert record["step"] == 3
    ahead = load_run(tmp_path).model.state_dict()
    best = {k.removeprefix("best."): v for k, v in tensors.items() if k.startswith("best.")}
    assert any(not torch.equal(best[k], v) for k, v in ahead.items())  # the killed run had gone on to better ones
    assert code(run_signalled, config, tmp_path, 3, signal.SIGKILL) == -signal.SIGKILL
    assert all(torch.equal(best[k], v) for k, v in load_run(tmp_path).model.state_dict().items())


def test_the_log_of_a_resumed_run_has_no_row_twice(tmp_path: Path) -> None:
    for _ in range(2):
        assert code(run_signalled, recipe(save_every=3), tmp_path, 5, signal.SIGKILL) == -signal.SIGKILL
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == [1, 2, 3, 4, 5]


def test_environment_tells_where_a_run_went_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code(run_signalled, recipe(), tmp_path, 4, signal.SIGTERM) == 143
    first = json.loads((tmp_path / "environment.json").read_text())
    assert {"python", "versions", "device", "commit", "modified", "command", "seed", "image_shape"} <= set(first)
    assert first["versions"]["torch"] == metadata.version("torch")
    monkeypatch.setattr("chasm.common.provenance._git", lambda *words: "another")
    train(recipe(), tmp_path, quiet=True)
    now = json.loads((tmp_path / "environment.json").read_text())
    assert now["commit"] == first["commit"]
    assert [(r["step"], r["commit"]) for r in now["resumed"]] == [(5, "another")]


def test_environment_tells_that_a_file_of_ones_own_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code(run_signalled, recipe(), tmp_path, 4, signal.SIGTERM) == 143
    monkeypatch.setattr("chasm.train.run.loaded", lambda: {"mine.py": "another"})
    train(recipe(), tmp_path, quiet=True)
    (again,) = json.loads((tmp_path / "environment.json").read_text())["resumed"]
    assert again["with"] == {"mine.py": "another"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["bin/chasm", "train", "r.yaml"], "chasm train r.yaml"),
        (
            ["lib/chasm/__main__.py", "train", "r.yaml", "--set", "a={b: 1}"],
            "python -m chasm train r.yaml --set 'a={b: 1}'",
        ),
    ],
)
def test_the_command_can_be_typed_again(
    argv: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    assert environment(recipe(), torch.device("cpu"), (1, 16, 16))["command"] == expected


def test_a_kill_from_outside(tmp_path: Path) -> None:
    """At whatever moment it comes, once there is a checkpoint."""
    child = process(run, recipe(steps=4000, val_every=1000, save_every=1), tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "checkpoints" / "00000015").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.kill()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    found = Checkpoints(tmp_path / "checkpoints", pytest.fail).newest()
    assert found is not None
    assert found[1].step >= 14


def save_on_a_full_disk(folder: Path) -> None:
    """The system itself refuses to write more than 40 kB into a file."""
    saved = Checkpoints(folder, print)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    saved.save({"x": torch.ones(10)}, record(1))
    with pytest.raises(OSError, match="could not be written") as e:
        saved.save({"x": torch.ones(100_000)}, record(2))
    raise SystemExit(3 if "\n" not in str(e.value) else 4)


def test_a_disk_that_fills_up_during_a_save(tmp_path: Path) -> None:
    assert code(save_on_a_full_disk, tmp_path) == 3
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["00000001", "record.json", "state.safetensors"]
    found = Checkpoints(tmp_path, pytest.fail).newest()
    assert found is not None
    assert torch.equal(found[0]["x"], torch.ones(10))


@pytest.mark.parametrize("name", ["model.", "optimizer.", "best.", "rng.cpu"])
@pytest.mark.parametrize("change", ["missing", "another shape"])
def test_tensors_that_do_not_fit_the_model_are_one_line(name: str, change: str, stopped: Path) -> None:
    """Even where the checksums are sound."""
    saved = Checkpoints(stopped / "checkpoints", pytest.fail)
    tensors, read = saved.newest() or pytest.fail("no checkpoint")
    chosen = max(key for key in tensors if key.startswith(name))
    if change == "missing":
        del tensors[chosen]
    else:
        tensors[chosen] = torch.zeros(7, 7)
    saved.save(tensors, read)
    with pytest.raises(ValueError, match=f"0000000.: the checkpoint does not fit this model: {chosen} has shape") as e:
        train(recipe(), stopped, quiet=True)
    assert "\n" not in str(e.value)


def test_an_environment_of_another_shape_is_one_line(stopped: Path) -> None:
    path = stopped / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "resumed": "yes"}))
    with pytest.raises(ValueError, match="resumed: expected a list"):
        train(recipe(), stopped, quiet=True)
