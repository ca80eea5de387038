"""`chasm demo`: what it compares, where it leaves the report, how it fails."""

import json
import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from chasm.cli import demo as commands
from chasm.cli.app import app
from chasm.studies import executors, worker
from chasm.train import load_recipe
from chasm.train.config import shipped_recipes

RUNS = ("baseline", "wrapper-only", "gfnet", "chasm")


def call(out: Path, *words: str) -> Result:
    line = ["demo", "--steps", "2", "--out", str(out), *words]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, line, catch_exceptions=False)


def error_of(said: Result) -> str:
    """The only line that is an error, which ends what was printed."""
    assert said.exit_code == 3
    (line,) = [line for line in said.stderr.splitlines() if line.startswith("error: ")]
    assert said.stderr.endswith(f"{line}\n")
    return line


@pytest.fixture(scope="module")
def tiny() -> Iterator[None]:
    """The demo's own recipe with smaller images and a smaller network."""
    recipe = yaml.safe_load(shipped_recipes()["demo"].read_text())
    recipe["data"]["options"] |= {"size": 32, "cases": 10, "slices": 1}
    recipe["backbone"]["options"] |= {"width": 8, "groups": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(commands.TASKS, "reconstruction", recipe)
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield


@pytest.fixture(scope="module")
def finished(tiny: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder of a demo that ran to its end, and what it said. The first method trains in a worker process."""
    out, start = tmp_path_factory.mktemp("demo"), executors.local

    def local(jobs: list[worker.Job], at_once: int, **options: Any) -> Generator[tuple[str, str], None, None]:
        yield from start(jobs[:1], at_once, **options)
        yield from ((job["key"], worker.run_cell(job)) for job in jobs[1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "local", local)
        return out, call(out)


def test_all_methods_share_one_protocol(finished: tuple[Path, Result]) -> None:
    runs = finished[0] / "reconstruction" / "seed0-2steps"
    found = [json.loads((runs / f / "metrics.json").read_text()) for f in (*RUNS, "compressed-sensing")]
    assert len({json.dumps(m["task"]) for m in found}) == 1
    assert found[0]["task"]["mask"]["kind"] == "equispaced"
    assert found[0]["task"]["mask"]["nominal"] == 4
    configs = [yaml.safe_load((runs / f / "config.yaml").read_text()) for f in RUNS]
    mixers = [config.pop("mixer") for config in configs]
    assert [m["name"] for m in mixers] == ["identity", "chasm", "gfnet", "chasm"]
    assert mixers[1]["options"] == {"basis": None}
    assert len({json.dumps({**config, "name": ""}) for config in configs}) == 1


def test_the_network_enforces_data_consistency(finished: tuple[Path, Result]) -> None:
    config = load_recipe(finished[0] / "reconstruction" / "seed0-2steps" / "chasm" / "config.yaml")
    assert config.backbone.name == "hifi-mamba"
    assert load_recipe("demo").backbone.name == "hifi-mamba"


def test_scores_are_printed_and_the_page_names_all_in_order(finished: tuple[Path, Result]) -> None:
    out, said = finished
    page = out / "reconstruction" / "report.html"
    assert said.exit_code == 0
    assert f"report: {page}\n" in said.output
    assert f": chasm app {out / 'reconstruction' / 'seed0-2steps' / 'chasm'}\n" in said.output
    html = page.read_text()
    assert "Made by <code>chasm demo --task reconstruction --steps 2 --seed 0</code>" in html
    assert commands.QUESTIONS["reconstruction"] in html
    for method in ("zero-filled", "compressed sensing", *commands.METHODS):
        assert f">{method}</td>" in html
        assert f"  {method} " in said.stderr


def test_a_second_call_trains_nothing_again(finished: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = finished
    monkeypatch.setattr(executors, "WorkerProcess", None)  # starting one would fail
    assert call(out).exit_code == 0


def test_another_recipe_in_the_same_folder_is_one_line(
    finished: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = commands.TASKS["reconstruction"]
    assert isinstance(recipe, dict)
    monkeypatch.setitem(commands.TASKS, "reconstruction", {**recipe, "train": {**recipe["train"], "lr": 0.5}})
    line = error_of(call(finished[0]))
    assert "baseline holds a run with another config: train.lr (is 0.003, not 0.5): choose another --out" in line


def test_methods_train_side_by_side_with_one_thread_each(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def stopped(
        jobs: list[worker.Job], at_once: int, *, threads: int, on_poll: Callable[[], None]
    ) -> Iterator[tuple[str, str]]:
        asked.append((len(jobs), at_once, threads))
        on_poll()
        yield jobs[0]["key"], "interrupted"

    monkeypatch.setattr(executors, "local", stopped)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert error_of(call(tmp_path)) == "error: Baseline: interrupted: run the same command again to go on"
    assert asked == [(4, 3, 1)]


def test_a_place_that_cannot_be_written_is_one_line(tiny: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert re.search(r"could not be written \((File exists|Not a directory)\)", error_of(call(tmp_path / "file")))


def test_a_run_that_fails_is_one_line(tiny: None, tmp_path: Path) -> None:
    run = tmp_path / "reconstruction" / "seed0-2steps" / "baseline"
    run.parent.mkdir(parents=True)
    run.touch()
    assert error_of(call(tmp_path)).startswith(f"error: Baseline: {run}: not a folder that can be written")
