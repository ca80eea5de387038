"""Assign cases to splits by folder name, by half of a validation folder, or by a seeded hash."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from chasm.data.base import existing
from chasm.data.files import require_folder
from chasm.data.records import SPLITS, Case, check_split, fault

_ROLES = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
SINGLE_FILE = "a single file"  # the split rule of a path that is no folder


def role_of(folder: str) -> str:
    """Return the split that a folder's name stands for, or "".

    >>> role_of("Train"), role_of("singlecoil_val"), role_of("other")
    ('train', 'val', '')
    """
    return _ROLES.get(folder.lower().rpartition("_")[2], "")


def role_folders(path: Path) -> list[tuple[str, Path]]:
    """Return the folders directly in `path` with the split that each stands for; if none does, `path` itself."""
    require_folder(path)
    folders = sorted(p for p in path.iterdir() if p.is_dir())
    return [(role_of(f.name), f) for f in folders if role_of(f.name)] or [(role_of(path.name), path)]


def ranked_split(groups: Iterable[str], seed: int = 0) -> dict[str, str]:
    """Return a split of each group (patient or case), 70/10/20 by the rank of a seeded hash of its name.

    It is the same on every machine. With three groups or more no split is empty.

    >>> ranked_split(["a", "b", "c"])
    {'a': 'test', 'c': 'val', 'b': 'train'}
    """
    ranked = sorted(set(groups), key=lambda g: hashlib.sha256(f"{seed}:{g}".encode()).digest())
    n = len(ranked)
    n_test, n_val = (max(round(n * share), int(n >= 3)) for share in (0.2, 0.1))
    order = ["test"] * n_test + ["val"] * n_val + ["train"] * n
    return dict(zip(ranked, order, strict=False))


def assign_splits(cases: Sequence[Case], seed: int = 0, by: str = "case name") -> tuple[list[Case], str]:
    """Return the cases with their splits, and the rule in words.

    Cases of folders that stand for no split are split 70/10/20 by hash. A validation folder without a test folder is
    halved: even groups, in sorted order, stay, and odd ones are the test split, so that reported numbers never come
    from the cases a model was selected on.

    Args:
        cases: cases with the role of their folder as split, or "".
        seed: seed of the hash.
        by: what is hashed, for the rule: the group of a case, or its name if it has none.
    """
    roles = {c.split for c in cases}
    if roles <= {""}:
        split = ranked_split((c.patient for c in cases), seed)
        cases = [replace(c, split=split[c.patient]) for c in cases]
        return cases, f"70/10/20 by hash of the {by}, seed {seed}"
    if "val" in roles and "test" not in roles:
        odd = set(sorted({c.patient for c in cases if c.split == "val"})[1::2])
        cases = [replace(c, split="test") if c.split == "val" and c.patient in odd else c for c in cases]
        return cases, "folder names; every second case of the validation folder is the test split"
    return list(cases), "folder names"


def splits_from_list(cases: Sequence[Case], file: str | Path) -> tuple[list[Case], str]:
    """Return the cases that a text file lists, each with its split, and the rule in words.

    Every line has a case and its split ("case07 train"); # starts a comment.
    """
    path = existing(file)
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
