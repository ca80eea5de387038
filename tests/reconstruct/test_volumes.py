"""What `chasm reconstruct` writes: files of its own, whole or not at all, with the geometry of the input."""

import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import writers
from runs import as_trained, call, columns, make_run

from chasm.reconstruct import reconstruct
from chasm.reconstruct.cases import PICTURED_SLICES, UNKNOWN_VOXELS
from chasm.reconstruct.slices import Reconstructor


@pytest.mark.usefixtures("no_picture")
def test_png(tmp_path: Path) -> None:
    """A file for each slice, all in one scale: a slice of half the brightness is half as bright."""
    volume = writers.blob(np.random.default_rng(0), 11, 16, 16) * np.linspace(1, 0.1, 11)[:, None, None]
    np.save(tmp_path / "scan.npy", volume)
    (made,) = reconstruct(tmp_path / "scan.npy", make_run(tmp_path / "run"), tmp_path / "out.png").volumes
    assert made.files == sorted(tmp_path.glob("out-*.png"))
    assert [f.name for f in made.files[::10]] == ["out-00.png", "out-10.png"]
    wanted = as_trained(volume, columns(16))
    for file, slice_ in zip(made.files, wanted, strict=True):
        with Image.open(file) as image:
            pixels = np.asarray(image).astype(float)
        np.testing.assert_allclose(pixels / 65535, slice_ / wanted.max(), atol=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir() if "out" not in p.name) == ["run", "scan.npy"]
    found = call(tmp_path / "scan.npy", "--run", tmp_path / "run", "-o", tmp_path / "out.png", "--device", "cpu")
    assert f"{tmp_path / 'out-00.png'} .. out-10.png: 11 slices" in found.output
    assert "replaced an earlier file" in found.output


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("suffix", [".h5", ".nii", ".nii.gz", ".png"])
def test_slices_are_let_go_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """At no time more than the few that the picture needs, and the one at hand, are in memory."""
    made: list[Any] = []
    alive: list[int] = []
    original = Reconstructor.result

    def tracked(self: Reconstructor, row: int, meters: Any) -> Any:
        result = original(self, row, meters)
        made.append(weakref.ref(result.image))
        alive.append(sum(image() is not None for image in made))
        return result

    monkeypatch.setattr(Reconstructor, "result", tracked)
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 20, 16, 16).astype(np.float32))
    reconstruct(tmp_path / "scan.npy", make_run(tmp_path / "run"), tmp_path / f"out{suffix}")
    assert len(alive) == 20
    assert max(alive) <= PICTURED_SLICES + 2


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    volume = writers.blob(np.random.default_rng(0), 4, 16, 16)
    volume[2, 5, 5] = np.nan
    np.save(tmp_path / "scan.npy", volume)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"scan.npy: image 2: 1 of 256 values are NaN"):
        reconstruct(tmp_path / "scan.npy", make_run(tmp_path / "run"), tmp_path / "out" / "x.h5")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("way", ["same", "hard link", "symbolic link", "picture", "record", "slice", "mask", "run"])
def test_an_input_is_never_written_over(tmp_path: Path, way: str) -> None:
    run, source, mask = make_run(tmp_path / "run"), tmp_path / "in.h5", None
    writers.write_fastmri(source, slices=2, size=(16, 16), recon=16)
    out, kept = source, source
    if way == "hard link":
        out = tmp_path / "other.h5"
        out.hardlink_to(source)
    elif way == "symbolic link":
        (tmp_path / "elsewhere").symlink_to(tmp_path)
        out = tmp_path / "elsewhere" / "in.h5"
    elif way in ("picture", "slice"):
        source = kept = tmp_path / ("out.side-by-side.png" if way == "picture" else "images/out-0.png")
        source.parent.mkdir(exist_ok=True)
        Image.fromarray((255 * writers.blob(np.random.default_rng(0), 16, 16) / 1.3).astype(np.uint8)).save(source)
        out = tmp_path / "out.h5"
        if way == "slice":
            np.save(tmp_path / "images" / "0.npy", writers.blob(np.random.default_rng(0), 1, 16, 16))
            source, out = tmp_path / "images", tmp_path / "images" / "out.png"
    elif way == "record":  # a text file that came with the scan, not a record of an earlier reconstruction
        kept = tmp_path / "in.json"
        kept.write_text('{"EchoTime": 0.1}')
        out = tmp_path / "in.nii.gz"
    elif way == "mask":
        kept = mask = tmp_path / "mask.json"
        np.savetxt(mask, np.ones(16))
        out = tmp_path / "mask.h5"
    elif way == "run":
        kept, out = run / "environment.json", run / "environment.h5"
        kept.write_text("{}")
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    lost = "chasm did not write this file" if way == "record" else "is .*--out"
    with pytest.raises(ValueError, match=rf"{kept.name if way != 'hard link' else 'other.h5'}: {lost}"):
        reconstruct(source, run, out, mask=mask)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before


@pytest.mark.usefixtures("no_picture")
def test_an_earlier_reconstruction_is_replaced(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    run = make_run(tmp_path / "run")
    told = [reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.h5").volumes[0].replaced for _ in range(2)]
    assert told == [False, True]


@pytest.mark.parametrize("name", ["out.nii", "out.side-by-side.png", "out.json"])
def test_a_file_that_no_reconstruction_wrote_is_kept(name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    run = make_run(tmp_path / "run")
    if name == "out.nii":
        reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.h5")  # its record does not speak for another suffix
    (tmp_path / name).write_text("mine")
    words = (tmp_path / "scan.npy", "--run", run, "-o", tmp_path / "out.nii", "--device", "cpu")
    found = call(*words)
    assert found.exit_code == 3
    assert f"{name}: chasm did not write this file" in found.stderr
    assert (tmp_path / name).read_text() == "mine"
    assert call(*words, "--force").exit_code == 0
    assert (tmp_path / name).read_bytes() != b"mine"


@pytest.mark.usefixtures("no_picture")
def test_a_pipe_or_a_folder_is_never_replaced(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    os.mkfifo(tmp_path / "out.h5")
    with pytest.raises(ValueError, match=r"out\.h5: not a file, and it is never replaced"):
        reconstruct(tmp_path / "scan.npy", make_run(tmp_path / "run"), tmp_path / "out.h5", force=True)


NAMES = (
    "scan.001.npy",
    "scan.002.npy",
    "scan_001_npy/x.npy",
    "a/b/x.npy",
    "a_b/x.npy",
    "o.npy",
    "o-0.npy",
    "A.npy",
)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("suffix", [".h5", ".png"])
def test_every_case_has_files_of_its_own(tmp_path: Path, suffix: str) -> None:
    volumes = {}
    for i, name in enumerate(NAMES):
        file = tmp_path / "images" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        n = 2 if name == "o.npy" else 1  # as PNG: o-0 and o-1
        volumes[name.removesuffix("/x.npy")] = (i + 1) * writers.blob(np.random.default_rng(i), n, 16, 16)
        np.save(file, volumes[name.removesuffix("/x.npy")])
    outcome = reconstruct(tmp_path / "images", make_run(tmp_path / "run"), tmp_path / f"out{suffix}")
    stems = {v.case: v.picture.name.removesuffix(".side-by-side.png") for v in outcome.volumes}
    assert len({stem.lower() for stem in stems.values()}) == len(NAMES)
    written = [f.name for v in outcome.volumes for f in (*v.files, v.picture)] + [f"{s}.json" for s in stems.values()]
    assert sorted(written) == sorted(f.name for f in tmp_path.glob("out*"))
    assert stems["A.npy"] == "out-A"
    assert stems["scan_001_npy"] == "out-scan_001_npy"  # a name of its own is kept
    assert stems["scan.001.npy"] == "out-scan_001_npy-2"
    assert stems["scan.002.npy"] == "out-scan_002_npy"
    assert {stems["a/b"], stems["a_b"]} == {"out-a_b", "out-a_b-2"}
    if suffix == ".h5":
        assert stems["o.npy"] == "out-o"
        for v in outcome.volumes:
            with h5py.File(v.files[0]) as f:
                np.testing.assert_allclose(f["reconstruction"][()], as_trained(volumes[v.case], columns(16)), atol=1e-4)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("codes", [(2, 0), (1, 1), (4, 1), (0, 1), (0, 0)])
def test_nifti_keeps_the_geometry_of_nifti(tmp_path: Path, codes: tuple[int, int]) -> None:
    """Other axes, voxels and origin than ours: every voxel stays where it was, in the coordinates it was given in."""
    volume = writers.blob(np.random.default_rng(0), 5, 20, 16).astype(np.float32)
    affine = np.array([[0, 0.7, 0, 10], [-0.5, 0, 0, -20], [0, 0, 3, 30], [0, 0, 0, 1.0]])
    image = nibabel.Nifti1Image(volume.transpose(2, 1, 0), affine)
    image.set_sform(affine, code=codes[0])
    image.set_qform(affine, code=codes[1])
    nibabel.save(image, tmp_path / "in.nii.gz")
    # every column, and a run of zero weights: the reconstruction is the volume itself
    np.savetxt(tmp_path / "all.txt", np.ones(16 if codes == (0, 0) else 20))
    outcome = reconstruct(
        tmp_path / "in.nii.gz", make_run(tmp_path / "run"), tmp_path / "out.nii.gz", mask=tmp_path / "all.txt"
    )
    assert not any("voxel" in note for note in outcome.notes)
    found, wanted = nibabel.load(tmp_path / "out.nii.gz"), nibabel.load(tmp_path / "in.nii.gz")
    assert found.header.get_zooms() == pytest.approx((0.5, 0.7, 3) if codes == (0, 0) else (0.7, 0.5, 3))
    assert found.header.get_xyzt_units()[0] == "mm"
    # a file without coordinates is read in those that nibabel makes up, which are then written down
    written = (int(found.header["sform_code"]), int(found.header["qform_code"]))
    assert written == (codes if codes != (0, 0) else (2, 0))
    np.testing.assert_allclose(found.header.get_qform(), found.affine, atol=1e-4)
    for voxel in ((0, 0, 0), (3, 7, 2), (15, 19, 4)):
        world = nibabel.affines.apply_affine(wanted.affine, voxel)
        here = nibabel.affines.apply_affine(np.linalg.inv(found.affine), world).round().astype(int)
        np.testing.assert_allclose(nibabel.affines.apply_affine(found.affine, here), world, atol=1e-4)
        assert found.get_fdata()[tuple(here)] == pytest.approx(wanted.get_fdata()[voxel], abs=1e-4)


@pytest.mark.usefixtures("no_picture")
def test_nifti_is_reconstructed_in_its_acquired_plane(tmp_path: Path) -> None:
    """The phase-encoded axis is one of the acquired plane, never the slice direction; the plane can be chosen."""
    volume = writers.blob(np.random.default_rng(0), 3, 20, 16).astype(np.float32)  # (right, up, front)
    affine = np.array([[6.0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(volume, affine), tmp_path / "in.nii")
    words = (tmp_path / "in.nii", "--run", make_run(tmp_path / "run"), "-o", tmp_path / "out.nii")
    found = call(*words)
    assert "read as: magnitude images, sagittal slices of NIfTI (3 slices, 20 x 16)" in found.output
    written = nibabel.load(tmp_path / "out.nii")
    assert nibabel.aff2axcodes(written.affine) == ("A", "S", "R")
    # rows from above, columns to the front; the file counts rows from below
    wanted = as_trained(volume[:, ::-1], columns(16))[:, ::-1]
    np.testing.assert_allclose(written.get_fdata().transpose(2, 1, 0), wanted, atol=1e-5)
    assert "in.nii: image: slices of 20 x 3 cannot be scored" in call(*words, "-O", "plane=coronal").output
    for word, expected in (("plane=oblique", "unknown plane 'oblique'"), ("volume=1", "no volume 1"), ("a=1", "'a'")):
        refused = call(*words, "-O", word)
        assert refused.exit_code == 3
        assert expected in refused.output
        assert len(refused.output.strip().splitlines()) == 1


def test_nifti_keeps_the_geometry_of_a_dicom_series(tmp_path: Path) -> None:
    """Oblique, and numbered from above: every voxel is where the scanner put it, in NIfTI's directions."""
    volume = np.random.default_rng(0).integers(1, 4000, (4, 20, 16))
    columns, rows = np.array([0.8, 0.6, 0]), np.array([-0.6, 0.8, 0])
    first, step = np.array([10.0, -20, 30]), np.array([0.1, 0, -3])
    geometry = {"ImageOrientationPatient": [*columns, *rows], "PixelSpacing": [0.5, 0.7], "SeriesInstanceUID": "1.2"}
    for i, pixels in enumerate(volume):
        place = {"ImagePositionPatient": list(first + i * step)}
        writers.write_dicom(tmp_path / "in" / f"{9 - i}.dcm", pixels, number=i + 1, **geometry, **place)
    np.savetxt(tmp_path / "all.txt", np.ones(16))
    outcome = reconstruct(tmp_path / "in", make_run(tmp_path / "run"), tmp_path / "out.nii", mask=tmp_path / "all.txt")
    assert UNKNOWN_VOXELS not in outcome.notes
    found = nibabel.load(next(tmp_path.glob("out*.nii")))
    assert found.header.get_zooms() == pytest.approx((0.7, 0.5, np.linalg.norm(step)))
    for i, row, column in ((0, 0, 0), (3, 19, 15), (2, 5, 11)):
        left_back_up = first + i * step + row * 0.5 * rows + column * 0.7 * columns
        world = left_back_up * [-1, -1, 1]
        here = nibabel.affines.apply_affine(np.linalg.inv(found.affine), world)
        np.testing.assert_allclose(here, here.round(), atol=1e-3)
        assert found.get_fdata()[tuple(here.round().astype(int))] == pytest.approx(volume[i, row, column], rel=1e-4)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("missing", ["a position", "a slice", "all"])
def test_a_dicom_series_without_a_grid(tmp_path: Path, missing: str) -> None:
    """What is known is written, and a volume with a gap is refused: 1 mm voxels were written for all three."""
    for i in range(4):
        more = {
            "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
            "PixelSpacing": [2, 3],
            "SliceThickness": 5,
            "ImagePositionPatient": [0, 0, 4 * i],
            "SeriesInstanceUID": "1.2",
        }
        if missing == "a position" and i == 2:
            del more["ImagePositionPatient"]
        if not (missing == "a slice" and i == 2):
            pixels = np.random.default_rng(i).integers(1, 4000, (16, 16))
            writers.write_dicom(tmp_path / "in" / f"{i}.dcm", pixels, number=i, **({} if missing == "all" else more))
    words = (tmp_path / "in", "--run", make_run(tmp_path / "run"), "-o", tmp_path / "out.nii")
    found = call(*words)
    if missing == "a slice":
        assert found.exit_code == 3
        assert "a slice is missing between 4 and 12 mm: the others are 4 mm apart" in found.output
        assert call(*words[:-1], tmp_path / "out.h5").exit_code == 0  # without geometry there is nothing wrong
        return
    note = UNKNOWN_VOXELS if missing == "all" else "ImagePositionPatient is missing: only the voxel sizes are written"
    assert f"note: {note}\n" in found.output
    written = nibabel.load(next(tmp_path.glob("out*.nii")))
    assert written.header.get_zooms() == ((1, 1, 1) if missing == "all" else (3, 2, 5))


@pytest.mark.usefixtures("no_picture")
def test_nifti_takes_voxel_sizes_from_the_header(tmp_path: Path) -> None:
    run, notes = make_run(tmp_path / "run"), {}
    for name, fov in (("known", (48, 32, 5)), ("unknown", None), ("zero", (0, 32, 5))):
        writers.write_fastmri(tmp_path / f"{name}.h5", slices=2, size=(24, 20), recon=16, fov=fov)
        notes[name] = reconstruct(tmp_path / f"{name}.h5", run, tmp_path / f"{name}.nii").notes
    assert nibabel.load(tmp_path / "known.nii").header.get_zooms() == pytest.approx((2, 3, 5))  # columns, rows, slices
    assert notes == {"known": [], "unknown": [UNKNOWN_VOXELS], "zero": [UNKNOWN_VOXELS]}
    assert nibabel.load(tmp_path / "unknown.nii").header.get_zooms() == (1, 1, 1)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("place", ["in", "in/deeper", "link"])
def test_nothing_is_written_where_it_would_be_read(tmp_path: Path, place: str) -> None:
    """A second call would take the first one's picture for a slice."""
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    np.save(tmp_path / "in" / "scan.npy", writers.blob(np.random.default_rng(0), 2, 16, 16))
    with pytest.raises(ValueError, match=r"out.h5: in the folder that is read.*give another --out"):
        reconstruct(tmp_path / "in", make_run(tmp_path / "run"), tmp_path / place / "out.h5")
    assert [file.name for file in (tmp_path / "in").iterdir()] == ["scan.npy"]


FULL = """
import resource, signal, sys
from pathlib import Path
import numpy as np
import h5py, PIL.Image, pydicom
from chasm.data import Geometry
from chasm.reconstruct.dicom import Series
from chasm.reconstruct.outputs import plan_outputs
from chasm.reconstruct.volumes import write_volume
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for name in ("out.h5", "out.nii", "out.nii.gz", "out.npy", "out.dcm", "out.png"):
    for room in (0, 100 if name == "out.nii.gz" else 20_000):  # 20 slices, packed, take less
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        place = plan_outputs(Path(sys.argv[1]) / name, {"a": 20})["a"]
        try:
            images = (np.ones((64, 64), np.float32) for _ in range(20))
            write_volume(place, images, Series("a", "", "", {}, Geometry(np.eye(4))))
        except OSError as e:
            print(e)
"""


def test_a_full_disk_is_one_line_and_no_crash(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk. HDF5 used to end in a trace and a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 12
    for line in lines:
        assert re.fullmatch(
            r".*out.*: could not be written \(.*File too large.*\): free space or choose another folder", line
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_picture")
def test_slices_of_an_earlier_call_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for slices, stale in ((12, 0), (12, 0), (3, 12), (1, 15)):
        np.save(tmp_path / "scan.npy", writers.blob(np.random.default_rng(0), slices, 16, 16))
        notes = reconstruct(tmp_path / "scan.npy", run, tmp_path / "out.png").notes
        first = tmp_path / ("out-00.png" if slices == 3 else "out-0.png")
        assert notes == ([f"still there from an earlier call: {stale} slices, first {first}"] if stale else [])
