"""The config of a run: data, task, backbone, mixer and training, checked on reading. Recipes are YAML files of it."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from chasm.backbones.base import BACKBONES
from chasm.common.files import expanded, is_folder_name
from chasm.common.registry import suggest
from chasm.data import DATASETS
from chasm.mixers import MIXERS
from chasm.models import find_model
from chasm.mri import Sampling
from chasm.mri.masks import MASK_KINDS
from chasm.tasks import Task, create_task
from chasm.tasks.base import TASKS
from chasm.train.yaml_text import parse_yaml, read_yaml, write_yaml

MAX_OPTION = 2**14  # largest whole number among the options of a backbone or a mixer


class Strict(BaseModel):
    """A record that refuses unknown keys and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(Strict):
    """A registered name (of a backbone, a mixer, ...) and its options."""

    name: str
    options: dict[str, Any] = {}


class Data(Part):
    """A registered dataset, its options, and the path of its files.

    With ``depth``, blocks of that many neighbouring slices of a case are volumes, for tasks like "volume".
    """

    name: str = "embedded"
    path: str | None = None
    depth: int | None = Field(None, ge=1)


class TaskPart(Part):
    """A registered task and its options."""

    name: str = "reconstruction"

    def create(self) -> Task:
        """Create the task.

        Raises:
            ValueError: if its name or an option is wrong.
        """
        options = dict(self.options)
        if "sampling" in options:
            options["sampling"] = _sampling(options["sampling"])
        return create_task(self.name, **options)


class Training(Strict):
    """How a run trains. Give either ``steps`` or ``epochs``."""

    steps: int | None = Field(None, ge=1)
    epochs: float | None = Field(None, gt=0, le=1e9)
    batch: int = Field(8, ge=1, le=2**16)
    accumulate: int = Field(1, ge=1)  # micro-batches per step; `batch` is the number of slices of the whole step
    lr: float = Field(5e-4, gt=0)
    spectral_multiplier: float = Field(1.0, gt=0)  # step size of spectral parameters, as a multiple of lr
    weight_decay: float = Field(0.01, ge=0)
    warmup: float = Field(0.05, ge=0, lt=1)  # fraction of the steps
    final_lr: float = Field(1e-6, ge=0)
    clip: float | None = Field(None, gt=0)
    ema: float | None = Field(
        None, gt=0, lt=1
    )  # decay of an average of the weights, which is validated, selected and saved
    flips: bool = False  # mirror each training slice left to right, top to bottom, both or not, at random
    vary: bool = False  # turn, zoom, shift and shear each training slice and change its contrast, at random
    start: str | None = None  # a run folder, a model, or owner/name on the Hub, whose weights training begins with
    precision: Literal["float32", "bf16"] = "float32"
    tf32: bool = False  # let float32 products and convolutions on a GPU round their inputs to TF32
    compile: bool = False  # torch.compile the backbone; HiFi-Mamba compiles block by block
    cuda_graph: bool = False  # run forward and backward of a step as one CUDA graph; needs one process on a GPU
    on_nonfinite: Literal["stop", "skip"] = "stop"
    val_every: int | None = Field(None, ge=1)  # steps between validations; by default twenty validations per run
    save_every: int = Field(500, ge=1)
    log_every: int = Field(20, ge=1)
    workers: int = Field(0, ge=0, le=256)
    resident: bool = True  # keep the prepared set on the device when it fits

    @model_validator(mode="after")
    def _one_length(self) -> "Training":
        if (self.steps is None) == (self.epochs is None):
            how_many = "neither" if self.steps is None else "both"
            raise ValueError(f"give either train.steps or train.epochs, got {how_many}: set the other to null")
        if self.batch % self.accumulate:
            raise ValueError(f"train.batch {self.batch} must be a multiple of train.accumulate {self.accumulate}")
        return self


class RunConfig(Strict):
    """Everything that decides what a run computes."""

    name: str = "run"
    seed: int = Field(0, ge=0, lt=2**32)
    data: Data = Data()
    task: TaskPart = TaskPart()
    backbone: Part = Part(name="unet")
    mixer: Part = Part(name="identity")
    train: Training

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        """Refuse names that are no folder names: the run folder has this name and must stay inside runs/."""
        if not is_folder_name(name):
            raise ValueError("expected a name that a folder can have, without / and \\")
        return name

    @field_validator("backbone", "mixer")
    @classmethod
    def _buildable(cls, part: Part) -> Part:
        """Refuse numbers of layers, channels and so on that no network has, because counting to them takes memory."""
        for option, value in part.options.items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and number > MAX_OPTION:
                    raise ValueError(f"option {option!r}: a network has at most {MAX_OPTION}")
        return part

    @model_validator(mode="after")
    def _graph_or_recomputation(self) -> "RunConfig":
        if self.train.cuda_graph and self.backbone.options.get("checkpoint"):
            raise ValueError(
                "train.cuda_graph and backbone.options.checkpoint do not go together (recomputation reads the random "
                "state, a graph cannot): set one of them to false"
            )
        return self


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of recipes. Editors complete and check YAML files by it; known names are its examples.

    >>> recipe_schema()["$defs"]["Training"]["properties"]["batch"]["minimum"]
    1
    """
    schema = RunConfig.model_json_schema()
    schema["title"] = "A recipe of chasm"
    names = {"data": DATASETS.list(), "task": TASKS.list(), "backbone": BACKBONES.list(), "mixer": MIXERS.list()}
    for part, known in names.items():
        place = schema["properties"][part]
        schema["properties"][part] = {
            "allOf": [{"$ref": place.pop("$ref")}],
            "properties": {"name": {"examples": known}},
            **place,
        }
    return schema


def config_of_run(run: str | Path) -> RunConfig:
    """Return the config of a run, without loading its weights.

    Args:
        run: the run folder, the name of a shipped model, or owner/name on the Hugging Face Hub.
    """
    return load_recipe(find_model(run) / "config.yaml")


def load_recipe(source: str | Path | dict[str, Any], overrides: list[str] | None = None) -> RunConfig:
    """Read a recipe and apply changes.

    Args:
        source: a YAML file, the name of a shipped recipe, or the content.
        overrides: ``a.b=c``. Another ``data.name`` starts without the options and the path of the recipe's dataset.

    Returns:
        The checked config.

    Raises:
        FileNotFoundError: if there is no recipe of this name.
        ValueError: if a key or a value is wrong; the message is one line.

    >>> load_recipe({"train": {"steps": 10}}, ["train.lr=1e-3", "mixer.name=chasm"]).train.lr
    0.001
    """
    if isinstance(source, dict):
        where, content = "recipe", deepcopy(source)
    else:
        where = str(source)
        content = read_yaml(find_recipe(source)) or {}
        if not isinstance(content, dict):
            raise ValueError(f"{where}: expected a mapping of keys, got {type(content).__name__}")
    changes = [_change(override) for override in overrides or []]
    for keys, value in sorted(changes, key=lambda change: change[0] != _DATASET):
        if keys == _DATASET and value != _dataset_of(content):
            content.pop("data", None)  # the options and the path belong to the dataset that the recipe names
        _set(content, keys, value)
    _make_path_absolute(content)
    try:
        config = RunConfig.model_validate(content)
    except ValidationError as e:
        raise ValueError(f"{where}: {_first(e)}") from None
    for registry, part in ((DATASETS, config.data), (BACKBONES, config.backbone), (MIXERS, config.mixer)):
        registry.get(part.name)
    config.task.create()
    return config


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package: their files, by name."""
    package = Path(__file__).parents[1]
    places = (package / "recipes", package.parents[1] / "recipes")
    return {path.stem: path for path in sorted(next((p for p in places if p.is_dir()), places[0]).glob("*.yaml"))}


def find_recipe(source: str | Path) -> Path:
    """Return the file of a recipe. An existing file is preferred to a shipped recipe of the same name.

    Args:
        source: a path, or the name of a shipped recipe.

    Raises:
        FileNotFoundError: if there is neither; the message suggests near names.
    """
    path, shipped = expanded(source), shipped_recipes()
    if path.is_file():
        return path
    if str(source) in shipped:
        return shipped[str(source)]
    what = "a folder, no recipe" if path.is_dir() else "no such recipe"
    raise FileNotFoundError(
        f"{source}: {what}: give a YAML file or the name of a recipe, {suggest(path.stem, shipped)}"
    )


def dump(config: RunConfig) -> str:
    """Return a config as YAML, which `load_recipe` reads."""
    return write_yaml(config.model_dump(mode="json"))


def differences(stored: RunConfig, wanted: RunConfig) -> str:
    """List the keys in which two configs differ.

    Returns:
        For example "train.steps (is 500, not 6)"; empty if they are equal.

    >>> stored, wanted = (load_recipe({"train": {"steps": n}}) for n in (500, 6))
    >>> differences(stored, wanted)
    'train.steps (is 500, not 6)'
    """
    return changes(stored.model_dump(mode="json"), wanted.model_dump(mode="json"))


def changes(stored: dict[str, Any], wanted: dict[str, Any]) -> str:
    """List the keys in which two nested mappings differ, as `differences` does."""
    a, b = flat(stored), flat(wanted)
    pairs = {k: (a.get(k, "unset"), b.get(k, "unset")) for k in dict.fromkeys((*a, *b))}
    return ", ".join(f"{k} (is {is_!r}, not {not_!r})" for k, (is_, not_) in pairs.items() if is_ != not_)


def flat_config(config: RunConfig) -> dict[str, Any]:
    """Return every value of a config by its dotted key: "train.steps"."""
    return flat(config.model_dump(mode="json"))


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their dotted keys.

    >>> flat({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    if not isinstance(value, dict):
        return {place: value}
    return {k: v for key, item in value.items() for k, v in flat(item, f"{place}.{key}".lstrip(".")).items()}


def _sampling(options: Any) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    if not isinstance(options, dict):
        raise ValueError(f"task.options.sampling: expected keys ({', '.join(known)}), got {options!r}")
    for key in options:
        if key not in known:
            raise ValueError(f"unknown key 'task.options.sampling.{key}': {suggest(str(key), known)}")
    if options.get("kind", MASK_KINDS[0]) not in MASK_KINDS:
        raise ValueError(f"unknown mask kind {options['kind']!r}: {suggest(str(options['kind']), MASK_KINDS)}")
    chosen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    try:
        checked = TypeAdapter(Sampling).validate_python(chosen)
    except ValidationError as e:
        problem = e.errors()[0]
        place = ".".join(map(str, ("task.options.sampling", *problem["loc"][:1])))
        raise ValueError(f"{place}: {problem['msg']}, got {problem['input']!r}") from None
    chosen |= {k: getattr(checked, k) for k, v in chosen.items() if isinstance(v, str)}  # numbers in quotes
    return Sampling(**chosen)  # a seed may be a YAML list; a mask is looked up by hashable values


_DATASET = ["data", "name"]


def _dataset_of(content: dict[str, Any]) -> Any:
    data = content.get("data", {})
    return data.get("name", Data().name) if isinstance(data, dict) else None


def _change(override: str) -> tuple[list[str], Any]:
    """Split ``a.b=c`` into its keys and its value."""
    key, equals, value = override.partition("=")
    if not equals:
        raise ValueError(f"--set {override!r}: write it as key.subkey=value")
    return key.split("."), parse_yaml(value, f"--set {override!r}")


def _make_path_absolute(content: dict[str, Any]) -> None:
    """Make data.path absolute, since a run may be resumed and evaluated from another folder."""
    data = content.get("data")
    if isinstance(data, dict) and isinstance(data.get("path"), str):
        content["data"] = data | {"path": str(expanded(data["path"]).absolute())}


def _set(content: dict[str, Any], keys: list[str], value: Any) -> None:
    *parents, last = keys
    for key in parents:
        content = content.setdefault(key, {})
        if not isinstance(content, dict):
            raise ValueError(f"--set {'.'.join(keys)}: {key!r} holds a value, not more keys")
    content[last] = value


def _first(error: ValidationError) -> str:
    """Return the first problem in one line, with the nearest key if one was mistyped."""
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    place = ".".join(str(p) for p in problem["loc"])
    if problem["type"] == "model_type":  # as in mixer=chasm, where mixer.name=chasm is meant
        keys = ", ".join(_record_at(problem["loc"]).model_fields)
        return f"{place}: expected keys ({keys}), got {problem['input']!r}"
    if problem["type"] != "extra_forbidden":
        got = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
        return f"{place or 'recipe'}: {problem['msg'].removeprefix('Value error, ')}{got}"
    known = _record_at(problem["loc"][:-1]).model_fields
    return f"unknown key {place!r}: {suggest(str(problem['loc'][-1]), known)}"


def _record_at(place: Iterable[Any]) -> type[Strict]:
    """Return the record that a config has at these keys."""
    record: Any = RunConfig
    for key in place:
        record = record.model_fields[key].annotation
    return record
