"""Check that a downloaded dataset is complete and sound: read all of it, report what is wrong, keep hashes."""

import inspect
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from chasm.common.files import expanded, read_json, sha256, write_text
from chasm.common.registry import suggest
from chasm.common.text import counted
from chasm.data.base import BEYOND_SINGLE, DATASETS, FileDataset, existing
from chasm.data.files import reading
from chasm.data.limits import require_fits, require_written
from chasm.data.records import Case, CaseFacts, DataError, fault

Progress = Callable[[int, int], None]  # (cases done, cases in all)
_UNFINISHED = (".part", ".partial", ".crdownload", ".download", ".tmp", ".aria2")
_FORMAT = "chasm-manifest-1"


@dataclass
class CheckReport:
    """The result of a check."""

    dataset: str  # the registered name of the format
    root: Path  # the folder or file that was read
    split_rule: str  # rule that split the cases
    cases: dict[str, list[str]] = field(default_factory=dict)  # split -> names of its cases
    slices: Counter[str] = field(default_factory=Counter)  # split -> number of slices
    shapes: Counter[str] = field(default_factory=Counter)  # "kind (M, H, W) dtype" -> number of cases
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)  # kind -> lowest and highest value
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # relative path -> {"size", "sha256"}
    findings: list[str] = field(default_factory=list)  # errors, each in one line: file, field, problem
    notes: list[str] = field(default_factory=list)  # other facts, which are no errors

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.findings

    def manifest(self) -> dict[str, Any]:
        """Return all but the folder: the same data in another place gives the same manifest."""
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
) -> CheckReport:
    """Read every case of a dataset, and report what is wrong with it.

    Args:
        path: the folder or file of the dataset.
        dataset: the name of its format.
        jobs: cases read at the same time; default: one per core.
        progress: called with (cases done, cases in all).
        options: options of the reader's `find` and `probe`, such as seed, splits or part.
    """
    cls = DATASETS.get(dataset)
    if not issubclass(cls, FileDataset):
        raise ValueError(f"dataset {dataset!r} reads no files: nothing to check")
    known = {method: list(inspect.signature(getattr(cls, method)).parameters)[1:] for method in ("find", "probe")}
    for option in options:
        if option not in known["find"] + known["probe"]:
            names = [name for name in known["find"] + known["probe"] if name != "options"]
            raise ValueError(f"checking {dataset!r} knows no option {option!r}: {suggest(option, names)}")
    of_find, of_probe = ({k: v for k, v in options.items() if k in known[m]} for m in ("find", "probe"))
    root = existing(path)
    try:
        cases, rule = cls.find(root, **of_find)
    except DataError as e:
        return CheckReport(dataset, root, "", findings=[str(e)])
    report = CheckReport(dataset, root, rule)
    if cls.published:
        report.notes.append(f"the published set has {cls.published}")
    if not cases:
        report.findings.append(f"{root}: folder: no case found: expected {cls.summary}")
    facts = _read(report, partial(cls.probe, **of_probe), cases, jobs or os.cpu_count() or 1, progress)
    _odd_shapes(report, facts)
    _patients_in_two_splits(report, cases, facts)
    _equal_slices(report, facts)
    _other_files(report, cases)
    return report


def _read(
    report: CheckReport,
    probe: Callable[[Case], CaseFacts],
    cases: list[Case],
    jobs: int,
    progress: Progress | None,
) -> list[tuple[Case, CaseFacts]]:
    """Probe every case and hash every file, some at a time; return the facts of the sound cases."""

    def probed(case: Case) -> CaseFacts | DataError:
        try:
            for file in filter(Path.exists, case.files):
                require_written(file)
            facts = probe(case)
        except DataError as e:
            return e
        except ImportError:
            raise
        except Exception as e:  # one damaged file must not end the check
            return fault(case.files[0], "file", f"cannot be read ({str(e) or type(e).__name__})")
        if not (math.isfinite(facts.low) and math.isfinite(facts.high)):
            return fault(case.files[0], "image", BEYOND_SINGLE)
        return facts

    def hashed(file: Path) -> dict[str, Any]:
        try:
            require_written(file)
            return {"size": file.stat().st_size, "sha256": sha256(file)}
        except (OSError, DataError):  # the probe says why
            return {"size": -1, "sha256": ""}

    good: list[tuple[Case, CaseFacts]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for start in range(0, len(cases), 256):
            some = cases[start : start + 256]
            files = {_relative(report.root, f): f for case in some for f in case.files if f.is_file()}
            new = {name: f for name, f in files.items() if name not in report.files}
            hashes = pool.map(hashed, new.values())
            for i, (case, result) in enumerate(zip(some, pool.map(probed, some), strict=True)):
                report.cases.setdefault(case.split, []).append(case.name)
                if isinstance(result, DataError):
                    report.findings.append(str(result))
                else:
                    good.append((case, result))
                    report.slices[case.split] += result.slices
                if progress is not None:
                    progress(start + i + 1, len(cases))
            report.files.update(zip(new, hashes, strict=True))
    return good


def _odd_shapes(report: CheckReport, facts: list[tuple[Case, CaseFacts]]) -> None:
    """Count shapes and ranges. A case whose shape differs from most of its kind is a finding."""
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


def _patients_in_two_splits(report: CheckReport, cases: list[Case], facts: list[tuple[Case, CaseFacts]]) -> None:
    """Find patients whose cases are in two splits."""
    stored_groups = {(c.name, c.split): f.group for c, f in facts if f.group}
    groups: dict[str, dict[str, Case]] = {}
    for case in cases:
        group = stored_groups.get((case.name, case.split)) or case.patient
        groups.setdefault(group, {}).setdefault(case.split, case)
    if len(groups) == 1 and len(cases) > 1 and report.root.is_dir():
        advice = "if an anonymiser wrote that, make folders train, val and test, or give a list (splits)"
        report.notes.append(f"all {len(cases)} cases are of one patient, by their files, and share one split: {advice}")
    for group, by_split in groups.items():
        if len(by_split) > 1:
            one, other = list(by_split.values())[:2]
            where = " and ".join(sorted(by_split))
            report.findings.append(f"{one.files[0]}: split: {group!r} is in {where}, see {other.files[0]}")


def _equal_slices(report: CheckReport, facts: list[tuple[Case, CaseFacts]]) -> None:
    """Find slices that two cases share, in two splits (a leak) or in one (a note), and slices that are blank.

    A case whose reader makes no hashes of slices is compared by the hashes of its files.
    """

    def file_hashes(case: Case) -> tuple[str, ...]:
        return tuple(sorted(report.files[_relative(report.root, f)]["sha256"] for f in case.files))

    owners: dict[Any, dict[str, Case]] = {}  # hash of a slice -> split -> the first case that has it
    shared: Counter[tuple[Case, Case]] = Counter()
    slices = {case: f.slices for case, f in facts}
    for case, f in facts:
        keys: set[Any] = {digest for digest in f.digests if digest}
        for key in keys or {file_hashes(case)}:
            by_split = owners.setdefault(key, {})
            others = [other for split, other in by_split.items() if split != case.split] or list(by_split.values())
            for other in others:
                shared[other, case] += 1
            by_split.setdefault(case.split, case)
        blank = [str(k) for k, digest in enumerate(f.digests) if not digest]
        if blank:
            which = ", ".join(blank[:10]) + (", .." if len(blank) > 10 else "")
            what = f"{len(blank)} of {counted(f.slices, 'slice')} {'is' if len(blank) == 1 else 'are'} blank"
            name = _relative(report.root, case.files[0]) if len(case.files) == 1 else case.name
            report.notes.append(f"{name}: {what} ({which}): they are not scored")
    for (one, other), number in shared.items():
        names = sorted(_relative(report.root, case.files[0]) for case in (one, other))
        if file_hashes(one) == file_hashes(other):
            what = f"split: identical file {names[1]}"
        else:
            first = min(one, other, key=lambda case: _relative(report.root, case.files[0]))
            are = "is" if number == 1 else "are"
            what = f"pixels: {number} of {counted(slices[first], 'slice')} {are} in {names[1]}"
        if one.split == other.split:
            report.notes.append(f"{names[0]}: {what}")
        else:
            report.findings.append(f"{names[0]}: {what}, together in {' and '.join(sorted((one.split, other.split)))}")


def _other_files(report: CheckReport, cases: Iterable[Case]) -> None:
    """Find files that belong to no case: unfinished downloads are findings, the rest is counted."""
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
        try:
            _compare(report, _read_sums(sums), sums.name)
        except DataError as e:
            report.findings.append(str(e))


def _read_sums(file: Path) -> dict[str, str]:
    """Read the format of the sha256sum program: hash, then the name of the file."""
    require_written(file)
    require_fits(file, "file", (file.stat().st_size,), 1)
    with reading(file, "sums"):
        lines = [line.split(maxsplit=1) for line in file.read_text().splitlines() if line.strip()]
    if not all(len(words) == 2 for words in lines):
        raise fault(file, "sums", "expected a hash and a name on every line")
    return {name.strip().lstrip("*"): digest for digest, name in lines}


def _compare(report: CheckReport, expected: dict[str, str], source: str) -> None:
    for name, digest in expected.items():
        if name in report.files and report.files[name]["sha256"] != digest:
            report.findings.append(f"{report.root / name}: sha256: differs from {source}")
        elif name not in report.files and not (report.root / name).is_file():
            report.findings.append(f"{report.root / name}: file: missing, but listed in {source}")


def verify(report: CheckReport, manifest: str | Path) -> None:
    """Add to the report what differs from an earlier manifest, which `write_manifest` wrote."""
    file = existing(manifest)
    try:
        stored = read_json(file)
        files = {name: facts["sha256"] for name, facts in stored["files"].items()}
        moved = {c: s for s, names in stored["cases"].items() for c in names}
        if stored["format"] != _FORMAT:
            raise ValueError(stored["format"])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError(f"{file}: manifest: not one written by `chasm data check --manifest` ({e})") from e
    _compare(report, files, file.name)
    for name in sorted(set(report.files) - set(files)):
        report.findings.append(f"{report.root / name}: file: not listed in {file.name}")
    for split, names in report.cases.items():
        for name in names:
            if moved.get(name, split) != split:
                report.findings.append(f"{name}: split: {split}, but {moved[name]} in {file.name}")


def is_manifest(file: Path) -> bool:
    """Return True if `write_manifest` wrote the file."""
    try:
        return read_json(file).get("format") == _FORMAT
    except (OSError, ValueError):
        return False


def write_manifest(report: CheckReport, file: str | Path) -> None:
    """Write the manifest of a report: hashes, sizes, splits and findings as JSON."""
    write_text(expanded(file), json.dumps(report.manifest(), indent=1, sort_keys=True))


def _relative(root: Path, file: Path) -> str:
    return file.name if root.is_file() else file.relative_to(root).as_posix()
