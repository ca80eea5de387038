"""Agreement with the BART toolbox, where it is installed: `make interop`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import needs

sys.path.insert(0, str(Path(__file__).parents[1] / "mri"))
from test_classical import db, phantom

from chasm.mri import Operator, create_mask, total_variation
from chasm.mri.classical import objective

pytestmark = [pytest.mark.interop, needs("bart")]


def _write_cfl(path: Path, array: np.ndarray) -> None:
    path.with_suffix(".hdr").write_text("# Dimensions\n" + " ".join(map(str, array.shape)) + "\n")
    array.astype(np.complex64).ravel(order="F").tofile(path.with_suffix(".cfl"))


def _read_cfl(path: Path) -> np.ndarray:
    dims = [int(n) for n in path.with_suffix(".hdr").read_text().splitlines()[1].split()]
    return np.fromfile(path.with_suffix(".cfl"), np.complex64).reshape(dims, order="F").squeeze()


def test_total_variation(tmp_path: Path) -> None:
    """BART takes backward differences. Conjugate k-space is that of the mirrored image, where they are forward ones.

    Its solver needs many iterations with a small step (-u) to arrive at the minimum that ours reaches in 50.
    """
    target = phantom()[1:]
    A = Operator(create_mask("random", 64, 3).tensor())
    y = A.forward(target)
    lam = 3e-3
    weight = lam * A.adjoint(y).abs().max().item()  # BART's is absolute once its own scaling is off (-w 1)
    _write_cfl(tmp_path / "k", y[0, 0, :, :, None, None].conj().resolve_conj().numpy())
    _write_cfl(tmp_path / "s", np.ones((64, 64, 1, 1)))
    command = ["bart", "pics", "-w", "1", "-i", "3000", "-u", "0.1", "-R", f"T:3:0:{weight:g}", "k", "s", "x"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    mirrored = torch.from_numpy(_read_cfl(tmp_path / "x"))[None, None].conj()
    theirs = mirrored.flip(-2, -1).roll((1, 1), (-2, -1))
    ours = total_variation(A, y, lam, iterations=1000)
    assert db(ours, theirs) > 80
    assert objective(A, y, ours, lam).item() == pytest.approx(objective(A, y, theirs, lam).item(), rel=1e-4)
    assert db(total_variation(A, y, lam), theirs) > 40  # the default number of iterations
