"""Self-supervised reconstruction: what the network sees, what its output is compared with, and that it learns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chasm.backbones import create_backbone
from chasm.data import open_dataset
from chasm.mri import Sampling, fft2c, ifft2c, rss, to_channels, to_complex
from chasm.tasks import Meter, Reconstruction, TaskBatch
from chasm.tasks.self_supervision import CENTER_LINES
from chasm.train import load_recipe, train
from chasm.train.schedule import seeds_of_step

SAMPLING = Sampling(acceleration=3)
SIZE = (20, 48)


def images(coils: int = 1, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(coils)
    return torch.randn(batch, coils, *SIZE, dtype=torch.complex64, generator=generator)


@pytest.mark.parametrize("coils", [1, 3])
def test_the_measured_lines_are_split_in_two(coils: int) -> None:
    task = Reconstruction(SAMPLING, complex=True, self_supervised=0.4)
    whole = task.prepare(images(coils))
    batch = task.for_training(whole, [5, 6])
    assert whole.mask is not None
    assert batch.mask is not None
    assert batch.held_out is not None
    assert batch.held_out_kspace is not None
    assert torch.equal(batch.mask + batch.held_out, whole.mask.expand(2, 1, 1, SIZE[1]))
    assert batch.held_out.unique().tolist() == [0, 1]
    outside = whole.mask.sum() - CENTER_LINES
    assert batch.held_out.sum((1, 2, 3)).tolist() == [round(0.4 * outside.item())] * 2
    assert not batch.held_out[..., SIZE[1] // 2 - 2 : SIZE[1] // 2 + 2].any()
    assert not torch.equal(batch.held_out[0], batch.held_out[1])  # every slice has its own
    measured = whole.mask * fft2c(images(coils)) / rss(images(coils)).amax((2, 3), keepdim=True)
    torch.testing.assert_close(batch.held_out_kspace, batch.held_out * measured, rtol=1e-4, atol=1e-5)
    if coils == 1:
        k = fft2c(to_complex(batch.input))
        torch.testing.assert_close(k, batch.mask * measured, rtol=1e-4, atol=1e-5)  # nothing else gets in
        assert batch.measured is None
    else:
        torch.testing.assert_close(batch.measured, batch.mask * measured, rtol=1e-4, atol=1e-5)
        assert torch.equal(batch.maps, whole.maps)  # type: ignore[arg-type]
    assert torch.equal(batch.input, task.for_training(whole, [5, 6]).input)
    assert not torch.equal(batch.input, task.for_training(whole, [6, 5]).input)


@pytest.mark.parametrize("coils", [1, 3])
def test_every_slice_may_have_its_own_mask_and_several_splits(coils: int) -> None:
    """Two splits of two slices, whose masks differ: each holds out its own measured lines, and shares the loss."""
    task = Reconstruction(Sampling("random", 3), complex=True, self_supervised=0.4, masks="slice", splits=2)
    whole = task.prepare(images(coils), case=["a", "b"])
    batch = task.for_training(whole, [5, 6])
    assert whole.mask is not None
    assert not torch.equal(whole.mask[0], whole.mask[1])
    assert batch.mask is not None
    assert batch.held_out is not None
    assert batch.case == ["a", "a", "b", "b"]
    assert torch.equal(batch.mask + batch.held_out, whole.mask.repeat_interleave(2, 0))
    assert len({tuple(row.flatten().tolist()) for row in batch.held_out}) == 4
    once = Reconstruction(Sampling("random", 3), complex=True, self_supervised=0.4, masks="slice")
    assert torch.equal(once.for_training(whole, [5, 6]).input, batch.input[::2])  # the first split is that of one
    output = torch.randn(4, 2, *SIZE)
    halves = [once.loss(output[i::2], _rows(batch, slice(i, None, 2))) for i in range(2)]
    torch.testing.assert_close(task.loss(output, batch), sum(halves) / 2)


def _rows(batch: TaskBatch, rows: slice) -> TaskBatch:
    names = ("input", "target", "mask", "maps", "measured", "held_out", "held_out_kspace")
    return replace(batch, **{n: v[rows] for n in names if (v := getattr(batch, n)) is not None})


@pytest.mark.parametrize("coils", [1, 3])
def test_the_masks_of_undersampled_data_are_what_was_measured(coils: int) -> None:
    """Zero-filled images with masks of their own give the same batches as full images under the same masks."""
    drawn = Reconstruction(Sampling("random", 3), complex=True, self_supervised=0.4, masks="slice")
    full = drawn.prepare(images(coils))
    assert full.mask is not None
    zero_filled = ifft2c(full.mask * fft2c(images(coils)))
    task = Reconstruction(complex=True, self_supervised=0.4, masks="measured")
    found = task.prepare(zero_filled)
    assert torch.equal(found.mask, full.mask)  # type: ignore[arg-type]
    first, second = task.for_training(found, [5, 6]), drawn.for_training(full, [5, 6])
    assert torch.equal(first.held_out, second.held_out)  # type: ignore[arg-type]
    scale = first.scale / second.scale  # type: ignore[operator]
    if coils == 1:
        torch.testing.assert_close(first.input * scale, second.input, rtol=1e-3, atol=1e-4)
    else:  # the block around the centre that was measured may be larger than the one that every mask has
        lines = first.measured * scale  # type: ignore[operator]
        torch.testing.assert_close(lines, second.measured, rtol=1e-3, atol=1e-4)


def test_the_loss_by_hand_and_without_the_target() -> None:
    task = Reconstruction(SAMPLING, complex=True, self_supervised=0.4)
    batch = task.for_training(task.prepare(images(2)), [0, 1])
    output = torch.randn(2, 2, *SIZE)
    assert batch.maps is not None
    assert batch.held_out_kspace is not None
    assert batch.measured is not None
    expected = 0.0
    for lines, kspace in ((batch.held_out, batch.held_out_kspace), (batch.mask, batch.measured)):
        for b in range(2):
            u = lines[b] * fft2c(batch.maps[b] * to_complex(output)[b])  # type: ignore[index]
            d, v = u - kspace[b], kspace[b]
            expected += (d.abs().square().sum().sqrt() / v.abs().square().sum().sqrt()).item() / 2
            expected += (d.abs().sum() / v.abs().sum()).item() / 2
    assert task.loss(output, batch).item() == pytest.approx(expected, rel=1e-5)
    batch.target = batch.target + torch.nan
    assert task.loss(output, batch).isfinite()


def test_the_truth_has_no_loss_and_a_blank_slice_has_none() -> None:
    task = Reconstruction(SAMPLING, complex=True, self_supervised=0.4)
    image = images()
    image[1] = 0
    batch = task.for_training(task.prepare(image), [0, 1])
    truth = to_channels(image / rss(image).amax((2, 3), keepdim=True).clamp_min(1e-9)).requires_grad_()
    loss = task.loss(truth, batch)
    assert loss.item() == pytest.approx(0, abs=1e-5)
    loss.backward()
    assert truth.grad is not None
    assert truth.grad.isfinite().all()


def test_supervised_batches_stay_as_they_are() -> None:
    task = Reconstruction(SAMPLING)
    batch = task.prepare(images().abs())
    assert task.for_training(batch, [0, 1]) is batch
    assert task.for_scoring(batch) is batch


def test_scores_of_held_out_lines() -> None:
    task = Reconstruction(SAMPLING, complex=True, self_supervised=0.4, protocol="held-out")
    batch = task.for_scoring(task.prepare(images()))
    assert batch.held_out is not None
    assert torch.equal(batch.held_out[0], batch.held_out[1])  # whatever the batch size
    truth = to_channels(images() / rss(images()).amax((2, 3), keepdim=True))
    assert task.scores(0.9 * truth, batch)["snr"].tolist() == pytest.approx([20, 20], abs=1e-3)  # a tenth is wrong
    assert task.scores(batch.input, batch)["snr"].tolist() == pytest.approx([0, 0], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"self_supervised": 1.0}, "between 0 and 1, got 1"),
        ({"protocol": "held-out"}, "set it, to 0.4"),
        ({"self_supervised": 0.4, "masks": "epoch"}, "draws lines that were not measured"),
        ({"splits": 2}, "belong to self-supervised training"),
        ({"self_supervised": 0.4, "splits": 0}, "expected 1 or more"),
        ({"self_supervised": 0.4, "masks": "measured"}, "set complex=True"),
        ({"masks": "measured", "complex": True}, "belong to self-supervised training"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reconstruction(SAMPLING, **options)


def test_too_few_lines_are_named() -> None:
    task = Reconstruction(Sampling(acceleration=8), self_supervised=0.01)
    with pytest.raises(ValueError, match="holds out 0 of"):
        task.for_training(task.prepare(images().abs()), [0, 1])


def test_seeds_differ_by_slice_step_and_run() -> None:
    drawn = [tuple(seeds_of_step(step, 3, seed)) for step in range(3) for seed in range(2)]
    assert len({s for seeds in drawn for s in seeds}) == 18
    assert drawn[0] == tuple(seeds_of_step(0, 3, 0))


def test_it_learns_from_undersampled_data_alone() -> None:
    """Drawn brains in a wide field of view: above zero-filled, and not far below the same network with the truth."""
    data = open_dataset("embedded", split="train", size=32, cases=24, slices=2)
    pool = torch.nn.functional.pad(torch.stack([data[i].image for i in range(len(data))]), (16, 16))
    train_on, test_on = pool[:24], pool[24:]

    def psnr(self_supervised: float | None, steps: int, **more: Any) -> float:
        torch.manual_seed(0)
        sampling = Sampling("random", acceleration=2)
        task = Reconstruction(sampling, complex=True, self_supervised=self_supervised, **more)
        options = {"width": 8, "depth": 2, "levels": (), "data_consistency": True}
        model = create_backbone("unet", None, size=(32, 64), **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(steps):
            rows = torch.randperm(len(train_on))[:4]
            batch = task.for_training(task.prepare(train_on[rows]), seeds_of_step(step, 4, 0))
            if self_supervised:
                batch.target = batch.target * torch.nan  # whoever looks at it learns nothing more
            optimizer.zero_grad()
            output = model(batch.input, **batch.physics)
            assert isinstance(output, Tensor)
            task.loss(output, batch).backward()
            optimizer.step()
        meter, batch = Meter(task.protocol), task.prepare(test_on, case=["all"] * len(test_on))
        with torch.no_grad():
            output = model.eval()(batch.input, **batch.physics) if steps else batch.input
        assert isinstance(output, Tensor)
        meter.add(task.scores(output, batch), batch.case)
        return meter.summary()["psnr"].mean

    zero_filled, supervised, alone = psnr(None, 0), psnr(None, 60), psnr(0.4, 60)  # 25.2, 27.1 and 26.0 dB
    assert alone > zero_filled + 0.4
    assert supervised - 2 < alone < supervised
    zero_filled, supervised = (psnr(None, steps, masks="slice") for steps in (0, 60))  # every slice has its own mask
    alone = psnr(0.4, 60, splits=2, masks="slice")  # 25.1, 26.3 and 25.7 dB
    assert zero_filled + 0.3 < alone < supervised


@pytest.mark.parametrize("masks", ["fixed", "measured"])
def test_a_recipe_on_undersampled_kspace_alone(tmp_path: Path, masks: str) -> None:
    """The files hold nothing but measured lines; the run is chosen by lines it did not see."""
    import numpy as np

    mask = Sampling(acceleration=3).mask(24)
    folder = tmp_path / "scans"
    folder.mkdir()
    for i in range(10):
        generator = torch.Generator().manual_seed(i)
        kspace = fft2c(torch.randn(1, 3, 32, 24, dtype=torch.complex64, generator=generator)) * mask.tensor()
        if masks == "measured":  # every file has lost other lines
            kspace[..., i] = 0
        np.save(folder / f"scan{i}.npy", kspace.numpy())
    np.save(tmp_path / "mask.npy", mask.tensor()[0, 0, 0].numpy())
    config = load_recipe(
        {
            "data": {"name": "kspace", "path": str(folder), "options": {"axes": "SCHW", "undersampled": True}},
            "task": {
                "options": {
                    **({"sampling": {"kind": "file", "file": str(tmp_path / "mask.npy")}} if masks == "fixed" else {}),
                    "masks": masks,
                    "splits": 2,
                    "complex": True,
                    "protocol": "held-out",
                    "self_supervised": 0.4,
                }
            },
            "backbone": {"name": "varnet", "options": {"cascades": 1, "width": 4, "depth": 1, "levels": [1]}},
            "train": {"steps": 2, "batch": 2},
        }
    )
    metrics = train(config, tmp_path / "run", quiet=True)
    assert metrics["protocol"] == "held-out"
    assert set(metrics["mean"]) == {"snr"}
