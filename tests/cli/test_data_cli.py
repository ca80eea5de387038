"""`chasm data` as a user types it."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from chasm.cli.data import app

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from writers import write_brats, write_cc359, write_cc359_multi, write_photo, write_proxy

runner = CliRunner()


def test_list_names_every_format() -> None:
    result = runner.invoke(app, ["list"])
    assert result.exit_code == 0
    for name in ("cc359", "fastmri", "brats", "images", "folder", "proxy"):
        assert f"\n{name} " in "\n" + result.output


def test_check_a_sound_and_then_a_damaged_set(tmp_path: Path) -> None:
    root, manifest = tmp_path / "data", tmp_path / "m.json"
    for name in ("a", "b"):
        write_cc359(root / "Train" / f"{name}.npy", slices=62, seed=ord(name))
    sound = runner.invoke(app, ["check", str(root), "--as", "cc359", "--manifest", str(manifest)])
    assert sound.exit_code == 0, sound.output
    assert "2 cases, 124 slices, 2 files" in sound.output
    assert sound.output.endswith("sound\n")
    assert set(json.loads(manifest.read_text())["files"]) == {"Train/a.npy", "Train/b.npy"}

    (root / "Train" / "b.npy").write_bytes(b"")
    damaged = runner.invoke(app, ["check", str(root), "--as", "cc359", "--verify", str(manifest)])
    assert damaged.exit_code == 3
    assert "b.npy: header: the file is empty" in damaged.output
    assert "b.npy: sha256: differs from m.json" in damaged.output
    assert "2 things are wrong" in damaged.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "{}/nowhere", "--as", "cc359"], "nowhere: no such file or folder"),
        (["check", "{}", "--as", "cc395"], "did you mean 'cc359'"),
        (["check", "{}", "--as", "proxy", "-O", "part"], "expected KEY=VALUE"),
        (["check", "{}", "--as", "proxy", "--manifest", "{}/no/such/folder/m.json"], "No such file or directory"),
        (["check", "{}", "--as", "proxy", "--verify", "{}/m.json"], "m.json: no such file"),
        (["preview", "{}", "--as", "cc359", "-o", "{}/p.png"], "split 'train' has no case"),
        (["preview", "--as", "cc359", "-o", "{}/p.png"], "'cc359' reads files"),
        (["preview", "{}", "--as", "proxy", "-o", "{}/p.png", "--mask", "randon"], "did you mean 'random'"),
        (["preview", "{}", "--as", "proxy", "-o", "{}/p.nosuch"], "nosuch"),
    ],
)
def test_wrong_use_is_one_line_and_exit_3(arguments: list[str], message: str, tmp_path: Path) -> None:
    write_proxy(tmp_path, size=64)
    result = runner.invoke(app, [a.format(tmp_path) for a in arguments])
    assert result.exit_code == 3, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not isinstance(result.exception, ValueError)


def preview(kind: str, root: Path, *more: str) -> Image.Image:
    out = root / "p.png"
    result = runner.invoke(app, ["preview", str(root), "--as", kind, "-o", str(out), "--slices", "2", *more])
    assert result.exit_code == 0, result.output
    assert "2 of" in result.output or "1 of" in result.output
    with Image.open(out) as picture:
        return picture.convert("RGB")


def test_preview_of_magnitudes_coils_labels_and_photographs(tmp_path: Path) -> None:
    write_proxy(tmp_path / "proxy", size=64)
    write_cc359_multi(tmp_path / "coils" / "Train" / "a.h5", size=(64, 48))
    write_brats(tmp_path / "brats", "c1")
    write_photo(tmp_path / "images" / "train" / "a.png", size=(64, 80))
    small = ("--split", "all", "--acceleration", "2")
    pictures = [
        preview("proxy", tmp_path / "proxy"),
        preview("cc359", tmp_path / "coils", "-O", "combine=coils"),
        preview("brats", tmp_path / "brats", *small),
        preview("images", tmp_path / "images", "-O", "size=64"),
    ]
    for picture in pictures:
        assert picture.width > 900
        assert len(picture.getcolors(1 << 24)) > 100  # not a blank page
    red = [c for _, c in pictures[2].getcolors(1 << 24) if c[0] > 180 and c[1] < 80 and c[2] < 80]
    assert red  # the outline of the enhancing tumour
