"""A study at a scale: the list of its runs, each a RunConfig that differs from its neighbours only in declared factors.

The runs of a (setting, host) are copies of one base config with another mixer, spectral step size, seed and name. So
every mixer gets the same data in the same order under the same mask, and (one seed) a host with the same weights.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from chasm.common.files import expanded, read_json, write_json
from chasm.common.registry import suggest
from chasm.mixers import MIXERS
from chasm.studies import labels
from chasm.studies.agreement import FACTORS
from chasm.studies.budget import near_budget
from chasm.studies.catalogue import Quotes, Study, get_study
from chasm.studies.factors import (
    HOSTS,
    MULTIPLIERS,
    SCALES,
    SETTINGS,
    TINY_SIZE,
    Arm,
    UnknownArmError,
    base_recipe,
    get_arm,
    image_size,
    lookup,
    needed_path,
    split_outside_brackets,
    with_options,
)
from chasm.train.config import RunConfig, Training, load_recipe
from chasm.train.yaml_text import parse_yaml

PROTOCOLS = ("default", "matched", "tuned")
POINT_FIELDS = ("setting", "host", "arm", "multiplier", "seed")
MIXER_OPTIONS = "mixer.options."  # an override of every arm whose mixer has the option
SELECTION_STEPS = 1000
SELECTION_SEED = 0


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    setting: str
    host: str
    arm: str
    multiplier: float
    seed: int
    kind: str  # "train" or "cost"
    config: RunConfig
    is_selection: bool = False  # a short run that helps to choose a multiplier, and is no result

    @property
    def key(self) -> str:
        """Name of the run and of its folder."""
        return self.config.name


@dataclass(frozen=True)
class Selection:
    """The step-size multiplier of one arm in a setting and host, as far as validation has decided it."""

    setting: str
    host: str
    arm: str
    grid: tuple[float, ...] = MULTIPLIERS
    scores: dict[float, float | None] = field(default_factory=dict)  # of finished selection runs; None: diverged
    chosen: float | None = None  # None: selection runs are missing


@dataclass(frozen=True)
class Plan:
    """A study with the choices that its declaration leaves open: scale, protocol, seeds, paths and overrides.

    Protocols: `default` takes every mixer as shipped, `matched` one step size for all parameters, and `tuned` a step
    size of the spectral parameters that validation chooses among short runs (see `chasm.studies.tuning`).
    """

    study: Study
    scale: str
    protocol: str
    seeds: tuple[int, ...] | None  # None: those the study declares
    paths: dict[str, str]
    overrides: tuple[str, ...]  # a.b=c, of every run alike
    arms: tuple[str, ...] = ()  # in every grid, beside those the study declares
    selection_steps: int = SELECTION_STEPS
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()  # a part of the study: factor, and its allowed values
    selections: tuple[Selection, ...] = ()  # filled by `chasm.studies.tuning.with_selections`

    @property
    def own_parts(self) -> list[str]:
        """Overrides that change data, task, host or mixers, so that the paper's numbers do not apply."""
        own = [o for o in self.overrides if o.partition(".")[0] in ("data", "task", "backbone", "mixer")]
        return [o for o in own if o.partition("=")[0] != "data.path"]

    @property
    def quotes(self) -> Quotes:
        """Numbers that the paper prints for the runs; none if the runs are on other data or in another host."""
        return {} if self.own_parts else self.study.quotes

    def setting_title(self, setting: str) -> str:
        """Return the title of a setting in reports. It names other data that overrides put in place."""
        title, size = labels.setting_title(setting, self.overrides), SETTINGS[setting].size
        return title.replace(f"{size} x {size}", f"{TINY_SIZE} x {TINY_SIZE}") if self.scale == "tiny" else title

    def host_label(self, host: str) -> str:
        """Return the label of a host in reports. It names another host that overrides put in place."""
        return labels.host_label(host, self.overrides)

    def arm(self, name: str) -> Arm:
        """Return an arm, with those options of overrides that its mixer has and the arm itself does not set."""
        arm = get_arm(name)
        known = MIXERS.options(arm.mixer.name).keys() - arm.mixer.options.keys()
        return with_options(arm, {key: value for key, value in _mixer_options(self.overrides).items() if key in known})

    @property
    def points(self) -> list[tuple[str, str, str, float | None, int]]:
        """Setting, host, arm, multiplier (None if not yet chosen) and seed of every run. Grids may share a run."""
        points = (
            (setting, host, arm, self._multiplier(setting, host, arm), seed)
            for grid in self.study.grids
            for setting in grid.settings
            for host in grid.hosts
            for arm in dict.fromkeys((*grid.arms, *self.arms))
            for seed in self.seeds or grid.seeds
        )
        wanted = [(POINT_FIELDS.index(factor), values) for factor, values in self.only]
        return [p for p in dict.fromkeys(points) if all(factor_text(p[i]) in values for i, values in wanted)]

    @cached_property
    def runs(self) -> list[PlannedRun]:
        """The runs that give results, without those whose multiplier is not chosen yet."""
        runs = (self._run(s, h, a, m, seed) for s, h, a, m, seed in self.points if m is not None)
        return list({run.key: run for run in runs}.values())

    @cached_property
    def selection_runs(self) -> list[PlannedRun]:
        """The short runs among which validation chooses. Only the protocol `tuned` has any."""
        return [self.selection_run(selection, m) for selection in self.open_selections for m in selection.grid]

    @property
    def all_runs(self) -> list[PlannedRun]:
        """The selection runs and those that give results."""
        return [*self.selection_runs, *self.runs]

    @property
    def open_selections(self) -> list[Selection]:
        """The selection, decided or not, of every arm with spectral parameters under `tuned`."""
        known = {(s.setting, s.host, s.arm): s for s in self.selections}
        places = dict.fromkeys(point[:3] for point in self.points)
        return [known.get(place, Selection(*place)) for place in places if self._is_tuned(place[2])]

    def selection_run(self, selection: Selection, multiplier: float) -> PlannedRun:
        """Return the short run that tries a multiplier."""
        return self._run(selection.setting, selection.host, selection.arm, multiplier, SELECTION_SEED, True)

    def folder(self, root: str | Path, run: PlannedRun) -> Path:
        """Return the folder of a run. It does not depend on the study, so that studies share equal runs."""
        return Path(root) / self.scale / run.key

    def _is_tuned(self, arm: str) -> bool:
        return self.protocol == "tuned" and self.study.kind == "train" and get_arm(arm).spectral

    def _multiplier(self, setting: str, host: str, arm: str) -> float | None:
        """Return how far the spectral parameters step, as a multiple of the learning rate."""
        if self.study.kind != "train" or not get_arm(arm).spectral or self.protocol == "matched":
            return 1
        if self.protocol == "default":
            return int(_default_step_scale(arm) or 1)
        place = (setting, host, arm)
        return next((s.chosen for s in self.selections if (s.setting, s.host, s.arm) == place), None)

    @cached_property
    def _bases(self) -> dict[tuple[str, str], RunConfig]:
        """The config that all runs of a setting in a host have in common."""
        places = dict.fromkeys(point[:2] for point in self.points)
        changes = [o for o in self.overrides if not o.startswith(MIXER_OPTIONS)]
        return {
            (s, h): load_recipe(base_recipe(SETTINGS[s], HOSTS[h], self.scale, self.paths), changes) for s, h in places
        }

    def _run(
        self, setting: str, host: str, arm: str, multiplier: float, seed: int, is_selection: bool = False
    ) -> PlannedRun:
        base = self._bases[setting, host]
        mixer, kind, training = self.arm(arm).mixer, self.study.kind, base.train
        if get_arm(arm).budget:
            options = json.dumps(base.backbone.options, sort_keys=True)
            mixer = near_budget(mixer.name, base.backbone.name, options, image_size(SETTINGS[setting], self.scale))
        tail = f".m{multiplier:g}.s{seed}" if kind == "train" else f".{kind}"
        if is_selection:
            tail += ".select"
            training = _shortened(training, self.selection_steps)
        if _default_step_scale(arm) is None:  # the optimiser applies the multiplier
            training = training.model_copy(update={"spectral_multiplier": float(multiplier)})
        elif kind == "train" and get_arm(arm).spectral:  # the mixer applies it
            mixer = mixer.model_copy(update={"options": mixer.options | {"step_scale": float(multiplier)}})
        changes = {"name": f"{setting}.{host}.{arm}{tail}", "seed": seed, "mixer": mixer, "train": training}
        config = base.model_copy(update=changes)
        return PlannedRun(setting, host, arm, multiplier, seed, kind, config, is_selection)


def _mixer_options(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the mixer options that overrides set: option to value."""
    parts = (o.removeprefix(MIXER_OPTIONS).partition("=") for o in overrides if o.startswith(MIXER_OPTIONS))
    return {key: parse_yaml(value, f"--set {MIXER_OPTIONS}{key}={value}") for key, _, value in parts}


def _from_here(override: str) -> str:
    """Return an override with an absolute path, which means the same in every folder."""
    key, _, value = override.partition("=")
    return f"{key}={expanded(value).absolute()}" if key == "data.path" and value else override


def factor_text(value: str | float | None) -> str:
    """Return the value of a factor as text for --only, where 30 and 30.0 are the same multiplier."""
    return value if isinstance(value, str) else "" if value is None else f"{value:g}"


def _shortened(training: Training, steps: int) -> Training:
    """Return the training of a selection run: at most `steps` steps, and validated at least once."""
    length = min(steps, training.steps or steps)
    val_every = None if training.val_every is None else min(training.val_every, length)
    return training.model_copy(update={"steps": length, "epochs": None, "val_every": val_every})


def _default_step_scale(arm: str) -> float | None:
    """Return the default step scale of the mixer of an arm, None if the mixer has no step scale."""
    scale: float | None = MIXERS.get(get_arm(arm).mixer.name).default_step_scale  # type: ignore[attr-defined]
    return scale


def make_plan(
    study: str,
    scale: str = "tiny",
    protocol: str = "default",
    seeds: Sequence[int] | None = None,
    paths: dict[str, str] | None = None,
    overrides: Sequence[str] = (),
    arms: Sequence[str] = (),
    selection_steps: int = SELECTION_STEPS,
) -> Plan:
    """Plan the runs of a study.

    Args:
        study: a name of `chasm.studies.STUDIES`.
        scale: "tiny", "proxy" or "full".
        protocol: "default", "matched" or "tuned"; see `Plan`.
        seeds: replace the seeds that the study declares.
        paths: "proxy" to the folder of the bundle, or dataset to folder. Needed only to run the plan.
        overrides: ``a.b=c`` changes the config of every run, and ``mixer.options.a=c`` every arm whose mixer has the
            option.
        arms: arms of another study, or any registered mixers, to add to every grid. Options may follow in brackets, as
            in "chasm(bins=256)".
        selection_steps: steps of a selection run under `tuned`, at most those of a run of the study. A study whose
            length is given in epochs does not limit them.

    Raises:
        ValueError: if a name is unknown, or an override sets what the runs of a study differ in.
    """
    overrides = [_from_here(override) for override in overrides]
    lookup("scale", scale, dict.fromkeys(SCALES))
    lookup("protocol", protocol, dict.fromkeys(PROTOCOLS))
    if selection_steps < 1:
        raise ValueError(f"expected at least one selection step, got {selection_steps}")
    for override in overrides:
        key = override.partition("=")[0]
        if key.startswith(MIXER_OPTIONS) and key != f"{MIXER_OPTIONS}step_scale":
            continue
        if any(key == f or key.startswith(f"{f}.") or f.startswith(f"{key}.") for f in FACTORS):
            raise ValueError(f"--set {override}: the runs of a study differ in {key}, so it cannot be set for all")
    arms = ["".join(arm.split()) for arm in arms]  # without spaces, since the names of runs contain the options
    for arm in arms:
        get_arm(arm)
    plan = Plan(
        get_study(study),
        scale,
        protocol,
        tuple(seeds) if seeds else None,
        dict(paths or {}),
        tuple(overrides),
        tuple(arms),
        selection_steps,
    )
    used = {key for point in plan.points for key in plan.arm(point[2]).mixer.options}
    for key in _mixer_options(overrides):
        if key not in used:
            raise ValueError(f"--set {MIXER_OPTIONS}{key}: no mixer of the study has this option, or its arms set it")
    return plan


def part_of(plan: Plan, only: Sequence[str]) -> Plan:
    """Return the part of a study that `only` names.

    Args:
        plan: the whole study.
        only: texts like "host=unet,arm=chasm,gfnet": values of one factor are alternatives, factors combine.

    Returns:
        A plan with the runs that match. It is saved as the whole study.

    Raises:
        ValueError: a factor or value is unknown, or no run matches.

    >>> part_of(make_plan("cc359"), ["host=unet,vit,arm=chasm", "setting=cc359-x8"]).points
    [('cc359-x8', 'unet', 'chasm', 30, 0), ('cc359-x8', 'vit', 'chasm', 30, 0)]
    """
    known = {factor: {factor_text(point[i]) for point in plan.points} for i, factor in enumerate(POINT_FIELDS)}
    chosen: dict[str, list[str]] = {}
    factor = ""
    for entry in split_outside_brackets(",".join(only)) if only else ():
        name, equals, value = entry.strip().partition("=")
        if equals:
            factor = lookup("factor", name, {f: f for f in known})
        elif not factor:
            raise ValueError(f"--only {entry}: write it as factor=value, with a factor of {', '.join(known)}")
        value = value if equals else name
        if value not in known[factor]:
            raise ValueError(f"--only {factor}={value}: no run of the study has it: {suggest(value, known[factor])}")
        chosen.setdefault(factor, []).append(value)
    part = replace(plan, only=tuple((f, tuple(values)) for f, values in chosen.items()))
    if not part.points:
        raise ValueError(f"--only {' '.join(only)}: no run of the study matches all of it")
    return part


def missing_paths(plan: Plan) -> list[str]:
    """Return the keys of the folders that the plan still needs before it can run."""
    if plan.study.kind != "train" or any(o.startswith("data.path=") for o in plan.overrides):
        return []
    keys = {needed_path(SETTINGS[point[0]], plan.scale) for point in plan.points}
    return sorted(k for k in keys if k is not None and k not in plan.paths)


def _record(root: str | Path, study: str, scale: str, protocol: str) -> Path:
    return Path(root) / scale / "studies" / f"{study}.{protocol}.json"


def save_plan(plan: Plan, root: str | Path) -> None:
    """Write the arguments of the study beside its runs, for `status` and `report`."""
    saved = ("scale", "protocol", "seeds", "paths", "overrides", "arms", "selection_steps")
    record = {"study": plan.study.name} | {name: getattr(plan, name) for name in saved}
    write_json(_record(root, plan.study.name, plan.scale, plan.protocol), record)


def arms_left_out(plan: Plan, root: str | Path) -> list[str]:
    """Return the arms that this plan lacks and that the study was last started with in this folder."""
    path = _record(root, plan.study.name, plan.scale, plan.protocol)
    previous = read_json(path).get("arms", []) if path.is_file() else []
    return [arm for arm in previous if arm not in plan.arms]


def load_plan(root: str | Path, study: str, scale: str = "tiny", protocol: str = "default") -> Plan:
    """Return the plan of a study as it was last started in a folder.

    Args:
        root: folder of the runs.
        study: name of the study.
        scale: the scale it was started with.
        protocol: the protocol it was started with.

    Raises:
        FileNotFoundError: if it was not started there.
        UnknownArmError: if it was started with a mixer of a --with file that is not loaded now.
    """
    get_study(study)
    path = _record(root, study, scale, protocol)
    if not path.is_file():
        raise FileNotFoundError(
            f"study {study!r} ({scale}, {protocol}) was not started in {root}: "
            f"chasm study run {study} --scale {scale} --protocol {protocol}"
        )
    content = read_json(path)
    try:
        if any(type(seed) is not int for seed in content.get("seeds") or ()):
            raise ValueError("seeds: expected whole numbers")
        return make_plan(**content)
    except UnknownArmError as e:
        raise UnknownArmError(f"{path}: {e}") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as e:
        reason = " ".join(str(e).split())
        raise ValueError(
            f"{path}: not a plan that chasm wrote ({reason}): remove it and start the study again"
        ) from None
