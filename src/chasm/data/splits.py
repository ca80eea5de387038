"""Which case belongs to which split: by folder name, by half of a validation folder, or by a seeded hash."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from chasm.data.base import SPLITS, Case, check_split, fault
from chasm.data.files import need_folder

_ROLES = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


def role_of(folder: str) -> str:
    """The split a folder's name stands for ("Train", "singlecoil_val", "validation"), or ""."""
    return _ROLES.get(folder.lower().rpartition("_")[2], "")


def role_folders(path: Path) -> dict[str, list[Path]]:
    """Folders directly in `path` by the split they stand for; where none does, `path` itself."""
    need_folder(path)
    found: dict[str, list[Path]] = {}
    for folder in sorted(p for p in path.iterdir() if p.is_dir()):
        if role_of(folder.name):
            found.setdefault(role_of(folder.name), []).append(folder)
    return found or {role_of(path.name): [path]}


def ranked_split(groups: Iterable[str], seed: int = 0, val: float = 0.1, test: float = 0.2) -> dict[str, str]:
    """Group -> split, 70/10/20 by rank of a seeded hash: the same everywhere, none empty from 3 groups on."""
    ranked = sorted(set(groups), key=lambda g: hashlib.sha256(f"{seed}:{g}".encode()).digest())
    n = len(ranked)
    n_test, n_val = (max(round(n * share), int(n >= 3)) for share in (test, val))
    order = ["test"] * n_test + ["val"] * n_val + ["train"] * n
    return dict(zip(ranked, order, strict=False))


def assign(cases: Sequence[Case], seed: int = 0) -> tuple[list[Case], str]:
    """Give each case its split; comes in with `split` = the role of its folder, or "" where there is none.

    A validation folder without a test folder is halved: even groups (in sorted order) stay, odd ones are the
    test set, so that the numbers reported never come from the cases a model was selected on.
    """
    have = {c.split for c in cases}
    if have <= {""}:
        split = ranked_split((c.group or c.name for c in cases), seed)
        cases = [replace(c, split=split[c.group or c.name]) for c in cases]
        return cases, f"70/10/20 by hash of the case name, seed {seed}"
    if "val" in have and "test" not in have:
        groups = sorted({c.group or c.name for c in cases if c.split == "val"})
        odd = set(groups[1::2])
        cases = [replace(c, split="test") if c.split == "val" and (c.group or c.name) in odd else c for c in cases]
        return cases, "folder names; every second case of the validation folder is the test split"
    return list(cases), "folder names"


def listed(cases: Sequence[Case], file: str | Path) -> tuple[list[Case], str]:
    """Splits from a text file with a case and its split per line ("case07 train"); others are left out."""
    path = Path(file).expanduser()
    split: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        words = line.split("#")[0].rsplit(maxsplit=1)
        if not words:
            continue
        if len(words) != 2:
            raise fault(path, f"line {number}", f"expected 'CASE SPLIT', got {line.strip()!r}")
        name, word = words
        if split.setdefault(name, check_split(word, SPLITS)) != word:
            raise fault(path, f"line {number}", f"case {name!r} is in two splits")
    unknown = sorted(set(split) - {c.name for c in cases})
    if unknown:
        raise fault(path, "case", f"{unknown[0]!r} is not there ({len(unknown)} of {len(split)} are missing)")
    return [replace(c, split=split[c.name]) for c in cases if c.name in split], f"list {path.name}"
