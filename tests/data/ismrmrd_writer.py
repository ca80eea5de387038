"""Writes small ISMRMRD files for the tests."""

from pathlib import Path
from typing import Any

import ismrmrd
import numpy as np
import torch
from writers import blob

from chasm.data import KSpaceScan
from chasm.mri import ifft2c

H, W = 24, 20


def coil_images(slices: int, coils: int = 3, size: tuple[int, int] = (H, W), seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return blob(rng, slices, 1, *size) * np.exp(1j * rng.random((1, coils, 1, 1)) * 6) * rng.random((1, coils, 1, 1))


class Writer:
    """An ISMRMRD file of the readouts of k-space (samples, lines), with whatever header a test wants."""

    def __init__(
        self, file: Path, encoded: tuple[int, ...], recon: tuple[int, ...], fov: tuple[float, ...], **more: Any
    ):
        xsd = ismrmrd.xsd
        spaces = []
        for (x, y, z), (a, b, c) in ((encoded, fov[:3]), (recon, fov[3:])):
            matrix, view = xsd.matrixSizeType(x=x, y=y, z=z), xsd.fieldOfViewMm(x=a, y=b, z=c)
            spaces.append(xsd.encodingSpaceType(matrixSize=matrix, fieldOfView_mm=view))
        limits = xsd.encodingLimitsType()
        for name, centre in more.get("centres", {}).items():
            setattr(limits, name, xsd.limitType(minimum=0, maximum=99, center=centre))
        parallel = None
        if "calibration" in more:
            factor = xsd.accelerationFactorType(kspace_encoding_step_1=2, kspace_encoding_step_2=1)
            mode = xsd.calibrationModeType(more["calibration"])
            parallel = xsd.parallelImagingType(accelerationFactor=factor, calibrationMode=mode)
        encoding = xsd.encodingType(
            encodedSpace=spaces[0],
            reconSpace=spaces[1],
            encodingLimits=limits,
            trajectory=xsd.trajectoryType(more.get("trajectory", "cartesian")),
            parallelImaging=parallel,
        )
        subject = xsd.subjectInformationType(patientID=more["patient"]) if "patient" in more else None
        self.header = xsd.ismrmrdHeader(
            experimentalConditions=xsd.experimentalConditionsType(H1resonanceFrequency_Hz=1),
            encoding=[encoding],
            subjectInformation=subject,
        )
        self.file = file
        self.readouts: list[Any] = []

    def line(self, samples: np.ndarray, centre: int | None = None, flags: tuple[int, ...] = (), **more: Any) -> None:
        readout = ismrmrd.Acquisition.from_array(np.ascontiguousarray(samples, np.complex64))
        readout.center_sample = samples.shape[1] // 2 if centre is None else centre
        counters = {"line": "kspace_encode_step_1", "part": "kspace_encode_step_2"}
        for name, value in more.items():
            if name in ("position", "read_dir", "phase_dir", "slice_dir"):
                getattr(readout, name)[:] = value
            elif name in ("discard_pre", "discard_post", "encoding_space_ref"):
                setattr(readout, name, value)
            else:
                setattr(readout.idx, counters.get(name, name), value)
        for flag in flags:
            readout.set_flag(flag)
        self.readouts.append(readout)

    def slice(self, kspace: np.ndarray, **more: Any) -> None:
        """All lines of (coils, samples, lines)."""
        for column in range(kspace.shape[-1]):
            self.line(kspace[..., column], line=column, **more)

    def save(self) -> Path:
        with ismrmrd.File(self.file, "w") as handle:
            handle["dataset"].header, handle["dataset"].acquisitions = self.header, self.readouts
        return self.file


def plain(file: Path, **more: Any) -> Writer:
    return Writer(file, (H, W, 1), (H, W, 1), (240, 200, 5, 240, 200, 5), **more)


def images_of(scan: KSpaceScan) -> np.ndarray:
    return ifft2c(torch.from_numpy(scan.kspace)).numpy()
