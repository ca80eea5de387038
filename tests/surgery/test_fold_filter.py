"""GFNet and SpectFormer as constants: equal to the mixer, and without a Fourier transform in files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from networks import features, moved, relative
from torch import Tensor, nn

import chasm
from chasm.mixers import GFNet, SpectFormer
from chasm.surgery.fold_filter import FoldedFilter

MIXERS: list[tuple[str, dict[str, Any]]] = [("gfnet", {}), ("spectformer", {}), ("spectformer", {"projections": True})]
SIZES = [(6, 7), (8, 10), (5, 2), (2, 1), (1, 1)]


@pytest.mark.parametrize(("name", "options"), MIXERS)
@pytest.mark.parametrize("size", SIZES)
def test_a_folded_filter_equals_its_mixer_eagerly_and_exported(
    name: str, options: dict[str, Any], size: tuple[int, int]
) -> None:
    mixer = moved(chasm.create_mixer(name, 3, (6, 7), dtype=torch.float64, **options)).eval()
    x = features(2, 3, *size, dtype=torch.float64)
    folded = chasm.fold(mixer, size=size)
    exported = torch.export.export(folded, (x,))
    with torch.no_grad():
        want = mixer(x)
        assert relative(folded(x), want) <= 1e-12
        assert relative(exported.module()(x), want) <= 1e-12
    assert not any("fft" in str(node.target) or "complex" in str(node.target) for node in exported.graph.nodes)


def test_half_precision_gradients_and_empty_batches() -> None:
    mixer = moved(GFNet(3, size=(6, 5))).eval()
    x, folded = features(2, 3, 6, 5), chasm.fold(mixer, size=(6, 5))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    folded(a).square().sum().backward()
    mixer(b).square().sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert relative(a.grad, b.grad) <= 1e-5
    assert folded(x[:0]).shape == (0, 3, 6, 5)
    half = mixer.bfloat16()
    with torch.no_grad():
        y = chasm.fold(half, size=(6, 5))(x.bfloat16())
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, half(x.bfloat16()))


def test_a_folded_filter_keeps_one_size_and_refuses_what_it_would_drop() -> None:
    with pytest.raises(ValueError, match=r"folded for spatial size \(6, 5\), got \(5, 6\): fold again"):
        chasm.fold(GFNet(3), size=(6, 5))(features(1, 3, 5, 6))

    class Doubled(SpectFormer):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(ValueError, match=r"\(Doubled\) has a forward .* put a plain SpectFormer inside"):
        chasm.fold(Doubled(3), size=4)
    hooked = GFNet(3)
    hooked.register_forward_hook(lambda _m, _x, y: 2 * y)
    with pytest.raises(ValueError, match="has forward hooks"):
        chasm.fold(nn.Sequential(hooked), size=4)


def test_the_file_of_a_filter_has_no_fourier_transform(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    net = nn.Sequential(*(moved(chasm.create_mixer(name, 4, (8, 8))) for name in ("gfnet", "spectformer", "chasm")))
    path = chasm.export_onnx(net, tmp_path / "filters.onnx", features(1, 4, 7, 6))
    assert "DFT" not in {node.op_type for node in onnx.load(str(path)).graph.node}


def test_filters_fold_beside_other_mixers() -> None:
    net = moved(nn.Sequential(chasm.create_slot("gfnet", 3, (6, 5)), chasm.create_slot("afno", 3, (6, 5), blocks=1)))
    x, folded = features(2, 3, 6, 5), chasm.fold(net, example=features(1, 3, 6, 5))
    assert sum(isinstance(m, FoldedFilter) for m in folded.modules()) == 1
    with torch.no_grad():
        assert relative(folded(x), net.eval()(x)) <= 1e-5
