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

from chasm.data import KSpaceScan, open_dataset, read_scans, write_scan
from chasm.data.bart import read_cfl, write_cfl
from chasm.mri import Operator, compression_matrix, create_mask, espirit_maps, rss, sense, total_variation
from chasm.mri.classical import objective
from chasm.mri.noise import whitening_matrix

pytestmark = [pytest.mark.interop, needs("bart")]


def bart(folder: Path, *words: object) -> None:
    subprocess.run(["bart", *map(str, words)], cwd=folder, check=True, capture_output=True)


def test_total_variation(tmp_path: Path) -> None:
    """BART takes backward differences. Conjugate k-space is that of the mirrored image, where they are forward ones.

    Its solver needs many iterations with a small step (-u) to arrive at the minimum that ours reaches in 50.
    """
    target = phantom()[1:]
    A = Operator(create_mask("random", 64, 3).tensor())
    y = A.forward(target)
    lam = 3e-3
    weight = lam * A.adjoint(y).abs().max().item()  # BART's is absolute once its own scaling is off (-w 1)
    write_cfl(y[0, 0].conj().resolve_conj().numpy(), tmp_path / "k")
    write_cfl(np.ones((64, 64)), tmp_path / "s")
    bart(tmp_path, "pics", "-w", 1, "-i", 3000, "-u", 0.1, "-R", f"T:3:0:{weight:g}", "k", "s", "x")
    mirrored = torch.from_numpy(read_cfl(tmp_path / "x").squeeze().copy())[None, None].conj()
    theirs = mirrored.flip(-2, -1).roll((1, 1), (-2, -1))
    ours = total_variation(A, y, lam, iterations=1000)
    assert db(ours, theirs) > 80
    assert objective(A, y, ours, lam).item() == pytest.approx(objective(A, y, theirs, lam).item(), rel=1e-4)
    assert db(total_variation(A, y, lam), theirs) > 40  # the default number of iterations


def test_their_kspace_gives_their_image(tmp_path: Path) -> None:
    bart(tmp_path, "phantom", "-k", "-s", 8, "-x", 64, "k")
    bart(tmp_path, "fft", "-i", "-u", 7, "k", "coils")
    bart(tmp_path, "rss", 8, "coils", "image")
    data = open_dataset("kspace", tmp_path / "k.cfl", split="all", combine="rss")
    assert len(data) == 1
    theirs = np.abs(read_cfl(tmp_path / "image").squeeze())
    np.testing.assert_allclose(data[0].image[0], theirs, atol=1e-6 * theirs.max())


def test_they_read_what_we_write(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    k = (rng.standard_normal((3, 4, 32, 24)) + 1j * rng.standard_normal((3, 4, 32, 24))).astype(np.complex64)
    write_scan(KSpaceScan(k, (32, 24)), tmp_path / "k.cfl")
    bart(tmp_path, "slice", 13, 1, "k", "one")  # the second slice
    bart(tmp_path, "fft", "-i", "-u", 7, "one", "coils")
    ours = open_dataset("kspace", tmp_path / "k.cfl", split="all")[1].image
    np.testing.assert_allclose(ours, read_cfl(tmp_path / "coils").squeeze().transpose(2, 0, 1), atol=1e-5)
    bart(tmp_path, "copy", "k", "copy")
    np.testing.assert_array_equal(next(iter(read_scans(tmp_path / "copy.cfl").values())).kspace, k)


def test_prewhitening(tmp_path: Path) -> None:
    """Both whiten by a triangular matrix; BART scales the noise to a variance of 1, we keep the scale of the data."""
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((4, 4)) + 1j * rng.standard_normal((4, 4))
    noise = (mixing @ (rng.standard_normal((4, 2000)) + 1j * rng.standard_normal((4, 2000)))).astype(np.complex64)
    k = (rng.standard_normal((4, 16, 12)) + 1j * rng.standard_normal((4, 16, 12))).astype(np.complex64)
    write_cfl(k.transpose(1, 2, 0)[:, :, None], tmp_path / "k")
    write_cfl(noise.T[:, None, None], tmp_path / "n")
    bart(tmp_path, "whiten", "k", "n", "w")
    theirs = read_cfl(tmp_path / "w").squeeze().transpose(2, 0, 1)
    ours = np.einsum("pq,qhw->phw", whitening_matrix(torch.from_numpy(noise)).numpy(), k)
    scale = np.linalg.norm(ours) / np.linalg.norm(theirs)
    np.testing.assert_allclose(ours, scale * theirs, rtol=1e-2, atol=1e-3)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A folder with their phantom of eight coils, k, with noise; and the same as a tensor."""
    folder = tmp_path_factory.mktemp("noisy")
    bart(folder, "phantom", "-k", "-s", 8, "-x", 64, "clean")
    bart(folder, "noise", "-s", 1, "-n", 0.01, "clean", "k")
    return folder, torch.from_numpy(read_cfl(folder / "k").squeeze().transpose(2, 0, 1).copy())[None]


def test_espirit(noisy: tuple[Path, torch.Tensor]) -> None:
    """The same maps in the same pixels, up to one phase for all. Their eigenvectors are iterated, ours are exact."""
    folder, k = noisy
    for sets in (1, 2):
        bart(folder, "ecalib", "-m", sets, "k", "maps")
        theirs = torch.from_numpy(read_cfl(folder / "maps").squeeze().copy())
        theirs = theirs.permute(2, 0, 1) if sets == 1 else theirs.permute(3, 2, 0, 1)[0]
        ours = espirit_maps(k, (20, 44), sets)
        ours = ours[0] if sets == 1 else ours[0, 0]
        inside, same = (m.abs().sum(0) > 0 for m in (theirs, ours))
        assert (inside == same).float().mean() > 0.995
        agreement = (theirs.conj() * ours).sum(0)[inside & same]
        assert agreement.abs().quantile(0.05) > 0.99
        assert agreement.abs().median() > 0.999
        assert (agreement / agreement.mean()).angle().abs().quantile(0.95) < 0.05


def test_sense_with_their_maps(noisy: tuple[Path, torch.Tensor]) -> None:
    folder, k = noisy
    mask = create_mask("equispaced", 64, 3)
    y = mask.tensor() * k
    write_cfl(y[0].permute(1, 2, 0)[:, :, None].numpy(), folder / "y")
    bart(folder, "ecalib", "-m", 1, "k", "maps")
    maps = torch.from_numpy(read_cfl(folder / "maps").squeeze().transpose(2, 0, 1).copy())[None]
    bart(folder, "pics", "-w", 1, "-i", 200, "-l2", "-r", 0.01, "y", "maps", "x")
    theirs = torch.from_numpy(read_cfl(folder / "x").squeeze().copy())[None, None]
    ours = sense(Operator(mask.tensor(), maps), y, 0.01, iterations=200)
    assert (ours - theirs).abs().max() < 1e-3 * theirs.abs().max()


def test_coil_compression(noisy: tuple[Path, torch.Tensor]) -> None:
    """The same virtual coils, up to a phase of each."""
    folder, k = noisy
    bart(folder, "cc", "-p", 3, "-A", "k", "fewer")
    theirs = torch.from_numpy(read_cfl(folder / "fewer").squeeze().transpose(2, 0, 1).copy())
    ours = torch.einsum("pq,qhw->phw", compression_matrix(k[0], 3), k[0])
    for a, b in zip(theirs, ours, strict=True):
        assert (a.conj() * b).sum().abs() > 0.9999 * a.norm() * b.norm()
    assert torch.allclose(rss(theirs[None]), rss(ours[None]), rtol=1e-3, atol=1e-3 * float(rss(ours[None]).max()))
