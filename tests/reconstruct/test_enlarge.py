"""Photographs in, enlarged photographs out, with a super-resolution run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import call, make_run
from safetensors.torch import save_file

from chasm.reconstruct import is_enlarger
from chasm.tasks import SuperResolution
from chasm.train import load_recipe, load_run
from chasm.train.config import dump
from chasm.train.run import build_model


def make_enlarger(folder: Path, weights: str = "random", channels: int = 3) -> Path:
    """A super-resolution run without training. Zero weights leave what bicubic interpolation makes."""
    config = load_recipe(
        {
            "task": {"name": "superres", "options": {"factor": 2}},
            "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
            "mixer": {"name": "chasm"},
            "train": {"steps": 1},
        }
    )
    model = build_model(config, config.task.create(), (channels, 16, 16))
    scale = {"zero": 0, "random": 1}[weights]
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(config))
    (folder / "environment.json").write_text(json.dumps({"image_shape": [channels, 16, 16]}))
    save_file({k: scale * v for k, v in model.state_dict().items()}, folder / "weights.safetensors")
    return folder


def photo(path: Path, mode: str = "RGB", size: tuple[int, int] = (18, 11)) -> np.ndarray:
    """Write random pixels, and return them as RGB. Interpolation never leaves 0 to 255, where Pillow would clip."""
    width, height = size
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(0).integers(64, 192, (height, width, bands), dtype=np.uint8)
    picture = Image.fromarray(pixels.squeeze(-1) if bands == 1 else pixels, mode)
    picture.save(path)
    return np.array(picture.convert("RGB"))


def bicubic(pixels: np.ndarray) -> np.ndarray:
    """Pillow's bicubic interpolation to twice the size."""
    height, width = pixels.shape[:2]
    return np.asarray(Image.fromarray(pixels).resize((2 * width, 2 * height), Image.Resampling.BICUBIC))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_zero_weights_are_bicubic_interpolation(tmp_path: Path) -> None:
    pixels = photo(tmp_path / "cat.png")
    run = make_enlarger(tmp_path / "run", "zero")
    found = call("cat.png", "--run", run)
    assert found.exit_code == 0, found.output
    assert found.output.startswith("cat-x2.png: 18 x 11 pixels enlarged to 36 x 22 in ")
    written = np.asarray(Image.open("cat-x2.png"))
    assert np.abs(written.astype(int) - bicubic(pixels)).max() <= 1  # Pillow rounds between its two passes


def test_it_is_what_the_network_makes_of_the_reduced_photograph(tmp_path: Path) -> None:
    """As in training: the task reduces a photograph, and enlarging the reduced one gives the same output."""
    run = make_enlarger(tmp_path / "run")
    large = torch.rand(1, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    loaded = load_run(run)
    assert isinstance(loaded.task, SuperResolution)
    with torch.no_grad():
        batch = loaded.task.prepare(large)
        expected = loaded.model(batch.input)[0].clamp(0, 1).permute(1, 2, 0).numpy() * 255
    small = torch.nn.functional.interpolate(large, size=(12, 16), mode="bicubic", antialias=True).clamp(0, 1)
    Image.fromarray((small[0].permute(1, 2, 0) * 255).round().byte().numpy()).save("small.png")
    assert call("small.png", "--run", run, "-o", "out.png").exit_code == 0
    np.testing.assert_allclose(np.asarray(Image.open("out.png")), expected, atol=0.51)
    assert np.abs(expected - batch.input[0].permute(1, 2, 0).numpy() * 255).max() > 2  # the network does something


def test_several_photographs_of_other_kinds(tmp_path: Path) -> None:
    """Grey, transparent and turned ones; a file that is no picture does not stop the others."""
    run = make_enlarger(tmp_path / "run", "zero")
    grey, _ = photo(tmp_path / "grey.png", "L"), photo(tmp_path / "clear.png", "RGBA")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    Image.fromarray(grey).save("turned.jpg", exif=exif)
    Path("text.png").write_text("no picture")
    found = call("grey.png", "clear.png", "turned.jpg", "text.png", "--run", run, "-o", "big.png")
    assert found.exit_code == 3
    assert "note: transparency is left out" in found.output
    assert "error: text.png" in found.output
    assert "1 of 4 inputs failed" in found.output
    assert np.abs(np.asarray(Image.open("big-grey.png")).astype(int) - bicubic(grey)).max() <= 1
    assert Image.open("big-clear.png").mode == "RGB"
    assert Image.open("big-turned.png").size == (22, 36)
    found = call("grey.png", "--run", run, "--json")
    assert json.loads(found.output)["enlarged_size"] == [22, 36]
    grey_run = make_enlarger(tmp_path / "grey_run", "zero", channels=1)
    found = call("clear.png", "--run", grey_run)
    assert "colours are left out" in found.output
    assert Image.open("clear-x2.png").mode == "L"


def one_line(*words: Any) -> str:
    found = call(*words)
    assert found.exit_code == 3
    assert found.output.count("\n") == 1
    return found.output


def test_wrong_input_is_one_line(tmp_path: Path) -> None:
    run = make_enlarger(tmp_path / "run")
    photo(tmp_path / "cat.png")
    Path("photos").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint16)).save("deep.png")
    assert "cat.png: is an input, which would be lost" in one_line("cat.png", "--run", run, "-o", "cat.png", "--force")
    assert "a PNG file: give a name that ends in .png" in one_line("cat.png", "--run", run, "-o", "cat.nii.gz")
    assert "--uncertainty is for scans: leave it out" in one_line("cat.png", "--run", run, "--uncertainty", 8)
    assert "--as is for scans" in one_line("cat.png", "--run", run, "--as", "kspace")
    assert "a folder: give its photographs, as in photos/*.png" in one_line("photos", "--run", run)
    assert "expected 8 bits per channel" in one_line("deep.png", "--run", run)
    assert "device 'nowhere' cannot be used here" in one_line("cat.png", "--run", run, "--device", "nowhere")
    assert "trained for superres" in one_line("cat.png", "--run", run, "--run", make_run(tmp_path / "other"))
    Path("mine.png").write_text("a file of the user")
    assert "chasm did not write this file" in one_line("cat.png", "--run", run, "-o", "mine.png")
    assert call("cat.png", "--run", run, "-o", "mine.png", "--force").exit_code == 0
    assert call("cat.png", "--run", run, "-o", "mine.png").exit_code == 0  # now it is chasm's


def test_which_runs_enlarge(tmp_path: Path) -> None:
    assert is_enlarger(make_enlarger(tmp_path / "run"))
    assert not is_enlarger(make_run(tmp_path / "other"))
    assert not is_enlarger("tv")
    assert not is_enlarger(tmp_path / "nowhere")
