"""`pip install chasm` is another project with our import name: the command line says so where both are installed."""

from pathlib import Path

import pytest

from chasm.cli import main
from chasm.common.extras import namesake_warning


def test_alone_there_is_nothing_to_say() -> None:
    assert namesake_warning() == ""


def test_the_other_project_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "chasm-1.2.dist-info" / "METADATA"
    record.parent.mkdir()
    record.write_text("Metadata-Version: 2.1\nName: chasm\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.argv", ["chasm", "--help"])
    with pytest.raises(SystemExit) as e:
        main()
    printed = capsys.readouterr()
    assert e.value.code == 0
    assert printed.err.startswith("warning: the package chasm 1.2 is another project")
    assert printed.err.count("\n") == 1
    assert "reconstruct" in printed.out  # the command still runs
