"""The finished runs of every study that was started in some folders, for a page that spans studies."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chasm.studies import comparisons
from chasm.studies.catalogue import STUDIES
from chasm.studies.factors import UnknownArmError
from chasm.studies.plan import load_plan
from chasm.studies.records import ArmResult, RunRecord
from chasm.studies.results import collect
from chasm.studies.statistics import Interval


@dataclass(frozen=True)
class FinishedRow:
    """One arm in a setting and host, and where its runs are."""

    study: str
    result: ArmResult
    runs: list[RunRecord]
    root: Path

    @property
    def folder(self) -> Path:
        """The folder of the first seed."""
        return self.root / self.runs[0].folder


@dataclass(frozen=True)
class FinishedRows:
    """Rows of several studies by setting, host and arm; of equal rows the first one counts."""

    rows: list[FinishedRow]
    left_out: list[str]  # studies that could not be read or do not belong in the paper's tables, and why

    def get(self, study: str, setting: str, host: str, arm: str) -> FinishedRow | None:
        """Return a row of the study, else the first of another one that ran the same; None if no run is finished."""
        here = [r for r in self.rows if (*r.result.place, r.result.arm) == (setting, host, arm)]
        here = [r for r in here if STUDIES[r.study].kind == STUDIES[study].kind]
        return next((r for r in here if r.study == study), here[0] if here else None)


def gather(folders: Sequence[str | Path], scale: str, protocol: str) -> FinishedRows:
    """Read the finished runs of all studies in some folders. Where two have the same run, the first one counts.

    Studies that ran with other data, tasks, hosts or mixers (--set) are not what the paper's tables are about. They are
    left out and named, and so is a study with a mixer of a --with file that is not loaded.
    """
    rows, left_out = [], []
    for root in map(Path, folders):
        if not root.is_dir():
            raise FileNotFoundError(f"{root}: not a folder: give the folders of 'chasm study run --out'")
        for name in STUDIES:
            try:
                plan = load_plan(root, name, scale, protocol)
            except FileNotFoundError:
                continue
            except UnknownArmError as e:
                left_out.append(str(e))
                continue
            results = collect(plan, root)
            if not plan.own_parts:
                rows += [FinishedRow(name, row, results.runs_of(row), root) for row in results.rows]
            elif results.rows:
                left_out.append(f"{name} in {root}, which ran with --set {' --set '.join(plan.own_parts)}")
    return FinishedRows(rows, left_out)


def paired_difference(ours: FinishedRow | None, theirs: FinishedRow | None, metric: str) -> Interval | None:
    """Return the mean paired difference of two rows, None unless they share seeds and test cases."""
    return comparisons.paired_difference(ours.runs, theirs.runs, metric) if ours and theirs else None
