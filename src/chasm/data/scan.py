"""The form of measured k-space that all readers of scanner formats return."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from chasm.common.text import counted
from chasm.data.records import SOMEWHERE, Geometry
from chasm.mri.noise import whitening_matrix


@dataclass
class KSpaceScan:
    """The measured k-space of one volume.

    Attributes:
        kspace: (slices, coils, H, W) complex64, zero frequency at index N // 2; rows are samples of the readout,
            columns are phase-encoded lines. Exactly zero where nothing was measured.
        size: (H, W) of the image: the field of view in the middle that is kept. The rest is oversampling.
        geometry: position of the image, if the file has it.
        patient: a name for the patient, if the file says; cases of one patient share a split.
        noise: (coils, samples) complex64, measured without a signal, if there is any.
        mask: (W,) bool, True for the measured columns, if the file says; arrays do not.
        notes: lines about changes of the data, and about omissions.
        averages: mean number of measurements of a line.
        noise_level: root-mean-square of the noise of one sample, over all coils, if it was measured. Prewhitening keeps
            it.
    """

    kspace: np.ndarray
    size: tuple[int, int]
    geometry: Geometry | None = None
    patient: str = ""
    noise: np.ndarray | None = None
    mask: np.ndarray | None = None
    notes: list[str] = field(default_factory=list)
    averages: float = 1.0
    noise_level: float | None = None

    @property
    def columns(self) -> np.ndarray:
        """(W,) bool: True for the measured columns; those that are not empty, if the file has no mask."""
        is_measured: np.ndarray = (self.kspace != 0).any((0, 1, 2)) if self.mask is None else self.mask
        return is_measured

    def cropped_readout(self) -> "KSpaceScan":
        """Return the scan without oversampling of the readout, for formats that do not store the size of the image."""
        rows = self.kspace.shape[2]
        if self.size[0] == rows:
            return self
        start = (rows - self.size[0]) // 2
        images = ifft_along(self.kspace, -2)[..., start : start + self.size[0], :]
        kspace = np.fft.fftshift(np.fft.fft(np.fft.ifftshift(images, -2), axis=-2, norm="ortho"), -2)
        note = f"oversampling of the readout removed: {self.size[0]} of {rows} rows"
        masked = np.ascontiguousarray(kspace * self.columns, np.complex64)
        return replace(self, kspace=masked, notes=[*self.notes, note])

    def prewhitened(self) -> "KSpaceScan":
        """Return the scan with independent noise in all coils; unchanged, with a note, if that cannot be done."""
        if self.noise is None:
            return self
        try:
            matrix = whitening_matrix(torch.from_numpy(self.noise))
        except ValueError as e:
            return replace(self, noise=None, notes=[*self.notes, f"not prewhitened: {e}"])
        if len(matrix) != self.kspace.shape[1]:
            why = f"noise of {counted(len(matrix), 'coil')}, but data of {self.kspace.shape[1]}"
            return replace(self, noise=None, notes=[*self.notes, f"not prewhitened: {why}"])
        white = np.einsum("pq,sqhw->sphw", matrix.numpy(), self.kspace)
        note = f"prewhitened with {counted(self.noise.shape[1], 'sample')} of noise"
        return replace(self, kspace=white, noise=None, notes=[*self.notes, note])


def ifft_along(kspace: np.ndarray, axis: int) -> np.ndarray:
    """Return the centred orthonormal inverse Fourier transform along one axis."""
    return np.fft.fftshift(np.fft.ifft(np.fft.ifftshift(kspace, axis), axis=axis, norm="ortho"), axis)


def image_noise(noise: np.ndarray, band: float, averages: float = 1.0) -> float:
    """Return the root-mean-square of the noise of one image sample.

    Args:
        noise: samples of a noise scan.
        band: the width of the frequency band that an image sample takes noise from, over that of a noise sample.
        averages: number of measurements of an image sample.

    Example:
        >>> image_noise(np.array([2.0, -2.0]), band=0.5, averages=2)
        1.0
    """
    return float(np.sqrt(np.square(np.abs(noise)).mean() * band / averages))


@dataclass(frozen=True)
class Placement:
    """The position of one slice: vectors to the left, to the back and up, as in DICOM."""

    centre: np.ndarray  # the centre of the field of view, in mm
    down: np.ndarray  # the direction in which rows count up
    right: np.ndarray  # the direction in which columns count up
    normal: np.ndarray  # the direction from one slice to the next, in a 3-D scan

    @property
    def is_known(self) -> bool:
        """True if the directions have length 1, and the centre is a place."""
        directions = (self.down, self.right, self.normal)
        return bool(np.isfinite(self.centre).all()) and all(abs(np.linalg.norm(v) - 1) < 1e-2 for v in directions)


def slice_geometry(
    places: Sequence[Placement],
    voxel: tuple[float, float, float],
    size: tuple[int, int],
    middle: tuple[int, int],
    partitions: int = 1,
) -> Geometry:
    """Return the position of slices.

    Args:
        places: places of every slice, or of the slab of a 3-D scan.
        voxel: mm along rows of the image (its height), along its columns, and between slices.
        size: (H, W) of the image.
        middle: row and column of the pixel at the centre of the field of view.
        partitions: slices of a 3-D scan.
    """
    dy, dx, dz = voxel
    first, last = places[0], places[-1]
    if not all(place.is_known for place in places):
        note = "the file gives no directions: only the voxel sizes are written"
        return Geometry(np.diag([dx, dy, dz, 1.0]), SOMEWHERE, note=note)
    centre, note = first.centre, ""
    if partitions > 1:
        step = dz * first.normal
        centre = centre - (partitions // 2) * step
    elif len(places) > 1:
        step = (last.centre - first.centre) / (len(places) - 1)
        off = max(np.linalg.norm(p.centre - first.centre - i * step) for i, p in enumerate(places))
        if not step.any() or off > 0.1 * np.linalg.norm(step):
            note = "the slices are not evenly spaced: their distance is taken as the slice thickness"
            step = dz * first.normal
    else:
        step = dz * first.normal
    down, right = dy * first.down, dx * first.right
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1], affine[:3, 2] = right, -down, step
    affine[:3, 3] = centre - middle[1] * right + (size[0] - 1 - middle[0]) * down
    affine[:2] *= -1  # to the right and to the front
    return Geometry(affine, note=note)
