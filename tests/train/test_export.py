"""A run as one ONNX file: its real arithmetic against complex numbers, and files in onnxruntime against the run."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "surgery"))
from networks import moved

from chasm import CHASM
from chasm.backbones import create_backbone
from chasm.backbones.measurement import Measurement, RealMeasurement
from chasm.cli.app import app
from chasm.mri import create_mask, estimate_maps, fft2c, ifft2c, mask_from_array, real, rss, to_channels
from chasm.ops.selective_scan import selective_scan
from chasm.surgery.free_size import free_size
from chasm.train import load_recipe, load_run
from chasm.train.config import dump
from chasm.train.export import FromKSpace, export_run, from_complex_kspace
from chasm.train.run import build_model

SIZE = (13, 18)


def parts(x: Tensor) -> Tensor:
    """Complex (..., H, W) -> (..., 2, H, W)."""
    return torch.stack([x.real, x.imag], -3)


def coil_images(coils: int, size: tuple[int, int] = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(coils)
    re, im = torch.rand(2, 2, coils, *size, dtype=torch.float64, generator=generator)
    return torch.complex(re + 0.5, im)


@pytest.mark.parametrize("size", [(13, 18), (1, 2), (7, 7)])
def test_fourier_transforms_by_products(size: tuple[int, int]) -> None:
    x = coil_images(3, size)
    torch.testing.assert_close(real.dft2c(parts(x)), parts(fft2c(x)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(real.dft2c(parts(x), inverse=True), parts(ifft2c(x)), rtol=1e-12, atol=1e-12)


def test_real_sensitivities_are_the_complex_ones() -> None:
    mask = create_mask("equispaced", 40, 3).tensor()
    y = mask * fft2c(coil_images(4, (32, 40)))
    expected = estimate_maps(y, mask_from_array(mask.numpy()).center)
    assert expected.abs().amax() > 0
    torch.testing.assert_close(real.estimate_real_maps(parts(y), mask), parts(expected))


@pytest.mark.parametrize("columns", ["111111", "011110", "010111", "110011", "0011100"])
def test_calibration_columns(columns: str) -> None:
    mask = torch.tensor([float(c) for c in columns])
    first, end = real.calibration_columns(mask)
    assert (int(first), int(end)) == mask_from_array(mask.numpy()).center


@pytest.mark.parametrize("coils", [1, 3])
def test_real_data_consistency_is_the_complex_one(coils: int) -> None:
    mask = torch.rand(1, 1, 1, SIZE[1]) < 0.5
    images = coil_images(coils)
    maps = None if coils == 1 else images / rss(images)
    measured, x = fft2c(images.flip(-1)), torch.randn(2, 2, *SIZE, dtype=torch.float64)
    expected = Measurement.of(x, mask, maps, measured)
    found = RealMeasurement.of(x, mask, None if maps is None else parts(maps), parts(measured))
    torch.testing.assert_close(found.expand(x), parts(expected.expand(x)))
    torch.testing.assert_close(found.reduce(parts(measured)), expected.reduce(measured))
    torch.testing.assert_close(found.enforce(x), expected.enforce(x))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"axes": "ch+cw"},
    {"axes": "cw", "gain": "signed"},
    {"basis": "identity", "local": False},
    {"basis": None},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_mixer_of_free_size_is_the_mixer(options: dict[str, Any]) -> None:
    mixer = moved(CHASM(6, size=(8, 12), **options)).double().eval()
    free = free_size(mixer)
    assert not any(isinstance(m, CHASM) for m in free.modules())
    for size in ((8, 12), (7, 5), (1, 2), (16, 3)):
        x = torch.randn(2, 6, *size, dtype=torch.float64)
        torch.testing.assert_close(free(x), mixer(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{"basis": "untied"}, {"gain": "complex"}, {"ndim": 3}], ids=str)
def test_mixers_that_need_a_size_say_so(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs one fixed size"):
        free_size(nn.Sequential(CHASM(4, bins=3, **options)))


@pytest.mark.parametrize("name", ["unet", "varnet"])
@pytest.mark.parametrize("coils", [1, 3])
def test_from_kspace_in_real_arithmetic(name: str, coils: int) -> None:
    options: dict[str, Any] = {"width": 4, "depth": 1, "levels": (1,)}
    options |= {"data_consistency": True} if name == "unet" else {"cascades": 2, "align_phase": True}
    torch.manual_seed(0)
    mask = create_mask("equispaced", 36).tensor()
    kspace = to_channels(100 * fft2c(coil_images(coils, (20, 36)))).float()
    model = create_backbone(name, "chasm", size=(20, 36), **options).eval()
    expected = from_complex_kspace(model, kspace, mask, coils > 1)
    with torch.no_grad():
        found = FromKSpace(free_size(model), coils > 1)(kspace, mask)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


# Files


def make_run(folder: Path, backbone: dict[str, Any], shape: tuple[int, int, int], **task: Any) -> Path:
    """A run folder without training."""
    recipe = {"task": {"options": task}, "backbone": backbone, "mixer": {"name": "chasm"}, "train": {"steps": 1}}
    config = load_recipe(recipe)
    model = moved(build_model(config, config.task.create(), shape))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config))
    (folder / "environment.json").write_text(json.dumps({"image_shape": shape}))
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "weights.safetensors")
    return folder


UNET = {"name": "unet", "options": {"width": 4, "depth": 1, "levels": [1], "data_consistency": True}}
VARNET = {"name": "varnet", "options": {"cascades": 1, "align_phase": True, "width": 2, "depth": 1, "levels": [1]}}
HIFI = {"name": "hifi-mamba", "options": {"width": 8, "groups": 1, "blocks": 1, "state": 2, "expansion": 1}}


def exported(folder: Path, *arguments: str) -> tuple[str, Any]:
    """Run the command; what it printed, and the file in onnxruntime."""
    import onnx
    import onnxruntime

    out = folder / "model.onnx"
    result = CliRunner().invoke(app, ["export", str(folder), "-o", str(out), *arguments])
    assert result.exit_code == 0, result.output
    file = onnx.load(str(out))
    assert not {node.op_type for node in file.graph.node} & {"DFT", "STFT"}
    assert all(node.domain == "" for node in file.graph.node)  # nothing that only some runtimes have
    assert {p.key for p in file.metadata_props} >= {"chasm.run", "chasm.task"}
    return result.output, onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])


def compare(session: Any, folder: Path, coils: int, size: tuple[int, int]) -> None:
    mask = create_mask("equispaced", size[1], 3).tensor()
    kspace = to_channels(7 * fft2c(coil_images(coils, size))).float()
    expected = from_complex_kspace(load_run(folder).model, kspace, mask, coils > 1)
    found = session.run(["magnitude", "image", "zero_filled"], {"kspace": kspace.numpy(), "mask": mask.numpy()})
    for got, want in zip(found, expected, strict=True):
        assert np.linalg.norm(got - want.numpy()) < 1e-4 * np.linalg.norm(want.numpy())


@pytest.mark.parametrize("backbone", [UNET, VARNET], ids=["unet", "varnet"])
def test_a_file_for_any_size(tmp_path: Path, backbone: dict[str, Any]) -> None:
    """Sizes that need an even number of rows and columns of padding, an odd number, or none."""
    folder = make_run(tmp_path / "run", backbone, (1, 32, 48))
    printed, session = exported(folder)
    assert "in: kspace float32 (batch, 2, height, width)" in printed
    assert [i.shape for i in session.get_inputs()] == [["batch", 2, "height", "width"], [1, 1, 1, "width"]]
    compare(session, folder, 1, (37, 58))
    compare(session, folder, 1, (64, 33))
    compare(session, folder, 1, (64, 80))


def test_learned_sensitivities_in_a_file(tmp_path: Path) -> None:
    learned: dict[str, Any] = {"cascades": 1, "width": 2, "depth": 1, "levels": [], "sensitivities": "learned"}
    learned |= {"sensitivity_width": 2, "sensitivity_depth": 1}
    folder = make_run(tmp_path / "run", {"name": "varnet", "options": learned}, (3, 32, 36), complex=True)
    printed, session = exported(folder, "--size", "32x36")
    assert "in: kspace float32 (batch, 2 coils, 32, 36)" in printed
    compare(session, folder, 3, (32, 36))


def test_hifi_mamba_in_a_file_for_one_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_run(tmp_path / "run", HIFI, (1, 32, 32))
    printed, session = exported(folder, "--size", "20x26")
    assert "out: magnitude float32 (batch, 1, 20, 26)" in printed
    compare(session, folder, 1, (20, 26))
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_the_scan_of_mamba_as_an_onnx_scan(tmp_path: Path) -> None:
    from chasm.surgery.onnx import write_checked

    class Scan(nn.Module):
        def forward(self, *x: Tensor) -> Tensor:
            return selective_scan(*x[:6], delta_bias=x[6], delta_softplus=True)

    torch.manual_seed(0)
    B, D, N, L = 2, 3, 4, 7
    inputs = (
        torch.randn(B, D, L),
        torch.randn(B, D, L),
        -torch.rand(D, N),
        *torch.randn(2, B, N, L),
        *torch.randn(2, D),
    )
    scan = Scan().eval()
    expected = scan(*inputs)
    error = write_checked(tmp_path / "scan.onnx", scan, [(inputs, [expected])], sample=inputs, tolerance=1e-6)
    assert error < 1e-6


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Failed.\n## Exception summary\n\nNo function for a complex-valued input\n", "only CHASM can do without"),
        ("\nConstraints violated (height)!\nmore", r"\(Constraints violated \(height\)!\): try --size"),
    ],
)
def test_what_torch_cannot_export_is_one_line(
    said: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.export, "export", fail)
    folder = make_run(tmp_path / "run", UNET, (1, 32, 32))
    with pytest.raises(ValueError, match=expected) as e:
        export_run(folder, tmp_path / "model.onnx")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "256x"], "expected a size like 128 or 128x96, got '256x'"),
        (["--coils", "0"], "coils=0: expected 1 or more"),
        (["-o", "nowhere/model.onnx"], "nowhere: no such folder for model.onnx"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", UNET, (1, 32, 32))
    result = CliRunner().invoke(app, ["export", str(folder), *arguments])
    assert result.exit_code != 0
    assert message in result.output
    assert result.output.count("\n") == 1
