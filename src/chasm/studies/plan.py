"""A study at a scale: the list of its runs, each a RunConfig that differs from its neighbours only in declared factors.

The runs of a (setting, host) are copies of one base config with another mixer, spectral step size, seed and name. So
every mixer gets the same data in the same order under the same mask, and (one seed) a host with the same weights.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from chasm.backbones import create_backbone
from chasm.common.files import write_json
from chasm.common.registry import suggest
from chasm.mixers import MIXERS, create_mixer
from chasm.studies.catalogue import Study, get_study
from chasm.studies.vocabulary import (
    HOSTS,
    MULTIPLIERS,
    SCALES,
    SETTINGS,
    base_recipe,
    get_arm,
    image_size,
    lookup,
    needed_path,
)
from chasm.surgery.count import count_parameters
from chasm.train.config import Part, RunConfig, load_recipe

PROTOCOLS = ("default", "matched", "tuned")
FACTORS = ("name", "seed", "mixer", "train.spectral_multiplier")  # what may differ between runs of a setting in a host


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    setting: str
    host: str
    arm: str
    multiplier: int
    seed: int
    kind: str
    config: RunConfig

    @property
    def key(self) -> str:
        return self.config.name

    @property
    def factors(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("setting", "host", "arm", "multiplier", "seed")}


@dataclass(frozen=True)
class Plan:
    """A study with everything decided that its declaration leaves open."""

    study: Study
    scale: str
    # default: every mixer as shipped. matched: one step size for everything. tuned: the spectral one chosen on
    # validation from one grid.
    protocol: str
    seeds: tuple[int, ...] | None  # None: those the study declares
    paths: dict[str, str]
    overrides: tuple[str, ...]  # a.b=c, of every run alike
    arms: tuple[str, ...] = ()  # in every grid, beside those the study declares
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()  # a part of the study: factor, and its allowed values

    @property
    def points(self) -> list[tuple[str, str, str, int, int]]:
        """Setting, host, arm, multiplier and seed of every run, once where grids share it."""
        found = (
            (setting, host, arm, multiplier, seed)
            for grid in self.study.grids
            for setting in grid.settings
            for host in grid.hosts
            for arm in dict.fromkeys((*grid.arms, *self.arms))
            for multiplier in self._multipliers(arm)
            for seed in self.seeds or grid.seeds
        )
        names = ("setting", "host", "arm", "multiplier", "seed")
        wanted = [(names.index(factor), values) for factor, values in self.only]
        return [p for p in dict.fromkeys(found) if all(str(p[i]) in values for i, values in wanted)]

    @cached_property
    def cells(self) -> list[Cell]:
        places = dict.fromkeys(point[:2] for point in self.points)
        bases = {place: self._base(*place) for place in places}
        cells = (self._cell(bases[point[:2]], *point) for point in self.points)
        return list({cell.key: cell for cell in cells}.values())

    def folder(self, root: str | Path, cell: Cell) -> Path:
        """Runs are kept by what they are, not by study: a cell that two studies share is run once."""
        return Path(root) / self.scale / cell.key

    def _multipliers(self, arm: str) -> tuple[int, ...]:
        """How far the spectral parameters step, as a multiple of the learning rate: those of one run each."""
        if self.study.kind != "train" or not get_arm(arm).spectral or self.protocol == "matched":
            return (1,)
        if self.protocol == "tuned":
            return MULTIPLIERS
        return (int(_default_step_scale(arm) or 1),)

    def _base(self, setting: str, host: str) -> RunConfig:
        return load_recipe(base_recipe(SETTINGS[setting], HOSTS[host], self.scale, self.paths), list(self.overrides))

    def _cell(self, base: RunConfig, setting: str, host: str, arm: str, multiplier: int, seed: int) -> Cell:
        mixer = get_arm(arm).mixer
        if get_arm(arm).budget:
            options = json.dumps(base.backbone.options, sort_keys=True)
            mixer = near_budget(mixer.name, base.backbone.name, options, image_size(SETTINGS[setting], self.scale))
        kind = self.study.kind
        tail = f".m{multiplier}.s{seed}" if kind == "train" else f".{kind}"
        changes: dict[str, Any] = {"name": f"{setting}.{host}.{arm}{tail}", "seed": seed}
        if _default_step_scale(arm) is None:  # the multiplier belongs to the optimiser
            changes["train"] = base.train.model_copy(update={"spectral_multiplier": float(multiplier)})
        elif kind == "train" and get_arm(arm).spectral:  # the mixer has it built in
            mixer = mixer.model_copy(update={"options": mixer.options | {"step_scale": float(multiplier)}})
        changes["mixer"] = mixer
        return Cell(setting, host, arm, multiplier, seed, kind, base.model_copy(update=changes))


def _default_step_scale(arm: str) -> float | None:
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
) -> Plan:
    """The runs of a study. `paths`: "proxy" -> the bundle, or dataset -> folder; needed to run, not to look.

    `arms` stand beside the study's own in every grid: of another study, or any registered mixer.
    """
    for word, value, known in (("scale", scale, SCALES), ("protocol", protocol, PROTOCOLS)):
        if value not in known:
            raise ValueError(f"unknown {word} {value!r}: {suggest(value, known)}")
    for override in overrides:
        key = override.partition("=")[0]
        if any(key == f or key.startswith(f"{f}.") or f.startswith(f"{key}.") for f in FACTORS):
            raise ValueError(f"--set {override}: {key} is what the runs of a study differ in: it cannot be set for all")
    for arm in arms:
        get_arm(arm)
    chosen = tuple(seeds) if seeds else None
    return Plan(get_study(study), scale, protocol, chosen, dict(paths or {}), tuple(overrides), tuple(arms))


def part_of(plan: Plan, only: Sequence[str]) -> Plan:
    """The part of a study that `only` names.

    Args:
        plan: the whole study.
        only: words like "host=unet,arm=chasm,gfnet": values of one factor are alternatives, factors combine.

    Returns:
        A plan with the runs that match. It is saved as the whole study.

    Raises:
        ValueError: a factor or value is unknown, or no run matches.

    >>> part_of(make_plan("cc359"), ["host=unet,vit,arm=chasm", "setting=cc359-x8"]).points
    [('cc359-x8', 'unet', 'chasm', 30, 0), ('cc359-x8', 'vit', 'chasm', 30, 0)]
    """
    known = {
        f: {str(getattr(cell, f)) for cell in plan.cells} for f in ("setting", "host", "arm", "multiplier", "seed")
    }
    chosen: dict[str, list[str]] = {}
    factor = ""
    for word in ",".join(only).split(",") if only else ():
        name, equals, value = word.strip().partition("=")
        if equals:
            factor = lookup("factor", name, {f: f for f in known})
        elif not factor:
            raise ValueError(f"--only {word}: write it as factor=value, with a factor of {', '.join(known)}")
        value = value if equals else name
        if value not in known[factor]:
            raise ValueError(f"--only {factor}={value}: no run of the study has it: {suggest(value, known[factor])}")
        chosen.setdefault(factor, []).append(value)
    part = replace(plan, only=tuple((f, tuple(values)) for f, values in chosen.items()))
    if not part.points:
        raise ValueError(f"--only {' '.join(only)}: no run of the study matches all of it")
    return part


def missing_paths(plan: Plan) -> list[str]:
    """Keys of the folders the plan still needs before it can run."""
    if plan.study.kind != "train" or any(o.startswith("data.path=") for o in plan.overrides):
        return []
    keys = {needed_path(SETTINGS[cell.setting], plan.scale) for cell in plan.cells}
    return sorted(k for k in keys if k is not None and k not in plan.paths)


def _record(root: str | Path, study: str, scale: str, protocol: str) -> Path:
    return Path(root) / scale / "studies" / f"{study}.{protocol}.json"


def save_plan(plan: Plan, root: str | Path) -> None:
    """Beside the runs, so that status and report need not be told again."""
    fields = {
        k: v for k, v in asdict(plan).items() if k in ("scale", "protocol", "seeds", "paths", "overrides", "arms")
    }
    write_json(_record(root, plan.study.name, plan.scale, plan.protocol), {"study": plan.study.name, **fields})


def arms_left_out(plan: Plan, root: str | Path) -> list[str]:
    """Of the arms the study was last started with in this folder, those that this plan has not."""
    path = _record(root, plan.study.name, plan.scale, plan.protocol)
    before = json.loads(path.read_text()).get("arms", []) if path.is_file() else []
    return [arm for arm in before if arm not in plan.arms]


def load_plan(root: str | Path, study: str, scale: str = "tiny", protocol: str = "default") -> Plan:
    """The plan as it was last started in this folder."""
    get_study(study)
    path = _record(root, study, scale, protocol)
    if not path.is_file():
        raise FileNotFoundError(
            f"study {study!r} ({scale}, {protocol}) was not started in {root}: "
            f"chasm study run {study} --scale {scale} --protocol {protocol}"
        )
    return make_plan(**json.loads(path.read_text()))


# Options of each rival, from small to large, by which it can come near a number of parameters.
_LADDERS: dict[str, list[dict[str, Any]]] = {
    "afno": [{"blocks": b, "hidden_factor": f} for b in (4, 2, 1) for f in (1, 2, 3)],
    "ffc": [{"ratio": r, "lfu": lfu} for r in (0.75, 0.5, 0.25) for lfu in (False, True)],
    "fno-d": [{"modes": [m, m]} for m in (1, 2, 3, 4)],
    "difffno": [{"modes": [m, m]} for m in (1, 2, 3, 4)],
    "fsel": [{"part": part} for part in ("f+s", "f+effn")],
    "spectformer": [{"grid": [n, n]} for n in range(4, 65, 2)],
}


@lru_cache(maxsize=64)
def near_budget(mixer: str, backbone: str, options: str, size: int) -> Part:
    """The rival with the options that bring its real numbers in the slots of this host nearest to CHASM's.

    FFC, FNO-D, DiffFNO and FSEL cannot go as low: theirs is the smallest form, and the counts stand in the results.
    """
    target, widths = _slots(backbone, options, size)

    def numbers(own: dict[str, Any]) -> int | None:
        try:
            return sum(count_parameters(create_mixer(mixer, c, device="meta", **own))[1] for c in widths)
        except ValueError:
            return None  # these widths do not take these options

    sized = [(abs(n - target), i) for i, own in enumerate(_LADDERS[mixer]) if (n := numbers(own)) is not None]
    if not sized:
        raise ValueError(f"no options of {mixer} fit the slots of this {backbone}: choose another width")
    return Part(name=mixer, options=_LADDERS[mixer][min(sized)[1]])


@lru_cache(maxsize=16)
def _slots(backbone: str, options: str, size: int) -> tuple[int, tuple[int, ...]]:
    """Real numbers of CHASM in the slots of a host, and the channels of each slot."""
    with torch.device("meta"):
        slots = create_backbone(backbone, "chasm", size=(size, size), **json.loads(options)).slots
    return count_parameters(slots)[1], tuple(int(slot.channels) for slot in slots.values())  # type: ignore[arg-type]
