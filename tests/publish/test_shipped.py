"""The models that come with the package: whole, small, as good as they were, and the same in the page."""

import gzip
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

import chasm
from chasm.app.model import WEIGHTS, ForPage, graph_key, graph_of
from chasm.cli.app import app
from chasm.common.files import read_json
from chasm.data import open_dataset
from chasm.data.terms import terms_of
from chasm.models import GRAPH, MODEL_FILES, RECORD, shipped_models
from chasm.publish.card import write_card
from chasm.surgery.onnx_weights import weights_as_bytes
from chasm.train import load_run

# The PSNR of a drawn image that each must reach. They reached 27.62, 24.60, 25.33 and 28.82 dB; the zero-filled image
# has 22.44 (x4) and 20.92 dB (x8), and the bicubic one 28.52 dB.
LEAST_PSNR = {"brain-x4": 27.1, "brain-x8": 24.1, "knee-x4": 24.8, "photo-x4": 28.7}


def test_the_four_models_are_there() -> None:
    assert chasm.list_models() == sorted(LEAST_PSNR)
    listed = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["models", "list"])
    assert all(name in listed.output for name in LEAST_PSNR)


@pytest.mark.parametrize("name", LEAST_PSNR)
def test_a_model_is_whole_and_small_and_names_no_machine(name: str) -> None:
    folder = shipped_models()[name]
    assert {p.name for p in folder.iterdir()} == set(MODEL_FILES)
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 4 * 2**20
    assert set(read_json(folder / RECORD)["sha256"]) == {"config.yaml", "weights.safetensors", GRAPH}
    texts = [file.read_bytes() for file in folder.iterdir() if file.suffix in (".json", ".md", ".yaml")]
    for content in (*texts, gzip.decompress((folder / GRAPH).read_bytes())):
        assert b"site-packages" not in content
        assert re.search(rb"(?<![\w./])/\w+/\w", content) is None


@pytest.mark.parametrize("name", LEAST_PSNR)
def test_the_card_is_that_of_the_files(name: str) -> None:
    folder, run = shipped_models()[name], load_run(name)
    record, environment = read_json(folder / RECORD), read_json(folder / "environment.json")
    assert record["name"] == run.config.name == name
    assert record["parameters"]["model"] == sum(p.numel() for p in run.model.parameters())
    assert (folder / "README.md").read_text() == write_card(record, run.config, environment)
    assert run.config.data.path is None
    assert all(terms["weights"] for terms in record["trained_on"])
    assert record["trained_on"] == [asdict(terms) for terms in terms_of(run.config.data.name, run.config.data.options)]
    assert any("not trained on" in scores["split"] for scores in record["scores"])


@pytest.mark.parametrize("name", LEAST_PSNR)
def test_drawn_images_are_restored_as_well_as_before(name: str) -> None:
    run = load_run(name)
    content = "photos" if name == "photo-x4" else "brain"
    data = open_dataset("embedded", split="test", content=content, size=(256, 256), cases=10, slices=1)
    batch = run.task.prepare(data[0].image[None])
    with torch.no_grad():
        output = run.model(batch.input, **batch.physics)
    assert float(run.task.scores(output, batch)["psnr"][0]) > LEAST_PSNR[name]


@pytest.mark.parametrize("file", ["weights.safetensors", GRAPH])
def test_one_changed_byte_is_refused(file: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(shipped_models()["brain-x8"], tmp_path / "brain-x8"))
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{file}: changed, by its SHA-256"):
        chasm.load_model(folder)


def test_models_of_one_architecture_have_one_network_of_the_page() -> None:
    runs = [load_run(name) for name in ("brain-x4", "brain-x8", "knee-x4")]
    assert len(set(map(graph_key, runs))) == 1
    assert len(set(map(graph_of, runs))) == 1


@pytest.mark.parametrize("name", ["brain-x8", "photo-x4"])
def test_the_network_of_the_page_is_the_model(name: str, tmp_path: Path) -> None:
    run = load_run(name)
    assert read_json(run.folder / RECORD)["page"] == graph_key(run)
    (tmp_path / "model.onnx").write_bytes(graph_of(run))
    (tmp_path / WEIGHTS).write_bytes(weights_as_bytes(ForPage(run.model).state_dict()))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    x = torch.rand(1, run.model.in_channels, 64, 48, generator=torch.Generator().manual_seed(0))
    feed, physics = {"x": x.numpy(), "bands": np.ones(5, np.float32)}, {}
    if name != "photo-x4":
        physics["mask"] = (torch.arange(48) % 4 == 0).float().reshape(1, 1, 1, 48)
        feed["mask"] = physics["mask"].numpy()
    with torch.no_grad():
        want = run.model(x, **physics).numpy()
    np.testing.assert_allclose(session.run(None, feed)[0], want, atol=1e-4)
