"""NIfTI: slices of the acquired plane, one volume of a 4-D file, and the geometry of both."""

from pathlib import Path

import nibabel
import numpy as np
import pytest

from chasm.data import DataError, open_dataset
from chasm.data.nifti import PLANES, open_nifti

# stored axes: to the back, down, to the left; voxels of 1 x 1 x 6 mm: a sagittal scan
SAGITTAL = np.array([[0, 0, -6.0, 40], [-1, 0, 0, 60], [0, -1, 0, 70], [0, 0, 0, 1]])


def save(file: Path, volume: np.ndarray, affine: np.ndarray) -> Path:
    nibabel.save(nibabel.Nifti1Image(volume, affine), file)
    return file


def test_a_sagittal_scan_gives_sagittal_slices(tmp_path: Path) -> None:
    """It became 128 slices of 128 x 17, undersampled along the slice direction."""
    volume = np.random.default_rng(0).random((128, 128, 17)).astype(np.float32)
    save(tmp_path / "scan.nii.gz", volume, SAGITTAL)
    data = open_dataset("folder", tmp_path, split="all")
    assert len(data) == 17
    assert data[0].image.shape == (1, 128, 128)
    assert data[0].source.endswith("sagittal slices of NIfTI")
    # upright: rows from above to below as stored, columns from the back to the front, slices from the left to the right
    np.testing.assert_array_equal(data[0].image[0], volume[::-1, :, 16].T)
    axial = open_dataset("folder", tmp_path, split="all", plane="axial")
    assert len(axial) == 128
    assert axial[0].image.shape == (1, 128, 17)
    with pytest.raises(ValueError, match="unknown plane 'sagital': did you mean 'sagittal'"):
        open_dataset("folder", tmp_path, split="all", plane="sagital")


@pytest.mark.parametrize(
    ("shape", "voxels", "plane"),
    [
        ((8, 9, 10), (1, 1, 1), "axial"),
        ((8, 9, 10), (0.9, 0.9, 0.9001), "axial"),
        ((8, 9, 10), (1, 3, 1), "coronal"),
        ((8, 9, 10), (1.2, 1, 1), "sagittal"),
        ((1, 9, 10), (1, 1, 1), "sagittal"),  # one slice
        ((8, 9), (2, 2, 1), "axial"),
    ],
)
def test_the_acquired_plane(tmp_path: Path, shape: tuple[int, ...], voxels: tuple[float, ...], plane: str) -> None:
    file = save(tmp_path / "a.nii", np.zeros(shape, np.float32), np.diag([*voxels, 1]))
    assert open_nifti(file).plane == plane


@pytest.mark.parametrize("plane", PLANES)
def test_every_voxel_is_where_it_was(tmp_path: Path, plane: str) -> None:
    """In each plane, and in both coordinate systems of a file that has two."""
    volume = np.random.default_rng(0).random((5, 6, 7)).astype(np.float32)
    image = nibabel.Nifti1Image(volume, SAGITTAL)
    image.set_sform(SAGITTAL, code=4)
    moved = SAGITTAL.copy()
    moved[:3, 3] += 10
    image.set_qform(moved, code=1)
    nibabel.save(image, tmp_path / "a.nii")
    found = open_nifti(tmp_path / "a.nii", plane)
    values = found.read()
    assert values.shape == found.shape
    assert (found.geometry.code, found.geometry.qform_code) == (4, 1)
    for matrix, stored in ((found.geometry.affine, SAGITTAL), (found.geometry.qform, moved)):
        for k, row, column in ((0, 0, 0), (1, 2, 3), tuple(n - 1 for n in found.shape)):
            below = found.shape[1] - 1 - row
            place = nibabel.affines.apply_affine(matrix, (column, below, k))
            voxel = nibabel.affines.apply_affine(np.linalg.inv(stored), place)
            np.testing.assert_allclose(voxel, voxel.round(), atol=1e-4)
            assert volume[tuple(voxel.round().astype(int))] == values[k, row, column]


def test_one_volume_of_four_dimensions(tmp_path: Path) -> None:
    volumes = np.random.default_rng(0).random((5, 6, 7, 3)).astype(np.float32)
    save(tmp_path / "dwi.nii.gz", volumes, np.eye(4))
    with pytest.raises(DataError, match=r"dwi.nii.gz: volume: 3 volumes: choose one from 0 to 2 \(volume=0\)"):
        open_dataset("folder", tmp_path, split="all")
    data = open_dataset("folder", tmp_path, split="all", volume=2)
    np.testing.assert_array_equal(data[4].image[0], volumes[:, ::-1, 4, 2].T)
    with pytest.raises(DataError, match="no volume 3: the file has 3 volumes"):
        open_dataset("folder", tmp_path, split="all", volume=3)
    save(tmp_path / "dwi.nii.gz", volumes[..., :1], np.eye(4))  # one volume needs no choice
    assert len(open_dataset("folder", tmp_path, split="all")) == 7
    save(tmp_path / "dwi.nii.gz", volumes[None], np.eye(4))
    with pytest.raises(DataError, match="expected 2, 3 or 4 dimensions"):
        open_dataset("folder", tmp_path, split="all")
