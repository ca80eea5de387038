"""What is released: a wheel that works far from any checkout, and files that agree about version and date."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from chasm.train.config import dump, load_recipe

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASED = 1_700_000_000  # any time: the wheel takes it from SOURCE_DATE_EPOCH


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive and the wheel built from it, as `make wheel` and installers do."""
    for module in ("build", "twine"):
        pytest.importorskip(module)
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for folder in ("src", "recipes"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(RELEASED)}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, umask=0o077)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr
    return out


def test_the_package_index_takes_them(dist: Path) -> None:
    files = sorted(map(str, dist.iterdir()))
    assert len(files) == 2
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


def test_the_page_of_the_package_index_has_no_dead_links(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        page = wheel.read(name).decode()
    assert "Description-Content-Type: text/markdown" in page
    assert "CHASM is a layer for networks that look at images" in page
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", page)


def test_what_is_released_is_the_same_bytes_whenever_and_wherever_it_is_built(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        assert {entry.date_time for entry in wheel.infolist()} == {time.gmtime(RELEASED)[:6]}
        assert {oct(entry.external_attr >> 16) for entry in wheel.infolist()} <= {"0o100644", "0o100664"}
    archive = next(dist.glob("*.tar.gz"))
    with tarfile.open(archive) as packed:
        entries = packed.getmembers()
    names = [entry.name for entry in entries]
    assert any(name.endswith("/src/chasm/__init__.py") for name in names)
    assert names == sorted(names)
    assert {(entry.mtime, entry.uid, entry.gid, entry.uname) for entry in entries} == {(RELEASED, 0, 0, "")}
    assert {entry.mode for entry in entries} <= {0o644, 0o755}
    assert int.from_bytes(archive.read_bytes()[4:8], "little") == RELEASED  # the time in the header of gzip


def test_the_wheel_works_far_from_any_checkout(dist: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(installed)
    assert [p.read_text() for p in sorted(installed.glob("chasm/recipes/*"))] == [p.read_text() for p in RECIPES]
    for name in ("py.typed", "studies/report/page.html.j2", "reconstruct/page.html", "app/static/vendor/manifest.json"):
        assert (installed / "chasm" / name).is_file(), name
    packages = {p.parent.relative_to(ROOT / "src") for p in (ROOT / "src/chasm").rglob("*.py")}
    assert {p.parent.relative_to(installed) for p in (installed / "chasm").rglob("*.py")} == packages

    elsewhere.mkdir()
    command = [sys.executable, "-m", "chasm", "train", "demo", "--show"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    shown = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert shown.stdout == dump(load_recipe(ROOT / "recipes" / "demo.yaml")), shown.stderr


def test_version_and_date_are_the_same_everywhere() -> None:
    citation: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest, "CHANGELOG.md: the newest version needs a date"
    assert citation["version"] == newest[1] == VERSION
    assert str(citation["date-released"]) == newest[2]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_call_targets_that_exist(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text())
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    called = set(re.findall(r"\bmake ([a-z]+)", "\n".join(commands)))
    assert called
    assert called <= targets
    assert workflow["permissions"] == {"contents": "read"}  # a job that needs more says so itself


def test_only_the_publishing_job_may_ask_for_an_identity() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})} == {"publish"}
    assert "password" not in (ROOT / ".github/workflows/release.yml").read_text()


def test_hashes_are_those_of_the_pinned_versions() -> None:
    """One or more SHA-256 for each package of constraints.txt, and no other package."""
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hashed = (ROOT / "constraints-hashed.txt").read_text()
    entries = re.findall(r"^([\w.-]+)==(\S+) \\\n((?: {4}--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", hashed, re.MULTILINE)
    assert {(name, version) for name, version, _ in entries} == {(_normal(name), version) for name, version in pins}
    assert len(entries) == len(re.findall(r"^\S+==", hashed, re.MULTILINE)) == len(pins)
    digests = re.findall("sha256:([0-9a-f]{64})", hashed)
    assert len(digests) == len(set(digests))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
