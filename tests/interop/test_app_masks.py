"""The lines of a mask in the page of `chasm app`: where they differ from those of the training, the page says it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from app_pages import IN_A_BROWSER, SIZE, brain
from app_pages import play as play
from app_pages import runs as runs
from app_pages import served as served
from app_pages import static as static

from chasm.app.model import _trained_mask
from chasm.mri import Mask, Sampling, create_mask
from chasm.reconstruct.likeness import unlike_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from writers import centred_fft

pytestmark = IN_A_BROWSER
PHYSICS = Path(__file__).parents[2] / "src" / "chasm" / "app" / "static" / "physics.js"
SAID = "document.getElementById('unlike').hidden ? '' : document.getElementById('unlike').textContent"


def test_lines_are_compared_as_python_does() -> None:
    samplings = [
        Sampling(kind, acceleration, fraction, offset)
        for kind in ("equispaced", "random", "gaussian", "equispaced-plain", "poisson-2d")
        for acceleration in (4, 8)
        for fraction in (None, 0.1)
        for offset in ((None, 2) if kind.startswith("equispaced") else (None,))
    ]
    cases: list[tuple[list[int], dict[str, Any]]] = []
    want = []
    for trained in samplings:
        usual = trained.on(190, 190)
        for masks in ("fixed", "epoch", "measured"):
            about = {"kind": trained.kind, "masks": masks, "trained": _trained_mask(usual)}
            for sampling in samplings:
                for width in (190, 154, 48):
                    mask = sampling.on(190, width)
                    if isinstance(mask, Mask):
                        cases.append((mask.tensor()[0, 0, 0].int().tolist(), about))
                        want.append([] if masks == "measured" else unlike_lines(mask, usual, masks == "fixed"))
    script = (
        f"import {{unlikeLines}} from {json.dumps(PHYSICS.as_uri())};"
        "let text = ''; for await (const part of process.stdin) text += part;"
        "console.log(JSON.stringify(JSON.parse(text).map(([mask, task]) => unlikeLines(Uint8Array.from(mask), task))));"
    )
    command = ["node", "--input-type=module", "-e", script]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == want
    assert len({tuple(each) for each in want}) > 10


def test_the_page_says_that_lines_are_elsewhere(play: Any, static: str, tmp_path: Path) -> None:
    columns = create_mask("equispaced", SIZE, 4, offset=2).tensor()[0, 0, 0].numpy()
    with h5py.File(tmp_path / "measured.h5", "w") as f:  # without its mask
        f["kspace"] = (centred_fft(brain()) * columns).astype(np.complex64)
    np.save(tmp_path / "full.npy", brain())
    status = {"read": "document.getElementById('status').textContent", "as": "status"}
    steps: list[dict[str, Any]] = [{"drop": [str(tmp_path / "measured.h5")], "wait": 1500}, status]
    steps += [{"read": SAID, "as": "moved"}, {"read": "[...chasm.state.result.mask]", "as": "mask"}]
    steps += [{"read": "document.getElementById('numbers').textContent", "as": "numbers", "shot": "unlike"}]
    choice = "document.getElementById('acceleration').disabled"
    steps += [{"read": choice, "as": "no choice"}]
    steps += [{"drop": [str(tmp_path / "full.npy")], "wait": 1500}, {"read": SAID, "as": "same"}]
    steps += [{"read": choice, "as": "choice again"}]
    steps += [{"read": "[...chasm.state.result.mask]", "as": "own mask"}]
    steps += [{"set": ["#acceleration", "8"], "wait": 1500}, {"read": SAID, "as": "x8"}]
    read = play(steps, address=static)
    assert read["moved"] == (
        "Unlike the training of scans, so expect a worse result: lines at other columns (trained on one fixed mask)."
    )
    assert torch.equal(torch.tensor(read["mask"]), torch.tensor(columns).int())
    assert "the columns that hold anything are taken as measured" in read["status"]
    assert "No target to compare with" in read["numbers"]
    assert read["same"] == ""
    assert (read["no choice"], read["choice again"]) == (True, False)
    assert read["own mask"] == create_mask("equispaced", SIZE, 4).tensor()[0, 0, 0].int().tolist()
    assert "acceleration 8 (trained on 4)" in read["x8"]
