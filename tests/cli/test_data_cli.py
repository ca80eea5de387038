"""`chasm data` as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from chasm.cli.app import app
from chasm.cli.montage import montage
from chasm.data import KSpaceScan, open_dataset, read_scans, write_scan
from chasm.data.bart import write_cfl
from chasm.mri import Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from writers import (
    write_brats,
    write_cc359,
    write_cc359_multi,
    write_dicom,
    write_fastmri,
    write_photo,
    write_proxy,
)

runner = CliRunner()


def test_list_names_every_format() -> None:
    result = runner.invoke(app, ["data", "list"])
    assert result.exit_code == 0
    for name in ("cc359", "fastmri", "brats", "images", "folder", "proxy"):
        assert f"\n{name} " in "\n" + result.output


def test_check_a_sound_and_then_a_damaged_set(tmp_path: Path) -> None:
    root, manifest = tmp_path / "data", tmp_path / "m.json"
    for name in ("a", "b"):
        write_cc359(root / "Train" / f"{name}.npy", slices=62, seed=ord(name))
    sound = runner.invoke(app, ["data", "check", str(root), "--as", "cc359", "--manifest", str(manifest)])
    assert sound.exit_code == 0, sound.output
    assert "2 cases, 124 slices, 2 files" in sound.output
    assert sound.output.endswith("sound\n")
    assert set(json.loads(manifest.read_text())["files"]) == {"Train/a.npy", "Train/b.npy"}

    (root / "Train" / "b.npy").write_bytes(b"")
    damaged = runner.invoke(app, ["data", "check", str(root), "--as", "cc359", "--verify", str(manifest)])
    assert damaged.exit_code == 3
    assert "b.npy: header: the file is empty" in damaged.output
    assert "b.npy: sha256: differs from m.json" in damaged.output
    assert "2 things are wrong" in damaged.output


def test_one_case_is_one_case(tmp_path: Path) -> None:
    write_cc359(tmp_path / "Train" / "a.npy", slices=62)
    sound = runner.invoke(app, ["data", "check", str(tmp_path), "--as", "cc359"])
    assert ": 1 case, 62 slices, 1 file, " in sound.output
    assert "  train             1 case       62 slices\n" in sound.output
    (tmp_path / "Train" / "a.npy").write_bytes(b"")
    damaged = runner.invoke(app, ["data", "check", str(tmp_path), "--as", "cc359"])
    assert damaged.output.endswith("1 thing is wrong\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "{}/nowhere", "--as", "cc359"], "nowhere: no such file or folder"),
        (["check", "{}", "--as", "cc395"], "did you mean 'cc359'"),
        (["check", "{}", "--as", "proxy", "-O", "part"], "expected KEY=VALUE"),
        (["check", "{}", "--as", "proxy", "--manifest", "{}/a-file/m.json"], "could not be written (File exists)"),
        (["check", "{}", "--as", "proxy", "--verify", "{}/m.json"], "m.json: no such file"),
        (["preview", "{}", "--as", "cc359", "-o", "{}/p.png"], "split 'train' has no case"),
        (["preview", "--as", "cc359", "-o", "{}/p.png"], "'cc359' reads files"),
        (["preview", "{}", "--as", "proxy", "-o", "{}/p.png", "--mask", "randon"], "did you mean 'random'"),
        (["preview", "{}", "--as", "proxy", "-o", "{}/p.nosuch"], "nosuch"),
    ],
)
def test_wrong_use_is_one_line_and_exit_3(arguments: list[str], message: str, tmp_path: Path) -> None:
    write_proxy(tmp_path, size=64)
    (tmp_path / "a-file").touch()
    result = runner.invoke(app, ["data", *(a.format(tmp_path) for a in arguments)])
    assert result.exit_code == 3, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not isinstance(result.exception, ValueError)


@pytest.mark.parametrize("kind", ["proxy", "images"])
def test_preview_writes_a_picture(kind: str, tmp_path: Path) -> None:
    write_proxy(tmp_path / "proxy", size=64)
    write_photo(tmp_path / "images" / "train" / "a$^$b.png", size=(64, 80))  # no formula
    out = tmp_path / "new" / "p.png"
    more = {"proxy": ["--slices", "1"], "images": ["-O", "size=64"]}[kind]
    result = runner.invoke(app, ["data", "preview", str(tmp_path / kind), "--as", kind, "-o", str(out), *more])
    assert result.exit_code == 0, result.output
    assert result.output == f"wrote {out}: 1 of {'3 slices' if kind == 'proxy' else '1 slice'}\n"
    with Image.open(out) as picture:
        assert picture.width > 900
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 100  # not a blank page


def test_check_guesses_the_format(tmp_path: Path) -> None:
    k = np.fft.fft2(np.random.default_rng(0).random((2, 3, 16, 12))).astype(np.complex64)
    scan = KSpaceScan(np.fft.fftshift(k, axes=(-2, -1)), (16, 12))
    write_cc359(tmp_path / "cc359" / "Train" / "a.npy", slices=4)
    write_cc359_multi(tmp_path / "multi" / "Train" / "a.h5", slices=4)
    write_fastmri(tmp_path / "fastmri" / "singlecoil_train" / "a.h5")
    write_brats(tmp_path / "brats", "case1")
    write_photo(tmp_path / "photos" / "train" / "a.jpg")
    write_proxy(tmp_path / "proxy")
    write_dicom(tmp_path / "dicom" / "p1" / "IM1", np.arange(256).reshape(16, 16))
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "a.npy", np.eye(16))
    for suffix in (".mrd", ".cfl"):
        write_scan(scan, tmp_path / suffix[1:] / f"a{suffix}")
    (tmp_path / "mrd" / "a.mrd").rename(tmp_path / "mrd" / "a.h5")  # ISMRMRD by its content
    guesses = {"multi": "cc359", "photos": "images", "dicom": "folder", "mrd": "kspace", "cfl": "kspace"}
    for name in ("cc359", "multi", "fastmri", "brats", "photos", "proxy", "dicom", "folder", "mrd", "cfl"):
        result = runner.invoke(app, ["data", "check", str(tmp_path / name)])
        assert result.output.startswith(f"{guesses.get(name, name)} (guessed; --as names another) at "), result.output
    file = runner.invoke(app, ["data", "check", str(tmp_path / "mrd" / "a.h5")])
    assert file.output.startswith("kspace (guessed; --as names another) at ")
    assert "ISMRMRD k-space, 12 lines (3, 16, 12) complex64" in file.output
    (tmp_path / "nothing").mkdir()
    unknown = runner.invoke(app, ["data", "check", str(tmp_path / "nothing")])
    assert unknown.exit_code == 3
    assert "nothing: format: no known format: name it with --as (chasm data list)" in unknown.output
    told = runner.invoke(app, ["data", "check", str(tmp_path / "folder"), "--as", "folder"])
    assert told.output.startswith("folder at ")


def test_names_of_files_that_cannot_be_printed_are_escaped(tmp_path: Path) -> None:
    name = b"\xff\xe9 two\nlines \x1b[2J.npy"
    file = os.fsdecode(name)
    try:
        (tmp_path / file).touch()
    except OSError:
        pytest.skip("this file system has no such names")
    np.save(tmp_path / file, np.random.default_rng(0).random((2, 16, 12), dtype=np.float32))
    (tmp_path / f"{file}.part").touch()
    words = [sys.executable, "-m", "chasm", "data", "check", tmp_path]
    checked = subprocess.run(words, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (3, b"")
    escaped = {b"\xff": rb"\udcff", b"\xe9": rb"\udce9", b"\n": rb"\n", b"\x1b": rb"\x1b"}
    shown = b"".join(escaped.get(bytes([byte]), bytes([byte])) for byte in name)
    assert b"wrong: %b/%b.part: file: an unfinished download\n" % (os.fsencode(tmp_path), shown) in checked.stdout
    assert checked.stdout.endswith(b"\n1 thing is wrong\n")
    words = [*words[:3], "reconstruct", tmp_path / file, "--run", "zero-filled", "-o", tmp_path / "out.npy"]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
    assert np.load(tmp_path / "out.npy").shape == (2, 16, 12)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_check_asks_for_the_axes_of_kspace(tmp_path: Path, suffix: str) -> None:
    """Coils are not taken for slices of complex images."""
    images = np.random.default_rng(0).random((8, 32, 20)) * np.hanning(32)[:, None] * np.hanning(20) + 0j
    k = np.fft.fftshift(np.fft.fft2(images), axes=(-2, -1))
    for array, guess in ((images, "folder"), (k, "kspace"), (k[None], "kspace")):
        file = tmp_path / f"a{suffix}"
        np.save(file, array) if suffix == ".npy" else np.savez(file, array)
        result = runner.invoke(app, ["data", "check", str(file)])
        assert result.output.startswith(f"{guess} (guessed; --as names another) at "), result.output
        assert result.exit_code == (3 if guess == "kspace" else 0)
        assert ("say" in result.output) == (guess == "kspace")
        axes = "axes=CHW" if array.ndim == 3 else "axes=SCHW"
        told = runner.invoke(app, ["data", "check", str(file), "--as", "kspace", "-O", axes])
        assert told.exit_code == 0
        assert " (8, 32, 20) " in told.output


def test_convert_between_formats(tmp_path: Path) -> None:
    write_fastmri(tmp_path / "a.h5", slices=2, coils=3, size=(24, 16), recon=12, fov=(24, 24, 5))

    def convert(*words: object) -> str:
        result = runner.invoke(app, ["data", "convert", *map(str, words)])
        assert result.exit_code == 0, result.output
        return result.output

    said = convert(tmp_path / "a.h5", tmp_path / "b.mrd")
    assert said == f"{tmp_path / 'b.mrd'}: fastMRI -> ISMRMRD, 2 slices, 3 coils, 24 x 16, image 12 x 12\n"
    said = convert(tmp_path / "b.mrd", tmp_path / "c.cfl")
    assert "c.cfl: ISMRMRD -> BART, 2 slices, 3 coils, 12 x 16, image 12 x 12" in said
    assert "note: oversampling of the readout removed: 12 of 24 rows" in said
    convert(tmp_path / "c.cfl", tmp_path / "d.npz")
    convert(tmp_path / "c.cfl", tmp_path / "d.npz", "--force")
    convert(tmp_path / "d.npz", tmp_path / "e.h5", "-O", "axes=SCHW")
    first, last = (open_dataset("kspace", tmp_path / f"{name}.h5", split="all")[1].image for name in "ae")
    np.testing.assert_allclose(last[..., 2:-2], first, atol=1e-5)  # BART cannot say that columns are oversampled
    for words, message in (
        (("a.h5", "a.h5"), "a.h5: is the input"),
        (("a.h5", "b.mrd"), "b.mrd: is there and would be lost: give another name, or --force"),
        (("a.h5", "x.png"), "x.png: expected a name that ends in .mrd"),
        (("d.npz", "x.mrd"), "4 dimensions (2, 3, 12, 16): say -O axes=SCHW"),
        (("none.h5", "x.mrd"), "none.h5: no such file"),
        (("a.h5", "x.mrd", "-O", "axis=1"), "no option 'axis'"),
    ):
        files = [str(tmp_path / word) if "." in word else word for word in words]
        result = runner.invoke(app, ["data", "convert", *files])
        assert result.exit_code == 3, result.output
        assert message in result.output
        assert len(result.output.strip().splitlines()) == 1


def test_convert_gives_every_volume_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = (rng.random((16, 12, 1, 2, 1, 3)) + 1j).astype(np.complex64)  # three echoes
    write_cfl(array, tmp_path / "a.cfl")
    result = runner.invoke(app, ["data", "convert", str(tmp_path / "a.hdr"), str(tmp_path / "b.mrd")])
    assert result.exit_code == 0, result.output
    assert sorted(f.name for f in tmp_path.glob("b*")) == ["b-echo1.mrd", "b-echo2.mrd", "b-echo3.mrd"]
    (scan,) = read_scans(tmp_path / "b-echo2.mrd").values()
    np.testing.assert_allclose(scan.kspace[0], array[:, :, 0, :, 0, 1].transpose(2, 0, 1), rtol=1e-6)


def test_convert_never_replaces_a_pipe(tmp_path: Path) -> None:
    write_fastmri(tmp_path / "a.h5", slices=2, coils=3, size=(24, 16), recon=12, fov=(24, 24, 5))
    os.mkfifo(tmp_path / "b.mrd")
    words = ["data", "convert", str(tmp_path / "a.h5"), str(tmp_path / "b.mrd"), "--force"]
    result = runner.invoke(app, words)
    assert result.exit_code == 3, result.output
    assert "b.mrd: not a file, and it is never replaced" in result.output
    assert (tmp_path / "b.mrd").is_fifo()


def test_montage_shows_target_mask_zero_filled_error_and_labels(tmp_path: Path) -> None:
    write_brats(tmp_path, "c1")
    data = open_dataset("brats", tmp_path, split="all")
    sample = data[3]
    figure = montage([sample], "mri", Sampling("equispaced", 2))
    target, mask, plain, error = (np.asarray(ax.images[0].get_array()) for ax in figure.axes)
    flair = sample.image[3].numpy()
    np.testing.assert_allclose(target, (flair - flair.min()) / (flair.max() - flair.min()), atol=1e-6)
    assert mask.sum(1).tolist() == [Sampling("equispaced", 2).mask(16).lines] * 20
    kspace = np.fft.fftshift(np.fft.fft2(np.fft.ifftshift(target))) * mask
    expected = np.abs(np.fft.fftshift(np.fft.ifft2(np.fft.ifftshift(kspace))))
    np.testing.assert_allclose(plain, expected, atol=1e-5)
    np.testing.assert_allclose(error, 3 * np.abs(plain - target), atol=1e-6)
    assert len(figure.axes[0].collections) == 3  # the outlines of the three classes
    assert len(figure.axes[2].collections) == 0


def test_montage_combines_coils(tmp_path: Path) -> None:
    coils = write_cc359_multi(tmp_path / "Train" / "a.h5", size=(64, 48))
    sample = open_dataset("cc359", tmp_path, combine="coils")[0]
    target = np.asarray(montage([sample], "mri", Sampling()).axes[0].images[0].get_array())
    rss = np.sqrt((np.abs(coils[30]) ** 2).sum(0))
    np.testing.assert_allclose(target, rss / rss.max(), atol=1e-5)


@pytest.mark.parametrize("what", ["manifest", "preview"])
def test_a_file_that_chasm_did_not_write_is_kept(what: str, tmp_path: Path) -> None:
    write_photo(tmp_path / "images" / "train" / "a$^$b.png", size=(64, 80))  # no formula
    mine = tmp_path / ("thesis.json" if what == "manifest" else "thesis.png")
    words = ["check", "--manifest"] if what == "manifest" else ["preview", "-O", "size=64", "-o"]

    def call(*more: str, out: Path = mine) -> Result:
        return runner.invoke(
            app, ["data", words[0], str(tmp_path / "images"), "--as", "images", *words[1:], str(out), *more]
        )

    mine.write_text("{}")
    result = call()
    assert result.exit_code == 3, result.output
    assert "thesis" in result.output
    assert "chasm did not write this file, and it would be lost: give another name, or --force" in result.output
    assert mine.read_text() == "{}"
    assert call("--force").exit_code == 0
    assert mine.read_text(errors="replace") != "{}"
    assert call().exit_code == 0, "what chasm wrote may be replaced"
    os.mkfifo(tmp_path / "pipe.json")
    for never in (tmp_path, tmp_path / "pipe.json"):
        assert "not a file, and it is never replaced" in call("--force", out=never).output


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_every_kind_of_preview_is_known_again(suffix: str, tmp_path: Path) -> None:
    write_photo(tmp_path / "images" / "train" / "a$^$b.png", size=(64, 80))  # no formula
    words = ["data", "preview", str(tmp_path / "images"), "--as", "images", "-O", "size=64", "-o"]
    for _ in range(2):
        result = runner.invoke(app, [*words, str(tmp_path / f"p.{suffix}")])
        assert result.exit_code == 0, result.output
