"""Tiny files in exactly the formats the readers read, so that tests need no download."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
from PIL import Image

HEADER = """<?xml version="1.0"?>
<ismrmrdHeader xmlns="http://www.ismrm.org/ISMRMRD"><encoding>
<encodedSpace><matrixSize><x>{h}</x><y>{w}</y><z>1</z></matrixSize></encodedSpace>
<reconSpace><matrixSize><x>{rh}</x><y>{rw}</y><z>1</z></matrixSize>{fov}</reconSpace>
<encodingLimits><kspace_encoding_step_1><minimum>0</minimum><maximum>{last}</maximum><center>{centre}</center>
</kspace_encoding_step_1></encodingLimits></encoding></ismrmrdHeader>"""


def blob(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Positive images with structure: a smooth disc with texture."""
    h, w = shape[-2:]
    y, x = np.mgrid[-1 : 1 : h * 1j, -1 : 1 : w * 1j]
    disc = (x**2 + y**2 < 0.6).astype(np.float64)
    return disc * (1 + 0.3 * rng.random(shape))


def write_cc359(file: Path, slices: int = 70, size: int = 16, seed: int = 0) -> np.ndarray:
    """Single-channel volume; returns the images it holds."""
    images = blob(np.random.default_rng(seed), slices, size, size)
    k = np.fft.fft2(images)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file, np.stack([k.real, k.imag], axis=-1).astype(np.float32))
    return images


def write_cc359_multi(file: Path, slices: int = 66, coils: int = 3, size: tuple[int, int] = (12, 10)) -> np.ndarray:
    """Multi-channel volume; returns its complex coil images (slices, coils, H, W)."""
    rng = np.random.default_rng(0)
    images = blob(rng, slices, coils, *size) * np.exp(1j * rng.random((1, coils, 1, 1)))
    k = np.fft.fft2(images).transpose(0, 2, 3, 1)  # (slices, H, W, coils)
    pairs = np.stack([k.real, k.imag], axis=-1).reshape(*k.shape[:3], -1)  # interleaved
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as f:
        f["kspace"] = pairs.astype(np.float32)
    return images


def centred_fft(x: np.ndarray) -> np.ndarray:
    x = np.fft.ifftshift(x, axes=(-2, -1))
    return np.fft.fftshift(np.fft.fft2(x, norm="ortho"), axes=(-2, -1))


def write_fastmri(
    file: Path,
    *,
    slices: int = 24,
    size: tuple[int, int] = (24, 14),
    recon: int = 12,
    coils: int | None = None,
    acquisition: str = "CORPDFS_FBK",
    patient: str | None = None,
    test: bool = False,
    fov: tuple[float, float, float] | None = None,
    seed: int = 0,
) -> np.ndarray:
    """A volume as distributed; returns the complex (coil) images its k-space holds."""
    rng = np.random.default_rng(seed)
    shape = (slices, *size) if coils is None else (slices, coils, *size)
    images = (blob(rng, *shape) * np.exp(0.5j)).astype(np.complex64)
    kspace = centred_fft(images).astype(np.complex64)
    top, left = (size[0] - recon) // 2, (size[1] - recon) // 2
    cropped = images[..., top : top + recon, left : left + recon]
    rss = np.abs(cropped) if coils is None else np.sqrt((np.abs(cropped) ** 2).sum(1))
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as f:
        h, w = size
        view = "" if fov is None else "<fieldOfView_mm><x>{}</x><y>{}</y><z>{}</z></fieldOfView_mm>".format(*fov)
        text = HEADER.format(fov=view, h=h, w=w, rh=recon, rw=recon, last=w - 3, centre=w // 2 - 1)
        f["ismrmrd_header"] = np.bytes_(text)
        f.attrs["acquisition"] = acquisition
        f.attrs["patient_id"] = patient or file.stem
        if test:
            mask = np.zeros(w, dtype=np.uint8)
            mask[::2] = 1
            f["kspace"], f["mask"] = kspace * mask, mask
            return images
        f["kspace"] = kspace
        f["reconstruction_rss"] = rss.astype(np.float32)
        if coils is None:
            f["reconstruction_esc"] = np.abs(cropped).astype(np.float32)
        f.attrs["max"], f.attrs["norm"] = float(rss.max()), float(np.linalg.norm(rss))
    return images


def write_brats(root: Path, case: str, scheme: str = "2021") -> np.ndarray:
    """A case folder; brain in all but the first and last slice; returns the segmentation as stored."""
    rng, size = np.random.default_rng(len(case)), (16, 20, 9)
    words, sep, enhancing = ("t1", "t1ce", "t2", "flair"), "_", 4
    if scheme == "2023":
        words, sep, enhancing = ("t1n", "t1c", "t2w", "t2f"), "-", 3
    brain = np.zeros(size, dtype=bool)
    brain[3:-3, 3:-3, 1:-1] = True
    seg = np.zeros(size, dtype=np.uint8)
    seg[5:10, 5:10, 3:6], seg[6:8, 6:8, 3:6], seg[8:9, 8:9, 4] = 2, 1, enhancing
    (root / case).mkdir(parents=True)
    volumes = {word: (brain * (100 + 50 * rng.random(size))).astype(np.int16) for word in words}
    for volume in volumes.values():
        volume[8, 10, 2], volume[8, 10, 4:6] = 1, 900  # beyond the percentiles
    for word, volume in {**volumes, "seg": seg}.items():
        image = nibabel.Nifti1Image(volume, np.diag([-1, -1, 1, 1]))
        nibabel.save(image, root / case / f"{case}{sep}{word}.nii.gz")
    return seg


def write_photo(file: Path, size: tuple[int, int] = (40, 50), seed: int = 0, mode: str = "RGB") -> None:
    rng = np.random.default_rng(seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(file)


def write_dicom(file: Path, pixels: np.ndarray, number: int = 1, slope: float = 1.0, **more: Any) -> None:
    import pydicom
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, MRImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    data = pydicom.Dataset()
    data.file_meta = meta
    data.SOPClassUID, data.SOPInstanceUID = MRImageStorage, meta.MediaStorageSOPInstanceUID
    data.InstanceNumber, data.RescaleSlope, data.RescaleIntercept = number, slope, 0
    data.Rows, data.Columns = pixels.shape
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 16
    data.HighBit, data.PixelRepresentation = 15, 0
    data.PixelData = pixels.astype("<u2").tobytes()
    for name, value in more.items():
        setattr(data, name, value)
    file.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(file, enforce_file_format=True)


def write_proxy(root: Path, part: str = "brain_siat_t2", size: int = 16) -> dict[str, np.ndarray]:
    """A bundle file of MRI slices (with masks for the tumour part); returns the images of each split."""
    rng = np.random.default_rng(0)
    arrays, images = {}, {}
    for split, subjects in (("train", (1, 1, 2)), ("val", (3,)), ("test", (4, 5))):
        x = rng.integers(0, 256, (len(subjects), size, size), dtype=np.uint8)
        images[split] = x
        arrays[f"{split}_images_dx"] = np.diff(x, axis=-1, prepend=np.uint8(0))
        if part.startswith("tumour"):
            mask = x > 200
            images[f"{split}_masks"] = mask
            arrays[f"{split}_masks_bits"] = np.packbits(mask, axis=-1)
            arrays[f"{split}_patient"] = np.array([f"P{s}" for s in subjects])
        else:
            arrays[f"{split}_subject"] = np.array(subjects, dtype=np.uint8)
    root.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(root / f"{part}.npz", **arrays)
    return images


def write_proxy_photos(
    root: Path, part: str = "natural_kodak_test", size: int = 16, splits: Sequence[str] = ("test",)
) -> np.ndarray:
    rng = np.random.default_rng(0)
    photos = rng.integers(0, 256, (3, size, size, 3), dtype=np.uint8)
    encoded = []
    for photo in photos:
        buffer = io.BytesIO()
        Image.fromarray(photo).save(buffer, "PNG")
        encoded.append(np.frombuffer(buffer.getvalue(), dtype=np.uint8))
    root.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for split in splits:
        names = "abc" if split == "test" else [split + c for c in "abc"]
        arrays[f"{split}_bytes"] = np.concatenate(encoded)
        arrays[f"{split}_offsets"] = np.cumsum([0, *map(len, encoded)])
        arrays[f"{split}_source"] = np.array([f"{name}.png" for name in names])
    np.savez(root / f"{part}.npz", **arrays)
    return photos


def write_proxy_raw(root: Path, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Complex slices (4,H,W) and one k-space (coils,H,W) on its full grid."""
    rng = np.random.default_rng(0)
    value = rng.integers(-2047, 2048, (4, 2, size, size), dtype=np.int16)
    k = rng.standard_normal((2, 2, size, 10)).astype(np.float16)
    root.mkdir(parents=True, exist_ok=True)
    np.savez(
        root / "raw_complex.npz",
        siat_lo=(value & 255).astype(np.uint8),
        siat_hi=(value >> 8).astype(np.int8),
        siat_split=np.array(["train", "train", "val", "test"]),
        siat_subject=np.array([1, 4, 7, 8], dtype=np.uint8),
        brain8ch_kspace_f16=k,
        brain8ch_scale=np.float64(2.0),
        brain8ch_first_column=np.int16(3),
        brain8ch_full_columns=np.int16(size),
    )
    grid = np.zeros((2, size, size), dtype=np.complex64)
    grid[:, :, 3:13] = 2.0 * (k[:, 0].astype(np.float32) + 1j * k[:, 1].astype(np.float32))
    return (value[:, 0] + 1j * value[:, 1]) / 2047, grid
