"""Numbers that float32 cannot hold: one line, exit code 3, and nothing is written."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import call, make_run, writers
from safetensors.torch import load_file

from chasm.data import DataError, open_dataset
from chasm.data.check import check
from chasm.train import evaluate
from chasm.train.weights import save_weights, training_images


def files_of(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*"))


@pytest.mark.parametrize(
    ("form", "size", "says"),
    [
        ("image", 1e39, "values are beyond float32 (3.4e38): scale the data"),
        ("kspace", 1e39, "values are beyond float32 (3.4e38): scale the data"),
        ("kspace", 1e30, "the reconstruction is not finite, so nothing is written"),
    ],
)
def test_values_that_float32_cannot_hold_are_said(form: str, size: float, says: str, tmp_path: Path) -> None:
    scan = writers.blob(np.random.default_rng(0), 2, 16, 16) * size
    scan = np.fft.fft2(scan).astype(np.complex128) if form == "kspace" else scan
    np.save(tmp_path / "scan.npy", scan)
    run = make_run(tmp_path / "run", complex=form == "kspace")
    before = files_of(tmp_path)
    axes = ("-O", "axes=SHW") if form == "kspace" else ()
    found = call(tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.nii", "--as", form, *axes)
    assert found.exit_code == 3, found.output
    assert says in found.stderr
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("size", [-1.0, 0.0, 1e-42, 3e37])
def test_no_nan_is_printed_about_values_that_float32_holds(size: float, tmp_path: Path) -> None:
    image = (np.abs(writers.blob(np.random.default_rng(0), 2, 16, 16)) + 0.5) * size  # below zero throughout for -1
    np.save(tmp_path / "scan.npy", image.astype("f4"))
    run = make_run(tmp_path / "run")
    found = call(tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.nii", "--report", tmp_path / "page.html")
    assert found.exit_code == 0, found.output
    assert not re.search(r"\b(nan|inf)\b", found.output), found.output
    assert ("all samples are zero, so nothing was measured" in found.output) == (size == 0.0)


def test_a_check_finds_them(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16) * 1e39)
    (finding,) = check(tmp_path, "folder").findings
    assert "scan.npy: image 0: " in finding
    with pytest.raises(DataError, match="beyond float32"):
        open_dataset("folder", tmp_path, split="all")[0]


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    run = make_run(tmp_path / "run")
    weights = load_file(run / "weights.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] = torch.nan
    save_weights(run / "weights.safetensors", weights, training_images(run))
    before = files_of(tmp_path)
    found = call(tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.nii", "--device", "cpu")
    assert found.exit_code == 3
    assert f"weights.safetensors: {name}: weights that are not finite" in found.stderr
    assert files_of(tmp_path) == before
    with pytest.raises(ValueError, match="weights that are not finite"):
        evaluate(run)
