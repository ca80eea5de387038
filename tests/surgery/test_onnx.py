"""ONNX files that appear only when they are right."""

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net, Outputs, features, moved, relative
from torch import Tensor, nn

import chasm
from chasm import CHASM


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """One real export of a network with every kind of pass, for a batch of one."""
    pytest.importorskip("onnxruntime")
    net = nn.Sequential(Net(), CHASM(4, bins=3, basis="untied"), CHASM(4, bins=3, gain="complex", local=False))
    moved(net).train()
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    assert chasm.export_onnx(net, path, features(1, 4, 8, 6)) == path
    return net, path


def test_the_onnx_file_runs_at_another_batch_size(exported: tuple[nn.Module, Path]) -> None:
    import onnx
    import onnxruntime

    net, path = exported
    assert os.listdir(path.parent) == [path.name]
    assert net.training
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    reference = copy.deepcopy(net).eval()
    for batch in (1, 2, 5):
        x = features(batch, 4, 8, 6)
        with torch.no_grad():
            want = reference(x)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert relative(torch.from_numpy(got), want) <= 1e-5
    used = {node.op_type for node in onnx.load(str(path)).graph.node}
    assert not {op for op in used if "DFT" in op or "FFT" in op or op in ("Exp", "Softplus")}, used


class Runtime:
    """Stands in for onnxruntime: answers with the model's output times a factor."""

    def __init__(self, answer: Any, factor: float) -> None:
        self.answer, self.factor = answer, factor

    def InferenceSession(self, path: str, providers: list[str]) -> "Runtime":  # noqa: N802
        assert Path(path).read_bytes() == b"new"
        return self

    def get_inputs(self) -> list[Any]:
        return [type("Input", (), {"name": "x"})]

    def run(self, names: None, feed: dict[str, Any]) -> list[Any]:
        with torch.no_grad():
            return [self.answer(torch.from_numpy(feed["x"])).numpy() * self.factor]


class Program:
    """What torch.onnx.export returns."""

    def save(self, file: str, external_data: bool) -> None:
        Path(file).write_bytes(b"new")


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("failure", ["export", "runtime", "difference", "nan", "none"])
def test_a_file_appears_whole_and_checked_or_not_at_all(
    existing: bool, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    mixer = moved(CHASM(3, size=(6, 5)))
    x = features(1, 3, 6, 5)
    path = tmp_path / "mixer.onnx"
    if existing:
        path.write_bytes(b"old")

    class Failing(Program):
        def save(self, file: str, external_data: bool) -> None:
            super().save(file, external_data)
            if failure == "export":
                raise RuntimeError("no such operator")

    runtime = Runtime(chasm.fold(mixer, size=(6, 5)), {"difference": 1.01, "nan": np.nan}.get(failure, 1.0))
    if failure == "runtime":
        monkeypatch.setattr(Runtime, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("bad file")))
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: Failing())
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    if failure == "none":
        assert chasm.export_onnx(mixer, str(path), x) == path
        assert path.read_bytes() == b"new"
    else:
        expected: Any = RuntimeError if failure == "export" else ValueError
        with pytest.raises(expected) as info:
            chasm.export_onnx(mixer, str(path), x)
        if expected is ValueError:
            reason = "onnxruntime cannot run the file" if failure == "runtime" else "differs from the model"
            assert reason in str(info.value)
            assert "\n" not in str(info.value)
        assert not existing or path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ([path.name] if existing or failure == "none" else [])


def test_the_file_is_compared_with_the_model_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the folded copy, where a fault of folding would meet itself."""
    import sys

    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mixer = nn.BatchNorm2d(3), moved(CHASM(3, size=4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mixer(self.norm(x))
            return y if isinstance(self.mixer, CHASM) else 1.01 * y

    net = Sly().train()
    net.norm.running_mean = torch.ones(3)
    x = features(2, 3, 4, 4)
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: Program())
    monkeypatch.setitem(sys.modules, "onnxruntime", Runtime(chasm.fold(net, example=x), 1.0))
    with pytest.raises(ValueError, match=r"differs from the model by 1.0e-02 \(allowed 1e-04\)"):
        chasm.export_onnx(net, tmp_path / "x.onnx", x)
    monkeypatch.setitem(sys.modules, "onnxruntime", Runtime(chasm.fold(net, example=x), 1 / 1.01))
    chasm.export_onnx(net, tmp_path / "x.onnx", x)
    assert all(m.training for m in net.modules())
    assert torch.equal(net.norm.running_mean, torch.ones(3))


def test_outputs_of_every_kind_and_an_input_without_batch(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    net = moved(Outputs())
    path = chasm.export_onnx(net, tmp_path / "net.onnx", (features(1, 3, 6, 5), torch.tensor(2.0)))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x, level = features(3, 3, 6, 5), torch.tensor(0.5)
    y, mean, label = session.run(None, {"x": x.numpy(), "level": level.numpy()})
    with torch.no_grad():
        want = net.eval()(x, level)
    assert relative(torch.tensor(y), want["y"]) <= 1e-5
    assert relative(torch.tensor(mean), want["more"][0]) <= 1e-5
    assert (torch.tensor(label) == want["label"]).all()


def test_every_output_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.mean((2, 3))

    x = features(2, 3, 4, 4)
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: Program())
    monkeypatch.setitem(sys.modules, "onnxruntime", Runtime(None, 1.0))
    mean = x.mean((2, 3)).numpy()
    for second, error in ((mean, None), (1.01 * mean, "1.0e-02"), (mean[:1], "inf"), (mean * np.nan, "nan")):
        monkeypatch.setattr(Runtime, "run", lambda *_, second=second: [x.numpy(), second])
        if error is None:
            chasm.export_onnx(Pair(), tmp_path / "x.onnx", x)
        else:
            with pytest.raises(ValueError, match=f"differs from the model by {error}"):
                chasm.export_onnx(Pair(), tmp_path / "x.onnx", x)


def test_float16_models_are_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    chasm.export_onnx(moved(CHASM(3, size=(6, 5))).half(), tmp_path / "half.onnx", features(1, 3, 6, 5).half())


def test_what_cannot_be_exported_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")

    class Chatty(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            return x, "done"

    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: pytest.fail("the whole export ran"))
    x, path = features(1, 3, 4, 4), tmp_path / "x.onnx"
    requests: list[tuple[nn.Module, Path, Any, type[Exception], str]] = [
        (CHASM(3).double(), path, x.double(), ValueError, "checks float32 and float16, got torch.float64: convert"),
        (CHASM(3).bfloat16(), path, x.bfloat16(), ValueError, "checks float32 and float16, got torch.bfloat16"),
        (CHASM(3), tmp_path / "none" / "x.onnx", x, FileNotFoundError, "none: no such folder for x.onnx: make it"),
        (CHASM(3), path, (x, 2.0), ValueError, "a tensor or a tuple of tensors, got float"),
        (Chatty(), path, x, ValueError, "returns tensors, got str"),
    ]
    for model, file, example, kind, message in requests:
        with pytest.raises(kind, match=message) as info:
            chasm.export_onnx(model, file, example)
        assert "\n" not in str(info.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ValueError, match=r"needs onnxruntime: pip install 'chasm-mixer\[export\]'"):
        chasm.export_onnx(CHASM(3), tmp_path / "x.onnx", features(1, 3, 4, 4))
    assert os.listdir(tmp_path) == []


def test_mixers_that_multiply_spectra_are_exported(tmp_path: Path) -> None:
    """At a size for which filters are resized; the export is compared with the model before the file appears."""
    rivals = [chasm.create_mixer("gfnet", 4, (8, 8)), chasm.create_mixer("fno-d", 4, modes=(2, 3))]
    x = features(2, 4, 7, 6)
    assert chasm.export_onnx(nn.Sequential(*rivals), tmp_path / "rivals.onnx", x).is_file()


def test_what_onnx_has_not_is_one_line(tmp_path: Path) -> None:
    class Eigenvalues(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.eigvalsh(x @ x.mT)

    with pytest.raises(ValueError, match=r"cannot be written as ONNX: .*eigh") as info:
        chasm.export_onnx(Eigenvalues(), tmp_path / "model.onnx", features(2, 3, 4, 4))
    assert "\n" not in str(info.value)
    assert not list(tmp_path.iterdir())
