import pytest
import torch
from PIL import Image
from torch import Tensor

from chasm.mri import Operator, Sampling, fft2c, rss, to_channels, to_complex
from chasm.tasks import Meter, Reconstruction, Segmentation, SuperResolution, Task, create_task
from chasm.tasks.reconstruction import min_max


def phantom(batch: int = 3, size: int = 64) -> Tensor:
    """Discs of several intensities on a gradient, other ones in every slice: (B, 1, H, W) around 100."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    slices = []
    for b in range(batch):
        image = 100.0 + 40 * (x.square() + y.square() < 0.7) * (1 + 0.2 * x)
        for k in range(5):
            cx, cy = 0.5 * torch.cos(torch.tensor(k + b * 0.3)), 0.5 * torch.sin(torch.tensor(k + b * 0.3))
            image = image + 15 * (k - 1) * ((x - cx).square() + (y - cy).square() < 0.02 * (k + 1))
        slices.append(image)
    return torch.stack(slices)[:, None]


def with_phase(image: Tensor) -> Tensor:
    ramp = torch.linspace(0, 3, image.shape[-1])
    return torch.polar(image, (ramp + ramp[:, None]).expand_as(image))


def summary(task: Task, image: Tensor, label: Tensor | None = None) -> dict[str, float]:
    batch = task.prepare(image, label, case=[str(i) for i in range(len(image))])
    output = task.reference(batch)
    assert output is not None
    meter = Meter(task.protocol)
    meter.add(task.scores(output, batch), batch.case)
    return {k: s.mean for k, s in meter.summary().stats.items()}


def test_reconstruction_batch_follows_the_published_protocol() -> None:
    image = phantom()
    task = Reconstruction(Sampling(acceleration=4))
    batch = task.prepare(image, case=["a", "a", "b"])
    target, mask = batch.target, Sampling().mask(64).tensor()
    assert target.shape == (3, 1, 64, 64)
    assert target.amin((1, 2, 3)).tolist() == [0.0] * 3
    assert target.amax((1, 2, 3)).tolist() == [1.0] * 3
    assert batch.input.shape == (3, 2, 64, 64)
    assert batch.mask is mask
    torch.testing.assert_close(fft2c(to_complex(batch.input)), mask * fft2c(target), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.in_units(target), image)
    assert batch.physics == {"mask": mask, "maps": None, "measured": None}
    assert task.channels(1) == (2, 2)


def test_reconstruction_loss_is_l1_of_magnitudes() -> None:
    task = Reconstruction()
    batch = task.prepare(phantom())
    turned = to_channels(batch.target * torch.exp(torch.tensor(1.1j)))  # phase does not matter
    assert task.loss(turned, batch).item() == pytest.approx(0.0, abs=1e-6)
    assert task.loss(0 * turned, batch).item() == pytest.approx(batch.target.mean().item())
    half = batch.input.to(torch.bfloat16).requires_grad_()
    task.loss(half, batch).backward()
    assert half.grad is not None
    assert half.grad.isfinite().all()


def test_reconstruction_scores_and_reference() -> None:
    four = summary(Reconstruction(Sampling(acceleration=4)), phantom())
    eight = summary(Reconstruction(Sampling(acceleration=8)), phantom())
    assert 10 < eight["psnr"] < four["psnr"] < 40
    assert eight["ssim"] < four["ssim"] < 1
    perfect = Reconstruction()
    batch = perfect.prepare(phantom())
    assert perfect.scores(to_channels(batch.target + 0j), batch)["psnr"].isinf().all()


def test_fastmri_protocol_is_in_the_units_of_the_data() -> None:
    image = phantom() * torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1, 1)
    task = Reconstruction(protocol="fastmri")
    batch = task.prepare(image, case=["v"] * 3)
    rows = task.scores(to_channels(batch.target + 0j), batch)
    torch.testing.assert_close(rows["output"], image)
    hifi = summary(Reconstruction(), image)["psnr"]
    meter = Meter(task.protocol)
    meter.add(task.scores(task.reference(batch), batch), batch.case)
    volume = meter.summary()["psnr"]
    assert volume.cases == 1
    assert abs(volume.mean - hifi) > 1.0


def test_complex_keeps_the_phase() -> None:
    image = with_phase(phantom())
    task = Reconstruction(complex=True)
    batch = task.prepare(image)
    top = image.abs().amax((1, 2, 3), keepdim=True)
    torch.testing.assert_close(batch.target, image.abs() / top)
    assert batch.mask is not None
    torch.testing.assert_close(to_complex(batch.input), Operator(batch.mask).normal(image / top), atol=1e-5, rtol=0)
    # the magnitude protocol drops it: another zero-filled image
    assert not torch.allclose(Reconstruction().prepare(image).input, batch.input, atol=1e-2)
    assert task.report((1, 64, 64))["complex"] is True
    with pytest.raises(ValueError, match=r"complex=True needs complex images, got torch\.float32"):
        task.prepare(phantom())


def test_several_coils_are_combined() -> None:
    image = with_phase(phantom(size=96))
    x = torch.linspace(-1, 1, 96)
    maps = torch.stack([(1.2 + s * x[:, None] + t * x) * (1 + 0j) for s, t in ((1, 0), (-1, 0), (0, 1), (0, -1))])
    coils = maps * image
    task = Reconstruction(Sampling(acceleration=4), complex=True)
    batch = task.prepare(coils)
    assert task.channels(4) == (2, 2)
    assert batch.input.shape == (3, 2, 96, 96)
    assert batch.maps is not None
    assert batch.measured is not None
    assert batch.maps.shape == batch.measured.shape == (3, 4, 96, 96)
    torch.testing.assert_close(batch.in_units(batch.target), rss(coils), rtol=1e-5, atol=1e-3)
    assert batch.mask is not None
    combined = Operator(batch.mask, batch.maps).adjoint(batch.measured)
    torch.testing.assert_close(to_complex(batch.input), combined)
    # close to the target, and closer than one coil alone
    one = to_channels(Operator(batch.mask).adjoint(batch.measured)[:, :1])
    assert task.loss(batch.input, batch) < 0.6 * task.loss(one, batch)


def test_a_constant_slice_stays_finite() -> None:
    batch = Reconstruction().prepare(torch.full((1, 1, 16, 16), 7.0))
    assert batch.input.isfinite().all()
    assert batch.target.eq(0).all()
    batch = Reconstruction(complex=True).prepare(torch.zeros(1, 1, 32, 32, dtype=torch.complex64))
    assert batch.input.isfinite().all()


def test_segmentation_batch_and_loss() -> None:
    from monai.losses import DiceLoss  # MONAI takes three seconds: only the process that needs it imports it

    g = torch.Generator().manual_seed(0)
    image = torch.rand(2, 4, 48, 48, generator=g)
    label = torch.randint(0, 4, (2, 48, 48), generator=g)
    task = Segmentation(Sampling(acceleration=4))
    batch = task.prepare(image, label)
    assert task.channels(4) == (8, 4)
    assert batch.input.shape == (2, 8, 48, 48)
    assert batch.mask is not None
    torch.testing.assert_close(to_complex(batch.input), Operator(batch.mask).normal(image), atol=1e-6, rtol=0)
    logits = torch.randn(2, 4, 48, 48, generator=g)
    dice = DiceLoss(
        include_background=False, softmax=True, to_onehot_y=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5
    )(logits, label[:, None])
    expected = dice + torch.nn.functional.cross_entropy(logits, label)
    torch.testing.assert_close(task.loss(logits, batch), expected)
    assert task.reference(batch) is None
    sure = 50.0 * torch.nn.functional.one_hot(label, 4).permute(0, 3, 1, 2).float()
    assert task.loss(sure, batch).item() == pytest.approx(0.0, abs=1e-4)
    counts = task.scores(sure, batch)
    assert set(counts) == {"WT", "TC", "ET"}
    assert all((c[:, 0] == c[:, 1]).all() and (c[:, 0] == c[:, 2]).all() for c in counts.values())


def test_segmentation_of_one_class_and_its_errors() -> None:
    task = Segmentation(classes=2)
    image = torch.randint(0, 256, (1, 1, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    batch = task.prepare(image, torch.ones(1, 32, 32, dtype=torch.int64))
    assert batch.input.abs().max() < 1.5  # 8-bit images are scaled
    assert list(task.scores(torch.zeros(1, 2, 32, 32), batch)) == ["class1"]
    assert task.report((1, 32, 32))["regions"] == {"class1": [1]}
    with pytest.raises(ValueError, match="segmentation needs labels"):
        task.prepare(image)
    with pytest.raises(ValueError, match="2 or more classes"):
        Segmentation(classes=1)


def photo() -> Tensor:
    """(1, 3, 64, 64) uint8 with edges and gradients, away from black and white."""
    x = torch.arange(64)
    r = 60 + (x[:, None] * 3 + x) % 120
    g = 70 + 100 * ((x[:, None] // 9 + x // 7) % 2)
    b = (128 + 60 * torch.sin(x / 5.0)).expand(64, 64).long()
    return torch.stack([r, g, b])[None].to(torch.uint8)


def test_superres_degrades_as_pillow_does() -> None:
    image = photo()
    batch = SuperResolution().prepare(image)
    pil = Image.fromarray(image[0].permute(1, 2, 0).numpy())
    up = pil.resize((16, 16), Image.Resampling.BICUBIC).resize((64, 64), Image.Resampling.BICUBIC)
    theirs = torch.tensor(list(up.tobytes())).view(64, 64, 3).permute(2, 0, 1) / 255
    # Pillow rounds between its two passes and at the end: a level or two of 255
    assert (batch.input[0] - theirs).abs().max() < 2.5 / 255
    torch.testing.assert_close(batch.target, image / 255)


def test_superres_rounds_the_reduced_image_to_8_bits() -> None:
    batch = SuperResolution().prepare(torch.full((1, 3, 32, 32), 100.3 / 255))
    torch.testing.assert_close(batch.input, torch.full((1, 3, 32, 32), 100 / 255), atol=1e-6, rtol=0)
    assert batch.target.max().item() == pytest.approx(100.3 / 255)


def test_superres_loss_scores_and_errors() -> None:
    task = SuperResolution()
    batch = task.prepare(photo().float() / 255)
    assert task.channels(3) == (3, 3)
    assert batch.mask is None
    assert task.loss(batch.target + 0.25, batch).item() == pytest.approx(0.25, abs=1e-6)
    scores = summary(task, photo())
    assert 5 < scores["psnr"] < 40
    assert task.report((1, 64, 64)) == {"protocol": "unit", "meaning": task.protocol.meaning, "factor": 4}
    with pytest.raises(ValueError, match="64x66 images are not divisible by 4"):
        task.prepare(torch.zeros(1, 3, 64, 66))
    with pytest.raises(ValueError, match="2 or more"):
        SuperResolution(factor=1)


def test_tasks_are_made_by_name() -> None:
    task = create_task("reconstruction", sampling=Sampling("random", acceleration=8, seed=2))
    report = task.report((1, 256, 256))
    assert report["mask"]["seed"] == 2
    assert report["mask"]["lines"] == 32
    assert report["protocol"] == "hifi"
    with pytest.raises(ValueError, match="unknown task 'reconstrution': did you mean 'reconstruction'"):
        create_task("reconstrution")
    with pytest.raises(ValueError, match="no option 'accel'"):
        create_task("reconstruction", accel=4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_stays_on_the_device() -> None:
    image = phantom().cuda()
    label = torch.zeros(3, 64, 64, dtype=torch.int64, device="cuda")
    for name in ("reconstruction", "segmentation", "superres"):
        task = create_task(name)
        batch = task.prepare(image / 256, label)
        output = torch.zeros(3, task.channels(1)[1], 64, 64, device="cuda", requires_grad=True)
        assert task.loss(output, batch).device.type == "cuda"
        assert all(v.device.type == "cuda" for v in task.scores(output.detach(), batch).values())


def test_noise_belongs_to_the_slice() -> None:
    image = torch.rand(2, 1, 16, 16)
    task, clean = (Reconstruction(Sampling(acceleration=4), snr_db=snr) for snr in (10.0, None))
    batch, other = task.prepare(image), task.prepare(image.flip(0))
    torch.testing.assert_close(batch.input, other.input.flip(0))  # whatever stands beside it in a batch
    torch.testing.assert_close(batch.target, clean.prepare(image).target)
    noise = fft2c(to_complex(batch.input - clean.prepare(image).input))
    assert batch.mask is not None
    torch.testing.assert_close(noise * (1 - batch.mask), torch.zeros_like(noise), atol=1e-5, rtol=0)
    signal = fft2c(to_complex(clean.prepare(image).input))
    ratio = 10 * torch.log10(signal.abs().square().sum((1, 2, 3)) / noise.abs().square().sum((1, 2, 3)))
    torch.testing.assert_close(ratio, torch.full((2,), 10.0), atol=1.5, rtol=0)
    assert task.report((1, 16, 16))["snr_db"] == 10.0
    with pytest.raises(ValueError, match="snr_db adds noise to one coil, got 2"):
        Reconstruction(complex=True, snr_db=10.0).prepare(torch.randn(1, 2, 16, 16, dtype=torch.complex64))


def different(masks: torch.Tensor | None) -> int:
    """Number of different masks of a batch."""
    assert masks is not None
    return len({tuple(mask.flatten().tolist()) for mask in masks})


@pytest.mark.parametrize("kind", ["equispaced", "random", "poisson-2d"])
@pytest.mark.parametrize("content", ["magnitude", "complex", "coils", "segmentation"])
def test_masks_of_an_epoch_are_drawn_for_training_only(kind: str, content: str) -> None:
    image, label = phantom(3, 32) / 256, torch.zeros(3, 32, 32, dtype=torch.int64)
    sampling = Sampling(kind, acceleration=4, center_fraction=0.1)
    if content == "segmentation":
        task, full = Segmentation(sampling, masks="epoch"), image
    elif content == "magnitude":
        task, full = Reconstruction(sampling, masks="epoch"), min_max(image)[0]
    else:
        task, full = Reconstruction(sampling, masks="epoch", complex=True), image * torch.exp(1j * image)
        full = torch.cat([full, full.flip(-1)], 1) if content == "coils" else full
        image = full
    batch = task.prepare(image, label)
    assert torch.equal(batch.mask, sampling.on(32, 32).tensor())
    seen = task.for_training(batch, [5, 6, 7])
    assert seen.mask is not None
    assert different(seen.mask) > 1
    if content in ("magnitude", "segmentation"):
        torch.testing.assert_close(seen.input, to_channels(Operator(seen.mask).normal(full)))
    if content == "coils":
        assert seen.measured is not None
        torch.testing.assert_close(seen.measured, seen.mask * fft2c(image / batch.scale))
        torch.testing.assert_close(seen.input, to_channels(Operator(seen.mask, seen.maps).adjoint(seen.measured)))
    assert torch.equal(task.for_training(batch, [5, 6, 7]).input, seen.input)
    assert not torch.equal(task.for_training(batch, [8, 9, 10]).input, seen.input)
    assert seen.full is None
    assert task.for_scoring(batch) is batch
    assert task.report((1, 32, 32))["masks"] == "epoch"


@pytest.mark.parametrize("task", [Reconstruction, Segmentation])
def test_a_mask_of_its_own_for_every_slice(task: type[Reconstruction] | type[Segmentation]) -> None:
    image, label = phantom(6, 32) / 256, torch.zeros(6, 32, 32, dtype=torch.int64)
    of_slice = task(Sampling("random", acceleration=4), masks="slice")
    batch, turned = of_slice.prepare(image, label), of_slice.prepare(image.flip(0), label)
    assert different(batch.mask) == 6
    assert torch.equal(batch.mask.flip(0), turned.mask)  # whatever stands beside it in a batch
    assert torch.equal(of_slice.for_training(batch, [1] * 6).mask, batch.mask)
    other = task(Sampling("random", acceleration=4, seed=1), masks="slice").prepare(image, label)
    assert not torch.equal(other.mask, batch.mask)
    assert task(Sampling("random", acceleration=4)).prepare(image, label).mask.shape[0] == 1


def test_mistakes_about_masks_are_one_line() -> None:
    with pytest.raises(ValueError, match=r"unknown masks 'epochs'.*epoch"):
        Reconstruction(masks="epochs")
    with pytest.raises(ValueError, match=r"masks='slice' draws masks: set masks=fixed"):
        Segmentation(Sampling(offset=1), masks="slice")
    with pytest.raises(ValueError, match="masks='epoch' draws lines that were not measured"):
        Reconstruction(self_supervised=0.4, masks="epoch")
