"""`chasm reconstruct` on scans in the formats of the field, with models whose output is known."""

import json
import sys
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import as_trained, columns, make_run, zero_filled

from chasm.data.folder import Folder
from chasm.reconstruct import reconstruct
from chasm.reconstruct.inputs import ONE_COIL


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
    assert outcome.notes == [ONE_COIL]
    assert reconstruct(tmp_path / "e1.npy", run, tmp_path / "one.h5").notes == []
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
def test_blank_slices_are_reconstructed_and_not_scored(tmp_path: Path) -> None:
    volume = writers.blob(np.random.default_rng(0), 4, 16, 16)
    np.save(tmp_path / "sound.npy", volume)
    np.save(tmp_path / "blank.npy", np.insert(volume, 2, 0, axis=0))
    np.save(tmp_path / "nothing.npy", 0 * volume)
    run = make_run(tmp_path / "run")
    sound, blank, nothing = (
        reconstruct(tmp_path / f"{n}.npy", run, tmp_path / f"{n}.h5") for n in ("sound", "blank", "nothing")
    )
    assert (sound.notes, blank.notes) == ([], ["blank.npy: 1 blank slice not scored"])
    assert blank.volumes[0].scores == pytest.approx(sound.volumes[0].scores)
    assert blank.volumes[0].slices == 5
    assert nothing.volumes[0].scores == {}


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
def test_what_a_folder_holds_beside_images_is_said(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    writers.write_fastmri(tmp_path / "in" / "a.h5", slices=2)
    found = reconstruct(tmp_path / "in", make_run(tmp_path / "run"), tmp_path / "out.h5")
    assert found.notes == ["left out of the folder: 1 .h5 file: give those as files"]
