"""Volumes: blocks of slices, their undersampling in the plane of slices and columns, and a host with three axes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from chasm.backbones import create_backbone
from chasm.data import DataError, Volumes, open_dataset
from chasm.mri import Sampling, to_complex
from chasm.tasks import Volume
from chasm.train import load_recipe, train


def test_blocks_are_the_slices_of_a_case_in_order() -> None:
    slices = open_dataset("embedded", split="val", size=16, cases=20, slices=7)
    volumes = Volumes(slices, 3)
    assert len(volumes) == 2 * len(slices.cases)
    block = volumes[3]
    rows = slices.rows_by_case()[block.case][3:6]
    assert block.index == 1
    assert torch.equal(block.image, torch.cat([slices[row].image for row in rows]))
    with pytest.raises(DataError, match="no case has 8 slices: expected at most 7"):
        Volumes(slices, 8)
    with pytest.raises(DataError, match="slices with one channel, got 3"):
        Volumes(open_dataset("embedded", content="photos", size=32), 1)[0]


@pytest.mark.parametrize("kind", ["poisson-2d", "equispaced"])
def test_the_plane_of_slices_and_columns_is_undersampled(kind: str) -> None:
    task = Volume(Sampling(kind, acceleration=3, center_fraction=0.2))
    image = 40 + 20 * torch.rand(2, 9, 12, 16)
    batch = task.prepare(image)
    assert batch.target.amin((1, 2, 3)).tolist() == [0, 0]
    assert batch.target.amax((1, 2, 3)).tolist() == [1, 1]
    torch.testing.assert_close(batch.in_units(batch.target), image)
    axes = (1, 2, 3)

    def centred(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fftshift(torch.fft.fftn(torch.fft.ifftshift(x, axes), dim=axes, norm="ortho"), axes)

    k = centred(to_complex(batch.input))
    kept = task.sampling.on(9, 16).tensor()[0, 0]  # (9 or 1, 16)
    expected = kept[:, None] * centred(batch.target.to(torch.complex64))  # whole lines along H
    torch.testing.assert_close(k, expected, atol=1e-4, rtol=1e-4)
    assert task.report((9, 12, 16))["mask"]["acceleration"] == pytest.approx(3, rel=0.25)


def test_a_mixer_with_three_axes_mixes_across_slices_and_one_with_two_does_not() -> None:
    x = torch.randn(1, 12, 16, 16)
    nudged = x.clone()
    nudged[:, :2] += torch.randn(2, 16, 16)  # the first slice
    for mixer, options, crosses in (("chasm", {}, True), ("chasm", {"axes": "ch>cw"}, False), ("gfnet", {}, False)):
        torch.manual_seed(0)
        host = create_backbone(
            "unet-3d", mixer, options, in_channels=12, out_channels=12, size=16, width=4, depth=1, levels=[1]
        )
        slot = host.slots["1"]
        for parameter in slot.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        if mixer == "chasm":
            torch.nn.init.zeros_(slot.refine.weight)  # the convolution crosses slices; the core alone may not
            slot.refine.weight.data[:, :, 1, 1, 1] = 1
        features = [torch.randn(1, 8, 6, 8, 8)]
        features.append(features[0].clone())
        features[1][:, :, 0] += 1
        with torch.no_grad():
            one, other = (slot(f) for f in features)
        assert one.shape == features[0].shape
        assert bool((one[:, :, 3] - other[:, :, 3]).abs().max() > 1e-4) == crosses, mixer
        assert host(x).shape == x.shape
        assert not torch.equal(host(x), host(nudged))


def test_slices_and_components_must_fit_the_channels() -> None:
    with pytest.raises(ValueError, match="expected 2 channels for every slice"):
        create_backbone("unet-3d", in_channels=3, out_channels=3)
    assert create_backbone("unet-3d", in_channels=5, out_channels=5, components=1).slices == 5


def test_nifti_volumes_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nibabel = pytest.importorskip("nibabel")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "data").mkdir()
    for i in range(10):
        volume = np.random.default_rng(i).uniform(size=(16, 18, 9)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(volume, np.diag([1, 1, 3, 1])), tmp_path / "data" / f"case{i}.nii.gz")
    changes = ["data.name=folder", f"data.path={tmp_path / 'data'}", "data.depth=4", "train.steps=2", "train.batch=2"]
    changes.append("backbone.options={width: 4, depth: 1, levels: [0]}")
    metrics = train(load_recipe("volume_x4", changes), tmp_path / "run", quiet=True)
    assert metrics["reference"]["name"] == "zero-filled"
    assert metrics["task"]["mask"]["size"] == [4, 16]
    assert np.isfinite(metrics["mean"]["psnr"])
