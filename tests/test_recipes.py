"""Every recipe runs: two steps, with a small host, on tiny files in the formats it names; by its name anywhere."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "data"))
from writers import blob, write_brats, write_cc359, write_fastmri, write_photo, write_proxy, write_proxy_photos

from chasm.train import load_recipe, train
from chasm.train.config import shipped_recipes

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HOSTS = {
    "unet": [f"backbone.options.{small}" for small in ("width=4", "depth=1", "levels=[0]")],
    "unet-3d": ["backbone.options={width: 4, depth: 1, levels: [0]}"],
    "varnet": ["backbone.options={cascades: 2, width: 4, depth: 1, levels: [0]}"],
    "hifi-mamba": ["backbone.options={width: 8, groups: 1, blocks: 1, state: 2}"],
    "vit": ["backbone.options={width: 8, depth: 2, heads: 2, patch: 4, head_width: 4, slot_blocks: [2]}"],
}


def cc359(root: Path) -> list[str]:
    for i, split in enumerate(("Train", "Val", "Test")):
        write_cc359(root / split / f"e{i}.npy", slices=64, seed=i)
    return []


def brats(root: Path) -> list[str]:
    for i in range(10):
        write_brats(root, f"BraTS2021_{i:05d}")
    return []


def images(root: Path) -> list[str]:
    for split, n in (("training", 3), ("validation", 2)):
        for i in range(n):
            write_photo(root / "images" / split / f"{split}{i}.png", seed=i)
    return ["data.options.size=16"]


def fastmri(root: Path) -> list[str]:
    for i in range(10):
        write_fastmri(root / f"file{i}.h5", slices=1, size=(36, 24), recon=24, coils=3, seed=i)
    return []


def folder(root: Path) -> list[str]:
    root.mkdir()
    for i in range(5):
        np.save(root / f"patient{i}.npy", blob(np.random.default_rng(i), 2, 32, 24))
    return []


def proxy(root: Path) -> list[str]:
    for part in ("brain_ixi_pd", "tumour_lgg_flair", "knee_stanford_pdfs"):
        write_proxy(root, part, size=32)
    for part in ("natural_imagenet", "natural_scenes_bsds_ade"):
        write_proxy_photos(root, part, size=32, splits=("train", "val", "test"))
    return []


WRITERS: dict[str, Callable[[Path], list[str]]] = {
    "cc359": cc359,
    "brats": brats,
    "images": images,
    "fastmri": fastmri,
    "folder": folder,
    "proxy": proxy,
}


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 4


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    config = load_recipe(path)
    changes = ["train.epochs=null", "train.steps=2", "train.batch=2", *HOSTS[config.backbone.name]]
    if config.data.name == "embedded":
        changes.append(f"data.options={{size: 32, cases: 10, slices: {config.data.depth or 1}}}")
    else:
        changes += [f"data.path={tmp_path / 'data'}", *WRITERS[config.data.name](tmp_path / "data")]
    metrics = train(load_recipe(path, changes), tmp_path / "run", quiet=True)
    assert metrics["steps"] == 2
    assert all(torch.tensor(v).isfinite() for v in metrics["mean"].values())
    assert (tmp_path / "run" / "pictures" / "1.png").is_file()


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_real_host_can_be_built(path: Path) -> None:
    """At full size, without storage: options of hosts and mixers are right too."""
    from chasm.train.run import build_model

    config = load_recipe(path)
    modalities = {"brats": 4, "images": 3}.get(config.data.name, 3 if config.task.name == "superres" else 1)
    with torch.device("meta"):
        build_model(config, config.task.create(), (modalities, 256, 256))


def test_names_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_recipes() == {path.stem: path for path in RECIPES}
    for path in RECIPES:
        assert load_recipe(path.stem) == load_recipe(path)


def test_a_file_goes_before_a_name_and_a_folder_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named demo is what `chasm demo` leaves."""
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert load_recipe("demo").name == "demo"
    Path("demo").rmdir()
    Path("demo").write_text("name: mine\ntrain: {steps: 1}")
    assert load_recipe("demo").name == "mine"
