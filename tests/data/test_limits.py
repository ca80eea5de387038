"""Small files that claim to be large, and things that are no files: one line, at once, without the memory."""

import gzip
import io
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
import tifffile
from writers import write_cc359, write_cc359_multi, write_dicom, write_fastmri, write_photo

from chasm.data import DataError, open_dataset
from chasm.data.check import check
from chasm.data.guess import guess_dataset
from chasm.data.limits import max_bytes

LIMIT = "0.03125"  # GiB
MEMORY = 2**28  # bytes beyond what the process has mapped: less than any of the files claims
BLOCK, BLOCKS = bytes(2**26), 6
BOMBS: dict[str, Callable[[Path], str]] = {}  # each writes a file into a folder, and returns the kind of dataset


def bomb(f: Callable[[Path], str]) -> Callable[[Path], str]:
    BOMBS[f.__name__] = f
    return f


def _npy_header(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return stream.getvalue()


@bomb
def npz_that_inflates(root: Path) -> str:
    with (
        zipfile.ZipFile(root / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as z,
        z.open("image.npy", "w") as f,
    ):
        f.write(_npy_header((BLOCKS, 2**12, 2**12)))
        for _ in range(BLOCKS):
            f.write(BLOCK)
    return "folder"


@bomb
def npz_whose_header_lies(root: Path) -> str:
    with zipfile.ZipFile(root / "a.npz", "w") as z:
        z.writestr("image.npy", _npy_header((2**20, 2**20, 2**20)) + bytes(64))
    return "folder"


@bomb
def tiff_with_a_large_shape(root: Path) -> str:
    tifffile.imwrite(root / "a.tif", np.zeros((16, 16), np.uint8))
    with tifffile.TiffFile(root / "a.tif", mode="r+") as tiff:
        for name in ("ImageWidth", "ImageLength"):
            tiff.pages[0].tags[name].overwrite(65535)
    return "folder"


@bomb
def tiff_with_a_strip_that_inflates(root: Path) -> str:
    tifffile.imwrite(root / "a.tif", np.zeros((64, 64), np.uint8), compression="zlib")
    with tifffile.TiffFile(root / "a.tif") as tiff:
        page = tiff.pages[0]
        place, length = page.tags["StripOffsets"].valueoffset, page.tags["StripByteCounts"].valueoffset
    data = bytearray((root / "a.tif").read_bytes())
    pack = zlib.compressobj(1)
    packed = b"".join(pack.compress(BLOCK) for _ in range(BLOCKS)) + pack.flush()
    with tifffile.TiffFile(root / "a.tif") as tiff:
        small = {tag: tiff.pages[0].tags[tag].dtype for tag in ("StripOffsets", "StripByteCounts")}
    for tag, at, value in (("StripOffsets", place, len(data)), ("StripByteCounts", length, len(packed))):
        form = {3: "<H", 4: "<I", 16: "<Q"}[int(small[tag])]
        if form == "<H":  # the type of the entry, four bytes before its value, becomes a long number
            struct.pack_into("<H", data, at - 6, 4)
        struct.pack_into("<I" if form == "<H" else form, data, at, value)
    (root / "a.tif").write_bytes(bytes(data + packed))
    return "folder"


@bomb
def png_with_a_large_shape(root: Path) -> str:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 9000, 9000, 8, 6, 0, 0, 0)  # Pillow's own limit is higher
    body = chunk(b"IDAT", zlib.compress(bytes(2**20)))
    (root / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b""))
    return "folder"


@bomb
def nifti_with_a_large_shape(root: Path) -> str:
    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.float64)
    header.set_data_shape((20000, 20000, 2000))
    header["magic"], header["vox_offset"] = b"n+1", 352
    with gzip.open(root / "a.nii.gz", "wb", 1) as f:
        f.write(header.binaryblock + bytes(2**22))
    return "folder"


@bomb
def nifti_with_a_long_header(root: Path) -> str:
    header = nibabel.Nifti1Header()
    header.set_data_shape((8, 8, 8))
    header["magic"], header["vox_offset"] = b"n+1", 2**31
    with gzip.open(root / "a.nii.gz", "wb", 1) as f:
        f.write(header.binaryblock + b"\1\0\0\0" + struct.pack("<ii", 2**31 - 352 - 8, 0))
        for _ in range(BLOCKS):
            f.write(BLOCK)
    return "folder"


@bomb
def brats_with_a_large_shape(root: Path) -> str:
    (root / "c1").mkdir()
    nifti_with_a_large_shape(root / "c1")
    for word in ("t1", "t1ce", "t2", "flair", "seg"):
        (root / "c1" / f"c1_{word}.nii.gz").write_bytes((root / "c1" / "a.nii.gz").read_bytes())
    (root / "c1" / "a.nii.gz").unlink()
    return "brats"


@bomb
def h5_slice_that_inflates(root: Path) -> str:
    (root / "Train").mkdir()
    with h5py.File(root / "Train" / "a.h5", "w") as f:
        f.create_dataset("kspace", (70, 2**15, 2**15, 4), np.float32, chunks=(1, 64, 64, 4), compression="gzip")
    return "cc359"


@bomb
def h5_with_a_large_chunk(root: Path) -> str:
    (root / "Train").mkdir()
    with h5py.File(root / "Train" / "a.h5", "w") as f:
        f.create_dataset(
            "kspace", (2**15, 16, 16, 4), np.float32, chunks=(2**19, 16, 16, 4), maxshape=(None, 16, 16, 4)
        )
    return "cc359"


@bomb
def h5_with_a_large_mask(root: Path) -> str:
    file = root / "singlecoil_test" / "a.h5"
    write_fastmri(file, test=True)
    with h5py.File(file, "a") as f:
        del f["mask"]
        f.create_dataset("mask", (2**34,), np.float32, chunks=(2**16,), compression="gzip")
    return "fastmri"


@bomb
def h5_with_a_large_header(root: Path) -> str:
    file = root / "singlecoil_train" / "a.h5"
    write_fastmri(file)
    with h5py.File(file, "a") as f:
        del f["ismrmrd_header"]
        f.create_dataset("ismrmrd_header", (2,), f"S{2**30}", chunks=(1,), compression="gzip")
    return "fastmri"


@bomb
def dicom_with_many_frames(root: Path) -> str:
    write_dicom(root / "a.dcm", np.arange(400).reshape(20, 20), NumberOfFrames=2**31 - 1)
    return "folder"


@bomb
def dicom_with_many_small_frames(root: Path) -> str:
    write_dicom(root / "a.dcm", np.ones((1, 1)), NumberOfFrames=10**8)
    return "folder"


@bomb
def dicom_that_inflates(root: Path) -> str:
    import pydicom

    write_dicom(root / "b", np.arange(400).reshape(20, 20))
    data = pydicom.dcmread(root / "b")
    data.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    data.save_as(root / "a.dcm", enforce_file_format=True)
    (root / "b").unlink()
    meta = pydicom.filereader.read_file_meta_info(root / "a.dcm")
    start = 144 + meta.FileMetaInformationGroupLength
    pack = zlib.compressobj(1, wbits=-15)
    packed = pack.compress(struct.pack("<HH2sHI", 0x7FE0, 0x10, b"OB", 0, BLOCKS * len(BLOCK)))
    packed += b"".join(pack.compress(BLOCK) for _ in range(BLOCKS)) + pack.flush()
    (root / "a.dcm").write_bytes((root / "a.dcm").read_bytes()[:start] + packed)
    return "folder"


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_file_that_claims_too_much_is_refused_before_memory_is_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    kind = BOMBS[name](tmp_path)
    monkeypatch.setenv("CHASM_MAX_GIB", LIMIT)
    monkeypatch.setattr("chasm.data.check.require_written", lambda file: None)  # what headers claim is refused, too
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as f:
        mapped = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, before[1]))
    try:
        report = check(tmp_path, kind, jobs=1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert len(report.findings) == 1, report.findings
    assert "GiB" in report.findings[0] or "damaged" in report.findings[0]


def test_a_slice_of_a_sparse_file_is_refused(tmp_path: Path) -> None:
    header = _npy_header((2, 2**20, 2**16))
    (tmp_path / "a.npy").write_bytes(header)
    os.truncate(tmp_path / "a.npy", len(header) + 2**39)
    with pytest.raises(DataError, match=r"a\.npy: slice: 1048576x65536 values take 256 GiB, above the limit of 1 GiB"):
        open_dataset("folder", tmp_path, split="all")


def test_a_long_file_of_holes_is_neither_read_nor_hashed(tmp_path: Path) -> None:
    header = _npy_header((100_000, 4000, 4000))  # every slice fits
    (tmp_path / "a.npy").write_bytes(header)
    os.truncate(tmp_path / "a.npy", len(header) + 100_000 * 4000 * 4000 * 4)
    report = check(tmp_path, "folder")
    (finding,) = report.findings
    refusal = r".*a\.npy: file: .* GiB long, and \d+ bytes of it are on disk: .*"
    assert re.fullmatch(refusal, finding)
    with pytest.raises(DataError, match=refusal):
        open_dataset("folder", tmp_path, split="all")
    assert report.files == {"a.npy": {"size": -1, "sha256": ""}}


def test_values_that_were_never_written_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "Train").mkdir()
    with h5py.File(tmp_path / "Train" / "a.h5", "w") as f:
        f.create_dataset("kspace", (90_000, 2000, 2000, 2), np.float32, chunks=(1, 100, 100, 2))
    (finding,) = check(tmp_path, "cc359").findings
    assert finding.endswith("a.h5: kspace: 2,682.209 GiB, of which 0 bytes were written: damaged or a trap")


def test_pages_of_a_tiff_that_go_in_a_circle_are_one_line(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
        for value in (1, 2, 3):
            tiff.write(np.full((8, 6), value, np.uint8), contiguous=False, metadata=None)
    content = bytearray((tmp_path / "a.tif").read_bytes())
    with tifffile.TiffFile(tmp_path / "a.tif") as tiff:
        second, last = tiff.pages[1].offset, tiff.pages[2].offset
    (tags,) = struct.unpack_from("<H", content, last)
    struct.pack_into("<I", content, last + 2 + 12 * tags, second)
    (tmp_path / "a.tif").write_bytes(content)
    assert check(tmp_path, "folder").findings == [
        f"{tmp_path / 'a.tif'}: pages: they lead back to an earlier one: damaged"
    ]


def test_more_slices_than_any_scan_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "Train").mkdir()
    with h5py.File(tmp_path / "Train" / "a.h5", "w") as f:
        f.create_dataset("kspace", (10**9, 8, 8, 4), np.float32, chunks=(1, 8, 8, 4), compression="gzip")
    with pytest.raises(DataError, match=r"a\.h5: kspace: 1000000000 slices: expected at most 100000$"):
        open_dataset("cc359", tmp_path)
    header = _npy_header((10**9, 2, 2))
    (tmp_path / "a.npy").write_bytes(header)
    os.truncate(tmp_path / "a.npy", len(header) + 16 * 10**9)
    with pytest.raises(DataError, match=r"a\.npy: shape: 1000000000 slices: expected at most 100000$"):
        open_dataset("folder", tmp_path / "a.npy", split="all")


def test_the_limit_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", image=np.random.default_rng(0).random((4, 300, 300)))
    assert check(tmp_path, "folder").ok
    monkeypatch.setenv("CHASM_MAX_GIB", "0.001")
    (finding,) = check(tmp_path, "folder").findings
    assert finding.endswith("if the file is sound, set CHASM_MAX_GIB=1")
    monkeypatch.setenv("CHASM_MAX_GIB", "8")
    assert max_bytes() == 2**33
    for wrong in ("many", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("CHASM_MAX_GIB", wrong)
        with pytest.raises(ValueError, match=f"CHASM_MAX_GIB={wrong}: expected a number of GiB above 0"):
            max_bytes()


@pytest.mark.parametrize("name", ["a.npy", "a.h5", "a.npz", "a.nii.gz", "a.dcm", "a.png", "pipe"])
def test_a_pipe_among_the_files_does_not_hang(name: str, tmp_path: Path) -> None:
    kind = "cc359" if name.endswith((".npy", ".h5")) else "folder"
    write_cc359(tmp_path / "Train" / "b.npy")
    os.mkfifo(tmp_path / "Train" / name)
    if kind == "folder":
        np.save(tmp_path / "Train" / "b.npy", np.random.default_rng(0).random((3, 8, 8)))
        assert check(tmp_path, kind).slices.total() > 0  # whatever is no file is left out
        return
    with pytest.raises(DataError, match=rf"{name}: .*expected a file, got a pipe"):
        open_dataset(kind, tmp_path)
    assert len(check(tmp_path, kind).findings) == 1


def test_a_pipe_without_a_suffix_does_not_hang_the_guess(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "IM1")
    np.save(tmp_path / "b.npy", np.eye(8))
    assert guess_dataset(tmp_path) == "folder"


@pytest.mark.parametrize("kind", ["folder", "images", "cc359", "fastmri", "brats", "proxy"])
@pytest.mark.parametrize("path", ["pipe", "/dev/zero", "loop"])
def test_a_dataset_that_is_no_folder_and_no_file_is_one_line(kind: str, path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((DataError, FileNotFoundError)):
        open_dataset(kind, tmp_path / path)


def test_folders_that_link_to_themselves_are_walked_once(tmp_path: Path) -> None:
    write_photo(tmp_path / "train" / "a.png")
    for name in ("x", "y", "z"):  # three links at each of 40 levels: without care, more folders than there are atoms
        (tmp_path / "train" / name).symlink_to(tmp_path / "train")
    assert open_dataset("images", tmp_path).cases == ["train/a.png"]
    assert len(open_dataset("folder", tmp_path).cases) == 1


def test_a_volume_in_fortran_order_is_read(tmp_path: Path) -> None:
    write_cc359(tmp_path / "a.npy")
    before = open_dataset("cc359", tmp_path / "a.npy")[3].image
    np.save(tmp_path / "a.npy", np.asfortranarray(np.load(tmp_path / "a.npy")))
    assert open_dataset("cc359", tmp_path / "a.npy")[3].image.equal(before)


def test_a_flipped_bit_anywhere_in_hdf5_ends_no_check(tmp_path: Path) -> None:
    write_cc359(tmp_path / "Train" / "b.npy")
    file = tmp_path / "Train" / "a.h5"
    write_cc359_multi(file, size=(4, 4), coils=1)
    sound = file.read_bytes()
    for place in range(0, 2048, 41):
        spoiled = bytearray(sound)
        spoiled[place] ^= 1 << place % 8
        file.write_bytes(bytes(spoiled))
        assert "train" in check(tmp_path, "cc359", jobs=1).slices
