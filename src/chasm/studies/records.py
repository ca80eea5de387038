"""The results of a study as records with named fields: `collect` fills them, a report is made of them.

`Results.to_json` is what report.json holds: the fields by their names, and null for values that are not finite.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from chasm.common.files import MAKE_AGAIN, json_safe, read_json
from chasm.studies.paper import Quote
from chasm.train.config import RunConfig

FORMAT = 2  # of report.json; 1 had "cells" instead of "runs", and no "selections"
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]  # null: not finite


def _same_metrics(cases: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    if len({frozenset(scores) for scores in cases.values()}) > 1:
        raise ValueError("the cases are scored in different metrics")
    return cases


class _FromFile:
    """A record that is read from a JSON file of a run folder."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the record. Keys that are not fields are ignored, and a null stands for the default.

        Raises:
            ValueError: with one line that names the file and the key, if a value has another type than it should.
            OSError: if the file cannot be opened.
        """
        content = {key: value for key, value in read_json(path).items() if value is not None}
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as e:
            problem = e.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise ValueError(f"{path}: {place}: {problem['msg']}, got {problem['input']!r:.80}: {MAKE_AGAIN}") from None


@dataclass
class Reference:
    """Scores of the method that needs no training (zero-filled, bicubic) in a setting."""

    name: Annotated[str, BeforeValidator(lambda name: name or "reference")]  # a user's own task may leave it out
    mean: dict[str, Number]
    std: dict[str, Number]
    setting: str = ""


@dataclass
class Metrics(_FromFile):
    """The part of a run's metrics.json that studies use. Scores that are null there are nan."""

    # Test case to metric to score.
    cases: Annotated[dict[str, dict[str, Number]], AfterValidator(_same_metrics)] = field(default_factory=dict)
    best_val: dict[str, Number] = field(default_factory=dict)  # validation scores of the selected weights
    best_step: int | None = None
    steps: int | None = None
    seconds: float | None = None
    seed: int = 0
    source: str = ""  # of the data
    proxy: bool = False
    task: dict[str, Any] = field(default_factory=dict)
    protocol: str = ""  # of the metric
    meaning: str = ""
    device: str | None = None
    peak_memory: int | None = None  # bytes
    macs: int | None = None
    parameters: dict[str, int] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)  # of a cost study
    reference: Reference | None = None

    @property
    def slot_numbers(self) -> int | None:
        """Real numbers stored in the slots."""
        return self.parameters.get("slots_real")


@dataclass
class Start:
    """The weights that a run began with: from `train.start`."""

    name: str
    sha256: str
    steps: int | None = None


@dataclass
class Environment(_FromFile):
    """The part of a run's environment.json that says where it ran."""

    device: str = ""
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    modified: bool | None = None
    command: str = ""
    seed: int | None = None
    with_files: Annotated[dict[str, str], Field(validation_alias="with")] = field(default_factory=dict)  # to SHA-256
    plugins: dict[str, str] = field(default_factory=dict)  # "group: name" to package and version
    start: Start | None = None


@dataclass
class RunRecord:
    """One run of a study, finished or not."""

    key: str
    setting: str
    host: str
    arm: str
    multiplier: float | None
    seed: int
    folder: str  # relative to the folder of the runs, or absolute
    status: str  # one of `chasm.studies.state.STATES`
    error: str | None = None
    config: RunConfig | None = None
    environment: Environment | None = None
    metrics: Metrics | None = None

    @property
    def result(self) -> Metrics:
        """The metrics of a finished run."""
        if self.metrics is None:
            raise ValueError(f"run {self.key} is not finished: it has no metrics")
        return self.metrics


@dataclass
class Score:
    """One metric of one arm over the test cases and seeds."""

    mean: float
    std_cases: float | None = None
    std_seeds: float | None = None
    cases: dict[str, float] = field(default_factory=dict)  # mean over seeds


@dataclass
class ArmResult:
    """One arm in a setting and host, over its finished runs."""

    setting: str
    host: str
    arm: str
    multiplier: float | None
    seeds: list[int]
    runs: list[str]  # keys
    scores: dict[str, Score]
    chosen_from: dict[str, float | None] | None = None  # protocol tuned: multiplier to validation score
    paper: dict[str, Quote] = field(default_factory=dict)
    slot_numbers: int | None = None  # real numbers stored in the slots
    macs: int | None = None
    seconds: float | None = None  # of training, mean over seeds

    @property
    def place(self) -> tuple[str, str]:
        """Setting and host."""
        return self.setting, self.host


@dataclass
class SelectionRecord:
    """The choice of a step size for one arm in a setting and host."""

    setting: str
    host: str
    arm: str
    multiplier: float | None  # None: not chosen yet
    scores: dict[str, float | None]  # multiplier to validation score; None: diverged, or still to do


@dataclass
class Comparison:
    """Mean paired difference `arm` minus `against` with its 95 % interval."""

    setting: str
    host: str
    metric: str
    arm: str
    against: str
    mean: float
    low: float
    high: float
    cases: int
    seeds: int
    verdict: str  # "win", "loss", "level" or "too few cases"; after the correction of p
    paper: float | None = None  # difference of the printed means
    p: float | None = None  # two-sided, corrected by Holm's method over the comparisons of one table


@dataclass
class Gain:
    """Mean paired difference of CHASM and its strongest rival, with its 95 % interval."""

    mean: float
    low: float
    high: float
    verdict: str


@dataclass
class Drop:
    """The share of a gain that is lost, in per cent, with its 95 % interval; not finite where it has no meaning."""

    mean: float
    low: float
    high: float


@dataclass
class Falsification:
    """CHASM's gain under a structured and a random mask."""

    setting: str
    host: str
    metric: str
    rival: str
    rival_random: str
    structured: Gain
    random: Gain
    drop: Drop
    paper: dict[str, float] | None = None
    draws: int = 1  # of the random mask


def data_kind(runs: Iterable[RunRecord]) -> str:
    """Return "proxy data" or "embedded data" if runs were tested on other data than their settings name."""
    sources = {run.metrics.source for run in runs if run.metrics and run.metrics.cases}
    if any("proxy" in source for source in sources):
        return "proxy data"
    return "embedded data" if any(source.startswith("embedded") for source in sources) else ""


@dataclass
class StudyInfo:
    """What a study is about."""

    name: str
    title: str
    source: str = ""
    question: str = ""
    kind: str = "train"  # or "cost"


@dataclass
class SettingInfo:
    """A dataset with a task on it."""

    title: str
    metrics: list[str]  # the main one first
    dataset: str | None = None
    task: str | None = None
    acceleration: int | None = None
    mask: str | None = None


@dataclass
class ArmInfo:
    """What is in the slots."""

    label: str
    mixer: str | None
    options: dict[str, Any]


@dataclass
class Results:
    """Everything known about the runs of a study.

    Comparisons are every arm against "baseline", and "chasm" against every other arm, on the cases and seeds that both
    have. Rows of a cost study hold single numbers as scores.
    """

    study: StudyInfo
    settings: dict[str, SettingInfo]
    hosts: dict[str, str]  # name to label
    arms: dict[str, ArmInfo]
    counts: dict[str, int]  # state to number of runs
    runs: list[RunRecord]
    rows: list[ArmResult]
    references: list[Reference] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    falsification: list[Falsification] = field(default_factory=list)
    selections: list[SelectionRecord] = field(default_factory=list)
    paper: dict[str, Any] = field(default_factory=dict)  # what the paper prints beside the arms
    scale: str | None = None
    protocol: str | None = None
    seeds: list[int] | None = None
    overrides: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # files of runs that the report lacks, and why
    format: int = FORMAT

    @property
    def is_cost(self) -> bool:
        """True if nothing was trained: parameters and multiply-adds only."""
        return self.study.kind == "cost"

    def places(self) -> list[tuple[str, str]]:
        """Return every (setting, host) with at least one finished run."""
        return list(dict.fromkeys(row.place for row in self.rows))

    def rows_of(self, setting: str, host: str) -> list[ArmResult]:
        """Return the rows of a setting in a host."""
        return [row for row in self.rows if row.place == (setting, host)]

    def runs_of(self, row: ArmResult) -> list[RunRecord]:
        """Return the finished runs behind a row, the first seed first."""
        by_key = {run.key: run for run in self.runs}
        return [by_key[key] for key in row.runs]

    def comparisons_of(self, setting: str, host: str, metric: str) -> list[Comparison]:
        """Return the comparisons of one table."""
        return [c for c in self.comparisons if (c.setting, c.host, c.metric) == (setting, host, metric)]

    def metrics_of(self, setting: str, rows: list[ArmResult]) -> list[str]:
        """Return the metrics that a table of these rows shows, the main one first."""
        wanted = [] if self.is_cost else self.settings[setting].metrics
        return [m for m in wanted if m in rows[0].scores] or list(rows[0].scores)

    def data_kind(self, setting: str | None = None) -> str:
        """Return "proxy data" or "embedded data" if the numbers are not on the dataset that the setting names."""
        return data_kind([run for run in self.runs if setting in (None, run.setting)])

    def place_name(self, setting: str, host: str) -> str:
        """Return the title of a setting in a host, with the kind of data if it is not the setting's own."""
        kind, title = self.data_kind(setting), self.settings[setting].title
        parts = (title, "" if kind.partition(" ")[0] in title else kind, self.hosts[host])
        return ", ".join(part for part in parts if part)

    def label(self, row: ArmResult) -> str:
        """Return the name of the arm of a row, as it is printed."""
        return self.arms[row.arm].label

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        content = asdict(self)
        for record, run in zip(content["runs"], self.runs, strict=True):
            record["config"] = run.config and run.config.model_dump(mode="json")
        for record, row in zip(content["rows"], self.rows, strict=True):
            record["paper"] = {metric: quote._asdict() for metric, quote in row.paper.items()}
        plain: dict[str, Any] = json_safe(content)
        return plain
