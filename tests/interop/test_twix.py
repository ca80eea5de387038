"""A real Siemens file, if somebody has one: CHASM_TWIX=meas.dat make interop.

Written for the gradient echo of the example data of twixtools (pehses/twixtools, MIT): 160 x 160, 2 coils.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from chasm.data import open_dataset, read_scans, write_scan

FILE = os.environ.get("CHASM_TWIX", "")
pytestmark = [pytest.mark.interop, pytest.mark.skipif(not FILE, reason="CHASM_TWIX names no file")]


def test_a_measured_phantom(tmp_path: Path) -> None:
    (scan,) = read_scans(FILE).values()
    assert scan.kspace.shape == (1, 2, 320, 160)
    assert scan.size == (160, 160)
    assert scan.columns.all()
    image = open_dataset("kspace", FILE, split="all", combine="rss")[0].image[0].numpy()
    rows, columns = np.mgrid[-1:1:160j, -1:1:160j]
    inside = rows**2 + columns**2 < 0.5
    assert np.median(image[inside]) > 5 * np.median(image[rows**2 + columns**2 > 1.1])  # a full disc in the middle
    voxels = np.linalg.norm(scan.geometry.affine[:3, :3], axis=0)
    assert voxels == pytest.approx([1.25, 1.25, 4], rel=1e-3)
    centre = scan.geometry.affine @ [80, 79, 0, 1]
    assert centre[:3] == pytest.approx([2.59, -53.92, -54.0], abs=0.01)  # the position in the protocol
    write_scan(scan, tmp_path / "a.mrd")
    (back,) = read_scans(tmp_path / "a.mrd").values()
    np.testing.assert_array_equal(back.kspace, scan.kspace)
    np.testing.assert_allclose(back.geometry.affine, scan.geometry.affine, atol=1e-4)
