"""Siemens raw data: lines in their place, noise scans of the measurement or of an adjustment, and refusals."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from twix_writer import measurement, readout, write_twix

from chasm.data import DataError, open_dataset, read_scans, write_scan

RNG = np.random.default_rng(0)
MIXING = RNG.standard_normal((3, 3)) + 1j * RNG.standard_normal((3, 3))


def noise(samples: int, seed: int) -> np.ndarray:
    """Noise (3 coils, samples) that the coils share."""
    rng = np.random.default_rng(seed)
    return MIXING @ (rng.standard_normal((3, samples)) + 1j * rng.standard_normal((3, samples)))


def image_lines(k: np.ndarray, **counters: int) -> list:
    return [readout(k[:, :, i], Lin=i, **counters) for i in range(k.shape[2])]


def kspace(seed: int = 1) -> np.ndarray:
    """(3 coils, 32 samples, 12 lines): nothing but noise, as strong as a noise scan that 100 us long samples have."""
    return noise(32 * 12, seed).reshape(3, 32, 12)


def test_lines_and_geometry(tmp_path: Path) -> None:
    k = kspace().astype(np.complex64)
    (scan,) = read_scans(write_twix(tmp_path / "a.dat", measurement(image_lines(k)))).values()
    np.testing.assert_array_equal(scan.kspace[0], k)
    assert scan.size == (16, 12)
    assert scan.noise is None
    assert scan.noise_level is None
    assert np.linalg.norm(scan.geometry.affine[:3, :3], axis=0) == pytest.approx([10, 10, 4])


@pytest.mark.parametrize("place", ["inside", "AdjCoilSens", "AdjQuietCoilSens"])
def test_a_noise_scan_prewhitens_and_gives_the_noise_of_a_sample(tmp_path: Path, place: str) -> None:
    """Of 130 Hz per pixel, 256 samples take 30 us each, those of an adjustment 5 or 4; those of the image take 10."""
    time = {"inside": 1e6 / 130 / 256, "AdjCoilSens": 5.0, "AdjQuietCoilSens": 4.0}[place]
    lines = image_lines(np.sqrt(time / 10 / 0.793) * kspace())
    scans = [readout(noise(256, seed), "NOISEADJSCAN") for seed in range(10, 30)]
    if place == "inside":
        file = write_twix(tmp_path / "a.dat", measurement([*scans, *lines]))
    else:
        file = write_twix(tmp_path / "a.dat", measurement(scans, place), measurement(lines))
    data = open_dataset("kspace", file, split="all")
    raw = data.raw_slice(0)
    found = raw.kspace.flatten(1).numpy()
    measured = np.sqrt(np.square(np.abs(found)).mean())
    assert raw.noise == pytest.approx(measured, rel=0.05)
    covariance = np.abs(np.cov(found)) / measured**2
    np.testing.assert_allclose(covariance, np.eye(3), atol=0.2)
    assert any("prewhitened with 5,120 samples of noise" in note for note in data.scan(data.locate(0)[0]).notes)
    plain = open_dataset("kspace", file, split="all", prewhiten=False).raw_slice(0).kspace.flatten(1).numpy()
    assert np.abs(np.cov(plain) / measured**2 - np.eye(3)).max() > 0.5


def test_coils_are_told_apart_by_their_number(tmp_path: Path) -> None:
    """An adjustment may have more coils than the image, and others first."""
    samples = noise(256, 5).astype(np.complex64)
    adjustment = measurement([readout(samples, "NOISEADJSCAN", coils=[7, 4, 2])], "AdjCoilSens")
    two = [readout(k[:2], Lin=i, coils=[2, 7]) for i, k in enumerate(kspace().transpose(2, 0, 1))]
    (scan,) = read_scans(write_twix(tmp_path / "a.dat", adjustment, measurement(two))).values()
    np.testing.assert_array_equal(scan.noise, samples[[2, 0]])
    other = [readout(k[:2], Lin=i, coils=[2, 9]) for i, k in enumerate(kspace().transpose(2, 0, 1))]
    (scan,) = read_scans(write_twix(tmp_path / "b.dat", adjustment, measurement(other))).values()
    assert scan.noise is None


def test_averages_have_less_noise_and_echoes_of_two_bandwidths_none_that_is_known(tmp_path: Path) -> None:
    scans = [readout(noise(256, 10), "NOISEADJSCAN")]
    (once,) = read_scans(write_twix(tmp_path / "a.dat", measurement(scans + image_lines(kspace())))).values()
    twice = measurement(scans + image_lines(kspace()) + image_lines(kspace(2), Ave=1))
    (found,) = read_scans(write_twix(tmp_path / "b.dat", twice)).values()
    np.testing.assert_allclose(found.kspace[0], (kspace() + kspace(2)) / 2, rtol=1e-5)
    assert found.noise_level == pytest.approx(once.noise_level / np.sqrt(2))
    echoes = scans + image_lines(kspace()) + image_lines(kspace(2), Eco=1)
    protocol = {"sRXSPEC__alDwellTime[1]": 5000}
    found = read_scans(write_twix(tmp_path / "c.dat", measurement(echoes, **protocol)))
    assert list(found) == ["echo1", "echo2"]
    assert all(scan.noise is not None and scan.noise_level is None for scan in found.values())


def test_the_noise_survives_a_conversion(tmp_path: Path) -> None:
    scans = [readout(noise(256, 10), "NOISEADJSCAN")]
    (scan,) = read_scans(write_twix(tmp_path / "a.dat", measurement(scans + image_lines(kspace())))).values()
    write_scan(scan, tmp_path / "a.mrd")
    (found,) = read_scans(tmp_path / "a.mrd").values()
    np.testing.assert_array_equal(found.noise, scan.noise)
    assert found.noise_level == pytest.approx(scan.noise_level, rel=1e-5)
    scan.noise_level = None
    write_scan(scan, tmp_path / "b.mrd")
    (found,) = read_scans(tmp_path / "b.mrd").values()
    assert found.noise_level is None


def test_radial_data_is_refused_in_one_line(tmp_path: Path) -> None:
    file = write_twix(tmp_path / "a.dat", measurement(image_lines(kspace()), sKSpace__ucTrajectory=2))
    with pytest.raises(DataError, match=r"ucTrajectory: 2: only Cartesian data can be read") as e:
        read_scans(file)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("length", "measurement: bytes 10240 to 9223372036854786048 of "),
        ("cut", "measurement: bytes 10240 to "),
        ("header", "header: 4294967295 bytes: no Siemens raw data, or damaged"),
        ("channels", "the file is damaged or not complete"),
        ("stuck", "data: a readout takes bytes "),
        ("index", "header: an index or a word that no protocol of a scanner has"),
        ("word", "header: an index or a word that no protocol of a scanner has"),
    ],
)
def test_lengths_that_lead_nowhere_are_one_line(tmp_path: Path, spoil: str, message: str) -> None:
    """On most of these, twixtools alone takes all memory or never ends."""
    more = {"index": {"sSliceArray__asSlice[4000000000]__dThickness": 1}, "word": {"x" * 10**6: 1}}.get(spoil, {})
    file = write_twix(tmp_path / "a.dat", measurement(image_lines(kspace()), **more))
    data = bytearray(file.read_bytes())
    first = 10240 + struct.unpack_from("<I", data, 10240)[0]  # readout
    if spoil == "length":
        struct.pack_into("<Q", data, 24, 2**63)
    elif spoil == "cut":
        data = data[:-5000]
    elif spoil == "header":
        struct.pack_into("<I", data, 10240, 2**32 - 1)
    elif spoil == "channels":
        struct.pack_into("<HH", data, first + 48, 65535, 65535)
    elif spoil == "stuck":
        struct.pack_into("<I", data, first, 0)  # its length,
        data[first + 40] |= 1 << 5  # which counts for synchronous data
    file.write_bytes(bytes(data))
    with pytest.raises(DataError, match=re.escape(message)) as e:
        read_scans(file)
    assert "\n" not in str(e.value)


def test_an_old_file_with_a_readout_of_length_zero_is_one_line(tmp_path: Path) -> None:
    """Before VD, each channel has a header of its own, so that a readout of no channel has no length."""
    header = struct.pack("<II", 20000, 0).ljust(20000, b"\0")
    (tmp_path / "a.dat").write_bytes(header + bytes(8) + b"\1" + bytes(2000))
    with pytest.raises(DataError, match=r"a readout takes bytes 20000 to 20000"):
        read_scans(tmp_path / "a.dat")
