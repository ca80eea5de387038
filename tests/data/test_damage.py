"""Damaged, missing or odd files: one line that names the file and the field, from the reader and from the check."""

import gzip
from collections.abc import Callable
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
from writers import write_brats, write_cc359, write_cc359_multi, write_dicom, write_fastmri, write_photo, write_proxy

from chasm.data import DataError, open_dataset
from chasm.data.check import check


def truncate(file: Path, keep: float = 0.5) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


def read_all(kind: str, root: Path) -> None:
    data = open_dataset(kind, root, split="all")
    for i in range(len(data)):
        data[i]


# Each spoils a sound dataset in one way and returns (kind, file named, field named).
Spoiler = Callable[[Path], tuple[str, str, str]]
SPOILERS: dict[str, Spoiler] = {}


def spoiler(f: Spoiler) -> Spoiler:
    SPOILERS[f.__name__] = f
    return f


def edit_h5(file: Path, key: str, value: object | None) -> None:
    with h5py.File(file, "a") as f:
        del f[key]
        if value is not None:
            f[key] = value


@spoiler
def npy_truncated(root: Path) -> tuple[str, str, str]:
    write_cc359(root / "Train" / "a.npy")
    truncate(root / "Train" / "a.npy")
    return "cc359", "a.npy", "header"


@spoiler
def npy_empty(root: Path) -> tuple[str, str, str]:
    (root / "Train").mkdir()
    (root / "Train" / "a.npy").touch()
    return "cc359", "a.npy", "empty"


@spoiler
def npy_is_text(root: Path) -> tuple[str, str, str]:
    (root / "Train").mkdir()
    (root / "Train" / "a.npy").write_text("<html>404 not found</html>")
    return "cc359", "a.npy", "not a .npy file"


@spoiler
def npy_pickled_objects(root: Path) -> tuple[str, str, str]:
    (root / "Train").mkdir()
    np.save(root / "Train" / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return "cc359", "a.npy", "header"


@spoiler
def npy_wrong_dtype(root: Path) -> tuple[str, str, str]:
    (root / "Train").mkdir()
    np.save(root / "Train" / "a.npy", np.zeros((70, 8, 8, 2), dtype=np.int16))
    return "cc359", "a.npy", "kspace: expected (slices, H, W, 2) floats"


@spoiler
def npy_wrong_shape(root: Path) -> tuple[str, str, str]:
    (root / "Train").mkdir()
    np.save(root / "Train" / "a.npy", np.zeros((70, 8, 8), dtype=np.float32))
    return "cc359", "a.npy", "kspace: expected (slices, H, W, 2) floats"


@spoiler
def npy_nan(root: Path) -> tuple[str, str, str]:
    write_cc359(root / "Train" / "a.npy")
    volume = np.load(root / "Train" / "a.npy")
    volume[35, 2, 3, 0] = np.nan
    np.save(root / "Train" / "a.npy", volume)
    return "cc359", "a.npy", "kspace slice 35: 1 of 512 values are NaN"


@spoiler
def npy_beyond_float32(root: Path) -> tuple[str, str, str]:
    (root / "Train").mkdir()
    np.save(root / "Train" / "a.npy", np.full((70, 8, 8, 2), 3e38, np.float32))
    return "cc359", "a.npy", "values are beyond float32"


@spoiler
def h5_missing_key(root: Path) -> tuple[str, str, str]:
    write_cc359_multi(root / "Train" / "a.h5")
    edit_h5(root / "Train" / "a.h5", "kspace", None)
    return "cc359", "a.h5", "kspace: missing; the file has nothing"


@spoiler
def h5_truncated(root: Path) -> tuple[str, str, str]:
    write_fastmri(root / "singlecoil_train" / "a.h5")
    truncate(root / "singlecoil_train" / "a.h5")
    return "fastmri", "a.h5", "cannot be read"


@spoiler
def h5_is_text(root: Path) -> tuple[str, str, str]:
    (root / "singlecoil_train").mkdir()
    (root / "singlecoil_train" / "a.h5").write_text("not hdf5")
    return "fastmri", "a.h5", "cannot be read"


@spoiler
def fastmri_target_missing(root: Path) -> tuple[str, str, str]:
    write_fastmri(root / "singlecoil_train" / "a.h5")
    edit_h5(root / "singlecoil_train" / "a.h5", "reconstruction_rss", None)
    edit_h5(root / "singlecoil_train" / "a.h5", "reconstruction_esc", None)
    return "fastmri", "a.h5", "reconstruction_rss: missing"


@spoiler
def fastmri_target_complex(root: Path) -> tuple[str, str, str]:
    write_fastmri(root / "singlecoil_train" / "a.h5")
    edit_h5(root / "singlecoil_train" / "a.h5", "reconstruction_rss", np.ones((24, 12, 12), np.complex64))
    return "fastmri", "a.h5", "reconstruction_rss: expected real numbers"


@spoiler
def fastmri_target_shape(root: Path) -> tuple[str, str, str]:
    write_fastmri(root / "singlecoil_train" / "a.h5")
    edit_h5(root / "singlecoil_train" / "a.h5", "reconstruction_rss", np.ones((24, 12), np.float32))
    return "fastmri", "a.h5", "reconstruction_rss: expected 3 dimensions"


@spoiler
def fastmri_nan(root: Path) -> tuple[str, str, str]:
    write_fastmri(root / "singlecoil_train" / "a.h5")
    with h5py.File(root / "singlecoil_train" / "a.h5", "a") as f:
        f["reconstruction_rss"][12, 0, 0] = np.inf
    return "fastmri", "a.h5", "reconstruction_rss slice 12: 1 of 144 values are NaN or infinite"


@spoiler
def fastmri_no_slices(root: Path) -> tuple[str, str, str]:
    write_fastmri(root / "singlecoil_train" / "a.h5")
    edit_h5(root / "singlecoil_train" / "a.h5", "kspace", np.zeros((0, 24, 14), np.complex64))
    edit_h5(root / "singlecoil_train" / "a.h5", "reconstruction_rss", np.zeros((0, 12, 12)))
    return "fastmri", "a.h5", "holds no slices: shape (0, "


@spoiler
def cc359_no_slices(root: Path) -> tuple[str, str, str]:
    (root / "Train").mkdir()
    np.save(root / "Train" / "a.npy", np.zeros((0, 16, 16, 2), np.float32))
    return "cc359", "a.npy", "kspace: holds no slices: shape (0, 16, 16, 2)"


@spoiler
def brats_missing_modality(root: Path) -> tuple[str, str, str]:
    write_brats(root, "c1")
    (root / "c1" / "c1_flair.nii.gz").unlink()
    return "brats", "c1_flair.nii.gz", "modality"


@spoiler
def brats_missing_segmentation(root: Path) -> tuple[str, str, str]:
    write_brats(root, "B-00001-000", "2023")
    (root / "B-00001-000" / "B-00001-000-seg.nii.gz").unlink()
    return "brats", "B-00001-000-seg.nii.gz", "modality"


@spoiler
def brats_truncated(root: Path) -> tuple[str, str, str]:
    write_brats(root, "c1")
    truncate(root / "c1" / "c1_flair.nii.gz")
    return "brats", "c1_flair.nii.gz", "volume"


@spoiler
def brats_other_shape(root: Path) -> tuple[str, str, str]:
    write_brats(root, "c1")
    nibabel.save(nibabel.Nifti1Image(np.ones((8, 8, 9), np.int16), np.eye(4)), root / "c1" / "c1_t2.nii.gz")
    return "brats", "c1_t2.nii.gz", "volume: shape (8, 8, 9) differs"


@spoiler
def brats_unknown_label(root: Path) -> tuple[str, str, str]:
    seg = write_brats(root, "c1")
    seg[0, 0, 4] = 7
    nibabel.save(nibabel.Nifti1Image(seg, np.eye(4)), root / "c1" / "c1_seg.nii.gz")
    return "brats", "c1_seg.nii.gz", "label: expected the classes (0, 1, 2, 4), got also [7]"


@spoiler
def brats_nan(root: Path) -> tuple[str, str, str]:
    write_brats(root, "c1")
    volume = np.ones((16, 20, 9), np.float32)
    volume[0, 0, 0] = np.nan
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), root / "c1" / "c1_t1.nii.gz")
    return "brats", "c1_t1.nii.gz", "volume: 1 of 2880 values are NaN"


@spoiler
def png_is_text(root: Path) -> tuple[str, str, str]:
    write_photo(root / "train" / "a.png")
    (root / "train" / "b.png").write_text("not a picture")
    return "images", "b.png", "image: cannot be read"


@spoiler
def jpeg_truncated(root: Path) -> tuple[str, str, str]:
    write_photo(root / "train" / "a.jpg", size=(300, 300))
    truncate(root / "train" / "a.jpg", 0.6)
    return "images", "a.jpg", "image: cannot be read"


@spoiler
def folder_png_is_text(root: Path) -> tuple[str, str, str]:
    (root / "a.png").write_text("not a picture")
    return "folder", "a.png", "image: cannot be read"


@spoiler
def folder_npz_key(root: Path) -> tuple[str, str, str]:
    np.savez(root / "a.npz", picture=np.eye(8))
    return "folder", "a.npz", "image: missing; the file has picture"


@spoiler
def folder_npz_truncated(root: Path) -> tuple[str, str, str]:
    np.savez(root / "a.npz", image=np.eye(8))
    truncate(root / "a.npz")
    return "folder", "a.npz", "archive: cannot be read"


@spoiler
def folder_npz_pickled_objects(root: Path) -> tuple[str, str, str]:
    np.savez(root / "a.npz", image=np.array([{"a": 1}], dtype=object))
    return "folder", "a.npz", "archive: cannot be read"


@spoiler
def folder_label_shape(root: Path) -> tuple[str, str, str]:
    np.savez(root / "a.npz", image=np.eye(8), label=np.zeros((4, 4), np.uint8))
    return "folder", "a.npz", "label: expected integers (1, 8, 8)"


@spoiler
def folder_colours(root: Path) -> tuple[str, str, str]:
    np.save(root / "a.npy", np.random.default_rng(0).random((16, 16, 3)))
    return "folder", "a.npy", "looks like colours last"


@spoiler
def folder_nan(root: Path) -> tuple[str, str, str]:
    np.save(root / "a.npy", np.full((8, 8), np.nan))
    return "folder", "a.npy", "64 of 64 values are NaN"


@spoiler
def folder_nifti_truncated(root: Path) -> tuple[str, str, str]:
    (root / "a.nii.gz").write_bytes(gzip.compress(b"\x5c\x01" + bytes(100)))
    return "folder", "a.nii.gz", "cannot be read"


@spoiler
def folder_dicom_truncated(root: Path) -> tuple[str, str, str]:
    write_dicom(root / "a.dcm", np.arange(400).reshape(20, 20))
    truncate(root / "a.dcm", 0.8)
    return "folder", "a.dcm", "PixelData"


@spoiler
def proxy_truncated(root: Path) -> tuple[str, str, str]:
    write_proxy(root)
    truncate(root / "brain_siat_t2.npz")
    return "proxy", "brain_siat_t2.npz", "archive: cannot be read"


@spoiler
def proxy_wrong_dtype(root: Path) -> tuple[str, str, str]:
    images = np.zeros((1, 8, 8), np.float32)
    np.savez(root / "brain_siat_t2.npz", train_images_dx=images, train_subject=np.array([1]))
    return "proxy", "brain_siat_t2.npz", "train_images_dx: expected uint8 numbers, got float32"


@spoiler
def proxy_pickled_objects(root: Path) -> tuple[str, str, str]:
    images, subjects = np.zeros((1, 8, 8), np.uint8), np.array([{"a": 1}], dtype=object)
    np.savez(root / "brain_siat_t2.npz", train_images_dx=images, train_subject=subjects)
    return "proxy", "brain_siat_t2.npz", "train_subject: cannot be read"


@spoiler
def proxy_missing_key(root: Path) -> tuple[str, str, str]:
    np.savez(root / "brain_siat_t2.npz", train_images_dx=np.zeros((1, 8, 8), np.uint8))
    return "proxy", "brain_siat_t2.npz", "train_subject: missing"


@pytest.mark.parametrize("name", sorted(SPOILERS))
def test_reader_and_check_name_file_and_field(name: str, tmp_path: Path) -> None:
    kind, file, field = SPOILERS[name](tmp_path)
    with pytest.raises(DataError) as caught:
        read_all(kind, tmp_path)
    for line in [str(caught.value), *(found := check(tmp_path, kind).findings)]:
        assert "\n" not in line
    assert len(found) == 1, found
    for line in (str(caught.value), found[0]):
        assert file in line
        assert field in line


def test_one_bad_file_does_not_hide_the_others(tmp_path: Path) -> None:
    write_proxy(tmp_path)
    write_proxy(tmp_path, "brain_ixi_pd")
    truncate(tmp_path / "brain_siat_t2.npz")
    report = check(tmp_path, "proxy")
    assert len(report.findings) == 1
    assert sum(map(len, report.cases.values())) == 1 + 5


@pytest.mark.parametrize("kind", ["cc359", "fastmri", "brats", "images", "folder", "proxy"])
def test_empty_folder_missing_path_and_file_for_folder(kind: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"empty: (split 'train' has no case|part: no \.npz)"):
        open_dataset(kind, empty)
    assert "no case found" in check(empty, kind).findings[0]
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such file or folder: give the folder .* --data FOLDER"):
        open_dataset(kind, tmp_path / "nowhere")
    (tmp_path / "note.txt").write_text("a file")
    with pytest.raises(DataError, match=r"note\.txt"):
        read_all(kind, tmp_path / "note.txt")


def test_too_few_slices(tmp_path: Path) -> None:
    write_cc359(tmp_path / "Train" / "a.npy", slices=60)
    with pytest.raises(DataError, match=r"a\.npy: shape: 60 slices, and skip=30 leaves none"):
        open_dataset("cc359", tmp_path)


def test_a_dataset_of_files_needs_a_path() -> None:
    with pytest.raises(ValueError, match=r"'cc359' reads files: give the folder .*--set data.path=FOLDER"):
        open_dataset("cc359")
    with pytest.raises(ValueError, match="'embedded' reads no files: leave out the path somewhere"):
        open_dataset("embedded", "somewhere")


def test_a_split_without_cases_says_what_there_is(tmp_path: Path) -> None:
    write_cc359(tmp_path / "Train" / "a.npy")
    with pytest.raises(DataError, match=r"split 'val' has no case \(cases found: train 1\)"):
        open_dataset("cc359", tmp_path, split="val")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("<a><encoding/></a>", "no number at encoding/encodedSpace/matrixSize/x"),
        ('<!DOCTYPE a [<!ENTITY x "x">]><a>&x;</a>', "declares a document type"),
    ],
)
def test_a_fastmri_header_that_says_something_else(header: str, expected: str, tmp_path: Path) -> None:
    write_fastmri(tmp_path / "singlecoil_train" / "a.h5")
    edit_h5(tmp_path / "singlecoil_train" / "a.h5", "ismrmrd_header", np.bytes_(header))
    data = open_dataset("fastmri", tmp_path)
    with pytest.raises(DataError, match=rf"a\.h5: ismrmrd_header: {expected}"):
        data.raw_slice(0)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (np.ones(5), "expected one value for each of 14 columns"),
        (np.zeros(14), "every value is zero: no column was measured"),
        (np.full(14, 0.5), "expected zeros and ones, got values from 0.5 to 0.5"),
    ],
)
def test_fastmri_wrong_mask(tmp_path: Path, mask: np.ndarray, expected: str) -> None:
    write_fastmri(tmp_path / "singlecoil_test" / "a.h5", test=True)
    edit_h5(tmp_path / "singlecoil_test" / "a.h5", "mask", mask)
    data = open_dataset("fastmri", tmp_path, split="challenge", target="kspace")
    with pytest.raises(DataError, match=rf"a\.h5: mask: {expected}"):
        data.raw_slice(0)
    (finding,) = check(tmp_path, "fastmri").findings
    assert f"a.h5: mask: {expected}" in finding
