"""The page of `chasm app` in a headless Chromium: files dropped, numbers compared with Python, errors read."""

import gzip
import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import torch
import torch.nn.functional as F
from app_pages import IN_A_BROWSER, MESSAGE, RECIPES, RESULT, SIZE, assert_same, brain, expected
from app_pages import play as play
from app_pages import runs as runs
from app_pages import served as served
from app_pages import static as static
from PIL import Image

from chasm.app import build_site, server
from chasm.data.nifti import open_nifti
from chasm.models.folders import find_model
from chasm.mri import create_mask, to_channels, to_complex
from chasm.train import Run, load_recipe, load_run

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from writers import centred_fft, write_dicom

pytestmark = IN_A_BROWSER


# The part of the view of a volume that its three pictures take.
FILLED = "chasm.volumeView.viewer.getCustomLayout().reduce((sum, {position: [, , w, h]}) => sum + w * h, 0)"
MODELS = ("brain-x4", "brain-x8", "knee-x4", "photo-x4")


def test_the_shipped_models_give_the_numbers_of_python(play: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", brain()[0].astype(np.complex64))
    photo = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    steps: list[dict[str, Any]] = []
    for name in MODELS:
        file = "photo.png" if name == "photo-x4" else "array.npy"
        steps += [{"set": ["#model", name], "wait": 1500}, {"drop": [str(tmp_path / file)], "wait": 1500}]
        steps += [{"set": ["#mode", "test"], "wait": 1500}, {"read": RESULT, "as": name}]
    with server.make_server(build_site([find_model(name) for name in MODELS], tmp_path / "page")) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        read = play(steps, address=running.address)
        running.shutdown()
    for name in MODELS:
        pixels = photo.transpose(2, 0, 1).astype(np.float32) / 255
        assert_same(read[name], expected(load_run(name), pixels if name == "photo-x4" else brain()[0]))


def test_files_of_every_kind_give_the_numbers_of_python(play: Any, runs: dict[str, Run], tmp_path: Path) -> None:
    volume = brain(3)
    complex_image = (volume[0] * np.exp(1j * np.linspace(-1, 2, SIZE))).astype(np.complex64)
    np.save(tmp_path / "array.npy", complex_image)
    affine = np.diag([0.5, 0.5, 3.0, 1.0])
    nibabel.save(nibabel.Nifti1Image(volume[:, ::-1].transpose(2, 1, 0), affine), tmp_path / "volume.nii.gz")
    series = []
    for i, image in enumerate(volume):
        file = tmp_path / "dicom" / f"{i}.dcm"
        place = {"ImagePositionPatient": [0, 0, 3.0 * i], "ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}
        write_dicom(file, np.round(image * 1000), number=3 - i, slope=0.001, SeriesInstanceUID="1.2.3", **place)
        series.insert(0, str(file))  # in another order than that of the slices
    with h5py.File(tmp_path / "kspace.h5", "w") as f:
        f["kspace"] = centred_fft(volume).astype(np.complex64)
    columns = create_mask("equispaced", SIZE, 4).tensor()[0, 0, 0].numpy()
    with h5py.File(tmp_path / "measured.h5", "w") as f:
        f["kspace"], f["mask"] = (centred_fft(volume[:1]) * columns).astype(np.complex64), columns
    eight = (brain()[0] * 255 / brain()[0].max()).astype(np.uint8)
    Image.fromarray(eight).save(tmp_path / "picture.png")

    steps: list[dict[str, Any]] = []
    for name in ("array.npy", "volume.nii.gz", "kspace.h5", "measured.h5", "picture.png"):
        steps += [{"drop": [str(tmp_path / name)], "wait": 1500}, {"read": MESSAGE, "as": f"{name}!"}]
        steps.append({"read": RESULT, "as": name})
    steps += [{"drop": series, "wait": 1500}, {"read": RESULT, "as": "dicom"}]
    steps += [{"set": ["#acceleration", "8"], "wait": 1500}, {"read": RESULT, "as": "x8"}]
    steps += [{"press": "ArrowRight", "wait": 1500}, {"read": "chasm.state.index", "as": "slice"}]
    read = play(steps)

    run = runs["scans"]
    assert {key: text for key, text in read.items() if key.endswith("!") and text} == {}
    assert_same(read["array.npy"], expected(run, complex_image))
    for name in ("volume.nii.gz", "kspace.h5"):
        assert_same(read[name], expected(run, volume[1]))
    measured = to_complex(run.task.prepare(torch.as_tensor(volume[:1]).to(torch.complex64)[None]).input)[0, 0]
    with torch.no_grad():
        scaled = to_channels((measured / measured.abs().max())[None, None])
        output = to_complex(run.model(scaled, mask=torch.as_tensor(columns).reshape(1, 1, 1, -1)))[0, 0].abs()
    assert_same(read["measured.h5"], (output.numpy(), (measured / measured.abs().max()).abs().numpy()))
    assert_same(read["picture.png"], expected(run, eight.astype(np.float32) / 255))
    assert_same(read["dicom"], expected(run, (np.round(volume[1] * 1000) / 1000).astype(np.float32)))
    stronger = load_recipe({**RECIPES["scans"], "train": {"steps": 1}}, ["task.options.sampling.acceleration=8"])
    faster = Run(run.model, stronger.task.create(), stronger, run.folder)
    assert_same(read["x8"], expected(faster, (np.round(volume[1] * 1000) / 1000).astype(np.float32)))
    assert read["slice"] == 2


def test_bands_volume_photographs_and_pictures_of_the_page(play: Any, runs: dict[str, Run], tmp_path: Path) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    nibabel.save(nibabel.Nifti1Image(brain(3).transpose(2, 1, 0), np.eye(4)), tmp_path / "volume.nii")
    changed = "Math.max(...chasm.state.result.shown.map((v, i) => Math.abs(v - chasm.state.result.unchanged[i])))"
    read = play(
        [
            {"drop": [str(tmp_path / "volume.nii")], "wait": 1500, "shot": "wide"},
            {"set": ["[data-band='0']", "0"], "wait": 2500},
            {"read": changed, "as": "changed"},
            {"click": "#volume-button", "wait": 4000, "shot": "volume"},
            {"read": MESSAGE, "as": "message"},
            {"read": "chasm.volumeView.viewer.volumes[0].dims.slice(1, 4)", "as": "dims"},
            {"read": FILLED, "as": "filled"},
            {"size": [390, 844], "wait": 700, "shot": "phone"},
            {"read": "document.documentElement.scrollWidth", "as": "width"},
            {"click": "#theme", "wait": 300, "shot": "dark"},
            {"click": "#bands button", "wait": 1500},
            {"set": ["#model", "photos"], "wait": 2500},
            {"drop": [str(tmp_path / "photo.png")], "wait": 1500, "shot": "photo"},
            {"read": RESULT, "as": "enlarged"},
            {"read": "document.getElementById('numbers').textContent", "as": "numbers"},
            {"set": ["#mode", "test"], "wait": 1500},
            {"read": RESULT, "as": "photo"},
        ]
    )
    assert read["message"] == ""
    assert read["changed"] > 1e-3
    assert read["dims"] == [SIZE, SIZE, 3]
    assert read["filled"] > 0.9  # thin slabs do not leave the view half empty
    assert read["width"] <= 390  # nothing to scroll sideways on a phone
    pixels = torch.as_tensor(photo.transpose(2, 0, 1).astype(np.float32) / 255)[None]
    assert_same(read["photo"], expected(runs["photos"], pixels[0].numpy()))
    large = F.interpolate(pixels, scale_factor=4, mode="bicubic", antialias=True).clamp(0, 1)
    with torch.no_grad():
        assert_same(read["enlarged"], (runs["photos"].model(large).clamp(0, 1).numpy(), large.numpy()))
    assert "No target to compare with: the picture itself was enlarged" in read["numbers"]


def test_volumes_are_cut_along_the_chosen_plane(play: Any, runs: dict[str, Run], tmp_path: Path) -> None:
    """Stored with x to the left and y last: the page turns it, and starts with the plane it was acquired in."""
    volume = np.random.default_rng(0).random((40, 44, 36)).astype(np.float32)
    affine = np.array([[-1.0, 0, 0, 0], [0, 0, 3, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(volume, affine), tmp_path / "volume.nii")
    steps: list[dict[str, Any]] = [{"drop": [str(tmp_path / "volume.nii")], "wait": 1500}]
    steps += [{"read": "document.getElementById('plane').value", "as": "acquired"}, {"read": RESULT, "as": "coronal"}]
    for plane in ("axial", "sagittal"):
        steps += [{"set": ["#plane", plane], "wait": 1500}, {"read": RESULT, "as": plane}]
    read = play(steps)
    assert read["acquired"] == "coronal"
    for plane in ("coronal", "axial", "sagittal"):
        slices = open_nifti(tmp_path / "volume.nii", plane).read()
        assert_same(read[plane], expected(runs["scans"], slices[len(slices) // 2].copy()))


def test_coils_are_combined_and_what_cannot_be_is_said(
    play: Any, static: str, runs: dict[str, Run], tmp_path: Path
) -> None:
    images = brain()[0] * np.exp(1j * np.linspace(-1, 2, SIZE)) * np.linspace(0.2, 1, SIZE)[:, None]
    coils = np.stack([images, images[::-1]])[None].astype(np.complex64)
    columns = create_mask("equispaced", SIZE, 4).tensor()[0, 0, 0].numpy()
    with h5py.File(tmp_path / "coils.h5", "w") as f:
        f["kspace"] = centred_fft(coils).astype(np.complex64)
    with h5py.File(tmp_path / "measured.h5", "w") as f:
        f["kspace"], f["mask"] = (centred_fft(coils) * columns).astype(np.complex64), columns
    status = {"read": "document.getElementById('status').textContent", "as": "status"}
    steps = [{"drop": [str(tmp_path / "coils.h5")], "wait": 1500}, {"read": RESULT, "as": "coils"}, status]
    steps += [{"drop": [str(tmp_path / "measured.h5")], "wait": 700}, {"read": MESSAGE, "as": "measured"}]
    read = play(steps, address=static)
    rss = np.sqrt((np.abs(coils[0]) ** 2).sum(0))
    assert_same(read["coils"], expected(runs["scans"], rss))
    assert "root-sum-of-squares of 2 coils" in read["status"]
    assert "undersampled k-space of 2 coils: 'chasm reconstruct'" in read["measured"]
    read = play(steps, quiet=False)  # the browser logs that the server refuses the second file
    combined = server.combine_coils(torch.as_tensor(coils[0]))[0].numpy()
    assert_same(read["coils"], expected(runs["scans"], combined))
    assert "2 coils combined" in read["status"]
    assert "use 'chasm reconstruct'" in read["measured"]


def test_the_static_page_sends_nothing(play: Any, static: str, runs: dict[str, Run], tmp_path: Path) -> None:
    np.save(tmp_path / "good.npy", brain()[0])
    (tmp_path / "letter.txt").write_text("dear")
    steps = [{"drop": [str(tmp_path / "letter.txt")], "wait": 500}, {"read": MESSAGE, "as": "letter"}]
    steps += [{"drop": [str(tmp_path / "good.npy")], "wait": 1500}, {"read": RESULT, "as": "good"}]
    steps += [{"read": "document.getElementById('privacy').textContent", "as": "privacy"}]
    read = play(steps, address=static)
    assert read["letter"] == "letter.txt: not a NIfTI, DICOM, PNG, JPEG, NumPy or HDF5 file."
    assert_same(read["good"], expected(runs["scans"], brain()[0]))
    assert "no server" in read["privacy"]
    assert read["methods"] == {"GET"}


def test_bad_files_and_a_dead_worker_are_said_and_survived(play: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "good.npy", brain()[0])
    bad = {
        "letter.txt": b"dear",
        "empty.nii": b"",
        "short.npy": (tmp_path / "good.npy").read_bytes()[:500],
        "broken.nii.gz": b"\x1f\x8b" + bytes(60),
        "broken.h5": b"\x89HDF\r\n\x1a\n" + bytes(600),
    }
    steps: list[dict[str, Any]] = []
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        steps += [{"drop": [str(tmp_path / name)], "wait": 700}, {"read": MESSAGE, "as": name}]
    nan = brain()[0].copy()
    nan[3, 3] = np.nan
    np.save(tmp_path / "nan.npy", nan)
    steps += [{"drop": [str(tmp_path / "nan.npy")], "wait": 700}, {"read": MESSAGE, "as": "nan.npy"}]
    with open(tmp_path / "huge.nii", "wb") as f:
        f.truncate(2 * 2**30)  # takes no place on the disk
    with gzip.open(tmp_path / "bomb.nii.gz", "wb", compresslevel=1) as f:
        for _ in range(13):
            f.write(bytes(2**26))
    for name in ("huge.nii", "bomb.nii.gz"):
        steps += [{"upload": str(tmp_path / name), "wait": 1000}, {"read": MESSAGE, "as": name}]
    steps += [{"drop": [str(tmp_path / "good.npy")], "wait": 1500}, {"read": MESSAGE, "as": "good"}]
    for when in ("at work", "idle"):
        steps += [{"kill": when, "wait": 700}, {"set": ["#kind", "equispaced"], "wait": 700}]
        steps += [{"read": MESSAGE, "as": when}, {"click": "#restart", "wait": 2500}]
    steps += [{"read": MESSAGE, "as": "again"}, {"read": RESULT, "as": "result"}]
    read = play(steps, quiet=False)  # the libraries log what they cannot read
    assert "empty.nii is empty" in read["empty.nii"]
    for name in ("letter.txt", "short.npy", "broken.nii.gz", "broken.h5"):
        assert name in read[name], read[name]
        assert "chasm-app-" not in read[name]
    assert "not a number" in read["nan.npy"] or "not finite" in read["nan.npy"]
    assert "2.0 GB" in read["huge.nii"]
    assert "bomb.nii.gz" in read["bomb.nii.gz"]
    assert read["good"] == ""
    assert "stopped" in read["at work"]
    assert "stopped" in read["idle"]
    assert read["again"] == ""
    assert len(read["result"]["output"]) == SIZE * SIZE
