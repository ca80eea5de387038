"""Is a downloaded dataset complete and sound? Read all of it, say what is wrong, keep hashes."""

import hashlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chasm.common.files import write_text
from chasm.common.registry import suggest
from chasm.data.base import DATASETS, Case, DataError, Facts, FileDataset, existing

Progress = Callable[[int, int], None]  # (cases done, cases in all)
_UNFINISHED = (".part", ".partial", ".crdownload", ".download", ".tmp", ".aria2")
_FORMAT = "chasm-manifest-1"


@dataclass
class Report:
    """What a check found."""

    dataset: str
    root: Path
    split_rule: str
    cases: dict[str, list[str]] = field(default_factory=dict)  # split -> case names
    slices: Counter[str] = field(default_factory=Counter)  # split -> slices
    shapes: Counter[str] = field(default_factory=Counter)  # "kind (M,H,W) dtype" -> cases
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)  # kind -> lowest, highest value
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # relative path -> size, sha256
    findings: list[str] = field(default_factory=list)  # each one line: file, field, problem
    notes: list[str] = field(default_factory=list)  # worth knowing, no fault

    @property
    def ok(self) -> bool:
        return not self.findings

    def manifest(self) -> dict[str, Any]:
        """Everything but the place it lies in: the same data elsewhere gives the same manifest."""
        return {
            "format": _FORMAT,
            "dataset": self.dataset,
            "split_rule": self.split_rule,
            "cases": self.cases,
            "slices": dict(self.slices),
            "shapes": dict(self.shapes),
            "findings": [line.replace(f"{self.root}{os.sep}", "") for line in self.findings],
            "files": self.files,
        }


def check(
    path: str | Path, dataset: str, jobs: int | None = None, progress: Progress | None = None, **options: Any
) -> Report:
    """Read every case of the dataset at `path`; `options` are those of its `find`: seed, splits, part."""
    cls = DATASETS.get(dataset)
    if not issubclass(cls, FileDataset):
        raise ValueError(f"dataset {dataset!r} reads no files: nothing to check")
    known = list(inspect.signature(cls.find).parameters)[1:]
    for option in options:
        if option not in known:
            raise ValueError(f"checking {dataset!r} knows no option {option!r}: {suggest(option, known)}")
    root = existing(path)
    try:
        cases, rule = cls.find(root, **options)
    except DataError as e:
        return Report(dataset, root, "", findings=[str(e)])
    report = Report(dataset, root, rule)
    if cls.published:
        report.notes.append(f"the published set has {cls.published}")
    if not cases:
        report.findings.append(f"{root}: folder: no case found: expected {cls.summary}")
    facts = _read(report, cls, cases, jobs or os.cpu_count() or 1, progress)
    _odd_shapes(report, facts)
    _leaks(report, cases, facts)
    _strangers(report, cases)
    return report


def _read(
    report: Report, cls: type[FileDataset], cases: list[Case], jobs: int, progress: Progress | None
) -> list[tuple[Case, Facts]]:
    """Probe every case and hash every file, a few at a time."""

    def one(case: Case) -> Facts | DataError:
        try:
            return cls.probe(case)
        except DataError as e:
            return e

    def record(file: Path) -> dict[str, Any]:
        try:
            with open(file, "rb") as f:
                return {"size": file.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}
        except OSError:  # the probe says why
            return {"size": -1, "sha256": ""}

    good: list[tuple[Case, Facts]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for start in range(0, len(cases), 256):
            some = cases[start : start + 256]
            new = {_relative(report.root, f): f for case in some for f in case.files if f.is_file()}
            todo = [(name, f) for name, f in new.items() if name not in report.files]
            hashed = pool.map(record, [f for _, f in todo])
            for i, (case, result) in enumerate(zip(some, pool.map(one, some), strict=True)):
                report.cases.setdefault(case.split, []).append(case.name)
                if isinstance(result, DataError):
                    report.findings.append(str(result))
                else:
                    good.append((case, result))
                    report.slices[case.split] += result.slices
                if progress is not None:
                    progress(start + i + 1, len(cases))
            report.files.update(zip([name for name, _ in todo], hashed, strict=True))
    return good


def _odd_shapes(report: Report, facts: list[tuple[Case, Facts]]) -> None:
    """Count shapes and ranges; a case whose shape differs from most of its kind is a finding."""
    common: dict[str, Counter[tuple[int, ...]]] = {}
    for _, f in facts:
        common.setdefault(f.kind, Counter())[f.shape] += 1
        report.shapes[f"{f.kind} {f.shape} {f.dtype}".strip()] += 1
        low, high = report.ranges.get(f.kind, (f.low, f.high))
        report.ranges[f.kind] = (min(low, f.low), max(high, f.high))
    for case, f in facts:
        usual = common[f.kind].most_common(1)[0][0]
        if not f.varies and f.shape != usual:
            report.findings.append(f"{case.files[0]}: shape: {f.shape}, most have {usual}")


def _leaks(report: Report, cases: Iterable[Case], facts: list[tuple[Case, Facts]]) -> None:
    """Patients, or cases of identical files, in two splits. (Single files may well be alike: a blank slice.)"""
    told = {(c.name, c.split): f.group for c, f in facts if f.group}
    groups: dict[str, dict[str, Case]] = {}
    copies: dict[tuple[str, ...], dict[str, set[str]]] = {}  # hashes of a case -> split -> its first file
    for case in cases:
        group = told.get((case.name, case.split)) or case.group or case.name
        groups.setdefault(group, {}).setdefault(case.split, case)
        names = [_relative(report.root, file) for file in case.files]
        digest = tuple(sorted(report.files.get(name, {}).get("sha256", "") for name in names))
        if all(digest):
            copies.setdefault(digest, {}).setdefault(case.split, set()).add(names[0])
    for group, by_split in groups.items():
        if len(by_split) > 1:
            one, other = list(by_split.values())[:2]
            where = " and ".join(sorted(by_split))
            line = f"{one.files[0]}: split: {group!r} is in {where}, see {other.files[0]}"
            report.findings.append(line)
    for by_hash in copies.values():
        names = sorted(set().union(*by_hash.values()))
        if len(names) > 1 and len(by_hash) > 1:
            where = " and ".join(sorted(by_hash))
            report.findings.append(f"{names[0]}: split: identical file {names[1]}, together in {where}")
        elif len(names) > 1:
            report.notes.append(f"{names[0]}: identical to {', '.join(names[1:])}")


def _strangers(report: Report, cases: Iterable[Case]) -> None:
    """Files that belong to no case: unfinished downloads are findings, the rest is counted."""
    if report.root.is_file():
        return
    known = {file for case in cases for file in case.files}
    ignored: Counter[str] = Counter()
    for here, _, names in os.walk(report.root):
        for name in names:
            file = Path(here, name)
            if file.suffix in _UNFINISHED:
                report.findings.append(f"{file}: file: an unfinished download")
            elif file not in known:
                ignored[file.suffix or name] += 1
    if ignored:
        what = ", ".join(f"{n} {suffix}" for suffix, n in ignored.most_common(5))
        report.notes.append(f"files that are not part of the dataset: {what}")
    sums = report.root / "SHA256SUMS"
    if sums.is_file():
        _compare(report, _read_sums(sums), sums.name)


def _read_sums(file: Path) -> dict[str, str]:
    """The format of the sha256sum program: hash, then the file's name."""
    pairs = [line.split(maxsplit=1) for line in file.read_text().splitlines() if line.strip()]
    return {name.strip().lstrip("*"): digest for digest, name in pairs}


def _compare(report: Report, expected: dict[str, str], source: str) -> None:
    for name, digest in expected.items():
        if name in report.files and report.files[name]["sha256"] != digest:
            report.findings.append(f"{report.root / name}: sha256: differs from {source}")
        elif name not in report.files and not (report.root / name).is_file():
            report.findings.append(f"{report.root / name}: file: missing, but listed in {source}")


def verify(report: Report, manifest: str | Path) -> None:
    """Add to the report what differs from an earlier manifest."""
    file = existing(manifest)
    try:
        stored = json.loads(file.read_text())
        files = {name: facts["sha256"] for name, facts in stored["files"].items()}
        if stored["format"] != _FORMAT:
            raise ValueError(stored["format"])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError(f"{file}: manifest: not one written by `chasm data check --manifest` ({e})") from e
    _compare(report, files, file.name)
    for name in sorted(set(report.files) - set(files)):
        report.findings.append(f"{report.root / name}: file: not listed in {file.name}")
    moved = {c: s for s, names in stored["cases"].items() for c in names}
    for split, names in report.cases.items():
        for name in names:
            if moved.get(name, split) != split:
                report.findings.append(f"{name}: split: {split}, but {moved[name]} in {file.name}")


def write_manifest(report: Report, file: str | Path) -> None:
    """Write the manifest; an interrupted write leaves what was there before."""
    write_text(Path(file).expanduser(), json.dumps(report.manifest(), indent=1, sort_keys=True))


def _relative(root: Path, file: Path) -> str:
    return file.name if root.is_file() else file.relative_to(root).as_posix()
