"""What a run is: data, task, backbone, mixer and training, as one checked record. Recipes are YAML files of it."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from chasm.mri import Sampling
from chasm.registry import near
from chasm.tasks import TASKS, Task, create_task


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(Strict):
    """Something from a registry, and its options."""

    name: str
    options: dict[str, Any] = {}


class Data(Part):
    name: str = "embedded"
    path: str | None = None


class TaskPart(Part):
    name: str = "reconstruction"

    def create(self) -> Task:
        options = dict(self.options)
        if "sampling" in options:
            options["sampling"] = Sampling(**options["sampling"])
        return create_task(self.name, **options)


class Training(Strict):
    steps: int | None = Field(None, ge=1)
    epochs: float | None = Field(None, gt=0)
    batch: int = Field(8, ge=1)
    accumulate: int = Field(1, ge=1)  # micro-batches per step; `batch` stays the number of slices per step
    lr: float = Field(5e-4, gt=0)
    spectral_multiplier: float = Field(1.0, gt=0)  # of the step size of spectral parameters
    weight_decay: float = Field(0.01, ge=0)
    warmup: float = Field(0.05, ge=0, lt=1)  # fraction of the steps
    final_lr: float = Field(1e-6, ge=0)
    clip: float | None = Field(None, gt=0)
    ema: float | None = Field(None, gt=0, lt=1)
    precision: Literal["float32", "bf16"] = "float32"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    val_every: int | None = Field(None, ge=1)  # steps; default: twenty times per run
    save_every: int = Field(500, ge=1)
    log_every: int = Field(20, ge=1)
    workers: int = Field(0, ge=0)
    resident: bool = True  # keep the prepared set on the device when it fits

    @model_validator(mode="after")
    def _one_length(self) -> "Training":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either train.steps or train.epochs")
        if self.batch % self.accumulate:
            raise ValueError(f"train.batch {self.batch} must be a multiple of train.accumulate {self.accumulate}")
        return self


class RunConfig(Strict):
    name: str = "run"
    seed: int = Field(0, ge=0)
    data: Data = Data()
    task: TaskPart = TaskPart()
    backbone: Part = Part(name="unet")
    mixer: Part = Part(name="identity")
    train: Training


def load_recipe(source: str | Path | dict[str, Any], overrides: list[str] | None = None) -> RunConfig:
    """A recipe file (or its content) with ``a.b=c`` overrides applied, checked; errors are one line."""
    if isinstance(source, dict):
        where, content = "recipe", source
    else:
        where = str(source)
        path = Path(source).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such recipe: give the path of a YAML file")
        try:
            content = yaml.safe_load(path.read_text()) or {}
        except yaml.YAMLError as e:
            raise ValueError(f"{where}: not YAML ({' '.join(str(e).split())})") from None
        if not isinstance(content, dict):
            raise ValueError(f"{where}: expected a mapping of keys, got {type(content).__name__}")
    for override in overrides or []:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"--set {override!r}: write it as key.subkey=value")
        _set(content, key.split("."), yaml.safe_load(value))
    try:
        config = RunConfig.model_validate(content)
    except ValidationError as e:
        raise ValueError(f"{where}: {_first(e)}") from None
    TASKS.get(config.task.name)
    return config


def dump(config: RunConfig) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _set(content: dict[str, Any], keys: list[str], value: Any) -> None:
    *parents, last = keys
    for key in parents:
        content = content.setdefault(key, {})
        if not isinstance(content, dict):
            raise ValueError(f"--set {'.'.join(keys)}: {key!r} holds a value, not more keys")
    content[last] = value


def _first(error: ValidationError) -> str:
    """The first problem in one line, with the near key where one was mistyped."""
    problem = error.errors()[0]
    place = ".".join(str(p) for p in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{place or 'recipe'}: {problem['msg'].removeprefix('Value error, ')}"
    model: Any = RunConfig
    for key in problem["loc"][:-1]:
        model = model.model_fields[key].annotation
    return f"unknown key {place!r}: {near(str(problem['loc'][-1]), model.model_fields)}"
