"""What a run does from start to end: selection, precision, and what it refuses."""

import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small import UNET, _one_thread, assert_same_run, checkpoint, recipe  # noqa: F401

from chasm.common import files
from chasm.data import DataError
from chasm.tasks import Summary
from chasm.train import NonFiniteError, evaluate, load_recipe, load_run, log, loop, train
from chasm.train.loading import batches
from chasm.train.loop import Trainer
from chasm.train.nonfinite import MAX_SKIPPED_STEPS
from chasm.train.run import open_split
from chasm.train.schedule import rows_of_step


def rows_logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "done"
    torch.set_num_threads(1)
    train(recipe(), folder, quiet=True)
    return folder


def test_same_seed_same_curve_other_seed_other_curve(done: Path, tmp_path: Path) -> None:
    train(recipe(), tmp_path / "again", quiet=True)
    assert_same_run(done, tmp_path / "again")
    train(recipe().model_copy(update={"seed": 1}), tmp_path / "other", quiet=True)
    assert rows_logged(tmp_path / "other")[0]["loss"] != rows_logged(done)[0]["loss"]


def test_the_run_folder(done: Path) -> None:
    assert sorted(p.name for p in done.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "environment.json",
        "examples.npz",
        "log.csv",
        "log.jsonl",
        "metrics.json",
        "pictures",
        "training.lock",
        "weights.safetensors",
    ]
    metrics = json.loads((done / "metrics.json").read_text())
    assert metrics["status"] == "done"
    assert metrics["split"] == "test"
    assert set(metrics["cases"]) == {"test0", "test1", "test2"}  # disjoint from train and val
    assert metrics["reference"]["name"] == "zero-filled"
    assert metrics["parameters"]["model"] == sum(p.numel() for p in load_run(done).model.parameters())
    assert {"protocol", "meaning", "source", "proxy", "task", "macs", "seconds", "device", "peak_memory"} < set(metrics)
    for key, values in metrics["mean"].items():
        assert values == pytest.approx(np.mean([c[key] for c in metrics["cases"].values()]))
    header, *lines = (done / "log.csv").read_text().splitlines()
    assert header == "step,loss,grad_norm,lr,val_psnr,val_ssim,val_nmse"
    assert len(lines) == len(rows_logged(done)) == 6 + 3
    examples = np.load(done / "examples.npz")
    assert examples["target"].shape == examples["output"].shape == examples["reference"].shape == (4, 16, 16)
    assert list(examples["slices"]) == ["test0:0", "test1:0", "test1:1", "test2:1"]
    assert len(list((done / "pictures").glob("*.png"))) == 4
    assert load_recipe(done / "config.yaml") == recipe()


def test_evaluate_gives_the_metrics_of_the_run_and_writes_nothing(done: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in done.rglob("*")}
    metrics = json.loads((done / "metrics.json").read_text())
    again = evaluate(done)
    assert again == {k: metrics[k] for k in again}
    assert set(evaluate(done, "val")["cases"]) == {"val0", "val1", "val2"}
    assert before == {p: p.stat().st_mtime_ns for p in done.rglob("*")}


def test_loading_a_run_leaves_the_random_state_alone(done: Path) -> None:
    torch.manual_seed(123)
    state = torch.get_rng_state()
    run = load_run(done)
    assert torch.equal(state, torch.get_rng_state())
    assert not run.model.training


def test_a_finished_run_is_skipped(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Trainer", None)
    assert train(recipe(), done) == json.loads((done / "metrics.json").read_text())


def test_another_config_in_the_same_folder_is_refused(done: Path) -> None:
    with pytest.raises(ValueError, match=r"another config: train\.lr \(is 0\.001, not 0\.002\): choose another folder"):
        train(recipe(lr=2e-3), done)
    # the same one, written in another way, is not another one
    train(recipe({**UNET, "options": {**UNET["options"], "levels": (0, 1)}}), done)


def test_a_start_that_failed_is_in_nobodys_way(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it had written before its first save is not taken for the new run's."""
    with pytest.raises(NonFiniteError):
        train(recipe(data={"bad": "train1"}, save_every=9, val_every=1), tmp_path, quiet=True)
    (tmp_path / "weights.safetensors").write_text("of another run")
    monkeypatch.setattr(Trainer, "fit", lambda self: pytest.fail("left over") if self.weights.exists() else exit())
    with pytest.raises(SystemExit):
        train(recipe(), tmp_path, quiet=True)
    monkeypatch.undo()
    torch.set_num_threads(1)
    train(recipe(), tmp_path, quiet=True)
    assert_same_run(done, tmp_path)
    assert not (tmp_path / "nonfinite.jsonl").exists()


def test_two_processes_that_do_not_know_of_each_other_do_not_share_a_folder(tmp_path: Path) -> None:
    hold = """import pathlib, sys
from chasm.common.locks import locked
with locked(pathlib.Path(sys.argv[1]) / "training.lock"):
    print(flush=True)
    input()"""
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        for config in (recipe(), recipe(lr=0.1)):
            with pytest.raises(ValueError, match="another process works there: wait for it"):
                train(config, tmp_path, quiet=True)
        assert [p.name for p in tmp_path.iterdir()] == ["training.lock"]
    finally:
        other.kill()
        other.wait()
    train(recipe(), tmp_path, quiet=True)


def test_weights_that_are_cut_short_are_no_success(done: Path, tmp_path: Path) -> None:
    """Neither for training, which finds the run finished, nor for those who would use them."""
    folder = shutil.copytree(done, tmp_path / "run")
    weights = folder / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for use in (lambda: train(recipe(), folder), lambda: evaluate(folder)):
        with pytest.raises(ValueError, match=r"weights\.safetensors: cannot be read .*remove .*metrics\.json") as e:
            use()
        assert "\n" not in str(e.value)
    (folder / "metrics.json").unlink()  # as the error says
    train(recipe(), folder, quiet=True)
    assert_same_run(done, folder)


def test_the_best_on_validation_is_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([1.0, math.nan, 5.0, 3.0, 5.0, 4.0])

    def rigged(*args: Any, **kwargs: Any) -> Summary:
        return Summary("hifi", "", {"val0": {"psnr": next(scores), "ssim": 0.0, "nmse": 0.0}})

    monkeypatch.setattr(loop, "score", rigged)
    monkeypatch.setattr("chasm.train.checkpoints.Checkpoints.MAX_CHECKPOINTS", 100)
    metrics = train(recipe(val_every=1, save_every=1), tmp_path, quiet=True)
    assert metrics["best_step"] == 3
    assert metrics["best_val"]["psnr"] == 5
    kept = load_run(tmp_path).model.state_dict()
    then, after = checkpoint(tmp_path, 3)[0], checkpoint(tmp_path, 4)[0]
    assert all(torch.equal(v, then[f"model.{k}"]) for k, v in kept.items())
    assert not all(torch.equal(v, after[f"model.{k}"]) for k, v in kept.items())


def test_scores_that_are_not_numbers_do_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([math.nan, -3.0, math.nan])
    rigged = lambda *a, **k: Summary("hifi", "", {"val0": {"psnr": next(scores)}})  # noqa: E731
    monkeypatch.setattr(loop, "score", rigged)
    assert train(recipe(), tmp_path, quiet=True)["best_step"] == 4


@pytest.mark.parametrize("options", [{"resident": False}, {"resident": False, "workers": 1}])
def test_resident_or_not_the_run_is_the_same(options: dict[str, Any], done: Path, tmp_path: Path) -> None:
    train(recipe(**options), tmp_path, quiet=True)
    assert_same_run(done, tmp_path)


def kill_reader(self: Any, i: int) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def damage_reader(self: Any, i: int) -> Any:
    raise DataError("a.npy: image: damaged")


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (kill_reader, "a process that reads data was killed.*train.workers"),
        (damage_reader, "^a.npy: image: damaged$"),
    ],
)
def test_what_happens_in_a_process_that_reads_data_is_one_line(
    read: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe()
    data = open_split(config, "train")
    monkeypatch.setattr(type(data), "__getitem__", read)
    with pytest.raises((DataError, ChildProcessError), match=expected) as e:
        list(batches(data, [[0]], torch.device("cpu"), workers=1))
    assert "\n" not in str(e.value)
    assert not multiprocessing.active_children()  # Python would wait for them at exit, and they ignore SIGTERM


def test_an_error_of_a_step_leaves_no_process_that_reads_data(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError) as e:  # its traceback is kept here, as a notebook does
        train(recipe(data={"bad": "train1"}, resident=False, workers=1), tmp_path, quiet=True)
    assert e.tb is not None
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_changes_with_the_epoch(workers: int, tmp_path: Path) -> None:
    """Every slice comes as its own epoch has it, however far a loader reads ahead."""
    config = recipe(data={"changing": True}, workers=workers, steps=7)  # 3 steps per epoch
    trainer = Trainer(config, tmp_path, quiet=True)
    data: Any = loop.open_split(config, "train")
    for micro, step in trainer._stream():
        trainer.step = step + 1
        data.set_epoch(step // 3)
        expected = torch.stack([data[i].image for i in rows_of_step(step, 6, 2, 0)])
        assert torch.equal(micro[0].image, expected)
    assert trainer.step == 7


def test_epochs(tmp_path: Path) -> None:
    assert Trainer(recipe(steps=None, epochs=2.5), tmp_path, quiet=True).steps == 8  # of 6 slices, by 2


def test_runs_of_both_precisions_in_one_process(done: Path, tmp_path: Path) -> None:
    train(recipe(precision="bf16"), tmp_path / "bf16", quiet=True)
    train(recipe(), tmp_path / "float32", quiet=True)
    assert_same_run(done, tmp_path / "float32")
    half, full = (rows_logged(f)[0]["loss"] for f in (tmp_path / "bf16", done))
    assert half != full
    assert half == pytest.approx(full, rel=0.02)
    assert all(v.dtype == torch.float32 for v in load_run(tmp_path / "bf16").model.state_dict().values())
    metrics = json.loads((tmp_path / "bf16" / "metrics.json").read_text())
    assert evaluate(tmp_path / "bf16")["cases"] == metrics["cases"]


def test_a_thread_may_train(done: Path, tmp_path: Path) -> None:
    """Signals belong to the main thread; a run in another one goes without."""
    thread = threading.Thread(target=train, args=(recipe(), tmp_path), kwargs={"quiet": True})
    thread.start()
    thread.join()
    assert_same_run(done, tmp_path)


def test_a_loss_that_is_not_finite_stops_and_names_the_slices(tmp_path: Path) -> None:
    config = recipe(data={"bad": "train1"})
    step = next(s for s in range(3) if 2 in rows_of_step(s, 6, 2, 0))
    with pytest.raises(NonFiniteError, match=f"step {step}: loss nan.*stopped; its slices are in") as e:
        train(config, tmp_path, quiet=True)
    assert "\n" not in str(e.value)
    record = json.loads((tmp_path / "nonfinite.jsonl").read_text())
    assert record["step"] == step
    expected = [[f"train{r // 2}", r % 2] for r in rows_of_step(step, 6, 2, 0)]
    assert record["slices"] == expected
    assert ["train1", 0] in expected


def test_or_skips_by_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe(data={"bad": "train1"}, on_nonfinite="skip", ema=0.9)
    metrics = train(config, tmp_path)
    assert metrics["status"] == "done"
    records = [json.loads(line) for line in (tmp_path / "nonfinite.jsonl").read_text().splitlines()]
    assert len({r["step"] for r in records}) == len(records) == 2  # once an epoch
    assert capsys.readouterr().err.count("skipped; its slices are in") == 2
    tensors, _ = checkpoint(tmp_path)
    assert all(v.isfinite().all() for k, v in tensors.items() if not k.startswith("rng"))
    assert tensors["optimizer.0.step"] == 4


def strict(path: Path) -> Any:
    """JSON as others read it: without NaN and infinity."""
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} in {path.name}"))


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_weights_that_are_not_finite_stop_a_run(on_nonfinite: str, tmp_path: Path) -> None:
    """Also where skipping is allowed, and where the last step is the one that ruins them."""
    config = recipe(lr=1e30, warmup=0, steps=30, on_nonfinite=on_nonfinite)
    with pytest.raises(NonFiniteError, match="stopped") as e:
        train(config, tmp_path / "long", quiet=True)
    assert "\n" not in str(e.value)
    with pytest.raises(NonFiniteError, match=r"weights are not finite \(.*\): stopped; lower train.lr"):
        train(recipe(lr=math.inf, warmup=0, steps=1, on_nonfinite=on_nonfinite), tmp_path / "last", quiet=True)
    for folder in (tmp_path / "long", tmp_path / "last"):
        assert not (folder / "metrics.json").exists()
        for weights in folder.rglob("*.safetensors"):
            assert all(v.isfinite().all() for v in load_file(weights).values())


def test_skipping_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_agree", lambda self, loss: math.inf)
    with pytest.raises(NonFiniteError, match=f"stopped, {MAX_SKIPPED_STEPS} such steps in a row"):
        train(recipe(steps=99, on_nonfinite="skip"), tmp_path, quiet=True)
    assert len((tmp_path / "nonfinite.jsonl").read_text().splitlines()) == MAX_SKIPPED_STEPS


def test_what_is_not_finite_is_null_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"psnr": math.nan, "ssim": math.inf}
    monkeypatch.setattr("chasm.tasks.protocols.Protocol.case", lambda *a: scores)
    train(recipe(), tmp_path, quiet=True)
    assert strict(tmp_path / "metrics.json")["mean"] == {"psnr": None, "ssim": None}
    assert strict(next(tmp_path.glob("checkpoints/*6/record.json")))["best"]["score"] is None
    assert "NaN" not in (tmp_path / "log.jsonl").read_text()


def test_the_log_grows_while_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files, row by row, and at every moment as a rewrite would leave them."""
    seen: list[int] = []
    original = Trainer._record

    def record(self: Trainer, row: dict[str, Any]) -> None:
        original(self, row)
        text = [(tmp_path / name).read_bytes() for name in ("log.jsonl", "log.csv")]
        seen.append(len(text[0].splitlines()))
        assert len(text[1].splitlines()) == seen[-1] + 1
        self.log.rewrite()
        assert [(tmp_path / name).read_bytes() for name in ("log.jsonl", "log.csv")] == text

    monkeypatch.setattr(Trainer, "_record", record)
    train(recipe(save_every=100), tmp_path, quiet=True)
    assert seen == list(range(1, 10))


def test_a_case_in_two_splits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"case 'same' \(1 in all\) is in the train and the val split"):
        train(recipe(data={"shared": "same"}), tmp_path)


def test_a_wrong_option_is_found_before_the_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "resident", lambda *a: pytest.fail("the data was read"))
    wrong = {"name": "unet", "options": {"widht": 4}}
    with pytest.raises(ValueError, match="backbone 'unet' has no option 'widht': did you mean 'width'"):
        train(recipe(wrong), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["log.jsonl", "state.safetensors", "weights.safetensors", "metrics.json"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_from_its_last_save(
    where: str, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third write of that file (or its only one) finds no space; later there is some again."""
    writes, full = Counter[str](), 1 if where == "metrics.json" else 3

    def refuse(path: Path) -> None:
        writes[path.name] += 1
        if path.name == where and writes[where] == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_atomic(path: Path, write: Any, original: Any = files.write_atomic) -> None:
        original(path, lambda partial: (write(partial), refuse(path)))

    def opened(path: Path, mode: str, **how: str) -> Any:
        refuse(path)
        return open(path, mode, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(files, "write_atomic", write_atomic)
    monkeypatch.setattr("chasm.train.checkpoints.write_atomic", write_atomic)
    monkeypatch.setattr(log, "open", opened, raising=False)
    with pytest.raises(OSError, match="could not be written \\(No space left on device\\): free space") as e:
        train(recipe(), tmp_path, quiet=True)
    assert where in str(e.value)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "metrics.json").exists()
    monkeypatch.undo()
    torch.set_num_threads(1)
    train(recipe(), tmp_path, quiet=True)
    assert_same_run(done, tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"training\.lock: could not be written \(Not a directory\)"):
        train(recipe(), tmp_path / "file" / "run", quiet=True)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give the folder of a run that has validated at least once"):
        load_run(tmp_path)
