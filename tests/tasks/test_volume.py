"""Volumes: blocks of slices, their undersampling in the plane of slices and columns, and a host with three axes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from chasm.backbones import create_backbone
from chasm.data import DataError, Volumes, open_dataset
from chasm.mri import Sampling, to_complex
from chasm.tasks import VolumeReconstruction
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
    task = VolumeReconstruction(Sampling(kind, acceleration=3, center_fraction=0.2))
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


@pytest.mark.parametrize("kind", ["poisson-2d", "equispaced"])
def test_the_host_puts_measured_points_back_and_keeps_its_own_elsewhere(kind: str) -> None:
    torch.manual_seed(0)
    options = {"in_channels": 18, "out_channels": 18, "size": 16, "width": 4, "depth": 1, "levels": [1]}
    host = create_backbone("unet-3d", "chasm", data_consistency=True, **options)
    batch = VolumeReconstruction(Sampling(kind, acceleration=3, center_fraction=0.2)).prepare(torch.rand(2, 9, 12, 16))
    with torch.no_grad():
        output = host(batch.input, **batch.physics)
        host.data_consistency = False
        free = host(batch.input, **batch.physics)
    axes = (1, 3)
    got, measured, own = (
        torch.fft.fftshift(torch.fft.fftn(torch.fft.ifftshift(to_complex(x), axes), dim=axes, norm="ortho"), axes)
        for x in (output, batch.input, free)
    )
    assert batch.mask is not None
    kept = (batch.mask > 0).expand(got.shape)
    assert 0.2 < kept.float().mean() < 0.5
    torch.testing.assert_close(got[kept], measured[kept], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got[~kept], own[~kept], atol=1e-5, rtol=1e-4)
    assert (own - measured)[kept].abs().max() > 0.01  # so that there was something to put back
    host.data_consistency = True
    with torch.no_grad():
        doubled = host(batch.input, batch.mask, measured=2 * measured)
    assert (doubled - output).abs().max() > 0.1  # what is passed as measured counts, not the input


def test_data_consistency_of_a_volume_says_what_it_needs() -> None:
    options = {"in_channels": 12, "out_channels": 12, "size": 16, "width": 4, "depth": 1, "levels": [1]}
    host, x = create_backbone("unet-3d", data_consistency=True, **options), torch.rand(1, 12, 16, 16)
    with pytest.raises(ValueError, match="pass the sampling mask"):
        host(x)
    with pytest.raises(ValueError, match=r"mask must broadcast to \(1, 6, 16, 16\), got \(1, 5, 1, 16\)"):
        host(x, torch.ones(1, 5, 1, 16))
    with pytest.raises(ValueError, match="volumes have one coil"):
        host(x, torch.ones(1, 6, 1, 16), maps=torch.ones(1, 6, 16, 16, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"measured must be complex \(1, 6, 16, 16\)"):
        host(x, torch.ones(1, 6, 1, 16), measured=torch.ones(1, 1, 16, 16, dtype=torch.complex64))
    with pytest.raises(ValueError, match="components=2, got 1"):
        create_backbone("unet-3d", in_channels=4, out_channels=4, components=1, data_consistency=True)


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
    changes.append("backbone.options={width: 4, depth: 1, levels: [0], data_consistency: true}")
    metrics = train(load_recipe("volume_x4", changes), tmp_path / "run", quiet=True)
    assert metrics["reference"]["name"] == "zero-filled"
    assert metrics["task"]["mask"]["size"] == [4, 16]
    assert np.isfinite(metrics["mean"]["psnr"])
