"""Every reader, on files with damage anywhere: it reads them, or says in one line what is wrong."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from mutations import damaged, examples, one_line

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import twix_writer
import writers

from chasm.data import KSpaceScan, open_dataset, write_scan
from chasm.data.check import check

Seed = tuple[str, dict[str, Any]]  # name of the dataset, and its options
SEEDS: dict[str, Callable[[Path], Seed]] = {}


def seed(make: Callable[[Path], Seed]) -> Callable[[Path], Seed]:
    SEEDS[make.__name__] = make
    return make


def scan(slices: int = 2) -> KSpaceScan:
    images = writers.blob(np.random.default_rng(0), slices, 2, 12, 10)
    return KSpaceScan(writers.centred_fft(images).astype(np.complex64), (12, 10))


@seed
def cc359_npy(root: Path) -> Seed:
    writers.write_cc359(root / "Train" / "a.npy", slices=66, size=4)
    return "cc359", {}


@seed
def cc359_h5(root: Path) -> Seed:
    writers.write_cc359_multi(root / "Train" / "a.h5", coils=2, size=(4, 6))
    return "cc359", {}


@seed
def fastmri(root: Path) -> Seed:
    writers.write_fastmri(root / "singlecoil_train" / "a.h5", slices=2, size=(8, 6), recon=4)
    return "fastmri", {}


@seed
def brats(root: Path) -> Seed:
    writers.write_brats(root, "c1")
    return "brats", {}


@seed
def proxy(root: Path) -> Seed:
    writers.write_proxy(root)
    return "proxy", {"part": "brain_siat_t2"}


@seed
def dicom(root: Path) -> Seed:
    place = {"ImageOrientationPatient": [1, 0, 0, 0, 1, 0], "PixelSpacing": [0.5, 0.7], "SliceThickness": 2.5}
    for i in range(2):
        pixels = np.arange(48).reshape(8, 6) + i
        writers.write_dicom(root / f"{i}.dcm", pixels, i, ImagePositionPatient=[0, 0, 2.5 * i], **place)
    return "folder", {}


@seed
def nifti(root: Path) -> Seed:
    volume = writers.blob(np.random.default_rng(0), 8, 6, 3).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), root / "a.nii")
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), root / "b.nii.gz")
    return "folder", {}


@seed
def arrays(root: Path) -> Seed:
    values = np.random.default_rng(0).random((3, 8, 6), dtype=np.float32)
    np.save(root / "a.npy", values)
    np.savez(root / "b.npz", values)
    np.savez_compressed(root / "c.npz", values)
    return "folder", {}


@seed
def pictures(root: Path) -> Seed:
    for name, mode in (("a.png", "L"), ("b.jpg", "L"), ("c.tif", "L"), ("d.bmp", "L"), ("e.webp", "RGB")):
        writers.write_photo(root / name, (8, 6), mode=mode)
    tifffile.imwrite(root / "f.tif", np.ones((2, 8, 6), np.uint16), compression="zlib")
    return "folder", {}


@seed
def photos(root: Path) -> Seed:
    writers.write_photo(root / "a.png", (40, 50))
    writers.write_photo(root / "b.jpg", (40, 50))
    return "images", {}


@seed
def kspace_ismrmrd(root: Path) -> Seed:
    write_scan(scan(1), root / "a.mrd")
    return "kspace", {}


@seed
def kspace_bart(root: Path) -> Seed:
    write_scan(scan(), root / "a.cfl")
    return "kspace", {}


@seed
def kspace_fastmri(root: Path) -> Seed:
    write_scan(scan(), root / "a.h5")
    return "kspace", {}


@seed
def kspace_arrays(root: Path) -> Seed:
    write_scan(scan(), root / "a.npy")
    write_scan(scan(), root / "b.npz")
    return "kspace", {"axes": "SCHW"}


@seed
def kspace_twix(root: Path) -> Seed:
    noise, *lines = writers.blob(np.random.default_rng(0), 13, 2, 32)
    readouts = [twix_writer.readout(noise, "NOISEADJSCAN")]
    readouts += [twix_writer.readout(line, Lin=i) for i, line in enumerate(lines)]
    twix_writer.write_twix(root / "a.dat", twix_writer.measurement(readouts))
    return "kspace", {}


def read(kind: str, root: Path, options: dict[str, Any]) -> None:
    data = open_dataset(kind, root, split="all", **options)
    for i in range(min(len(data), 4)):
        assert data[i].image.isfinite().all()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seed, Path]]:
    found = {}
    for name, make in SEEDS.items():
        root = tmp_path_factory.mktemp(name)
        found[name] = (make(root), root)
    return found


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_are_sound(name: str, sound: dict[str, tuple[Seed, Path]]) -> None:
    (kind, options), root = sound[name]
    read(kind, root, options)


@pytest.mark.parametrize("name", SEEDS)
def test_damage_is_one_line(name: str, sound: dict[str, tuple[Seed, Path]]) -> None:
    (kind, options), root = sound[name]
    files = {file: file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}

    @examples(12)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(sorted(files)))
        try:
            file.write_bytes(data.draw(damaged(files[file])))
            with one_line():
                read(kind, root, options)
            with one_line():
                check(root, kind, **options)
        finally:
            file.write_bytes(files[file])

    fuzz()
