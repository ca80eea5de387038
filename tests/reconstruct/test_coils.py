"""Coil sensitivities by ESPIRiT, in several sets, or from a file; virtual coils."""

import os
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import brains, call, coil_images, columns, make_run

from chasm.backbones import VarNet
from chasm.data import KSpaceScan, write_scan
from chasm.data.bart import write_cfl
from chasm.mri import Operator, compression_matrix, espirit_maps, fft2c, rss
from chasm.reconstruct import reconstruct
from chasm.train.config import dump, load_recipe
from chasm.train.run import build_model
from chasm.train.weights import TrainingImages, save_weights

pytestmark = pytest.mark.usefixtures("no_picture")


def true_maps(size: tuple[int, int] = (48, 40)) -> np.ndarray:
    return (coil_images(1, size=size) / brains(1, size)[:, None])[0].astype(np.complex64)


def half(width: int, centre: int = 12) -> np.ndarray:
    """Every second column, and some in the middle."""
    mask = np.zeros(width, bool)
    mask[::2], mask[(width - centre) // 2 : (width + centre) // 2] = True, True
    return mask


def test_espirit_finds_the_sensitivities() -> None:
    """Up to a phase that all coils share, where there is signal; and zero where there is none."""
    image, maps = torch.from_numpy(brains(1)), torch.from_numpy(true_maps())
    image = torch.where(image.abs() > 0.2 * image.abs().max(), image, 0)
    found = espirit_maps(fft2c(maps * image[:, None]), (14, 26))[0]
    inside = (image[0].abs() > 0) & (rss(found[None])[0, 0] > 0)
    assert inside.sum() > 0.9 * (image[0].abs() > 0).sum()
    agreement = (maps.conj() * found).sum(0).abs()[inside]
    assert agreement.quantile(0.05) > 0.98
    assert (rss(found[None])[0, 0][:5, :5] == 0).all()  # air


def test_operators_with_several_sets_are_adjoint() -> None:
    g = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 3, 4, 8, 6, dtype=torch.complex128, generator=g)
    A = Operator(torch.tensor([[[[1.0, 0, 1, 1, 0, 1]]]], dtype=torch.float64), maps)
    x, y = (torch.randn(2, n, 8, 6, dtype=torch.complex128, generator=g) for n in (3, 4))
    assert torch.allclose((A.forward(x).conj() * y).sum(), (x.conj() * A.adjoint(y)).sum())
    assert torch.allclose(A.normal(x), A.adjoint(A.forward(x)))


def test_two_sets_for_an_object_larger_than_the_field_of_view(tmp_path: Path) -> None:
    """Where it folds over itself, one set of maps contradicts the data, and two do not."""
    wide = coil_images(1, 4, (64, 80))[0]
    folded = wide[..., 20:60].copy()
    folded[..., -20:] += wide[..., :20]
    folded[..., :20] += wide[..., 60:]
    write_scan(KSpaceScan(writers.centred_fft(folded)[None].astype(np.complex64), (64, 40)), tmp_path / "scan.mrd")
    np.savetxt(tmp_path / "mask.txt", half(40, 24))

    def sense(sets: int) -> tuple[float, float]:
        settings = {"mask": tmp_path / "mask.txt", "maps": "espirit", "map_sets": sets}
        volume = reconstruct(tmp_path / "scan.mrd", "sense", tmp_path / "out.h5", **settings).volumes[0]
        return volume.scores["psnr"], volume.consistency.residual

    (one, left_one), (two, left_two) = sense(1), sense(2)
    assert two > one + 7  # the first of two sets alone would be 6 dB better
    assert left_two < 0.7 * left_one


def test_espirit_of_few_centre_columns_says_that_it_is_poor(tmp_path: Path) -> None:
    """The line is there where the low-resolution maps are much better, and not where both are good."""
    images = coil_images(2, 8, (96, 88))
    write_scan(KSpaceScan(writers.centred_fft(images).astype(np.complex64), (96, 88)), tmp_path / "scan.mrd")
    poor = "note: ESPIRiT maps of 8 centre columns have holes, and 12 or more are needed: --maps lowres is better here"
    for centre, worse in ((8, True), (12, False)):
        mask = half(88, centre)
        mask[(88 - centre) // 2 - 1 : (88 + centre) // 2 + 1 : centre + 1] = False  # no column beside the centre
        np.savetxt(tmp_path / "mask.txt", mask)
        psnr = {}
        for maps in ("espirit", "lowres"):
            words = ("--mask", tmp_path / "mask.txt", "--maps", maps, "-o", tmp_path / "out.h5")
            found = call(tmp_path / "scan.mrd", "--run", "tv", *words)
            assert found.exit_code == 0, found.output
            assert found.output.count(poor) == (worse and maps == "espirit")
            psnr[maps] = float(found.output.split("reconstruction: psnr ")[1].split()[0])
        assert (psnr["lowres"] > psnr["espirit"] + 3) == worse


@pytest.mark.parametrize("suffix", [".npy", ".cfl"])
def test_maps_of_a_file(tmp_path: Path, suffix: str) -> None:
    """The true maps give a better image than estimated ones, for every slice and for all slices."""
    maps, images = true_maps(), coil_images(2)
    k = writers.centred_fft(images) * half(40)
    write_scan(KSpaceScan(k.astype(np.complex64), (48, 40)), tmp_path / "scan.mrd")

    def error(**settings: object) -> float:
        reconstruct(tmp_path / "scan.mrd", "sense", tmp_path / "out.h5", strength=1e-4, **settings)
        with h5py.File(tmp_path / "out.h5") as f:
            return float(np.linalg.norm(f["reconstruction"][:] - np.abs(brains(2))) / np.linalg.norm(brains(2)))

    file = tmp_path / f"maps{suffix}"
    if suffix == ".npy":
        np.save(file, maps)
    else:
        write_cfl(
            np.broadcast_to(maps.transpose(1, 2, 0)[..., None], (48, 40, 6, 2)).reshape(48, 40, 1, 6, *[1] * 9, 2), file
        )
    assert error(maps=file) < 0.05
    assert error(maps=file) < error()


@pytest.mark.parametrize("factor", [1e5, 0.01])
def test_the_scale_of_maps_of_a_file_does_not_matter(tmp_path: Path, factor: float) -> None:
    """The image stays in the units of the data, and so do its scores."""
    k = writers.centred_fft(coil_images(2)).astype(np.complex64)
    write_scan(KSpaceScan(k, (48, 40)), tmp_path / "scan.mrd")

    def run(maps: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        np.save(tmp_path / "maps.npy", maps)
        settings = {"maps": tmp_path / "maps.npy", "acceleration": 3}
        found = reconstruct(tmp_path / "scan.mrd", "tv", tmp_path / "out.h5", **settings)
        with h5py.File(tmp_path / "out.h5") as f:
            return f["reconstruction"][:], found.volumes[0].scores

    image, scores = run(true_maps())
    scaled, scaled_scores = run(np.complex64(factor) * true_maps())
    np.testing.assert_allclose(scaled, image, rtol=1e-3, atol=1e-4 * image.max())
    assert scaled_scores == pytest.approx(scores, rel=1e-3)


def test_virtual_coils(tmp_path: Path) -> None:
    images = coil_images(1, 6)
    mixing = np.linalg.qr(np.random.default_rng(0).standard_normal((12, 6)))[0]
    many = np.einsum("pq,nqhw->nphw", mixing, images)  # twelve coils that hold six
    k = (writers.centred_fft(many) * half(40)).astype(np.complex64)
    virtual = torch.einsum("pq,nqhw->nphw", compression_matrix(torch.from_numpy(k[0]), 6), torch.from_numpy(k))
    np.testing.assert_allclose(rss(virtual)[0, 0], rss(torch.from_numpy(k))[0, 0], atol=1e-4)
    write_scan(KSpaceScan(k, (48, 40)), tmp_path / "scan.mrd")
    volumes = []
    for compress in (None, 6):
        reconstruct(tmp_path / "scan.mrd", "sense", tmp_path / "out.h5", compress=compress)
        with h5py.File(tmp_path / "out.h5") as f:
            volumes.append(f["reconstruction"][:])
    np.testing.assert_allclose(volumes[0], volumes[1], atol=1e-3 * volumes[0].max())


def test_a_trained_run_takes_other_maps(tmp_path: Path) -> None:
    """Zero weights give the combined zero-filled image: with the true maps, of the true phase."""
    k = (writers.centred_fft(coil_images(1)) * columns(40)).astype(np.complex64)
    write_scan(KSpaceScan(k, (48, 40)), tmp_path / "scan.mrd")
    np.save(tmp_path / "maps.npy", true_maps())
    run = make_run(tmp_path / "run", complex=True)
    reconstruct(tmp_path / "scan.mrd", run, tmp_path / "out.npy", maps=tmp_path / "maps.npy", complex=True)
    combined = Operator(torch.from_numpy(columns(40)), torch.from_numpy(true_maps())[None]).adjoint(torch.from_numpy(k))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), combined[:, 0], atol=1e-4)


@pytest.mark.usefixtures("no_picture")
def test_maps_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    k = (writers.centred_fft(coil_images(1)) * columns(40)).astype(np.complex64)
    write_scan(KSpaceScan(k, (48, 40)), tmp_path / "scan.mrd")
    (tmp_path / "maps.hdr").write_text("# Dimensions\n48 40 1 6 40\n")
    np.ones(48 * 40 * 6 * 40, np.complex64).tofile(tmp_path / "maps.cfl")
    monkeypatch.setenv("CHASM_MAX_GIB", "0.002")
    found = call(tmp_path / "scan.mrd", "--run", "tv", "--maps", tmp_path / "maps.cfl", "-o", tmp_path / "out.h5")
    assert found.exit_code == 3
    assert "GiB, above the limit of 0.002 GiB" in found.output


def test_wrong_choices_are_one_line(tmp_path: Path) -> None:
    k = (writers.centred_fft(coil_images(1)) * columns(40)).astype(np.complex64)
    write_scan(KSpaceScan(k, (48, 40)), tmp_path / "scan.mrd")
    np.save(tmp_path / "one.npy", brains(1))
    np.save(tmp_path / "maps.npy", true_maps()[:3])
    np.save(tmp_path / "real.npy", np.ones((6, 48, 40)))
    np.save(tmp_path / "huge.npy", np.full((6, 48, 40), 1e300 + 0j))
    (tmp_path / "sparse.hdr").write_text("# Dimensions\n48 40 1 6 100000\n")
    (tmp_path / "sparse.cfl").write_bytes(b"")
    os.truncate(tmp_path / "sparse.cfl", 8 * 48 * 40 * 6 * 100000)
    run = make_run(tmp_path / "run", complex=True)
    for words, expected in (
        (("scan.mrd", "--run", "tv", "--maps", "esprit"), "did you mean 'espirit'"),
        (("scan.mrd", "--run", "tv", "--map-sets", 2), "--map-sets needs --maps espirit"),
        (
            ("scan.mrd", "--run", "tv", "--maps", "espirit"),
            "ESPIRiT needs 6 or more centre columns, fully sampled: got",
        ),
        (("scan.mrd", "--run", run, "--maps", "espirit", "--map-sets", 2), "a trained run takes one set of maps"),
        (("scan.mrd", "--run", "tv", "--maps", tmp_path / "maps.npy"), "3 coils of 48 x 40, and the data has 6"),
        (("scan.mrd", "--run", "tv", "--maps", tmp_path / "real.npy"), "expected complex numbers (coils, H, W)"),
        (("scan.mrd", "--run", "tv", "--maps", tmp_path / "none.npy"), "none.npy: no such file"),
        (("scan.mrd", "--run", "tv", "--maps", tmp_path / "huge.npy"), "values are beyond float32"),
        (("scan.mrd", "--run", "tv", "--maps", tmp_path / "sparse.cfl"), "and 0 bytes of it are on disk"),
        (("one.npy", "--run", "tv", "--compress", 2), "need several coils, and this data has one"),
    ):
        found = call(tmp_path / words[0], *words[1:], "-o", tmp_path / "out.h5")
        assert found.exit_code == 3, found.output
        assert expected in found.output
        assert len(found.output.strip().splitlines()) == 1


@torch.no_grad()
def test_a_run_with_learned_sensitivities_is_measured_by_them(tmp_path: Path) -> None:
    """How far its image is from the measurement is told by the sensitivities that the image belongs to."""
    options = {"cascades": 2, "width": 2, "depth": 1, "levels": [], "sensitivities": "learned"}
    recipe = {
        "task": {"options": {"complex": True}},
        "backbone": {"name": "varnet", "options": options},
        "train": {"steps": 1},
    }
    config = load_recipe(recipe)
    model, run = build_model(config, config.task.create(), (6, 48, 40)).eval(), tmp_path / "run"
    assert isinstance(model, VarNet)
    save_weights(run / "weights.safetensors", model.state_dict(), TrainingImages((6, 48, 40)))
    (run / "config.yaml").write_text(dump(config))
    mask = half(40)
    k = (writers.centred_fft(coil_images()) * mask).astype(np.complex64)
    write_scan(KSpaceScan(k, (48, 40), mask=mask), tmp_path / "scan.mrd")
    more: dict[str, Any] = {"complex": True, "uncertainty": 2}
    found = reconstruct(tmp_path / "scan.mrd", run, tmp_path / "out.npy", **more).volumes[0].consistency
    image = torch.from_numpy(np.load(tmp_path / "out.npy"))[:, None]
    y, columns_ = torch.from_numpy(k), torch.from_numpy(mask).float()[None, None, None]
    residual = Operator(columns_, model.learned_maps(y, columns_)).forward(image) - y
    assert found.residual == pytest.approx(float(residual.norm() / y.norm()), rel=1e-3)
    with_others = reconstruct(tmp_path / "scan.mrd", run, tmp_path / "out.npy", maps="espirit").volumes[0].consistency
    assert with_others.residual != pytest.approx(found.residual, rel=0.01)
