"""A package that is not installed is named at the start, with what to install."""

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chasm.cli.app import app
from chasm.common import extras

MODULE_OF = {"PyYAML": "yaml", "pillow": "PIL", "scikit-image": "skimage"}


def test_extras_are_those_that_the_package_declares() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = {name: [re.split("[><=]", r)[0] for r in rs] for name, rs in project["optional-dependencies"].items()}
    for name, modules in extras.EXTRAS.items():
        assert list(modules) == [MODULE_OF.get(r, r) for r in declared[name]], name


@pytest.mark.parametrize(
    ("words", "lacking"),
    [
        (["demo"], "matplotlib"),
        (["train", "demo"], "accelerate"),
        (["study", "list"], "pydantic"),
        (["report", "basis"], "jinja2"),
        (["data", "list"], "h5py"),
        (["bench", "scaling", "--plot", "times.png"], "matplotlib"),
        (["reconstruct", "scan.h5", "--run", "runs/demo"], "matplotlib"),
        (["app", "photo-x4"], "skimage"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_command_says_what_it_lacks_before_it_works(
    words: list[str], lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> Any:
        return None if name == lacking else find_spec(name)

    monkeypatch.setattr(extras, "find_spec", find)
    found = CliRunner(env={"COLUMNS": "300"}).invoke(app, words)
    extra = next(extra for extra, modules in extras.EXTRAS.items() if lacking in modules)
    assert (found.exit_code, found.stderr) == (3, f"error: this needs {lacking}: pip install 'chasm-mixer[{extra}]'\n")


def test_without_typer_the_command_line_says_how_to_get_all_of_it() -> None:
    code = "import sys; sys.modules['typer'] = None; from chasm.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (3, "error: the command line needs typer: pip install 'chasm-mixer[all]'\n")


def test_a_package_of_chasm_says_what_it_lacks() -> None:
    code = "import sys; sys.modules['accelerate'] = None; import chasm; chasm.train"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert last == "ModuleNotFoundError: chasm.train needs accelerate: pip install 'chasm-mixer[train]'"
