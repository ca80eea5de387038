"""`chasm reconstruct` on files in the formats of the field, with models whose output is known."""

import json
import re
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent / "data"))
import writers

from chasm.cli.reconstruct import reconstruct as command
from chasm.data.embedded import Embedded
from chasm.data.folder import Folder
from chasm.mri import create_mask
from chasm.reconstruct import PICTURED, UNKNOWN, _name, _Work, reconstruct, reconstruct_each
from chasm.scans import looks_like_kspace
from chasm.train.config import dump, load_recipe
from chasm.train.run import build_model, load_run
from chasm.volumes import names


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file in its place: drawing takes longer than all the rest."""
    monkeypatch.setattr("chasm.reconstruct.side_by_side", lambda path, *_: path.touch())


def make_run(folder: Path, size: int = 16, weights: str = "zero", **task: Any) -> Path:
    """A run folder without training. Zero weights leave y = x: the reconstruction is then the zero-filled image."""
    options = {"sampling": {"kind": "equispaced", "acceleration": 4}, **task}
    recipe = {
        "task": {"options": options},
        "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
        "mixer": {"name": "chasm"},
        "train": {"steps": 1},
    }
    config = load_recipe(recipe)
    model = build_model(config, config.task.create(), (1, size, size))
    state = {k: torch.zeros_like(v) if weights == "zero" else v for k, v in model.state_dict().items()}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config))
    (folder / "environment.json").write_text(json.dumps({"image_shape": [1, size, size]}))
    save_file(state, folder / "weights.safetensors")
    return folder


def zero_filled(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Magnitude of (.., H, W) after its k-space lost the unmeasured columns."""
    k = writers.centred_fft(image) * mask
    back = np.fft.ifft2(np.fft.ifftshift(k, axes=(-2, -1)), norm="ortho")
    return np.abs(np.fft.fftshift(back, axes=(-2, -1)))


def as_trained(images: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What a run of zero weights makes of magnitudes: each slice to [0, 1], undersampled, and back."""
    low, high = (f(images, axis=(-2, -1), keepdims=True) for f in (np.min, np.max))
    return zero_filled((images - low) / (high - low), mask) * (high - low) + low


def columns(n: int) -> np.ndarray:
    return create_mask("equispaced", n, 4).tensor()[0, 0, 0].numpy()


def test_fastmri_with_its_reconstruction(tmp_path: Path) -> None:
    file = tmp_path / "file1.h5"
    writers.write_fastmri(file, slices=5, size=(24, 20), recon=16)
    outcome = reconstruct(file, make_run(tmp_path / "run"), tmp_path / "out.h5")
    with h5py.File(file) as f, h5py.File(tmp_path / "out.h5") as g:
        target, found = f["reconstruction_rss"][()], g["reconstruction"][()]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, as_trained(target, columns(16)), atol=1e-5)
    (volume,) = outcome.volumes
    peak, low = (f(target, axis=(1, 2), keepdims=True) for f in (np.max, np.min))
    a, b = ((x - low) / (peak - low) for x in (found, target))
    psnr = (10 * np.log10(1 / ((a.clip(0, 1) - b) ** 2).mean((1, 2)))).mean()
    assert volume.scores["psnr"] == pytest.approx(psnr, abs=1e-3)
    assert volume.scores == pytest.approx(volume.reference)  # zero weights add nothing
    assert outcome.protocol == "hifi"
    with Image.open(volume.picture) as picture:
        assert picture.width > 3 * picture.height / 4
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["scores"]["psnr"] == volume.scores["psnr"]
    assert "4 of 16 columns" in record["sampling"]


@pytest.mark.usefixtures("no_picture")
def test_a_trained_model_changes_the_image(tmp_path: Path) -> None:
    file = tmp_path / "file1.h5"
    writers.write_fastmri(file, slices=3, size=(24, 20), recon=16)
    outcome = reconstruct(file, make_run(tmp_path / "run", weights="random"), tmp_path / "out.h5")
    (volume,) = outcome.volumes
    assert volume.scores["psnr"] != pytest.approx(volume.reference["psnr"], abs=1e-3)


@pytest.mark.parametrize("coils", [None, 3])
def test_fastmri_measured_with_a_mask(tmp_path: Path, coils: int | None) -> None:
    file = tmp_path / "file2.h5"
    images = writers.write_fastmri(file, slices=4, size=(24, 20), recon=16, coils=coils, test=True)
    if coils:  # a calibration centre, for the coil sensitivities
        with h5py.File(file, "a") as f:
            mask = np.ones(20, dtype=np.uint8)
            mask[[1, 3, 17]] = 0
            f["mask"][...] = mask
            f["kspace"][...] = writers.centred_fft(images) * mask
    outcome = reconstruct(file, make_run(tmp_path / "run"), tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as g:
        found = g["reconstruction"][()]
    assert found.shape == (4, 16, 16)
    (volume,) = outcome.volumes
    assert volume.scores == {}
    assert "as measured" in outcome.sampling
    assert any("phase" in note for note in outcome.notes)
    if coils is None:
        mask = (np.arange(20) % 2 == 0).astype(float)
        np.testing.assert_allclose(found, zero_filled(images, mask)[:, 4:20, 2:18], rtol=1e-4, atol=1e-5)
    else:  # nearly all lines: close to the root-sum-of-squares
        rss = np.sqrt((np.abs(images[..., 4:20, 2:18]) ** 2).sum(1))
        assert np.abs(found - rss).mean() < 0.15 * rss.mean()


@pytest.mark.usefixtures("no_picture")
def test_complex_run_takes_the_phase(tmp_path: Path) -> None:
    file = tmp_path / "file3.h5"
    images = writers.write_fastmri(file, slices=3, size=(16, 16), recon=16)
    reconstruct(file, make_run(tmp_path / "run", complex=True), tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as g:
        np.testing.assert_allclose(g["reconstruction"][()], zero_filled(images, columns(16)), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("no_picture")
def test_cc359_single_and_multi_channel(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    images = writers.write_cc359(tmp_path / "e1.npy", slices=4, size=16)
    reconstruct(tmp_path / "e1.npy", run, tmp_path / "one.h5")
    with h5py.File(tmp_path / "one.h5") as g:
        scale = 16  # the files hold an unnormalised transform, the reader an orthonormal one
        np.testing.assert_allclose(
            g["reconstruction"][()], scale * as_trained(images, columns(16)), rtol=1e-3, atol=1e-3
        )
    coils = writers.write_cc359_multi(tmp_path / "e2.h5", slices=3, coils=2, size=(16, 12))
    outcome = reconstruct(tmp_path / "e2.h5", run, tmp_path / "two.h5")
    assert outcome.volumes[0].slices == len(coils) == 3
    assert outcome.volumes[0].scores["psnr"] > 0


@pytest.mark.usefixtures("no_picture")
def test_magnitude_folder_with_a_mask_to_nifti(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    volumes = {name: writers.blob(rng, 3, 16, 20).astype(np.float32) for name in ("a", "b")}
    (tmp_path / "images").mkdir()
    for name, volume in volumes.items():
        np.save(tmp_path / "images" / f"{name}.npy", volume)
    mask = np.ones(20)
    mask[[0, 3, 4, 15, 18]] = 0
    np.savetxt(tmp_path / "mask.txt", mask)
    outcome = reconstruct(
        tmp_path / "images", make_run(tmp_path / "run"), tmp_path / "out.nii.gz", mask=tmp_path / "mask.txt"
    )
    assert [v.files[0].name for v in outcome.volumes] == ["out-a.nii.gz", "out-b.nii.gz"]
    assert "15 of 20 columns" in outcome.sampling
    for volume, wanted in zip(outcome.volumes, volumes.values(), strict=True):
        assert nibabel.load(volume.files[0]).shape == (20, 16, 3)
        back = Folder(volume.files[0], "all")
        found = np.stack([back[i].image[0].numpy() for i in range(3)])
        np.testing.assert_allclose(found, as_trained(wanted, mask), atol=1e-5)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_slices_in_a_folder_are_one_volume(tmp_path: Path, suffix: str) -> None:
    """In the order of their numbers; an array beside them is a case of its own."""
    volume = (180 * writers.blob(np.random.default_rng(0), 11, 16, 16)).astype(np.uint8)
    (tmp_path / "scan").mkdir()
    for i, image in enumerate(volume):
        Image.fromarray(image).save(tmp_path / "scan" / f"slice{i}.{suffix}")  # slice10 comes last
    run = make_run(tmp_path / "run")
    (made,) = reconstruct(tmp_path / "scan", run, tmp_path / "out.h5").volumes
    assert (made.case, made.slices, made.files) == ("scan", 11, [tmp_path / "out.h5"])
    with h5py.File(tmp_path / "out.h5") as f:
        np.testing.assert_allclose(f["reconstruction"][()], as_trained(volume, columns(16)), atol=1e-3)
    np.save(tmp_path / "scan" / "other.npy", volume[:2].astype(np.float32))
    outcome = reconstruct(tmp_path / "scan", run, tmp_path / "both.h5")
    assert {v.case: v.slices for v in outcome.volumes} == {"scan": 11, "other.npy": 2}


@pytest.mark.usefixtures("no_picture")
def test_png(tmp_path: Path) -> None:
    """A file for each slice, all in one scale: a slice of half the brightness is half as bright."""
    volume = writers.blob(np.random.default_rng(0), 11, 16, 16) * np.linspace(1, 0.1, 11)[:, None, None]
    np.save(tmp_path / "scan.npy", volume)
    (made,) = reconstruct(tmp_path / "scan.npy", make_run(tmp_path / "run"), tmp_path / "out.png").volumes
    assert made.files == sorted(tmp_path.glob("out-*.png"))
    assert [f.name for f in made.files[::10]] == ["out-00.png", "out-10.png"]
    wanted = as_trained(volume, columns(16))
    for file, slice_ in zip(made.files, wanted, strict=True):
        with Image.open(file) as image:
            pixels = np.asarray(image).astype(float)
        np.testing.assert_allclose(pixels / 65535, slice_ / wanted.max(), atol=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir() if "out" not in p.name) == ["run", "scan.npy"]
    found = call(tmp_path / "scan.npy", "--run", tmp_path / "run", "-o", tmp_path / "out.png", "--device", "cpu")
    assert f"{tmp_path / 'out-00.png'} .. out-10.png: 11 slices" in found.output
    assert "replaced an earlier file" in found.output


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("suffix", [".h5", ".nii", ".nii.gz", ".png"])
def test_slices_are_let_go_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """At no time more than the few that the picture needs, and the one at hand, are in memory."""
    made: list[Any] = []
    alive: list[int] = []
    original = _Work.result

    def tracked(self: _Work, row: int, meters: Any) -> Any:
        result = original(self, row, meters)
        made.append(weakref.ref(result.image))
        alive.append(sum(image() is not None for image in made))
        return result

    monkeypatch.setattr(_Work, "result", tracked)
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 20, 16, 16).astype(np.float32))
    reconstruct(tmp_path / "scan.npy", make_run(tmp_path / "run"), tmp_path / f"out{suffix}")
    assert len(alive) == 20
    assert max(alive) <= PICTURED + 2


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    volume = writers.blob(np.random.default_rng(0), 4, 16, 16)
    volume[2, 5, 5] = np.nan
    np.save(tmp_path / "scan.npy", volume)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"scan.npy: image 2: 1 of 256 values are NaN"):
        reconstruct(tmp_path / "scan.npy", make_run(tmp_path / "run"), tmp_path / "out" / "x.h5")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("way", ["same", "hard link", "symbolic link", "picture", "record", "slice", "mask", "run"])
def test_an_input_is_never_written_over(tmp_path: Path, way: str) -> None:
    run, source, mask = make_run(tmp_path / "run"), tmp_path / "in.h5", None
    writers.write_fastmri(source, slices=2, size=(16, 16), recon=16)
    out, kept = source, source
    if way == "hard link":
        out = tmp_path / "other.h5"
        out.hardlink_to(source)
    elif way == "symbolic link":
        (tmp_path / "elsewhere").symlink_to(tmp_path)
        out = tmp_path / "elsewhere" / "in.h5"
    elif way in ("picture", "slice"):
        source = kept = tmp_path / ("out.side-by-side.png" if way == "picture" else "images/out-0.png")
        source.parent.mkdir(exist_ok=True)
        Image.fromarray((255 * writers.blob(np.random.default_rng(0), 16, 16) / 1.3).astype(np.uint8)).save(source)
        out = tmp_path / "out.h5"
        if way == "slice":
            np.save(tmp_path / "images" / "0.npy", writers.blob(np.random.default_rng(0), 1, 16, 16))
            source, out = tmp_path / "images", tmp_path / "images" / "out.png"
    elif way == "record":  # a text file that came with the scan, not a record of an earlier reconstruction
        kept = tmp_path / "in.json"
        kept.write_text('{"EchoTime": 0.1}')
        out = tmp_path / "in.nii.gz"
    elif way == "mask":
        kept = mask = tmp_path / "mask.json"
        np.savetxt(mask, np.ones(16))
        out = tmp_path / "mask.h5"
    elif way == "run":
        kept, out = run / "environment.json", run / "environment.h5"
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    with pytest.raises(ValueError, match=rf"{kept.name if way != 'hard link' else 'other.h5'}: is .*--out"):
        reconstruct(source, run, out, mask=mask)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before


@pytest.mark.usefixtures("no_picture")
def test_an_earlier_reconstruction_is_replaced(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    run = make_run(tmp_path / "run")
    told = [reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.h5").volumes[0].replaced for _ in range(2)]
    assert told == [False, True]


NAMES = (
    "scan.001.npy",
    "scan.002.npy",
    "scan_001_npy/x.npy",
    "a/b/x.npy",
    "a_b/x.npy",
    "o.npy",
    "o-0.npy",
    "A.npy",
)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("suffix", [".h5", ".png"])
def test_every_case_has_files_of_its_own(tmp_path: Path, suffix: str) -> None:
    volumes = {}
    for i, name in enumerate(NAMES):
        file = tmp_path / "images" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        n = 2 if name == "o.npy" else 1  # as PNG: o-0 and o-1
        volumes[name.removesuffix("/x.npy")] = (i + 1) * writers.blob(np.random.default_rng(i), n, 16, 16)
        np.save(file, volumes[name.removesuffix("/x.npy")])
    outcome = reconstruct(tmp_path / "images", make_run(tmp_path / "run"), tmp_path / f"out{suffix}")
    stems = {v.case: v.picture.name.removesuffix(".side-by-side.png") for v in outcome.volumes}
    assert len({stem.lower() for stem in stems.values()}) == len(NAMES)
    written = [f.name for v in outcome.volumes for f in (*v.files, v.picture)] + [f"{s}.json" for s in stems.values()]
    assert sorted(written) == sorted(f.name for f in tmp_path.glob("out*"))
    assert stems["A.npy"] == "out-A"
    assert stems["scan_001_npy"] == "out-scan_001_npy"  # a name of its own is kept
    assert stems["scan.001.npy"] == "out-scan_001_npy-2"
    assert stems["scan.002.npy"] == "out-scan_002_npy"
    assert {stems["a/b"], stems["a_b"]} == {"out-a_b", "out-a_b-2"}
    if suffix == ".h5":
        assert stems["o.npy"] == "out-o"
        for v in outcome.volumes:
            with h5py.File(v.files[0]) as f:
                np.testing.assert_allclose(f["reconstruction"][()], as_trained(volumes[v.case], columns(16)), atol=1e-4)


@pytest.mark.usefixtures("no_picture")
def test_a_default_name_keeps_its_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    for name in ("scan.001.npy", "scan.002.npy"):
        np.save(name, writers.blob(np.random.default_rng(0), 1, 16, 16))
        reconstruct(name, run)
    assert sorted(p.name for p in tmp_path.glob("*.h5")) == ["scan.001-reconstructed.h5", "scan.002-reconstructed.h5"]


def test_nifti_keeps_the_geometry_of_nifti(tmp_path: Path) -> None:
    """Other axes, voxels and origin than ours: every voxel stays where it was in the scanner."""
    volume = writers.blob(np.random.default_rng(0), 5, 20, 16).astype(np.float32)
    affine = np.array([[0, 0.7, 0, 10], [-0.5, 0, 0, -20], [0, 0, 3, 30], [0, 0, 0, 1.0]])
    nibabel.save(nibabel.Nifti1Image(volume.transpose(2, 1, 0), affine), tmp_path / "in.nii.gz")
    np.savetxt(tmp_path / "all.txt", np.ones(20))  # and a run of zero weights: the volume itself
    outcome = reconstruct(
        tmp_path / "in.nii.gz", make_run(tmp_path / "run"), tmp_path / "out.nii.gz", mask=tmp_path / "all.txt"
    )
    assert not any("voxel" in note for note in outcome.notes)
    found, wanted = nibabel.load(tmp_path / "out.nii.gz"), nibabel.load(tmp_path / "in.nii.gz")
    assert found.header.get_zooms() == pytest.approx((0.7, 0.5, 3))
    assert found.header.get_xyzt_units()[0] == "mm"
    for code in (found.header["sform_code"], found.header["qform_code"]):
        assert code == 1
    np.testing.assert_allclose(found.header.get_qform(), found.affine, atol=1e-4)
    for voxel in ((0, 0, 0), (3, 7, 2), (15, 19, 4)):
        world = nibabel.affines.apply_affine(wanted.affine, voxel)
        here = nibabel.affines.apply_affine(np.linalg.inv(found.affine), world).round().astype(int)
        np.testing.assert_allclose(nibabel.affines.apply_affine(found.affine, here), world, atol=1e-4)
        assert found.get_fdata()[tuple(here)] == pytest.approx(wanted.get_fdata()[voxel], abs=1e-4)


def test_nifti_keeps_the_geometry_of_a_dicom_series(tmp_path: Path) -> None:
    """Oblique, and numbered from above: every voxel is where the scanner put it, in NIfTI's directions."""
    volume = np.random.default_rng(0).integers(1, 4000, (4, 20, 16))
    columns, rows = np.array([0.8, 0.6, 0]), np.array([-0.6, 0.8, 0])
    first, step = np.array([10.0, -20, 30]), np.array([0.1, 0, -3])
    geometry = {"ImageOrientationPatient": [*columns, *rows], "PixelSpacing": [0.5, 0.7], "SeriesInstanceUID": "1.2"}
    for i, pixels in enumerate(volume):
        place = {"ImagePositionPatient": list(first + i * step)}
        writers.write_dicom(tmp_path / "in" / f"{9 - i}.dcm", pixels, number=i + 1, **geometry, **place)
    np.savetxt(tmp_path / "all.txt", np.ones(16))
    outcome = reconstruct(tmp_path / "in", make_run(tmp_path / "run"), tmp_path / "out.nii", mask=tmp_path / "all.txt")
    assert UNKNOWN not in outcome.notes
    found = nibabel.load(next(tmp_path.glob("out*.nii")))
    assert found.header.get_zooms() == pytest.approx((0.7, 0.5, np.linalg.norm(step)))
    for i, row, column in ((0, 0, 0), (3, 19, 15), (2, 5, 11)):
        left_back_up = first + i * step + row * 0.5 * rows + column * 0.7 * columns
        world = left_back_up * [-1, -1, 1]
        here = nibabel.affines.apply_affine(np.linalg.inv(found.affine), world)
        np.testing.assert_allclose(here, here.round(), atol=1e-3)
        assert found.get_fdata()[tuple(here.round().astype(int))] == pytest.approx(volume[i, row, column], rel=1e-4)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("missing", ["a position", "a slice", "all"])
def test_a_dicom_series_without_a_grid_has_no_geometry(tmp_path: Path, missing: str) -> None:
    for i in range(4):
        more = {
            "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
            "PixelSpacing": [1, 1],
            "ImagePositionPatient": [0, 0, i],
            "SeriesInstanceUID": "1.2",
        }
        if missing == "a position" and i == 2:
            del more["ImagePositionPatient"]
        if not (missing == "a slice" and i == 2):
            pixels = np.random.default_rng(i).integers(1, 4000, (16, 16))
            writers.write_dicom(tmp_path / "in" / f"{i}.dcm", pixels, number=i, **({} if missing == "all" else more))
    np.savetxt(tmp_path / "all.txt", np.ones(16))
    run = make_run(tmp_path / "run")
    assert UNKNOWN in reconstruct(tmp_path / "in", run, tmp_path / "out.nii", mask=tmp_path / "all.txt").notes


@pytest.mark.usefixtures("no_picture")
def test_nifti_takes_voxel_sizes_from_the_header(tmp_path: Path) -> None:
    run, notes = make_run(tmp_path / "run"), {}
    for name, fov in (("known", (48, 32, 5)), ("unknown", None), ("zero", (0, 32, 5))):
        writers.write_fastmri(tmp_path / f"{name}.h5", slices=2, size=(24, 20), recon=16, fov=fov)
        notes[name] = reconstruct(tmp_path / f"{name}.h5", run, tmp_path / f"{name}.nii").notes
    assert nibabel.load(tmp_path / "known.nii").header.get_zooms() == pytest.approx((2, 3, 5))  # columns, rows, slices
    assert notes == {"known": [], "unknown": [UNKNOWN], "zero": [UNKNOWN]}
    assert nibabel.load(tmp_path / "unknown.nii").header.get_zooms() == (1, 1, 1)


def brains(n: int, size: tuple[int, int] = (48, 40)) -> np.ndarray:
    """Complex images with a phase."""
    data = Embedded("test", size=size, cases=10, slices=n)
    return np.stack([data[i].image[0].numpy() for i in range(n)])


def test_kspace_is_told_from_images() -> None:
    x = brains(6)
    magnitude = np.abs(x).astype(np.complex64)
    for image in (*x, *magnitude, np.fft.fftshift(x[2])):
        assert not looks_like_kspace(torch.from_numpy(image))
        for k in (writers.centred_fft(image), np.fft.fft2(image), writers.centred_fft(image) * columns(40)):
            assert looks_like_kspace(torch.from_numpy(k.astype(np.complex64)))


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("size", [(48, 40), (45, 37)])
def test_arrays_of_kspace(tmp_path: Path, size: tuple[int, int]) -> None:
    """However k-space was shifted, the images are those it came from; and unless told, a note says what it may be."""
    x, run = brains(3, size), make_run(tmp_path / "run")
    np.save(tmp_path / "images.npy", x)
    told = reconstruct(tmp_path / "images.npy", run, tmp_path / "wanted.h5")
    assert (told.read_as, told.notes) == (f"complex images (3 slices, {size[0]} x {size[1]})", [])
    with h5py.File(tmp_path / "wanted.h5") as f:
        wanted = f["reconstruction"][()]
    centred = np.fft.fftshift(np.fft.fft2(x, norm="ortho"), axes=(-2, -1))
    for name, k in (("both", writers.centred_fft(x)), ("none", np.fft.fft2(x, norm="ortho")), ("k", centred)):
        np.save(tmp_path / f"{name}.npy", k.astype(np.complex64))
        told = reconstruct(tmp_path / f"{name}.npy", run, tmp_path / "out.h5", kind="kspace")
        assert told.read_as == f"k-space, fully sampled (3 slices, {size[0]} x {size[1]})"
        assert told.notes == []
        with h5py.File(tmp_path / "out.h5") as f:
            np.testing.assert_allclose(f["reconstruction"][()], wanted, atol=1e-4 * wanted.max())
        assert "--as kspace" in reconstruct(tmp_path / f"{name}.npy", run, tmp_path / "out.h5").notes[0]
        assert reconstruct(tmp_path / f"{name}.npy", run, tmp_path / "out.h5", kind="image").notes == []


@pytest.mark.usefixtures("no_picture")
def test_undersampled_arrays_of_kspace(tmp_path: Path) -> None:
    x, run = brains(3), make_run(tmp_path / "run")
    k = (writers.centred_fft(x) * columns(40)).astype(np.complex64)
    (tmp_path / "many").mkdir()
    for name, array in (("middle", k), ("corner", np.fft.ifftshift(k, axes=(-2, -1)))):
        np.save(tmp_path / "many" / f"{name}.npy", array)
        told = reconstruct(tmp_path / "many" / f"{name}.npy", run, tmp_path / "out.h5", kind="kspace")
        assert told.read_as == "k-space, as measured (3 slices, 48 x 40)"
        assert "10 of 40 columns, really x4.00, centre 19-21" in told.sampling
        with h5py.File(tmp_path / "out.h5") as f:
            wanted = zero_filled(x, columns(40))
            np.testing.assert_allclose(f["reconstruction"][()], wanted, atol=1e-4 * wanted.max())
    with pytest.raises(ValueError, match="several undersampled arrays"):
        reconstruct(tmp_path / "many", run, tmp_path / "out.h5", kind="kspace")


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("protocol", ["hifi", "fastmri"])
@pytest.mark.parametrize("phase", [False, True])
def test_undersampled_with_a_reconstruction_is_scored(tmp_path: Path, protocol: str, phase: bool) -> None:
    file = tmp_path / "file2.h5"
    images = writers.write_fastmri(file, slices=3, size=(24, 20), recon=16, test=True)
    target = np.abs(images[:, 4:20, 2:18]).astype(np.float32) + 0.1
    with h5py.File(file, "a") as f:
        f["reconstruction_esc"] = target
    run = make_run(tmp_path / "run", protocol=protocol, complex=phase)
    outcome = reconstruct(file, run, tmp_path / "out.h5")
    assert "scored by reconstruction_esc" in outcome.read_as
    with h5py.File(tmp_path / "out.h5") as g:
        found = g["reconstruction"][()]
    if protocol == "hifi":
        low, high = (f(target, axis=(1, 2), keepdims=True) for f in (np.min, np.max))
        low = 0 * low if phase else low
        a, b = ((x - low) / (high - low) for x in (found, target))
        psnr = (10 * np.log10(1 / ((a.clip(0, 1) - b) ** 2).mean((1, 2)))).mean()
    else:
        psnr = 10 * np.log10(target.max() ** 2 / ((found - target) ** 2).mean())
    (volume,) = outcome.volumes
    assert volume.scores["psnr"] == pytest.approx(psnr, abs=1e-3)
    assert volume.scores == pytest.approx(volume.reference)  # zero weights add nothing
    assert json.loads((tmp_path / "out.json").read_text())["scores"] == volume.scores


@pytest.mark.usefixtures("no_picture")
def test_undersampled_without_a_mask_in_the_file(tmp_path: Path) -> None:
    file, run = tmp_path / "file2.h5", make_run(tmp_path / "run")
    images = writers.write_fastmri(file, slices=4, size=(24, 20), recon=16, test=True)
    mask = (np.arange(20) % 2 == 0).astype(float)
    with h5py.File(file, "a") as f:
        del f["mask"]
    outcome = reconstruct(file, run, tmp_path / "out.h5")
    assert any("no mask in the file" in note for note in outcome.notes)
    assert "10 of 20 columns" in outcome.sampling
    np.savetxt(tmp_path / "mask.txt", mask * (np.arange(20) != 4))  # a line less than there are
    given = reconstruct(file, run, tmp_path / "given.h5", mask=tmp_path / "mask.txt")
    assert "9 of 20 columns" in given.sampling
    for name, kept in (("out.h5", mask), ("given.h5", mask * (np.arange(20) != 4))):
        with h5py.File(tmp_path / name) as g:
            wanted = zero_filled(images, kept)[:, 4:20, 2:18]
            np.testing.assert_allclose(g["reconstruction"][()], wanted, rtol=1e-4, atol=1e-5)
    np.savetxt(tmp_path / "other.txt", np.ones(20))
    with pytest.raises(ValueError, match=r"other.txt: keeps columns that are empty in the data \(9, first 1\)"):
        reconstruct(file, run, tmp_path / "out.h5", mask=tmp_path / "other.txt")


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(("coils", "stored"), [(None, "nothing"), (3, "nothing"), (None, "reconstruction_esc")])
def test_fully_sampled_kspace_alone(tmp_path: Path, coils: int | None, stored: str) -> None:
    """Without a stored reconstruction the target is the root-sum-of-squares; empty edges are no undersampling."""
    file = tmp_path / "file1.h5"
    images = writers.write_fastmri(file, slices=3, size=(16, 16), recon=16, coils=coils)
    with h5py.File(file, "a") as f:
        f["kspace"][..., :2] = 0
        f["kspace"][..., 15] = 0
        images = np.fft.fftshift(
            np.fft.ifft2(np.fft.ifftshift(f["kspace"][()], axes=(-2, -1)), norm="ortho"), axes=(-2, -1)
        )
        target = np.abs(images) if coils is None else np.sqrt((np.abs(images) ** 2).sum(1))
        for key in {"reconstruction_rss", "reconstruction_esc", "ismrmrd_header"} & set(f):
            del f[key]
        if stored != "nothing":
            target = target + 1
            f[stored] = target
    outcome = reconstruct(file, make_run(tmp_path / "run"), tmp_path / "out.h5")
    used = "k-space" if stored == "nothing" else stored
    assert outcome.read_as == f"fastMRI {'multi' if coils else 'single'}-coil {used}, fully sampled (3 slices, 16 x 16)"
    assert any("no ismrmrd_header: the image is 16 x 16" in n for n in outcome.notes) == (stored == "nothing")
    assert outcome.volumes[0].scores["psnr"] > 0
    with h5py.File(tmp_path / "out.h5") as g:
        np.testing.assert_allclose(g["reconstruction"][()], as_trained(target, columns(16)), atol=1e-4)


@pytest.mark.usefixtures("no_picture")
def test_undersampled_without_a_header(tmp_path: Path) -> None:
    file = tmp_path / "file2.h5"
    images = writers.write_fastmri(file, slices=3, size=(24, 20), recon=16, test=True)
    with h5py.File(file, "a") as f:
        del f["ismrmrd_header"]
    outcome = reconstruct(file, make_run(tmp_path / "run"), tmp_path / "out.h5")
    assert "no ismrmrd_header: the image is 24 x 20, as the k-space is" in outcome.notes
    with h5py.File(tmp_path / "out.h5") as g:
        wanted = zero_filled(images, np.arange(20) % 2 == 0)
        np.testing.assert_allclose(g["reconstruction"][()], wanted, rtol=1e-4, atol=1e-5)


def call(*words: object) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(w) for w in words])


def test_command(tmp_path: Path) -> None:
    file, run = tmp_path / "file1.h5", make_run(tmp_path / "run")
    writers.write_fastmri(file, slices=3, size=(24, 20), recon=16)
    found = call(file, "--run", run, "-o", tmp_path / "out.h5", "--device", "cpu")
    assert found.exit_code == 0, found.output
    assert "psnr" in found.output
    assert "read as: fastMRI single-coil reconstruction_rss, fully sampled (3 slices, 16 x 16)" in found.output
    assert "(hifi)" in found.output
    file = file.rename(tmp_path / "FILE1.H5")
    found = call(file, "--run", run, "-o", tmp_path / "out.h5", "--device", "cpu", "--json")
    assert json.loads(found.output)["volumes"][0]["slices"] == 3


def test_errors_are_one_line(tmp_path: Path) -> None:
    file, run = tmp_path / "file1.h5", make_run(tmp_path / "run")
    writers.write_fastmri(file, slices=2, size=(24, 20), recon=16, test=True)
    np.savetxt(tmp_path / "mask.txt", np.ones(20))
    np.savetxt(tmp_path / "short.txt", np.ones(7))
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    (tmp_path / "broken.h5").write_bytes(b"no HDF5")
    with h5py.File(tmp_path / "other.h5", "w") as f:
        f["data"] = 1
    np.savetxt(tmp_path / "grey.txt", np.full(16, 0.5))
    np.save(tmp_path / "none.npy", np.zeros((0, 16, 16)))
    np.save(tmp_path / "pairs.npy", np.zeros((2, 16, 16, 2)))
    np.savez(tmp_path / "lines.npz", kspace=np.ones((2, 16, 16), np.complex64))
    np.savez(tmp_path / "echo.npz", echo=np.ones((2, 16, 16), np.complex64))
    np.save(tmp_path / "small.npy", np.random.default_rng(0).random((2, 6, 16)))
    (tmp_path / "photo.jpg").write_bytes(b"JFIF")
    (tmp_path / "empty").mkdir()
    for name in ("volumes/a.h5", "volumes/b.h5", "fewer.h5"):
        writers.write_fastmri(tmp_path / name, slices=2, size=(24, 20), recon=16, test=name == "fewer.h5")
    with h5py.File(tmp_path / "fewer.h5", "a") as f:
        f["reconstruction_rss"] = np.ones((1, 16, 16), np.float32)
    phase = make_run(tmp_path / "phase", complex=True)
    other = make_run(tmp_path / "other")
    recipe = load_recipe({"task": {"name": "superres"}, "train": {"steps": 1}})
    (other / "config.yaml").write_text(dump(recipe))
    save_file(build_model(recipe, recipe.task.create(), (1, 16, 16)).state_dict(), other / "weights.safetensors")
    np.save(tmp_path / "scalar.npy", np.float32(1))
    writers.write_fastmri(tmp_path / "number.h5", slices=2)
    with h5py.File(tmp_path / "number.h5", "a") as f:
        del f["reconstruction_rss"]
        f["reconstruction_rss"] = 1.0
    for words, expected in (
        ((tmp_path / "none.h5", "--run", run), "none.h5: no such file or folder"),
        ((file, "--run", tmp_path / "norun"), "config.yaml"),
        ((file, "--run", run, "-o", tmp_path / "out.jpg"), "the suffix says the format"),
        ((file, "--run", run, "-o", tmp_path / "o.h5", "--mask", tmp_path / "mask.txt"), "leave out --mask"),
        ((tmp_path / "scan.npy", "--run", run, "--mask", tmp_path / "short.txt"), "7 columns"),
        ((tmp_path / "broken.h5", "--run", run), "broken.h5"),
        ((tmp_path / "scan.npy", "--run", other), "trained for superres"),
        ((tmp_path / "other.h5", "--run", run), "kspace: missing"),
        ((tmp_path / "scan.npy", "--run", run, "--mask", tmp_path / "grey.txt"), "other values too: 0.5"),
        ((tmp_path / "none.npy", "--run", run), "none.npy: slices: there is none"),
        ((tmp_path / "none.npy", "--run", run, "--as", "kspace"), "none.npy: slices: there is none"),
        ((tmp_path / "scan.npy", "--run", run, "--as", "kspac"), "did you mean 'kspace'"),
        ((tmp_path / "scan.npy", "--run", run, "--as", "kspace"), "scan.npy: dtype: k-space is complex"),
        ((tmp_path / "pairs.npy", "--run", run, "--as", "image"), "pairs.npy: holds k-space"),
        ((tmp_path / "lines.npz", "--run", run, "--as", "image"), "lines.npz: image: missing; the file has kspace"),
        ((tmp_path / "echo.npz", "--run", run, "--as", "kspace"), "echo.npz: kspace: missing; the file has echo"),
        ((tmp_path / "photo.jpg", "--run", run), "photo.jpg: format: expected .npy .npz"),
        ((tmp_path / "empty", "--run", run), "empty: folder: no file that is read (.npy .npz"),
        ((tmp_path / "volumes", "--run", run), "volumes: folder: 2 .h5 files: give the files,"),
        ((tmp_path / "fewer.h5", "--run", run), "fewer.h5: reconstruction_rss: 1 slice, but kspace has 2"),
        ((tmp_path / "scalar.npy", "--run", run), "scalar.npy: array: expected (H,W) or (slices,H,W), got shape ()"),
        ((tmp_path / "number.h5", "--run", run), "number.h5: reconstruction_rss: expected 3 dimensions, got shape ()"),
        ((tmp_path / "small.npy", "--run", run), "small.npy: image: slices of 6 x 16 cannot be scored"),
        ((tmp_path / "scan.npy", "--run", phase), "scan.npy: magnitudes, and the run was trained on complex images"),
        ((tmp_path / "scan.npy", "--run", run, "--device", "tpu9"), "device 'tpu9' cannot be used here"),
        ((tmp_path / "scan.npy", "--run", run, "--device", "cuda:99"), "device 'cuda:99' cannot be used here"),
    ):
        found = call(*words)
        assert found.exit_code == 3, found.output
        assert expected in found.output
        assert len(found.output.strip().splitlines()) == 1


@pytest.mark.usefixtures("no_picture")
def test_undersampled_cc359_is_reconstructed_as_measured(tmp_path: Path) -> None:
    """It was taken for a full scan: undersampled once more, and scored by its own aliases."""
    mask, run = np.ones(16), make_run(tmp_path / "run")
    mask[1::2] = 0
    mask[6:10] = 1
    images = writers.write_cc359(tmp_path / "one.npy", slices=3, size=16)
    np.save(tmp_path / "one.npy", np.load(tmp_path / "one.npy") * np.fft.ifftshift(mask)[:, None].astype(np.float32))
    found = reconstruct(tmp_path / "one.npy", run, tmp_path / "out.h5")
    assert found.read_as.startswith("CC359 k-space, as measured")
    assert found.sampling.startswith("as measured: file mask: 10 of 16 columns")
    assert found.volumes[0].scores == {}
    with h5py.File(tmp_path / "out.h5") as f:  # stored unscaled, read orthonormally
        np.testing.assert_allclose(f["reconstruction"], 16 * zero_filled(images, mask), atol=1e-3)
    several = writers.write_cc359_multi(tmp_path / "many.h5", slices=3, size=(16, 16))
    with h5py.File(tmp_path / "many.h5", "a") as f:
        f["kspace"][:] = f["kspace"][:] * np.fft.ifftshift(mask)[:, None]
    found = reconstruct(tmp_path / "many.h5", run, tmp_path / "out.h5")
    assert found.read_as.startswith("CC359 k-space, as measured")
    with h5py.File(tmp_path / "out.h5") as f:
        assert f["reconstruction"].shape == (3, *several.shape[-2:])


@pytest.mark.parametrize("lacking", ["rows", "points", "everything"])
@pytest.mark.parametrize("form", ["array", "fastmri", "cc359"])
def test_kspace_that_lacks_other_things_than_columns_is_refused(tmp_path: Path, lacking: str, form: str) -> None:
    rng = np.random.default_rng(0)
    mask = np.ones((24, 20))
    if lacking == "rows":
        mask[::3] = 0
    elif lacking == "points":
        mask = (rng.random((24, 20)) < 0.5).astype(float)
    else:
        mask[:] = 0
    k = (writers.centred_fft(writers.blob(rng, 3, 24, 20)) * mask).astype(np.complex64)
    file, kind = tmp_path / "scan.h5", None
    if form == "array":
        file, kind = tmp_path / "scan.npy", "kspace"
        np.save(file, k)
    elif form == "fastmri":
        with h5py.File(file, "w") as f:
            f["kspace"] = k
    else:
        k = np.fft.ifftshift(k, axes=(-2, -1))
        with h5py.File(file, "w") as f:
            f["kspace"] = np.stack([k.real, k.imag], axis=-1)
    expected = {
        "rows": r"not in whole columns .*: rows are empty, turn",
        "points": "not in whole columns [^:]*$",
        "everything": "every value of the middle slice is zero",
    }
    with pytest.raises(ValueError, match=expected[lacking]):
        reconstruct(file, make_run(tmp_path / "run"), tmp_path / "out.h5", kind=kind)


def test_undersampled_arrays_among_full_ones(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    k = writers.centred_fft(writers.blob(np.random.default_rng(0), 3, 16, 16))
    for name in "abc":
        np.save(tmp_path / "in" / f"{name}.npy", k)
    last = Folder(tmp_path / "in", "all").cases[-1]
    np.save(tmp_path / "in" / last, k * (np.arange(16) % 2))
    with pytest.raises(ValueError, match=rf"{last}: kspace slice 0: undersampled, and the middle .*not the folder"):
        reconstruct(tmp_path / "in", make_run(tmp_path / "run"), tmp_path / "out.h5", kind="kspace")


@pytest.mark.usefixtures("no_picture")
def test_a_round_or_padded_kspace_is_a_full_one(tmp_path: Path) -> None:
    y, x = np.mgrid[-12:12, -10:10]
    k = writers.centred_fft(writers.blob(np.random.default_rng(0), 3, 24, 20)) * (y**2 / 100 + x**2 / 80 < 1)
    k[1, 12, 12] = 0  # a value that happens to be zero
    np.save(tmp_path / "scan.npy", k)
    found = reconstruct(tmp_path / "scan.npy", make_run(tmp_path / "run"), tmp_path / "out.h5", kind="kspace")
    assert found.read_as.startswith("k-space, fully sampled")


def test_every_slice_must_hold_what_the_mask_keeps(tmp_path: Path) -> None:
    mask = np.zeros(20)
    mask[::3], mask[8:12] = 1, 1
    k = writers.centred_fft(writers.blob(np.random.default_rng(0), 3, 24, 20)) * mask
    k[0] = 0  # an empty slice is none of another mask
    run = make_run(tmp_path / "run")
    np.save(tmp_path / "scan.npy", k)
    reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.h5", kind="kspace")
    for spoilt, advice in ((np.roll(mask, 1), "file of their own"), (np.ones(20), "file of their own")):
        k[2] = writers.centred_fft(writers.blob(np.random.default_rng(1), 24, 20)) * spoilt
        np.save(tmp_path / "scan.npy", k)
        with pytest.raises(ValueError, match=rf"scan.npy: kspace slice 2: does not hold .* columns?, first .*{advice}"):
            reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.h5", kind="kspace")
    with h5py.File(tmp_path / "scan.h5", "w") as f:  # a mask of its own, which keeps what was not measured
        f["kspace"] = writers.centred_fft(writers.blob(np.random.default_rng(0), 3, 24, 20)) * mask
        f["mask"] = 1 - mask
    with pytest.raises(ValueError, match=r"scan.h5: kspace slice 0: does not hold .*: check the mask"):
        reconstruct(tmp_path / "scan.h5", run, tmp_path / "out.h5")


@pytest.mark.usefixtures("no_picture")
def test_an_npz_may_call_its_kspace_so(tmp_path: Path) -> None:
    k = writers.centred_fft(writers.blob(np.random.default_rng(0), 2, 16, 16)).astype(np.complex64)
    np.savez(tmp_path / "scan.npz", kspace=k, image=np.ones((3, 8, 8)))
    found = reconstruct(tmp_path / "scan.npz", make_run(tmp_path / "run"), tmp_path / "out.h5", kind="kspace")
    assert found.read_as == "k-space, fully sampled (2 slices, 16 x 16)"


@pytest.mark.usefixtures("no_picture")
def test_what_a_folder_holds_beside_images_is_said(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    writers.write_fastmri(tmp_path / "in" / "a.h5", slices=2)
    found = reconstruct(tmp_path / "in", make_run(tmp_path / "run"), tmp_path / "out.h5")
    assert found.notes == ["left out of the folder: 1 .h5 file: give those as files"]


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("place", ["in", "in/deeper", "link"])
def test_nothing_is_written_where_it_would_be_read(tmp_path: Path, place: str) -> None:
    """A second call would take the first one's picture for a slice."""
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    np.save(tmp_path / "in" / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    with pytest.raises(ValueError, match=r"out.h5: in the folder that is read.*give another --out"):
        reconstruct(tmp_path / "in", make_run(tmp_path / "run"), tmp_path / place / "out.h5")
    assert [file.name for file in (tmp_path / "in").iterdir()] == ["scan.npy"]


FULL = """
import resource, signal, sys
from pathlib import Path
import numpy as np
import h5py, PIL.Image
from chasm.volumes import plan, write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for name in ("out.h5", "out.nii", "out.nii.gz", "out.png"):
    for room in (0, 100 if name == "out.nii.gz" else 20_000):  # 20 slices, packed, take less
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        place = plan(Path(sys.argv[1]) / name, {"a": 20})["a"]
        try:
            write(place, (np.ones((64, 64), np.float32) for _ in range(20)))
        except OSError as e:
            print(e)
"""


def test_a_full_disk_is_one_line_and_no_crash(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk. HDF5 used to end in a trace and a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    for line in lines:
        assert re.fullmatch(
            r".*out.*: could not be written \(.*File too large.*\): free space or choose another folder", line
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_picture")
def test_slices_of_an_earlier_call_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for slices, stale in ((12, 0), (12, 0), (3, 12), (1, 15)):
        np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), slices, 16, 16))
        notes = reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.png").notes
        first = tmp_path / ("out-00.png" if slices == 3 else "out-0.png")
        assert notes == ([f"still there from an earlier call: {stale} slices, first {first}"] if stale else [])


@pytest.mark.usefixtures("no_picture")
def test_a_failure_says_what_was_written_before_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abc":
        np.save(tmp_path / "in" / f"{name}.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    first, second, spoilt = Folder(tmp_path / "in", "all").cases
    np.save(tmp_path / "in" / spoilt, np.full((2, 16, 16), np.nan))
    with pytest.raises(ValueError, match=rf"{spoilt}: image 0: 256 .*\(2 volumes of 3 written before\)$"):
        reconstruct(tmp_path / "in", make_run(tmp_path / "run"), tmp_path / "out" / "x.h5")
    assert sorted(f.name for f in (tmp_path / "out").glob("*.h5")) == [f"x-{first[0]}.h5", f"x-{second[0]}.h5"]


def test_ctrl_c_says_so_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, made = _Work.result, list[int]()

    def interrupted(self: _Work, row: int, meters: Any) -> Any:
        made.append(row)
        if len(made) == 3:
            raise KeyboardInterrupt
        return original(self, row, meters)

    monkeypatch.setattr(_Work, "result", interrupted)
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 4, 16, 16))
    found = call(tmp_path / "scan.npy", "--run", make_run(tmp_path / "run"), "-o", tmp_path / "out" / "x.h5")
    assert found.exit_code == 130
    assert "interrupted: " in found.output
    assert list((tmp_path / "out").iterdir()) == []


def test_several_coils_without_a_centre(tmp_path: Path) -> None:
    k = writers.centred_fft(writers.blob(np.random.default_rng(0), 2, 3, 24, 20)).astype(np.complex64)
    mask = np.zeros(20, np.uint8)
    mask[2::5] = 1
    with h5py.File(tmp_path / "scan.h5", "w") as f:
        f["kspace"], f["mask"] = k * mask, mask
    with pytest.raises(ValueError, match=r"2 or more centre columns, fully sampled: got none"):
        reconstruct(tmp_path / "scan.h5", make_run(tmp_path / "run"), tmp_path / "out.h5")


@pytest.mark.usefixtures("no_picture")
def test_several_inputs_with_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails does not stop the others; each has its name in its files, also where names are alike."""
    run, loaded = make_run(tmp_path / "run"), []
    monkeypatch.setattr("chasm.reconstruct.load_run", lambda *a, load=load_run: loaded.append(1) or load(*a))
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
    assert "r-f-q.h5: holds another input of this call" in found.output
    assert found.exit_code == 3


@pytest.mark.usefixtures("no_picture")
def test_no_memory_for_one_of_several_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        writers.write_fastmri(tmp_path / f"{name}.h5", slices=2)
    result = _Work.result

    def full(work: _Work, row: int, meters: Any) -> Any:
        if "b" in work.scan.cases:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result(work, row, meters)

    monkeypatch.setattr(_Work, "result", full)
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
        found = names(Path("o.h5"), {Path(file): _name(Path(file)) for file in inputs})
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
