"""What is known without ground truth: data consistency against the noise, and data unlike the training data."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import brains, call, columns, make_run

from chasm.data import KSpaceScan, open_dataset, write_scan
from chasm.mri import Sampling
from chasm.reconstruct import reconstruct
from chasm.reconstruct.likeness import unlike_lines
from chasm.reconstruct.trust import FROM_EDGE, Consistency, SliceConsistency
from chasm.train.weights import describe_training_data

pytestmark = pytest.mark.usefixtures("no_picture")
SIZE = (64, 64)


def noise(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Complex noise of variance 1."""
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)) / np.sqrt(2)


def write_noisy(file: Path, sigma: float, scan: bool = False) -> None:
    """Two slices of one coil with noise of this strength in k-space, and a noise scan."""
    rng = np.random.default_rng(0)
    images = brains(2, SIZE) / np.abs(brains(2, SIZE)).max()
    k = writers.centred_fft(images)[:, None] + sigma * noise(rng, 2, 1, *SIZE)
    k = (k * columns(SIZE[1])).astype(np.complex64)
    samples = (sigma * noise(rng, 1, 20_000)).astype(np.complex64) if scan else None
    level = sigma if scan else None
    write_scan(KSpaceScan(k, SIZE, noise=samples, mask=columns(SIZE[1]).astype(bool), noise_level=level), file)


@pytest.mark.parametrize("scan", [False, True])
def test_the_noise_level_is_known(tmp_path: Path, scan: bool) -> None:
    for sigma in (0.05, 0.2):
        write_noisy(tmp_path / "scan.mrd", sigma, scan)
        found = reconstruct(tmp_path / "scan.mrd", "tv", tmp_path / "out.h5").volumes[0].consistency
        assert found.noise == pytest.approx(sigma, rel=0.03 if scan else 0.3)
        assert found.noise_from == ("the noise scan" if scan else "the edge of k-space")


@pytest.mark.parametrize("options", [{}, {"acceleration": 2}])
@pytest.mark.parametrize("rows", [SIZE[0], 2 * SIZE[0]])  # the second is an oversampled readout
def test_zeros_around_the_measured_samples_are_not_noise(tmp_path: Path, rows: int, options: dict[str, int]) -> None:
    rng, sigma, images = np.random.default_rng(0), 0.1, np.zeros((1, rows, SIZE[1]), complex)
    images[:, (rows - SIZE[0]) // 2 :][:, : SIZE[0]] = brains(1, SIZE) / np.abs(brains(1, SIZE)).max()
    k = writers.centred_fft(images)[:, None] + sigma * noise(rng, 1, 1, rows, SIZE[1])
    k[..., :8] = k[..., -8:] = 0
    if rows > SIZE[0]:
        k[..., :16, :] = k[..., -16:, :] = 0
    write_scan(KSpaceScan(k.astype(np.complex64), SIZE), tmp_path / "scan.mrd")
    found = reconstruct(tmp_path / "scan.mrd", "tv", tmp_path / "out.h5", **options).volumes[0].consistency
    assert found.noise == pytest.approx(sigma, rel=0.3)


def test_the_residual_says_what_the_image_does_not_explain(tmp_path: Path) -> None:
    """Zero-filling follows the noise exactly, light smoothing follows most of it, strong smoothing contradicts it."""
    write_noisy(tmp_path / "scan.mrd", 0.1, scan=True)

    def residual(run: str, **settings: float) -> float:
        return reconstruct(tmp_path / "scan.mrd", run, tmp_path / "out.h5", **settings).volumes[0].consistency

    assert residual("zero-filled").against_noise < 1e-3
    light, strong = residual("tv").against_noise, residual("tv", strength=1.0).against_noise
    assert 0.05 < light < 1.2
    assert strong > 1.5
    found = residual("tv", strength=1.0)
    assert len(found.slices) == 2
    assert found.against_noise == pytest.approx(np.sqrt(np.mean(np.square(found.slices))), rel=1e-6)


def test_it_is_printed_and_recorded(tmp_path: Path) -> None:
    write_noisy(tmp_path / "scan.mrd", 0.1, scan=True)
    found = call(tmp_path / "scan.mrd", "--run", "tv", "-o", tmp_path / "out.h5")
    (line,) = (line for line in found.output.splitlines() if "data consistency" in line)
    assert " x the noise, which is 0.1 (the noise scan), and " in line
    assert "largest in slice" in line
    record = json.loads((tmp_path / "out.json").read_text())["data consistency"]
    assert record["noise_from"] == "the noise scan"
    assert len(record["slices"]) == 2


def test_full_data_that_is_undersampled_keeps_its_noise_scan(tmp_path: Path) -> None:
    rng, sigma = np.random.default_rng(0), 0.1
    k = writers.centred_fft(brains(1, SIZE) / np.abs(brains(1, SIZE)).max())[:, None] + sigma * noise(rng, 1, 1, *SIZE)
    samples = (sigma * noise(rng, 1, 20_000)).astype(np.complex64)
    write_scan(KSpaceScan(k.astype(np.complex64), SIZE, noise=samples, noise_level=sigma), tmp_path / "scan.mrd")
    run = make_run(tmp_path / "run", SIZE[0], complex=True)
    found = call(tmp_path / "scan.mrd", "--run", run, "-o", tmp_path / "out.h5")
    assert "x the noise, which is 0.1 (the noise scan), and " in found.output
    found = call(tmp_path / "scan.mrd", "--run", "zero-filled", "-o", tmp_path / "out.h5")
    assert f"sampling: as measured: all {SIZE[1]} columns\n" in found.output


def test_a_trained_run_reports_it_too(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", np.abs(brains(2, SIZE)))
    run = make_run(tmp_path / "run")
    found = reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.h5").volumes[0].consistency
    assert found.residual < 1e-5  # zero weights give the zero-filled image
    np.save(tmp_path / "blank.npy", np.zeros((1, *SIZE)))
    found = call(tmp_path / "blank.npy", "--run", run, "-o", tmp_path / "out.h5")
    assert "all samples are zero, so nothing was measured" in found.output
    assert str(Consistency.of([SliceConsistency(1.0, 4.0, 0.0, FROM_EDGE)])) == (
        "residual 0.25 of the signal (the noise is unknown from the edge of k-space)"
    )


def test_data_unlike_the_training_data_is_said_in_one_line(tmp_path: Path) -> None:
    like = brains(1, SIZE)
    usual = float(np.abs(like).mean() / np.abs(like).max())
    facts = {"shape": [1, *SIZE], "complex": True, "brightness": [usual / 2, 2 * usual]}
    run = make_run(tmp_path / "run", SIZE[0], training_data=facts, complex=True)

    def notes(image: np.ndarray, *words: object) -> list[str]:
        np.save(tmp_path / "scan.npy", image)
        found = call(tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.h5", *words)
        assert found.exit_code == 0, found.output
        return [line for line in found.output.splitlines() if "unlike the training data" in line]

    assert notes(like) == []
    assert notes(1000 * like) == []  # every slice is scaled
    (line,) = notes(np.sqrt(np.abs(brains(1, (64, 48)))) + 1j, "--acceleration", 8)
    assert "64 x 48 pixels (trained on 64 x 64), acceleration 8 (trained on 4), a mean of 0." in line
    coils = writers.centred_fft(like[:, None] * np.ones((3, 1, 1))) * columns(64)
    write_scan(KSpaceScan(coils.astype(np.complex64), SIZE), tmp_path / "scan.mrd")
    found = call(tmp_path / "scan.mrd", "--run", run, "-o", tmp_path / "out.h5")
    assert "a worse result: 3 coils (trained on 1)\n" in found.output


MASKS = {
    "the same": (Sampling("equispaced", 8, offset=0), "", ""),
    "moved": (Sampling("equispaced", 8, offset=2), "lines at other columns (trained on one fixed mask)", ""),
    "random": (Sampling("random", 8, seed=1), *["irregular lines (trained on equispaced ones)"] * 2),
    "centre": (Sampling("equispaced", 8, 0.1), *["26 lines in the centre (trained on 10)"] * 2),
    "no centre": (Sampling("equispaced-plain", 8, 0, offset=3), *["0 lines in the centre (trained on 10)"] * 2),
    "acceleration": (Sampling("equispaced", 6, 0.04, offset=0), *["acceleration 5.95 (trained on 8)"] * 2),
}


@pytest.mark.parametrize("name", MASKS)
def test_measured_lines_unlike_those_of_the_training_are_said(name: str, tmp_path: Path) -> None:
    """As `masks: fixed`, which knows one place of the lines, and as `masks: epoch`, which knows all of them."""
    sampling, *expected = MASKS[name]
    size = (32, 256)
    mask = sampling.mask(size[1]).tensor()[0, 0, 0].numpy()
    k = writers.centred_fft(brains(1, size))[:, None] * mask
    write_scan(KSpaceScan(k.astype(np.complex64), size, mask=mask.astype(bool)), tmp_path / "scan.mrd")
    np.save(tmp_path / "full.npy", brains(1, size))
    np.save(tmp_path / "mask.npy", mask)
    for masks, words in zip(("fixed", "epoch"), expected, strict=True):
        own = {"kind": "equispaced", "acceleration": 8}
        run = make_run(tmp_path / masks, size, complex=True, sampling=own, masks=masks)
        for source in (["scan.mrd"], ["full.npy", "--mask", tmp_path / "mask.npy"]):
            found = call(tmp_path / source[0], *source[1:], "--run", run, "-o", tmp_path / "out.h5")
            lines = [line.partition("result: ")[2] for line in found.output.splitlines() if "note: unlike" in line]
            assert lines == [words] * bool(words), found.output


@pytest.mark.parametrize(
    ("kind", "acceleration", "width"),
    [("equispaced", 8, 128), ("equispaced", 5, 64), ("random", 12, 64), ("random", 6, 32)],
)
def test_masks_that_training_draws_are_like_each_other(kind: str, acceleration: float, width: int) -> None:
    """Few lines, of which there may be one or two more; and whose distances may be alike by chance."""
    sampling = Sampling(kind, acceleration)
    for seed in range(50):
        drawn = replace(sampling, seed=(0, seed)).mask(width)
        assert unlike_lines(drawn, sampling.mask(width), False) == []


@pytest.mark.parametrize(
    "facts", [[1], {"shape": [1, 64]}, {"shape": [1, 64, 64], "complex": True, "brightness": ["a", 1]}]
)
def test_facts_that_no_training_wrote_are_one_line(tmp_path: Path, facts: object) -> None:
    run = make_run(tmp_path / "run", SIZE[0], training_data=facts, complex=True)
    np.save(tmp_path / "scan.npy", brains(1, SIZE))
    found = call(tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.h5")
    assert found.exit_code == 3
    assert "weights.safetensors: training_data: expected shape" in found.output
    assert len(found.output.strip().splitlines()) == 1


def test_training_records_what_its_data_is_like() -> None:
    data = open_dataset("embedded", split="train", size=32)
    facts = describe_training_data(data)
    assert facts["shape"] == [1, 32, 32]
    assert facts["complex"] is data[0].image.is_complex()
    low, high = facts["brightness"]
    assert 0 < low < high < 1
