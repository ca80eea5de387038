"""`chasm reconstruct` on several inputs."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import call, make_run

from chasm.reconstruct.outputs import name_outputs
from chasm.reconstruct.run import _name, reconstruct, reconstruct_each
from chasm.reconstruct.slices import Reconstructor
from chasm.train.run import load_run


@pytest.mark.usefixtures("no_picture")
def test_several_inputs_with_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails does not stop the others; each has its name in its files, also where names are alike."""
    run, loaded = make_run(tmp_path / "run"), []
    monkeypatch.setattr("chasm.reconstruct.settings.load_run", lambda *a, load=load_run: loaded.append(1) or load(*a))
    for name in ("a/one.h5", "a/two.h5", "b/one.h5"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        writers.write_fastmri(tmp_path / name, slices=2, seed=len(loaded))
    (tmp_path / "broken.h5").write_bytes(b"no HDF5")
    files = [tmp_path / name for name in ("a/one.h5", "broken.h5", "a/two.h5", "b/one.h5", "a/two.h5")]
    found = call(*files, "--run", run, "-o", tmp_path / "out" / "recon.h5")
    assert found.exit_code == 3, found.output
    assert "broken.h5" in found.output
    assert "1 of 4 inputs failed" in found.output
    assert len(loaded) == 1
    written = sorted(file.name for file in (tmp_path / "out").glob("*.h5"))
    assert len(written) == 3
    assert "recon-two.h5" in written
    assert all(name.startswith("recon-") and "one" in name for name in written if "two" not in name)
    time.sleep(1.1)  # files of HDF5 may hold the second they were made in
    reconstruct(tmp_path / "a" / "two.h5", run, tmp_path / "alone.h5")
    assert (tmp_path / "alone.h5").read_bytes() == (tmp_path / "out" / "recon-two.h5").read_bytes()
    found = call(*files[:2], "--run", run, "-o", tmp_path / "out" / "recon.h5", "--json")
    one, other = json.loads(found.stdout)
    assert one["input"].endswith("one.h5")
    assert one["volumes"][0]["slices"] == 2
    assert "broken.h5" in other["error"]


@pytest.mark.usefixtures("no_picture")
def test_several_inputs_keep_out_of_each_others_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for name in ("a", "recon-a"):
        writers.write_fastmri(tmp_path / f"{name}.h5", slices=2)
    before = (tmp_path / "recon-a.h5").read_bytes()
    found = call("a.h5", "recon-a.h5", "--run", run, "-o", "recon.h5")
    assert "recon-a.h5: is an input, which would be lost" in found.output
    assert (tmp_path / "recon-a.h5").read_bytes() == before
    assert (tmp_path / "recon-recon-a.h5").is_file()
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
        writers.write_fastmri(tmp_path / place / "scan.h5", slices=2)
    found = call("x/scan.h5", "y/scan.h5", "--run", run)
    assert "scan-reconstructed.h5: the default name of 2 inputs: give --out" in found.output
    found = call("x/scan.h5", "y/none.h5", "--run", run)  # before the first one is begun
    assert "none.h5: no such file" in found.output
    assert not list(tmp_path.glob("scan-reconstructed*"))
    # A folder of two cases and a file: the second case's name is the file's.
    (tmp_path / "f").mkdir()
    for case in ("p", "q"):
        np.save(tmp_path / "f" / f"{case}.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    np.save(tmp_path / "f-q.npy", writers.blob(np.random.default_rng(1), 2, 16, 16))
    found = call("f", "f-q.npy", "--run", run, "-o", "out/r.h5")
    assert "r-f-q.h5: was written for another input of this call" in found.output
    assert found.exit_code == 3


@pytest.mark.usefixtures("no_picture")
def test_no_memory_for_one_of_several_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        writers.write_fastmri(tmp_path / f"{name}.h5", slices=2)
    result = Reconstructor.result

    def full(work: Reconstructor, row: int, meters: Any) -> Any:
        if "b" in work.scan.data.cases:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result(work, row, meters)

    monkeypatch.setattr(Reconstructor, "result", full)
    files = [tmp_path / f"{name}.h5" for name in ("a", "b", "c")]
    found = call(*files, "--run", make_run(tmp_path / "run"), "-o", tmp_path / "out.h5")
    assert found.exit_code == 3
    assert "b.h5: out of memory on cpu" in found.output
    assert (tmp_path / "out-c.h5").is_file()


def test_files_of_several_inputs_are_called_after_them() -> None:
    for inputs, expected in (
        (["1.2.840.h5", "b.nii.gz"], ["o-1_2_840.h5", "o-b.h5"]),
        (["../a/x.h5", "b/x.h5"], ["o-a_x.h5", "o-b_x.h5"]),
        (["a.b.h5", "a_b.h5", "A_B.h5"], ["o-a_b.h5", "o-a_b-2.h5", "o-A_B-3.h5"]),
    ):
        found = name_outputs(Path("o.h5"), {Path(file): _name(Path(file)) for file in inputs})
        assert [file.name for file in found] == expected


@pytest.mark.usefixtures("no_picture")
def test_slices_of_another_input_are_not_left_from_an_earlier_call(tmp_path: Path) -> None:
    image = np.arange(256, dtype=np.uint16).reshape(16, 16)
    (tmp_path / "a").mkdir()
    for file in ("a-7.png", "a/0.png", "a/1.png"):
        Image.fromarray(image).save(tmp_path / file)
    out = tmp_path / "out" / "o.png"
    found = reconstruct_each([tmp_path / "a-7.png", tmp_path / "a"], make_run(tmp_path / "run"), out)
    assert all(not outcome.notes for _, outcome in found)
