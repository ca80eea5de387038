"""Small runs, the page of `chasm app` with them, and a headless Chromium that plays steps in it."""

import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import needs

from chasm.app import build_site, server
from chasm.common.files import write_json
from chasm.data import open_dataset
from chasm.mri import to_complex
from chasm.train import Run, load_recipe, load_run
from chasm.train.checkpoints import save_tensors
from chasm.train.config import dump
from chasm.train.run import build_model

HERE = Path(__file__).parent
SIZE = 48
SCAN = {"sampling": {"kind": "equispaced", "acceleration": 4}, "complex": True}
RECIPES: dict[str, Any] = {
    "scans": {
        "task": {"name": "reconstruction", "options": SCAN},
        "backbone": {"name": "varnet", "options": {"cascades": 2, "width": 4, "depth": 1, "levels": [0, 1]}},
    },
    "photos": {
        "task": {"name": "superres"},
        "backbone": {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [0]}},
    },
}
RESULT = (
    "({output: [...chasm.state.result.shown], plain: [...chasm.state.result.plain], bands: [...chasm.state.bands]})"
)
MESSAGE = "document.getElementById('message').hidden ? '' : document.querySelector('#message span').textContent"

IN_A_BROWSER = [
    pytest.mark.interop,
    needs("chromium", "node"),
    pytest.mark.skipif(
        not (HERE.parents[1] / "web" / "node_modules" / "puppeteer-core").is_dir(),
        reason="not installed: npm ci in web",
    ),
]


def make_run(folder: Path, recipe: dict[str, Any]) -> Path:
    """A run that was not trained, with weights that are not those of the start."""
    config = load_recipe({**recipe, "mixer": {"name": "chasm"}, "train": {"steps": 1}})
    channels = 1 if config.task.name == "reconstruction" else 3
    model = build_model(config, config.task.create(), (channels, SIZE, SIZE))
    generator = torch.Generator().manual_seed(0)
    state = {k: v + 0.02 * torch.randn(v.shape, generator=generator) for k, v in model.state_dict().items()}
    state |= {k: v for k, v in model.state_dict().items() if k.endswith("stored_step_scale")}
    (folder / "config.yaml").parent.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config))
    write_json(folder / "environment.json", {"image_shape": [channels, SIZE, SIZE]})
    save_tensors(folder / "weights.safetensors", state)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("runs")
    return {name: load_run(make_run(root / name, recipe)) for name, recipe in RECIPES.items()}


@pytest.fixture(scope="module")
def served(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.SiteServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(tmp_path_factory.mktemp("cache")))
        folders = [run.folder for run in runs.values()]
        site = build_site(folders, tmp_path_factory.mktemp("site") / "page", convert=True)
    with server.make_server(site) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def static(runs: dict[str, Run], tmp_path: Path, served: server.SiteServer) -> Iterator[str]:
    """The address of the page that needs no chasm, given out by Python's own web server."""
    site = Path(shutil.copytree(served.site, tmp_path / "page"))
    write_json(site / "site.json", {"models": list(runs), "convert": False, "version": "0"})
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(site))) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()


@pytest.fixture
def play(served: server.SiteServer, tmp_path: Path) -> Any:
    """Return what a list of steps in the page gave."""

    def run(steps: list[dict[str, Any]], quiet: bool = True, address: str = served.address) -> dict[str, Any]:
        shots = Path(os.environ.get("CHASM_SCREENSHOTS", tmp_path))
        (tmp_path / "steps.json").write_text(json.dumps(steps))
        command = ["node", str(HERE / "page.mjs"), address, str(shots), str(tmp_path / "steps.json")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-2000:]
        report: dict[str, Any] = json.loads(done.stdout)
        assert report["thrown"] == []
        assert report["logged"] == [] or not quiet
        assert all(address in r or "blob:" in r or "data:" in r for r in report["requests"]), report["requests"]
        return {**report["read"], "methods": {r.split(" ")[0] for r in report["requests"]}}

    return run


def brain(n: int = 1) -> np.ndarray:
    data = open_dataset("embedded", split="test", content="brain", size=SIZE, cases=10, slices=n)
    return np.stack([data[i].image[0].abs().float().numpy() for i in range(n)])


def expected(run: Run, image: np.ndarray, dtype: torch.dtype = torch.complex64) -> tuple[np.ndarray, np.ndarray]:
    """The output and the input of the network as the page shows them."""
    batch = run.task.prepare(
        torch.as_tensor(image).to(dtype)[None, None] if image.ndim == 2 else torch.as_tensor(image)[None]
    )
    with torch.no_grad():
        output = run.model(batch.input, **(batch.physics if run.config.task.name == "reconstruction" else {}))
    if run.config.task.name == "superres":
        return output[0].clamp(0, 1).numpy(), batch.input[0].numpy()
    return to_complex(output)[0, 0].abs().numpy(), to_complex(batch.input)[0, 0].abs().numpy()


def assert_same(read: dict[str, Any], want: tuple[np.ndarray, np.ndarray]) -> None:
    for name, values in zip(("output", "plain"), want, strict=True):
        np.testing.assert_allclose(read[name], values.ravel(), atol=1e-4)
