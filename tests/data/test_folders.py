"""Readers of plain folders: pictures, and volumes of any format."""

from pathlib import Path

import nibabel
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from writers import (
    write_dicom,
    write_photo,
)

from chasm.data import DataError, collate, open_dataset


def test_images_resize_short_side_and_crop_the_centre(tmp_path: Path) -> None:
    write_photo(tmp_path / "train" / "n1" / "a.png", size=(40, 60))
    data = open_dataset("images", tmp_path, size=20, augment=False)
    with Image.open(tmp_path / "train" / "n1" / "a.png") as photo:
        expected = np.asarray(photo.resize((30, 20), Image.Resampling.BICUBIC))[:, 5:25]
    np.testing.assert_allclose(data[0].image.permute(1, 2, 0) * 255, expected, atol=1e-4)
    assert data.domain == "photo"


def test_images_augmentation_depends_on_seed_epoch_and_index_only(tmp_path: Path) -> None:
    for i in range(4):
        write_photo(tmp_path / "train" / f"{i}.png", size=(20, 200), seed=i)
    a, b = (open_dataset("images", tmp_path, size=20) for _ in range(2))
    first = [a[i].image for i in range(4)]
    assert all(torch.equal(b[i].image, first[i]) for i in reversed(range(4)))  # order of access is irrelevant
    a.set_epoch(1)
    assert not all(torch.equal(a[i].image, first[i]) for i in range(4))
    a.set_epoch(0)
    assert torch.equal(a[2].image, first[2])
    assert torch.equal(a[-2].image, first[2])
    other = open_dataset("images", tmp_path, size=20, seed=1)
    assert not all(torch.equal(other[i].image, first[i]) for i in range(4))


def test_images_grey_and_small_ones_become_rgb_squares(tmp_path: Path) -> None:
    write_photo(tmp_path / "train" / "a.png", size=(10, 12), mode="L")
    assert open_dataset("images", tmp_path, size=16)[0].image.shape == (3, 16, 16)


def test_images_ade20k_and_imagenet_layouts(tmp_path: Path) -> None:
    ade, net = tmp_path / "ADEChallengeData2016", tmp_path / "ILSVRC"
    write_photo(ade / "images" / "training" / "ADE_train_1.jpg")
    write_photo(ade / "annotations" / "training" / "ADE_train_1.png")
    for i in range(4):
        write_photo(ade / "images" / "validation" / f"ADE_val_{i}.jpg")
    write_photo(net / "Data" / "CLS-LOC" / "train" / "n01" / "n01_1.JPEG")
    assert open_dataset("images", ade).cases == ["images/training/ADE_train_1.jpg"]
    assert len(open_dataset("images", ade, split="val")) == len(open_dataset("images", ade, split="test")) == 2
    assert open_dataset("images", net).cases == ["Data/CLS-LOC/train/n01/n01_1.JPEG"]


def test_images_fixed_subsets(tmp_path: Path) -> None:
    for i in range(9):
        write_photo(tmp_path / "train" / f"{i}.png")
    (tmp_path / "list.txt").write_text("# chosen\ntrain/7.png\n\ntrain/2.png\n")
    listed = open_dataset("images", tmp_path, split="val", files=tmp_path / "list.txt")
    assert listed.cases == ["train/7.png", "train/2.png"]
    assert listed.split == "val"
    one, two = (open_dataset("images", tmp_path, limit=4).cases for _ in range(2))
    assert one == two
    assert len(one) == 4
    (tmp_path / "list.txt").write_text("train/77.png\n")
    with pytest.raises(DataError, match=r"list\.txt: list: 'train/77\.png' is not in"):
        open_dataset("images", tmp_path, files=tmp_path / "list.txt")


def test_folder_reads_every_plain_format(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stack = rng.random((3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "a.npy", stack)
    np.savez(tmp_path / "b.npz", image=stack, label=(stack > 0.5).astype(np.uint8))
    grey16 = (stack[0] * 60000).astype(np.uint16)
    Image.fromarray(grey16).save(tmp_path / "c.png")
    tifffile.imwrite(tmp_path / "d.tif", stack, photometric="minisblack")
    nibabel.save(nibabel.Nifti1Image(stack, np.eye(4)), tmp_path / "e.nii.gz")
    write_dicom(tmp_path / "f.dcm", grey16, slope=0.5)
    np.save(tmp_path / "g.npy", (stack[0] * np.exp(1j)).astype(np.complex64))
    (tmp_path / "notes.txt").write_text("not an image")

    data = open_dataset("folder", tmp_path, split="all")
    got = {(s.case, s.index): s for s in (data[i] for i in range(len(data)))}
    assert data.cases == ["a.npy", "b.npz", "c.png", "d.tif", "e.nii.gz", "f.dcm", "g.npy"]
    for k in range(3):
        for case in ("a.npy", "b.npz", "d.tif"):
            np.testing.assert_array_equal(got[case, k].image[0], stack[k])
    np.testing.assert_array_equal(got["b.npz", 1].label, stack[1] > 0.5)
    np.testing.assert_array_equal(got["c.png", 0].image[0], grey16)
    np.testing.assert_allclose(got["f.dcm", 0].image[0], grey16 * 0.5)
    # axial slice 5 of (x, y, z): rows run from front (high y) to back
    np.testing.assert_array_equal(got["e.nii.gz", 5].image[0], stack[:, ::-1, 5].T)
    assert got["g.npy", 0].image.is_complex()


def test_folder_counts_axial_slices_however_nifti_stores_them(tmp_path: Path) -> None:
    """The axis that runs up is the second one here; the last one was counted, and slices were lost."""
    volume = np.random.default_rng(0).random((9, 12, 8)).astype(np.float32)
    affine = np.array([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(volume, affine), tmp_path / "a.nii.gz")
    nibabel.save(nibabel.Nifti1Image(volume[..., 0], np.eye(4)), tmp_path / "b.nii")
    data = open_dataset("folder", tmp_path, split="all")
    assert [s.case for s in data] == ["a.nii.gz"] * 12 + ["b.nii"]
    np.testing.assert_array_equal(data[0].image[0], volume[:, 11, ::-1].T)
    np.testing.assert_array_equal(data[11].image[0], volume[:, 0, ::-1].T)
    np.testing.assert_array_equal(data[12].image[0], volume[:, ::-1, 0].T)
    nibabel.save(nibabel.Nifti1Image(volume[None], np.eye(4)), tmp_path / "c.nii")
    with pytest.raises(DataError, match=r"c.nii: volume: 8 volumes: choose one"):
        open_dataset("folder", tmp_path, split="all")


def test_folder_says_which_formats_it_reads(tmp_path: Path) -> None:
    write_photo(tmp_path / "photo.jpg")
    with pytest.raises(DataError, match=r"photo.jpg: format: expected .npy .npz .* or DICOM"):
        open_dataset("folder", tmp_path / "photo.jpg", split="all")


def test_folder_series_is_a_case_in_instance_order(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        pixels = np.arange(16).reshape(4, 4) + 100 * number
        write_dicom(tmp_path / "p1" / "t2" / f"IM{99 - number}", pixels, number=number)  # no extension
    data = open_dataset("folder", tmp_path, split="all")
    assert data.cases == ["p1/t2"]
    assert [int(data[i].image[0, 0, 0]) for i in range(3)] == [100, 200, 1000]


def test_folder_series_side_by_side_are_cases(tmp_path: Path) -> None:
    """Slices of one series must not part, least of all into different splits; two series must not mix."""
    for place in (tmp_path, tmp_path / "p1"):
        for number in range(6):
            series = {"SeriesInstanceUID": f"1.2.{number % 2}"}
            write_dicom(place / f"IM{9 - number}.dcm", np.arange(16).reshape(4, 4) + 100 * number, number, **series)
    write_dicom(tmp_path / "p2" / "a.dcm", np.arange(16).reshape(4, 4), SeriesInstanceUID="1.3")
    write_dicom(tmp_path / "alone.dcm", np.arange(16).reshape(4, 4))
    data = open_dataset("folder", tmp_path, split="all")
    assert data.cases == ["IM8.dcm", "IM9.dcm", "alone.dcm", "p1/IM8.dcm", "p1/IM9.dcm", "p2"]
    first = {case: [] for case in data.cases}
    for i in range(len(data)):
        first[data[i].case].append(int(data[i].image[0, 0, 0]))
    assert first["IM9.dcm"] == first["p1/IM9.dcm"] == [0, 200, 400]
    assert first["IM8.dcm"] == first["p1/IM8.dcm"] == [100, 300, 500]


def test_folder_splits_by_name_by_list_and_by_hash(tmp_path: Path) -> None:
    flat, named = tmp_path / "flat", tmp_path / "named"
    for i in range(10):
        for file in (flat / f"c{i}.npy", named / ("train" if i < 8 else "val") / f"c{i}.npy"):
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, np.eye(4) + i)
    parts = {s: open_dataset("folder", flat, split=s).cases for s in ("train", "val", "test")}
    assert [len(c) for c in parts.values()] == [7, 1, 2]
    assert len(set().union(*parts.values())) == 10
    assert open_dataset("folder", flat, split="test").cases == parts["test"]
    assert len(open_dataset("folder", named)) == 8
    assert open_dataset("folder", named, split="test").cases == ["val/c9.npy"]
    (tmp_path / "splits.txt").write_text("c3.npy train\nc4.npy test  # held out\n")
    assert open_dataset("folder", flat, split="test", splits=tmp_path / "splits.txt").cases == ["c4.npy"]
    (tmp_path / "splits.txt").write_text("c3.npy train\nc3.npy test\n")
    with pytest.raises(DataError, match=r"splits\.txt: line 2: case 'c3\.npy' is in two splits"):
        open_dataset("folder", flat, splits=tmp_path / "splits.txt")


def test_folder_fits_images_to_one_size(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((6, 9)))
    np.save(tmp_path / "b.npy", np.eye(4))
    data = open_dataset("folder", tmp_path, split="all")
    with pytest.raises(DataError, match=r"case b\.npy slice 0: image: .*one shape"):
        collate([data[0], data[1]])
    data = open_dataset("folder", tmp_path, split="all", size=(5, 5))
    batch = collate([data[0], data[1]])
    assert batch.image.shape == (2, 1, 5, 5)
    assert batch.image.sum((1, 2, 3)).tolist() == [25, 4]


def test_pictures_of_a_folder_can_be_one_volume(tmp_path: Path) -> None:
    for i in (2, 10, 1):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / f"s{i}.png")
    assert open_dataset("folder", tmp_path, split="all").cases == ["s1.png", "s10.png", "s2.png"]
    volume = open_dataset("folder", tmp_path, split="all", stack=True)
    assert volume.cases == [tmp_path.name]
    assert [int(volume[k].image.max()) for k in range(3)] == [1, 2, 10]
