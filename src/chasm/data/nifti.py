"""NIfTI volumes as slices of the plane they were acquired in, upright whatever way they are stored.

The axes of a file are first turned to run to the right, to the front and up. Slices are then stacked along the axis
with the largest voxels, because the two finest axes are those of the acquired plane: a sagittal scan with 6 mm slices
gives sagittal slices. Volumes with equal voxels give axial slices, and `plane` overrides all of this.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chasm.common.files import read_json
from chasm.common.registry import suggest
from chasm.common.text import counted
from chasm.data.files import reading
from chasm.data.limits import open_nifti_file
from chasm.data.records import SOMEWHERE, Geometry, fault, patient_name

# plane -> the axes (right, front, up = 0, 1, 2) of its columns, of its rows counted from below, and of its slices
PLANES = {"axial": (0, 1, 2), "coronal": (0, 2, 1), "sagittal": (1, 2, 0)}


@dataclass(frozen=True)
class NiftiSlices:
    """The way to cut the slices of a NIfTI file, of which only the header has been read."""

    file: Path
    plane: str  # "axial", "coronal" or "sagittal"
    shape: tuple[int, int, int]  # (slices, H, W)
    geometry: Geometry  # position of the slices
    _image: Any
    _orientation: np.ndarray
    _volume: int | None

    def read(self) -> np.ndarray:
        """Read all slices, (slices, H, W)."""
        import nibabel

        with reading(self.file, "volume"):
            stored = self._image.dataobj
            values = np.asarray(stored if self._volume is None else stored[..., self._volume])
            values = values[..., None] if values.ndim == 2 else values
            oriented = nibabel.orientations.apply_orientation(values, self._orientation)
        columns, rows, slices = PLANES[self.plane]
        return np.flip(oriented.transpose(slices, rows, columns), axis=1)


def open_nifti(file: Path, plane: str | None = None, volume: int | None = None) -> NiftiSlices:
    """Read the header of a NIfTI file and decide how to cut it.

    Args:
        file: .nii or .nii.gz.
        plane: "axial", "coronal" or "sagittal"; default: the acquired plane.
        volume: number of the volume in a 4-D file, from 0.
    """
    import nibabel

    if plane is not None and plane not in PLANES:
        raise ValueError(f"unknown plane {plane!r}: {suggest(plane, PLANES)}")
    with reading(file, "header"):
        image = open_nifti_file(file, whole=False)
        axes = nibabel.io_orientation(image.affine)
        qform, qform_code = image.header.get_qform(coded=True)
    volumes = image.shape[3] if image.ndim == 4 else 1
    if image.ndim not in (2, 3, 4):
        raise fault(file, "volume", f"expected 2, 3 or 4 dimensions, got shape {image.shape}")
    if np.isnan(axes).any():
        raise fault(file, "affine", "an axis has no direction")
    if volume is None and volumes > 1:
        raise fault(file, "volume", f"{counted(volumes, 'volume')}: choose one from 0 to {volumes - 1} (volume=0)")
    if volume is not None and not 0 <= volume < volumes:
        raise fault(file, "volume", f"no volume {volume}: the file has {counted(volumes, 'volume')}, from 0 on")
    stored = (*image.shape[:3], 1)[:3]
    order = np.argsort(axes[:, 0])  # the stored axis that runs to the right, to the front, up
    lengths = [stored[i] for i in order]
    sizes = np.linalg.norm(image.affine[:3, :3], axis=0)[order]
    chosen = plane or _acquired_plane(lengths, sizes)
    cut = PLANES[chosen]
    # voxels as we store them -> turned voxels -> voxels as stored in the file
    turn = nibabel.orientations.inv_ornt_aff(axes, stored) @ np.eye(4)[:, [*cut, 3]]
    code, other = int(image.header["sform_code"]), image.affine if qform is None else qform
    if not code and not qform_code:  # neither is set: the affine is nibabel's, which other programs need to be told
        code = SOMEWHERE
    geometry = Geometry(image.affine @ turn, code, other @ turn, int(qform_code))
    shape = (lengths[cut[2]], lengths[cut[1]], lengths[cut[0]])
    picked = (volume or 0) if image.ndim == 4 else None
    return NiftiSlices(file, chosen, shape, geometry, image, axes, picked)


def _acquired_plane(lengths: list[int], sizes: np.ndarray) -> str:
    """Return the plane whose slices are stacked along the only axis of length 1, or else along the coarsest axis."""
    single = [axis for axis, n in enumerate(lengths) if n == 1]
    coarsest = 2 if sizes[2] > 0.999 * sizes.max() else int(sizes.argmax())
    axis = single[0] if len(single) == 1 else coarsest
    return next(plane for plane, axes in PLANES.items() if axes[2] == axis)


def patient_of_nifti(file: Path) -> str:
    """Return a name for the patient: by the JSON file beside a NIfTI file, or by ``sub-LABEL`` in its name (BIDS).

    >>> patient_of_nifti(Path("sub-07_ses-2_T1w.nii.gz")), patient_of_nifti(Path("scan.nii"))
    ('sub-07', '')
    """
    stem = file.name.removesuffix(".gz").rpartition(".")[0]
    sidecar = file.with_name(f"{stem}.json")
    try:
        facts = read_json(sidecar)
    except (OSError, ValueError):  # there is none, or it is something else
        facts = {}
    known = next((facts[key] for key in ("PatientID", "SubjectID") if facts.get(key)), None)
    label = re.match(r"sub-[A-Za-z0-9]+(?=_|$)", stem)
    return patient_name(known) or (label.group() if label else "")
