"""Every command fails in the same way: one line on standard error, and the exit code that `chasm --help` documents."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from typer.testing import CliRunner, Result

from chasm.cli import mixers
from chasm.cli.app import app
from chasm.train import NonFiniteError

COMMANDS = [
    ["demo", "--task", "recon"],
    ["mixers", "gfnt"],
    ["bench", "--mixer", "gfnt", "--device", "cpu"],
    ["bench", "hosts", "--host", "vit"],
    ["data", "check", "nowhere", "--as", "cc359"],
    ["data", "preview", "--as", "cc359", "-o", "p.png"],
    ["train", "no-such-recipe"],
    ["eval", "nowhere"],
    ["report", "basis", "--out", "nowhere"],
    ["study", "status", "basis", "--out", "nowhere"],
    ["study", "run", "bassis"],
    ["reconstruct", "nowhere.h5", "--run", "nowhere"],
    ["harmonise", "nowhere"],
    ["export", "nowhere"],
    ["app", "nowhere"],
    ["models", "show", "nowhere"],
    ["--with", "nowhere.py", "mixers"],
]


def chasm(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, words)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], Result]:
    """`chasm mixers`, where it raises this."""

    def run(error: BaseException) -> Result:
        def raises(*_: object) -> None:
            raise error

        monkeypatch.setattr(mixers, "row", raises)
        return chasm("mixers", "gfnet")

    return run


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_mistake_is_one_line_and_exit_code_3(words: list[str]) -> None:
    found = chasm(*words)
    assert found.exit_code == 3, found.output
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1
    assert found.stdout == ""


def test_every_command_is_among_them() -> None:
    tried = {words[0] for words in COMMANDS if not words[0].startswith("--")}
    assert tried == {c.name for c in app.registered_commands} | {g.name for g in app.registered_groups}


@pytest.mark.parametrize(
    "error",
    [ValueError("bad\nvalue"), OSError(28, "No space left"), NonFiniteError("loss nan"), FileNotFoundError("gone")],
    ids=lambda e: type(e).__name__,
)
def test_an_expected_error_is_one_line(failing: Callable[[BaseException], Result], error: Exception) -> None:
    found = failing(error)
    assert (found.exit_code, found.stderr) == (3, f"error: {error}\n".replace("d\nv", "d v"))


def test_a_package_that_is_not_installed_is_named(failing: Callable[[BaseException], Result]) -> None:
    found = failing(ModuleNotFoundError("No module named 'jinja2'", name="jinja2"))
    assert found.exit_code == 3
    assert found.stderr == "error: this needs jinja2: pip install 'chasm-mixer[report]'\n"


def test_ctrl_c(failing: Callable[[BaseException], Result]) -> None:
    found = failing(KeyboardInterrupt())
    assert found.exit_code == 130
    assert found.stderr.startswith("interrupted: ")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ModuleNotFoundError("no", name="chasm.nothing")])
def test_a_bug_keeps_its_traceback(failing: Callable[[BaseException], Result], error: Exception) -> None:
    found = failing(error)
    assert found.exit_code == 1
    assert found.exception is error


def test_a_line_that_cannot_be_read_is_exit_code_2() -> None:
    assert chasm("mixers", "--no-such-option").exit_code == 2
    assert chasm("no-such-command").exit_code == 2


def test_a_closed_pipe_ends_quietly() -> None:
    code = f"{sys.executable} -m chasm mixers --json --channels 4 --size 4 | true"
    found = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert "error" not in found.stderr
    assert "Traceback" not in found.stderr


def test_help_documents_the_codes() -> None:
    told = " ".join(chasm("--help").output.split())
    assert "Exit codes: 0 means done. 2 means that the command line could not be read. 3 means" in told


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried .."),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=["python", "cpu", "gpu"],
)
def test_too_little_memory_is_one_line(failing: Callable[[BaseException], Result], error: Exception) -> None:
    found = failing(error)
    assert found.exit_code == 3
    assert found.stderr.startswith("error: out of memory: ")
    assert found.stderr.count("\n") == 1
