"""One ONNX graph for all weights of an architecture."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from chasm.surgery.onnx import write_checked
from chasm.surgery.onnx_weights import weights_as_bytes


class Network(nn.Module):
    """Uses weights in ways that an optimiser would compute beforehand: one of several, a reshaped one, a sum."""

    shift: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.steps = nn.Parameter(torch.randn(3))
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("shift", torch.randn(4))
        self.layer = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.conv2d(x, self.matrix[:, :, None, None] + 1)
        return self.layer(y) * self.steps[1] + (self.shift + self.shift)[:, None, None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of a network, beside the file with its weights."""
    folder, network, x = tmp_path_factory.mktemp("graph"), Network(0).eval(), torch.randn(1, 4, 8, 8)
    state = network.state_dict()
    (folder / "model.bin").write_bytes(weights_as_bytes(state))
    with torch.no_grad():
        checks = [((x,), [network(x)])]
    write_checked(folder / "a.onnx", network, checks, sample=(x,), weights=state, weights_file="model.bin")
    return folder


def test_the_graph_computes_with_whatever_weights_lie_beside_it(folder: Path) -> None:
    x = torch.randn(1, 4, 8, 8)
    for seed in (1, 2):
        network = Network(seed).eval()
        (folder / "model.bin").write_bytes(weights_as_bytes(network.state_dict()))
        session = onnxruntime.InferenceSession(str(folder / "a.onnx"))
        with torch.no_grad():
            want = network(x).numpy()
        np.testing.assert_allclose(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0], want, atol=1e-5)


def test_the_graph_holds_no_path_and_no_weight(folder: Path) -> None:
    content = (folder / "a.onnx").read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in content
    assert b"site-packages" not in content
    assert Network(0).matrix.detach().numpy().tobytes() not in content
