"""Data stays data: no file starts a program, and none makes a reader open another one."""

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from writers import write_cc359_multi, write_fastmri, write_photo

from chasm.data import DataError, open_dataset
from chasm.data.check import check
from chasm.data.files import H5Files

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n0 0 16 16 rectfill\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(("kind", "name"), [("images", "b.jpg"), ("images", "b.tif"), ("folder", "b.png")])
def test_a_picture_that_holds_postscript_starts_no_program(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, data = tmp_path / "trace", tmp_path / "data" / "train"
    (tmp_path / "bin").mkdir()
    ghostscript = tmp_path / "bin" / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {trace}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    write_photo(data / "a.png")
    (data / name).write_bytes(EPS)
    (finding,) = check(data.parent, kind).findings
    assert f"{name}: image: cannot be read" in finding
    assert not trace.exists()


def _secret(folder: Path) -> Path:
    file = folder / "secret.h5"
    with h5py.File(file, "w") as f:
        f["kspace"] = np.ones((70, 16, 16, 4), np.float32)
    return file


def _external_link(f: h5py.File, secret: Path) -> None:
    f["kspace"] = h5py.ExternalLink(secret, "kspace")


def _soft_link_to_an_external_link(f: h5py.File, secret: Path) -> None:
    f["there"] = h5py.ExternalLink(secret, "/")
    f["kspace"] = h5py.SoftLink("/there/kspace")


def _external_link_in_a_group(f: h5py.File, secret: Path) -> None:
    f.create_group("a/b")["c"] = h5py.ExternalLink(secret, "kspace")
    f["kspace"] = np.ones((70, 16, 16, 4), np.float32)


def _external_storage(f: h5py.File, secret: Path) -> None:
    f.create_dataset("kspace", (70, 16, 16, 4), np.float32, external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


def _virtual_dataset(f: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout((70, 16, 16, 4), np.float32)
    layout[:] = h5py.VirtualSource(secret, "kspace", (70, 16, 16, 4))
    f.create_virtual_dataset("kspace", layout)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_external_link, "kspace: a link to another file"),
        (_soft_link_to_an_external_link, "there: a link to another file"),
        (_external_link_in_a_group, "a/b/c: a link to another file"),
        (_external_storage, "kspace: its values are in another file"),
        (_virtual_dataset, "kspace: a virtual dataset"),
    ],
)
def test_hdf5_that_leads_to_another_file_is_refused(
    make: Callable[[h5py.File, Path], None], says: str, tmp_path: Path
) -> None:
    secret = _secret(tmp_path)
    file = tmp_path / "data" / "Train" / "a.h5"
    write_cc359_multi(file)
    with h5py.File(file, "a") as f:
        del f["kspace"]
        make(f, secret)
    with pytest.raises(DataError, match=says):
        H5Files()[file]
    (finding,) = check(tmp_path / "data", "cc359").findings
    assert f"a.h5: {says}" in finding


def test_a_link_to_a_pipe_is_not_opened(tmp_path: Path) -> None:
    """Opening the pipe would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe")
    file = tmp_path / "Train" / "a.h5"
    write_cc359_multi(file)
    with h5py.File(file, "a") as f:
        f["mask"] = h5py.ExternalLink(tmp_path / "pipe", "mask")
    with pytest.raises(DataError, match="mask: a link to another file"):
        open_dataset("cc359", tmp_path)


def test_links_within_a_file_are_followed(tmp_path: Path) -> None:
    file = tmp_path / "singlecoil_train" / "a.h5"
    write_fastmri(file)
    with h5py.File(file, "a") as f:
        f["elsewhere"] = f["kspace"]
        del f["kspace"]
        f["kspace"] = h5py.SoftLink("/elsewhere")
    assert check(tmp_path, "fastmri").ok


@pytest.mark.parametrize("target", ["/nowhere", "/kspace"])
def test_a_dangling_or_looping_link_is_one_finding_among_others(target: str, tmp_path: Path) -> None:
    write_cc359_multi(tmp_path / "Train" / "a.h5")
    write_cc359_multi(tmp_path / "Train" / "b.h5", slices=70)
    with h5py.File(tmp_path / "Train" / "a.h5", "a") as f:
        del f["kspace"]
        f["kspace"] = h5py.SoftLink(target)
    report = check(tmp_path, "cc359")
    assert len(report.findings) == 1
    assert "a.h5: kspace" in report.findings[0]
    assert sum(report.slices.values()) > 0
