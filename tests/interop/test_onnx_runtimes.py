"""Exported files in other runtimes: OpenVINO, and onnxruntime-web in Node, where they are installed."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import chasm

pytestmark = pytest.mark.interop
X = torch.randn(2, 2, 12, 10, generator=torch.Generator().manual_seed(0))
LIBRARY = Path(__file__).parents[2] / "web/node_modules/onnxruntime-web"  # `make interop` installs it there
# Prints the output as JSON.
PROGRAM = """
const ort = require(process.argv[1]);
const { data, dims, file } = JSON.parse(require("fs").readFileSync(0, "utf8"));
ort.env.wasm.numThreads = 1;
ort.InferenceSession.create(require("fs").readFileSync(file)).then(async session => {
  const feed = { [session.inputNames[0]]: new ort.Tensor("float32", Float32Array.from(data), dims) };
  const result = (await session.run(feed))[session.outputNames[0]];
  console.log(JSON.stringify({ dims: result.dims, data: Array.from(result.data) }));
}).catch(error => { console.error(error); process.exit(1); });
"""


def export(folder: Path, mixer: str) -> tuple[nn.Module, Path]:
    """A U-Net with a mixer in two slots, away from its initial point, and its file."""
    torch.manual_seed(1)
    model = chasm.create_backbone("unet", mixer=mixer, size=(12, 10), width=4, depth=1, levels=(0, 1)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, chasm.export_onnx(model, folder / "model.onnx", X)


@pytest.mark.parametrize("mixer", ["chasm", "gfnet", "spectformer"])
def test_openvino(mixer: str, tmp_path: Path) -> None:
    """A folded mixer has no Fourier transform. OpenVINO 2026.4 cannot read ONNX's, which FNO-D's file has."""
    openvino = pytest.importorskip("openvino")
    model, file = export(tmp_path, mixer)
    compiled = openvino.Core().compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    with torch.no_grad():
        for x in (X, X[:1]):  # the batch is free
            np.testing.assert_allclose(compiled(x.numpy())[0], model(x).numpy(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("mixer", ["chasm", "gfnet", "fno-d"])
def test_onnxruntime_web(mixer: str, tmp_path: Path) -> None:
    if shutil.which("node") is None or not LIBRARY.is_dir():
        pytest.skip("needs node, and onnxruntime-web of the folder web")
    model, file = export(tmp_path, mixer)
    job = json.dumps({"data": X.flatten().tolist(), "dims": list(X.shape), "file": str(file)})
    run = subprocess.run(["node", "-e", PROGRAM, str(LIBRARY)], input=job, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    with torch.no_grad():
        want = model(X)
    assert tuple(found["dims"]) == tuple(want.shape)
    np.testing.assert_allclose(np.array(found["data"]).reshape(want.shape), want.numpy(), atol=1e-4, rtol=1e-3)
