"""Trackers get what the log gets: TensorBoard, Weights & Biases offline, MLflow on disk."""

import json
from pathlib import Path
from typing import Any

import pytest
from small import recipe

from chasm.train import train


def logged(folder: Path, name: str) -> list[tuple[int, Any]]:
    """(step, value) of a quantity in the log of a run."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(row["step"], pytest.approx(row[name])) for row in rows if name in row]


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(recipe(), tmp_path, quiet=True, trackers=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "tensorboard" / "chasm")).Reload()
    for name in ("loss", "lr", "val_psnr"):
        assert [(e.step, e.value) for e in events.Scalars(name)] == logged(tmp_path, name)


def test_mlflow_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", exc_type=ImportError)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    train(recipe(), tmp_path / "run", quiet=True, trackers=["mlflow"])
    client = mlflow.MlflowClient()
    (experiment,) = [e for e in client.search_experiments() if e.name == "chasm"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["backbone.name"] == recipe().backbone.name
    for name in ("loss", "val_psnr"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [(m.step, m.value) for m in history] == logged(tmp_path / "run", name)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(recipe(), tmp_path, quiet=True, trackers=["wandb"])
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert all(name in content for name in (b"val_psnr", b"grad_norm", b"backbone.name"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "unknown tracker 'wandbb': did you mean 'wandb'"),
        ("aim", "tracker 'aim' is not installed: pip install"),
    ],
)
def test_a_tracker_that_is_not_there_is_one_line_at_the_start(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(recipe(), tmp_path, quiet=True, trackers=[name])
    assert not (tmp_path / "config.yaml").exists()
