"""Files of other people: imported once, named in what a run keeps, known to the workers of a study."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from chasm.cli.app import app
from chasm.common.extensions import load_extensions, loaded
from chasm.data import DATASETS
from chasm.mixers import MIXERS, create_mixer
from chasm.studies import make_plan
from chasm.studies.executors import local
from chasm.studies.runner import jobs_of

TEXT = """
from torch import nn
from chasm.mixers import Facts, Mixer, register_mixer

@register_mixer("of-mine")
class Mine(Mixer):
    owns_residual = False
    facts = Facts(response="none", channel_mixing="dense", resolution="any")

    def __init__(self, channels, *, size=None, device=None, dtype=None):
        super().__init__()
        self.fuse = nn.Conv2d(channels, channels, 1, device=device, dtype=dtype)

    def forward(self, x):
        return self.fuse(x)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch, no_loaded_files):
    """A file, and everything afterwards as it was before."""
    monkeypatch.setattr(MIXERS, "_classes", dict(MIXERS._classes))
    file = tmp_path / "file_of_mine.py"
    file.write_text(TEXT)
    return file


def test_what_a_file_registers_has_a_name(mine):
    assert loaded() == {}
    load_extensions([mine])
    load_extensions([str(mine)])
    assert create_mixer("of-mine", 4)(torch.zeros(1, 4, 3, 3)).shape == (1, 4, 3, 3)
    assert loaded() == {str(mine): hashlib.sha256(TEXT.encode()).hexdigest()}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent.py", "absent.py: not there: expected a Python file"),
        ("notes.txt", "expected a Python file"),
        ("two-words.py", "a name that can be imported"),
        ("json.py", "another module named json: rename"),
    ],
)
def test_what_cannot_be_loaded(mine, name, reason):
    if name != "absent.py":
        (mine.parent / name).write_text(TEXT)
    with pytest.raises(ValueError, match=reason) as e:
        load_extensions([mine.parent / name])
    assert "\n" not in str(e.value)
    result = CliRunner().invoke(app, ["--with", str(mine.parent / name), "mixers"])
    assert result.exit_code == 3
    assert result.stderr == f"error: {e.value}\n"
    assert loaded() == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = (\n", "line 1: SyntaxError"),
        ("import os\n\nos.nothing\n", "line 3: AttributeError: module 'os'"),
        (TEXT.replace("Mine(Mixer)", "Mine(nn.Module)"), "line 5: .* a class derived from chasm.mixers.base.Mixer"),
        ("from chasm.backbones import *\nregister_backbone('b')(print)", "derived from chasm.backbones.base.Backbone"),
        ("from chasm.tasks import *\nregister_task('t')(int)", "derived from chasm.tasks.base.Task"),
        ("from chasm.data import *\nregister_dataset('d')(type('D', (), {}))", "from chasm.data.base.SliceDataset"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(mine, text, reason):
    mine.write_text(text)
    with pytest.raises(ValueError, match=reason) as e:
        load_extensions([mine])
    assert "\n" not in str(e.value)
    assert loaded() == {}


def test_a_mistake_in_a_file_beside_it_is_found_there(mine):
    (mine.parent / "beside_mine.py").write_text("import os\n\nos.nothing\n")
    mine.write_text("import beside_mine\n")
    with pytest.raises(ValueError, match=r"file_of_mine.py: \S*beside_mine.py, line 3: AttributeError"):
        load_extensions([mine])


@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize("form", ["--with {}", "--with={}"])
def test_the_command_line_knows_it(mine, place, form):
    words = ["mixers", "of-mine", "--json", "--channels", "4"]
    words[place:place] = form.format(mine).split()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.output)
    assert row["params"] == 4 * 4 + 4


def test_with_needs_a_file(mine):
    result = CliRunner().invoke(app, ["mixers", "--with"])
    assert result.exit_code == 2
    assert "requires an argument" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["mixers", "of-mine"],
        ["study", "show", "wrapper", "--arm", "of-mine"],
        ["bench", "--mixer", "of-mine", "--shape", "1,2,4,4"],
        ["data", "check", ".", "--as", "of-mine"],
    ],
)
def test_who_forgets_it_is_told(words):
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 3
    assert "chasm --with FILE.py" in result.output


def test_facts_may_be_left_out(mine):
    mine.write_text(re.sub(" +facts = .*", "", TEXT))
    result = CliRunner().invoke(app, ["--with", str(mine), "mixers", "of-mine", "--json", "--channels", "4"])
    assert result.exit_code == 0, result.output


def test_the_examples_of_the_guide_are_whole_files(mine, monkeypatch):
    monkeypatch.setattr(DATASETS, "_classes", dict(DATASETS._classes))
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    mixer, dataset = re.findall("```python\n(.*?)```", guide, re.DOTALL)
    mine.write_text(f"{mixer}\n{dataset}")
    folder = mine.parent / "arrays"
    folder.mkdir()
    for i in range(5):
        np.save(folder / f"{i}.npy", np.random.default_rng(i).random((2, 8, 8), np.float32))
    result = CliRunner().invoke(app, ["--with", str(mine), "data", "check", str(folder), "--as", "mine"])
    assert result.exit_code == 0, result.output
    assert "5 cases, 10 slices" in result.output
    assert MIXERS.list("mine") == ["mine"]


def test_so_do_the_workers_of_a_study_and_a_run_says_so(mine, tmp_path):
    load_extensions([mine])
    plan = make_plan("parameters", arms=["of-mine"])
    (job,) = [j for j in jobs_of(plan, tmp_path) if j["config"]["mixer"]["name"] == "of-mine"]
    assert [outcome for _, outcome in local([job])] == ["done"]
    environment = json.loads((tmp_path / job["folder"] / "environment.json").read_text())
    assert environment["with"] == loaded()
