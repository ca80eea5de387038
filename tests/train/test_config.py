"""Recipes: what they say is what runs, and a mistake is one line that names the near word."""

import re
from pathlib import Path
from typing import Any

import pytest
import small  # noqa: F401

from chasm.mri import Sampling
from chasm.studies import make_plan
from chasm.train import RunConfig, load_recipe
from chasm.train.config import dump

BASE: dict[str, Any] = {
    "data": {"name": "tiny"},
    "task": {"options": {"sampling": {"acceleration": 8}}},
    "train": {"steps": 3},
}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sed=1", "unknown key 'sed': did you mean 'seed'?"),
        ("train.stesp=1", "unknown key 'train.stesp': did you mean 'steps'?"),
        ("mixer.option={}", "unknown key 'mixer.option': did you mean 'options'?"),
        ("train.lr=-1", "train.lr: Input should be greater than 0, got -1"),
        ("train.lr=fast", "train.lr: Input should be a valid number, unable to parse string as a number, got 'fast'"),
        ("train.precision=fp16", "train.precision: Input should be 'float32' or 'bf16', got 'fp16'"),
        ("train.epochs=2", "train: give either train.steps or train.epochs, got both: set the other to null"),
        ("train.steps=null", "train: give either train.steps or train.epochs, got neither: set the other to null"),
        ("train.accumulate=3", "train: train.batch 8 must be a multiple of train.accumulate 3"),
        ("train=null", "train: expected keys (steps, epochs, "),
        ("mixer=chasm", "mixer: expected keys (name, options), got 'chasm'"),
        ("seed=-1", "seed: Input should be greater than or equal to 0, got -1"),
        ("data.name=embeded", "unknown dataset 'embeded': did you mean 'embedded'?"),
        ("task.name=reconstrucion", "unknown task 'reconstrucion': did you mean 'reconstruction'?"),
        ("backbone.name=unett", "unknown backbone 'unett': did you mean 'unet'"),
        ("mixer.name=chasmm", "unknown mixer 'chasmm': did you mean 'chasm'?"),
        ("task.options.protocl=hifi", "task 'reconstruction' has no option 'protocl': did you mean 'protocol'?"),
        ("task.options.sampling=4", "task.options.sampling: expected keys (kind, "),
        (
            "task.options.sampling.aceleration=8",
            "unknown key 'task.options.sampling.aceleration': did you mean 'acceleration'",
        ),
        ("task.options.sampling.kind=equispace", "unknown mask kind 'equispace': did you mean 'equispaced'"),
        ("train.steps", "--set 'train.steps': write it as key.subkey=value"),
        ("train.steps=[1", "--set 'train.steps=[1': not YAML ("),
        ("data.name.x=1", "--set data.name.x: 'name' holds a value, not more keys"),
    ],
)
def test_a_mistake_is_one_line(override: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)) as e:
        load_recipe(BASE, [override])
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("train: {steps: 3\nx", "not YAML"),
        ("- 1", "expected a mapping of keys, got list"),
        ("", "train: Field required"),
    ],
)
def test_a_file_that_is_no_recipe(content: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=expected) as e:
        load_recipe(path)
    assert str(e.value).startswith(str(path))
    assert "\n" not in str(e.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no such recipe: give a YAML file or the name of a recipe, known: .*demo"
    ):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(FileNotFoundError, match=r"/dem.yaml: no such recipe: .*, did you mean 'demo'\?"):
        load_recipe(tmp_path / "dem.yaml")
    with pytest.raises(FileNotFoundError, match="a folder, no recipe: give a YAML file or"):
        load_recipe(tmp_path)


def test_set_changes_what_it_names_and_nothing_else() -> None:
    content = {**BASE, "mixer": {"name": "gfnet"}, "backbone": {"name": "unet"}}
    changes = ["train.lr=1e-3", "mixer.options.a=[1, 2]", "task.options.sampling.seed=[1, 2]", "backbone.options.p=2e1"]
    config = load_recipe(content, changes)
    assert config.train.lr == 1e-3
    assert config.mixer.options == {"a": [1, 2]}
    assert config.backbone.options == {"p": 20.0}  # YAML 1.1 would read text
    assert content == {
        **BASE,
        "mixer": {"name": "gfnet"},
        "backbone": {"name": "unet"},
    }  # the caller's own is left alone
    assert BASE["task"] == {"options": {"sampling": {"acceleration": 8}}}
    task: Any = config.task.create()
    assert task.sampling == Sampling(acceleration=8, seed=(1, 2))
    task.sampling.mask(16)


@pytest.mark.parametrize("order", [1, -1])
def test_another_dataset_keeps_nothing_of_the_one_before(order: int) -> None:
    """Options and path belong to the dataset that the recipe names; those that --set gives stay, in either order."""
    changes = ["data.name=folder", "data.path=mine", "data.options.seed=3"][::order]
    data = load_recipe("demo", changes).data
    assert (data.name, data.path, data.options) == ("folder", str(Path("mine").absolute()), {"seed": 3})
    content = {**BASE, "data": {"name": "cc359", "path": "/theirs", "options": {"skip": 3}}}
    data = load_recipe(content, ["data.name=fastmri"]).data
    assert (data.path, data.options) == (None, {})
    data = load_recipe(content, ["data.name=cc359", "data.options.seed=1"]).data  # the same dataset
    assert (data.path, data.options) == ("/theirs", {"skip": 3, "seed": 1})


def test_round_trip(tmp_path: Path) -> None:
    options = {"levels": (0, 1), "text": "1e-3", "small": 1e-7, "none": None}
    config = load_recipe({**BASE, "name": "1e4", "backbone": {"name": "unet", "options": options}})
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    again = load_recipe(path)
    assert dump(again) == dump(config)
    assert again.name == "1e4"
    assert again.backbone.options == {**options, "levels": [0, 1]}
    assert set(RunConfig.model_fields) == {"name", "seed", "data", "task", "backbone", "mixer", "train"}


def _laughs(levels: int, merge: bool = False) -> str:
    """Anchors that each stand for nine of the one before."""
    if merge:
        lines = ["a0: &a0 {x: 1}"] + [
            f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, levels)
        ]
    else:
        lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_laughs(10), "its anchors stand for more than 100000 values"),
        (_laughs(10, merge=True), "its anchors stand for more than 100000 values"),
        ("name: &a [*a]", "more than 50 levels deep, or an anchor that contains itself"),
        ("name: " + "[" * 60 + "]" * 60, "more than 50 levels deep"),
        ("name: " + "[" * 100_000, "nested too deeply"),
        ("name: " + "{a: " * 100_000, "nested too deeply"),
        ("# " + "x" * 2**20, "a recipe has less than 1048576"),
        ("name: a\0b", "not YAML (unacceptable character #x0000"),
        ("name: 2020-13-45", "not YAML (month must be in 1..12)"),
        ("seed: " + "9" * 5000, "not YAML (Exceeds the limit"),
    ],
)
def test_a_recipe_that_grows_when_it_is_read_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)) as e:
        load_recipe(tmp_path / "a.yaml")
    assert "a.yaml" in str(e.value)
    assert "\n" not in str(e.value)


def test_anchors_of_a_sound_recipe_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: {name: tiny}\ntrain: &t {steps: 3}\nbackbone: {name: unet, options: {}}\n")
    assert load_recipe(tmp_path / "a.yaml").train.steps == 3


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(ValueError, match=r"a\.yaml: not text"):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize("name", ["../../etc", "..", "", "a/b", "a\\\\b", "/tmp/x"])
def test_a_name_cannot_lead_out_of_the_folder_of_runs(name: str) -> None:
    with pytest.raises(ValueError, match="name: expected a name that a folder can have"):
        load_recipe({**BASE, "name": name})


def test_a_relative_path_means_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_recipe({"data": {"name": "folder", "path": "scans"}, "train": {"steps": 1}})
    assert config.data.path == str(tmp_path / "scans")
    assert load_recipe({"train": {"steps": 1}}, ["data.name=folder", "data.path=x"]).data.path == str(tmp_path / "x")
    plan = make_plan("basis", overrides=["data.path=scans"])
    monkeypatch.chdir("/")
    assert plan.runs[0].config.data.path == str(tmp_path / "scans")
