"""Installed packages bring mixers, datasets, backbones and tasks: listed by name, imported on first use."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from chasm.backbones import BACKBONES, create_backbone
from chasm.cli.app import app
from chasm.common import extensions
from chasm.common.extensions import plugins
from chasm.data import DATASETS, open_dataset
from chasm.mixers import MIXERS, create_mixer
from chasm.tasks import TASKS, create_task
from chasm.train.run import environment

MODULE = """
from torch import nn
from chasm.backbones.base import BACKBONES
from chasm.backbones import register_backbone
from chasm.data import register_dataset
from chasm.data.embedded import Embedded
from chasm.mixers import Mixer, register_mixer
from chasm.tasks import Reconstruction, register_task

@register_mixer("plug")
class Plug(Mixer):
    def __init__(self, channels, *, size=None, device=None, dtype=None):
        super().__init__()
        self.fuse = nn.Conv2d(channels, channels, 1, device=device, dtype=dtype)

    def forward(self, x):
        return self.fuse(x)

@register_backbone("plug")
class PlugNet(BACKBONES.get("unet")): pass

@register_dataset("plug")
class PlugData(Embedded):
    summary = "drawn by a plug-in"

@register_task("plug")
class PlugTask(Reconstruction): pass
"""
GROUPS = ("chasm.mixers", "chasm.backbones", "chasm.datasets", "chasm.tasks")
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with one module on sys.path; afterwards everything is as it was before."""
    for registry in (MIXERS, BACKBONES, DATASETS, TASKS):
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr(extensions, "_plugins", {})

    def add(package: str = "plug-pack", text: str = MODULE, name: str = "plug", module: str = "plug_module") -> None:
        site = tmp_path / package
        info = site / f"{package.replace('-', '_')}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("\n".join(f"[{group}]\n{name} = {module}" for group in GROUPS))
        (site / "plug_module.py").write_text(text)
        monkeypatch.syspath_prepend(site)

    yield add
    sys.modules.pop("plug_module", None)


def chasm(*words: str) -> str:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_name_is_listed_without_an_import_and_imported_on_first_use(install: Install) -> None:
    install()
    for registry in (MIXERS, BACKBONES, DATASETS, TASKS):
        assert "plug" in registry.list()
    assert create_mixer("gfnet", 4, 8) is not None
    assert "plug_module" not in sys.modules
    assert create_mixer("plug", 4)(torch.zeros(1, 4, 3, 3)).shape == (1, 4, 3, 3)
    assert type(create_backbone("plug", mixer="plug", width=4, depth=1, levels=(0,))).__name__ == "PlugNet"
    assert open_dataset("plug", size=16, cases=10, slices=1)[0].image.shape == (1, 16, 16)
    assert type(create_task("plug")).__name__ == "PlugTask"


def test_commands_know_it(install: Install) -> None:
    install()
    (row,) = json.loads(chasm("mixers", "plug", "--json", "--channels", "4", "--size", "8"))
    assert row["params"] == 4 * 4 + 4
    assert "plug       drawn by a plug-in" in chasm("data", "list")


def test_a_run_records_the_package_that_was_used(install: Install) -> None:
    from chasm.train import load_recipe

    install()
    config = load_recipe("demo")
    assert "plugins" not in environment(config, torch.device("cpu"), (1, 8, 8))
    create_mixer("plug", 4)
    assert plugins() == {"chasm.mixers: plug": "plug-pack 1.2"}
    assert environment(config, torch.device("cpu"), (1, 8, 8))["plugins"] == plugins()


@pytest.mark.parametrize(
    ("text", "module", "reason"),
    [
        (
            "import os\nos.nothing\n",
            "plug_module",
            r"cannot be imported \(AttributeError: module 'os'",
        ),
        ("raise RuntimeError('two\\nlines')", "plug_module", r"cannot be imported \(RuntimeError: two lines\)"),
        ("", "plug_module", "does not register 'plug'"),
        ("", "no_such_module", r"cannot be imported \(ModuleNotFoundError: No module named 'no_such_module'\)"),
        (
            MODULE.replace('mixer("plug")', 'mixer("gfnet")'),
            "plug_module",
            "named 'gfnet' is already registered",
        ),
    ],
)
def test_a_broken_package_is_one_line_that_names_it(install: Install, text: str, module: str, reason: str) -> None:
    install(text=text, module=module)
    with pytest.raises(ValueError, match=reason) as e:
        create_mixer("plug", 4)
    assert str(e.value).startswith(f"package plug-pack 1.2: chasm.mixers: plug = {module}: ")
    assert str(e.value).endswith("update or uninstall the package")
    assert "\n" not in str(e.value)
    assert plugins() == {}
    # and is in nobody's way
    assert create_mixer("afno", 4) is not None
    found = {r["mixer"]: r for r in json.loads(chasm("mixers", "--json", "--channels", "16", "--size", "8"))}
    assert "package plug-pack 1.2" in found["plug"]["error"]
    assert "error" not in found["gfnet"]
    assert "package plug-pack 1.2" in chasm("mixers", "plug", "--channels", "16", "--size", "8")
    assert "error: package plug-pack 1.2" in chasm("data", "list")


def test_names_of_chasm_are_never_replaced(install: Install) -> None:
    install(name="gfnet", text="raise RuntimeError('imported')")
    assert type(create_mixer("gfnet", 4, 8)).__module__ == "chasm.mixers.gfnet"
    assert MIXERS.list("gfnet") == ["gfnet"]


def test_two_packages_with_one_name_are_named(install: Install) -> None:
    install()
    install("other-pack")
    with pytest.raises(ValueError, match=r"'plug' is announced by \S+-pack 1\.2 and \S+-pack 1\.2: uninstall"):
        create_mixer("plug", 4)
