"""Where a number comes from: hardware, versions, commit and command, recorded with every result."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from chasm.common.text import counted

PACKAGES = ("torch", "numpy", "chasm-mixer", "triton", "accelerate", "scikit-image")


@dataclass(frozen=True)
class Provenance:
    """What is needed to make a result again, beside its settings and seed."""

    device: str
    python: str
    versions: dict[str, str]  # version of each package; "not installed" if it is missing
    commit: str  # commit of the source tree; empty if it is not known
    modified: bool  # does the source tree differ from the commit
    command: str  # the command line, to type it again
    date: str  # year-month-day

    def lines(self) -> dict[str, str]:
        """Return the record as the short lines of a header, by name."""
        commit = (self.commit[:10] or "unknown") + (", modified" if self.modified else "")
        versions = {name: self.versions[name] for name in ("torch", "CUDA", "triton")}
        return {"device": self.device, **versions, "commit": commit, "date": self.date, "command": self.command}


def provenance(device: torch.device) -> Provenance:
    """Return the provenance of what this process computes on a device.

    A copy of the source tree without git can name its commit in the environment variable CHASM_COMMIT.

    Example:
        >>> torch.__version__.startswith(provenance(torch.device("cpu")).versions["torch"])
        True
    """
    commit, modified = _commit()
    return Provenance(
        device=device_name(device),
        python=platform.python_version(),
        versions={**{name: _version(name) for name in PACKAGES}, "CUDA": torch.version.cuda or "not installed"},
        commit=commit,
        modified=modified,
        command=command(sys.argv),
        date=time.strftime("%Y-%m-%d"),
    )


def source_digest() -> str:
    """Return a digest of the Python files of this package: it also tells apart two states of one commit."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the kind of CPU with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')}"


def command(argv: list[str]) -> str:
    """Return a command line as it can be typed again.

    A module that was run (python -m chasm) has the path of its file as first word.

    >>> command(["lib/chasm/__main__.py", "train", "a b.yaml"])
    "python -m chasm train 'a b.yaml'"
    """
    name = Path(argv[0]).name
    first = f"python -m {Path(argv[0]).parent.name}" if name == "__main__.py" else name
    return " ".join([first, *map(shlex.quote, argv[1:])])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> tuple[str, bool]:
    """Return (commit, modified) of the repository that tracks this file, not of one around the environment."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name):
        commit = _git("rev-parse", "HEAD")
        if commit:
            return commit, bool(_git("status", "--porcelain", "--untracked-files=no"))
    return os.environ.get("CHASM_COMMIT", ""), False


def _git(*arguments: str) -> str:
    here = str(Path(__file__).parent)
    try:
        run = subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""
