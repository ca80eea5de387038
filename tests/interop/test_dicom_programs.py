"""DICOM that we write, in other people's programs: dcm2niix, dcmtk's dcmdump and dicom3tools' dciodvfy."""

import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
from programs import needs

sys.path.insert(0, str(Path(__file__).parents[1] / "reconstruct"))
from runs import brains

from chasm.reconstruct import reconstruct

pytestmark = pytest.mark.interop
# an oblique volume: voxels of 1.5 x 2 x 4 mm, turned about two axes
TURN = np.array([[0.8, -0.6, 0], [0.6, 0.8, 0], [0, 0, 1]]) @ np.array([[1, 0, 0], [0, 0.96, -0.28], [0, 0.28, 0.96]])


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NIfTI volume of three slices, reconstructed to DICOM and to NIfTI."""
    folder = tmp_path_factory.mktemp("series")
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = TURN * [1.5, 2, 4], [-30, 12, 7]
    volume = np.abs(brains(3, (48, 40))).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(volume.transpose(2, 1, 0), affine), folder / "in.nii")
    for name in ("out.nii", "dicom/out.dcm"):
        reconstruct(folder / "in.nii", "zero-filled", folder / name, acceleration=2)
    return folder


@needs("dcm2niix")
def test_dcm2niix_finds_the_same_volume_at_the_same_place(series: Path) -> None:
    subprocess.run(["dcm2niix", "-o", series, "-f", "back", series / "dicom"], check=True, capture_output=True)
    theirs, ours = nibabel.load(series / "back.nii"), nibabel.load(series / "out.nii")
    theirs, ours = (nibabel.as_closest_canonical(image) for image in (theirs, ours))
    np.testing.assert_allclose(theirs.affine, ours.affine, atol=1e-3)
    a, b = theirs.get_fdata(), ours.get_fdata()
    np.testing.assert_allclose(a / a.max(), b / b.max(), atol=1e-3)


@needs("dcmdump")
def test_dcmtk_reads_every_attribute(series: Path) -> None:
    for file in sorted((series / "dicom").glob("*.dcm")):
        found = subprocess.run(["dcmdump", "+E", file], check=True, capture_output=True, text=True)
        assert found.stderr == ""
        assert "MRImageStorage" in found.stdout
        assert "DERIVED\\SECONDARY" in found.stdout


@needs("dciodvfy")
def test_it_is_a_valid_mr_image(series: Path) -> None:
    for file in sorted((series / "dicom").glob("*.dcm")):
        found = subprocess.run(["dciodvfy", file], capture_output=True, text=True)
        lines = (found.stdout + found.stderr).splitlines()
        assert "MRImage" in lines
        assert not [line for line in lines if line.startswith("Error")]
        assert not [line for line in lines if "not present in standard" in line]
