"""HDF5 files whose names and attributes are not as a reader expects: they read, or say one line."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from writers import write_fastmri

from chasm.data import DataError, open_dataset, read_scans
from chasm.data.check import check


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_fastmri(tmp_path / "singlecoil_train" / "a.h5")
    return tmp_path / "singlecoil_train" / "a.h5"


def test_an_acquisition_that_is_no_text_still_reads(file: Path) -> None:
    with h5py.File(file, "a") as f:
        f.attrs["acquisition"] = np.bytes_(b"\xff\xfe")
    assert len(open_dataset("fastmri", file.parent.parent, split="all", acquisition=None)) > 0
    assert check(file.parent.parent, "fastmri").ok


@pytest.mark.parametrize("affine", [np.eye(3), np.full((4, 4), np.nan), np.bytes_(b"none")])
def test_an_affine_that_is_none_is_not_used(file: Path, affine: np.ndarray) -> None:
    with h5py.File(file, "a") as f:
        f.attrs["affine"] = affine
    assert open_dataset("fastmri", file.parent.parent, split="all").geometry("a") is None


def test_names_that_are_no_text_are_printed_in_one_line(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("image", data=np.ones((2, 4, 4)))
        f.create_dataset(b"\xff\xfe", data=np.ones(2))
    with pytest.raises(DataError, match=r"a\.h5: ") as e:
        read_scans(tmp_path / "a.h5")
    assert "\n" not in str(e.value)
    (tmp_path / "singlecoil_train").mkdir()
    (tmp_path / "a.h5").rename(tmp_path / "singlecoil_train" / "a.h5")
    (finding,) = check(tmp_path, "fastmri").findings
    assert "missing; the file has" in finding
