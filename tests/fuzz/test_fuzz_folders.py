"""Run and study folders with a file damaged or of another shape: commands work, or say in one line what is wrong.

A line names the file that is wrong, so that it can be removed.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mutations import damaged, documents, examples, one_line, reshaped

sys.path.insert(0, str(Path(__file__).parents[1] / "studies" / "report"))
from finished_runs import fill_plan

from chasm.studies import collect, load_plan, make_plan
from chasm.studies.plan import save_plan
from chasm.studies.report import write_report
from chasm.studies.runner import jobs_of
from chasm.studies.state import state
from chasm.train import evaluate, load_recipe, train
from chasm.train.checkpoints import sha256_of

RECIPE: dict[str, Any] = {
    "name": "small",
    "data": {"name": "embedded", "options": {"size": 16, "cases": 10, "slices": 1}},
    "task": {"name": "reconstruction", "options": {"sampling": {"kind": "equispaced", "acceleration": 4}}},
    "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
    "mixer": {"name": "chasm", "options": {}},
    "train": {"steps": 2, "batch": 2, "save_every": 1},
}


@examples(30)
@given(reshaped(RECIPE) | documents)
def test_a_recipe_of_another_shape_is_one_line(content: Any) -> None:
    with one_line():
        load_recipe(content if isinstance(content, dict) else {"train": content})


@examples(30)
@given(damaged(yaml.safe_dump(RECIPE).encode()))
def test_a_damaged_recipe_is_one_line(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(content)
    with one_line():
        load_recipe(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is done."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        torch.set_num_threads(1)
        train(load_recipe(RECIPE), folder, quiet=True)
    return folder


def spoil(file: Path, data: st.DataObject) -> None:
    """Give the file another content: JSON and YAML another shape as often as other bytes."""
    content = file.read_bytes()
    if file.suffix in (".json", ".yaml") and data.draw(st.booleans()):
        value = yaml.safe_load(content) if file.suffix == ".yaml" else json.loads(content)
        other = data.draw(reshaped(value))
        if isinstance(other, dict) and other.pop("record_sha256", None) is not None:
            other["record_sha256"] = sha256_of(other)  # otherwise the checksum alone would find the damage
        file.write_text(json.dumps(other))  # JSON is YAML
    elif file.suffix == ".jsonl" and data.draw(st.booleans()):
        first, *rest = content.decode().splitlines()
        file.write_text("\n".join([json.dumps(data.draw(reshaped(json.loads(first)))), *rest]))
    else:
        file.write_bytes(data.draw(damaged(content)))


def each_file_spoiled(whole: Path, copy: Path, number: int, use: Callable[[Path], None]) -> None:
    """Call `use` with copies of a folder in which one file is spoiled."""
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())

    @examples(number)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        shutil.copytree(whole, copy)
        try:
            spoil(copy / data.draw(st.sampled_from(files)), data)
            use(copy)
        finally:
            shutil.rmtree(copy)

    fuzz()


def test_a_spoiled_run_folder_is_one_line(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def use(folder: Path) -> None:
        with one_line():
            train(load_recipe(RECIPE), folder, quiet=True)
        with one_line():
            evaluate(folder)

    each_file_spoiled(finished, tmp_path / "run", 10, use)


def test_a_spoiled_run_that_goes_on_is_one_line(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (whole := shutil.copytree(finished, tmp_path / "whole") / "metrics.json").unlink()

    def use(folder: Path) -> None:
        with one_line():
            train(load_recipe(RECIPE), folder, quiet=True)

    each_file_spoiled(whole.parent, tmp_path / "run", 5, use)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with two runs that are done."""
    root = tmp_path_factory.mktemp("study")
    plan = make_plan("seeds-basis", seeds=[0])
    save_plan(plan, root)
    fill_plan(plan, root, "embedded brain", size=24)
    return root


def test_a_spoiled_study_folder_is_one_line(study: Path, tmp_path: Path) -> None:
    plan = load_plan(study, "seeds-basis")

    def use(root: Path) -> None:
        with one_line():
            jobs_of(plan, root)
            for run in plan.runs:
                word, error = state(plan.folder(root, run), run.config)
                assert word in ("done", "failed", "missing", "interrupted", "other config")
                assert "\n" not in (error or "")
            collect(load_plan(root, "seeds-basis"), root).to_json()

    each_file_spoiled(study, tmp_path / "study", 10, use)


def test_a_spoiled_study_folder_has_a_report(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chasm.studies.report.figures.encoded", lambda figure, kind: b"")  # to draw takes long
    monkeypatch.setattr("chasm.studies.report.place.pareto_figure", lambda *_: None)
    plan = load_plan(study, "seeds-basis")

    def use(root: Path) -> None:
        with one_line():
            write_report(collect(plan, root), root / "report", root=root)

    each_file_spoiled(study, tmp_path / "study", 3, use)
