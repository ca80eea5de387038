import math

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from chasm.tasks.meter import Meter, aggregate
from chasm.tasks.metrics import dice_iou, nmse, overlap_counts, psnr, ssim
from chasm.tasks.protocols import BRATS_REGIONS, Overlap, get_protocol


def pair(channels: int = 1, size: tuple[int, int] = (24, 31), scale: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(channels)
    target = torch.rand(3, channels, *size, generator=g, dtype=torch.float64).cumsum(-1).cumsum(-2)
    target = scale * target / target.amax()
    noise = 0.05 * scale * torch.randn(target.shape, generator=g, dtype=torch.float64)
    return (target + noise).float(), target.float()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 3e-4])
def test_psnr_and_ssim_agree_with_scikit_image(channels: int, scale: float) -> None:
    output, target = pair(channels, scale=scale)
    ranges = target.amax((1, 2, 3))
    ours_p, ours_s = psnr(output, target, ranges), ssim(output, target, ranges)
    for i in range(len(target)):
        a, b = (x[i].double().numpy() for x in (target, output))
        r = float(ranges[i])
        assert ours_p[i].item() == pytest.approx(peak_signal_noise_ratio(a, b, data_range=r), abs=1e-6)
        theirs = structural_similarity(a, b, data_range=r, channel_axis=0)
        assert ours_s[i].item() == pytest.approx(theirs, abs=1e-6)


def test_ssim_in_flat_regions_is_as_exact() -> None:
    # where the window is nearly constant, single precision would lose the variance
    target = torch.full((1, 1, 32, 32), 0.9) + 1e-4 * torch.randn(
        1, 1, 32, 32, generator=torch.Generator().manual_seed(0)
    )
    output = target + 1e-4
    theirs = structural_similarity(target[0, 0].double().numpy(), output[0, 0].double().numpy(), data_range=1.0)
    assert ssim(output, target, 1.0).item() == pytest.approx(theirs, abs=1e-6)


def test_identical_images() -> None:
    _, target = pair()
    assert torch.isinf(psnr(target, target, 1.0)).all()
    assert ssim(target, target, 1.0).tolist() == pytest.approx([1.0] * 3)
    assert nmse(target, target).tolist() == [0.0] * 3
    assert nmse(torch.zeros_like(target), target).tolist() == pytest.approx([1.0] * 3)


def test_shapes_are_checked() -> None:
    _, target = pair()
    with pytest.raises(ValueError, match="one shape"):
        psnr(target[:, 0], target, 1.0)
    with pytest.raises(ValueError, match="7x7 or more"):
        ssim(target[..., :6], target[..., :6], 1.0)


def test_protocols_differ_as_they_say() -> None:
    output, target = pair()
    target = 0.8 * target / target.amax((1, 2, 3), keepdim=True) * torch.tensor([1.0, 0.5, 0.25]).view(3, 1, 1, 1)
    error = (output.clamp(0, 1).double() - target.double()).square().mean((1, 2, 3))
    peaks = torch.tensor([0.8, 0.4, 0.2]).double()
    unit, hifi = get_protocol("unit").rows(output, target), get_protocol("hifi").rows(output, target)
    torch.testing.assert_close(unit["psnr"], -10 * torch.log10(error))
    torch.testing.assert_close(hifi["psnr"], 10 * torch.log10(peaks**2 / error), rtol=1e-6, atol=0)
    assert (unit["ssim"] != hifi["ssim"]).all()

    fastmri = get_protocol("fastmri")
    volume = fastmri.case(fastmri.rows(output, target))
    a, b = target.double().numpy(), output.double().numpy()
    assert volume["psnr"] == pytest.approx(peak_signal_noise_ratio(a, b, data_range=a.max()), abs=1e-6)
    slices = [structural_similarity(a[i, 0], b[i, 0], data_range=a.max()) for i in range(3)]
    assert volume["ssim"] == pytest.approx(np.mean(slices), abs=1e-6)
    assert volume["nmse"] == pytest.approx(np.sum((a - b) ** 2) / np.sum(a**2))


def test_a_blank_slice_has_finite_scores_under_hifi() -> None:
    rows = get_protocol("hifi").rows(torch.full((1, 1, 8, 8), 0.1), torch.zeros(1, 1, 8, 8))
    assert rows["psnr"].item() == pytest.approx(20.0, abs=1e-5)
    assert math.isfinite(rows["ssim"].item())


@pytest.mark.parametrize("protocol", ["hifi", "unit", "fastmri"])
def test_blank_slices_are_not_scored(protocol: str) -> None:
    """They made PSNR infinite and NMSE undefined, and with them the mean over all cases."""
    output, target = pair()
    chosen = get_protocol(protocol)
    with_blank, without = Meter(chosen), Meter(chosen)
    zeros = torch.zeros_like(target[:1])
    without.add(chosen.rows(output, target), ["a", "a", "b"])
    with_blank.add(chosen.rows(zeros, zeros), ["blank"])  # a case of nothing else
    with_blank.add(chosen.rows(torch.cat([output, zeros]), torch.cat([target, zeros])), ["a", "a", "b", "empty"])
    assert with_blank.summary().per_case == without.summary().per_case
    assert (with_blank.summary().blank, without.summary().blank) == (2, 0)
    assert all(math.isfinite(stat.mean) for stat in with_blank.summary().stats.values())
    only = Meter(chosen)
    only.add(chosen.rows(zeros, zeros), ["blank"])
    with pytest.raises(ValueError, match="every slice is blank"):
        only.summary()


def test_a_blank_slice_within_a_case_leaves_its_mean_alone() -> None:
    output, target = pair()
    chosen, zeros = get_protocol("hifi"), torch.zeros(1, *target.shape[1:])
    plain, mixed = Meter(chosen), Meter(chosen)
    plain.add(chosen.rows(output, target), ["a"] * 3)
    mixed.add(chosen.rows(torch.cat([zeros, output]), torch.cat([zeros, target])), ["a"] * 4)
    assert mixed.summary().per_case == plain.summary().per_case
    assert mixed.summary().blank == 1


def labels(seed: int) -> Tensor:
    """(B, H, W) classes 0..3; the third slice has no enhancing tumour, the fourth nothing at all."""
    label = torch.randint(0, 4, (4, 10, 12), generator=torch.Generator().manual_seed(seed))
    label[2][label[2] == 3] = 0
    label[3] = 0
    return label


def one_hot_regions(label: Tensor) -> Tensor:
    return torch.stack([torch.isin(label, torch.tensor(c)) for c in BRATS_REGIONS.values()], 1).float()


@pytest.mark.parametrize("shared_empty", [False, True])
def test_dice_and_iou_agree_with_monai(shared_empty: bool) -> None:
    from monai.metrics import DiceMetric, MeanIoU  # three seconds: only the process that needs it imports it

    output, target = labels(0), labels(1)
    if not shared_empty:
        output[3, 0, 0] = 3  # predicted where nothing is: 0, not 1
    counts = overlap_counts(output, target, BRATS_REGIONS)
    ours = torch.tensor([[dice_iou(c) for c in counts[name]] for name in BRATS_REGIONS])  # (region, B, 2)
    a, b = one_hot_regions(output), one_hot_regions(target)
    dice = DiceMetric(include_background=True, ignore_empty=False)(a, b)
    iou = MeanIoU(include_background=True, ignore_empty=False)(a, b)
    torch.testing.assert_close(ours[..., 0].T, dice)
    torch.testing.assert_close(ours[..., 1].T, iou)
    assert ours[0, 3, 0] == (1.0 if shared_empty else 0.0)


def test_overlap_is_of_the_volume_not_the_mean_of_slices() -> None:
    from monai.metrics import DiceMetric

    output, target = labels(0), labels(1)
    protocol = Overlap()
    scores = protocol.case(protocol.rows(output, target))
    a, b = one_hot_regions(output), one_hot_regions(target)
    volume = (x.transpose(0, 1)[None] for x in (a, b))  # (1, region, S, H, W)
    dice = DiceMetric(include_background=True, ignore_empty=False)(*volume)
    assert [scores[f"dice_{r}"] for r in BRATS_REGIONS] == pytest.approx(dice[0].tolist())
    assert scores["dice"] == pytest.approx(dice.mean().item())
    assert scores["iou"] == pytest.approx(np.mean([scores[f"iou_{r}"] for r in BRATS_REGIONS]))


def test_aggregation_is_slice_to_case_to_mean_and_std() -> None:
    meter = Meter(get_protocol("hifi"))
    # case a: slices 1 and 3 (mean 2); case b: one slice, 8. Mean over cases 5, over slices it would be 4.
    meter.add({"psnr": torch.tensor([1.0, 3.0])}, ["a", "a"])
    meter.add({"psnr": torch.tensor([8.0])}, ["b"])
    summary = meter.summary()
    stat = summary["psnr"]
    assert (stat.mean, stat.std, stat.cases, stat.protocol) == (5.0, 3.0, 2, "hifi")
    assert summary.per_case == {"a": {"psnr": 2.0}, "b": {"psnr": 8.0}}
    assert str(stat) == "5.000 ± 3.0 (hifi, 2 cases)"
    assert str(summary) == "psnr 5.000 ± 3.0 (hifi, 2 cases)"
    assert "slice" in summary.meaning
    with pytest.raises(ValueError, match="no score 'psrn' under protocol hifi: did you mean 'psnr'"):
        summary["psrn"]


def test_a_case_split_over_batches_is_one_volume() -> None:
    output, target = pair()
    protocol = get_protocol("fastmri")
    meter = Meter(protocol)
    for i in range(3):
        meter.add(protocol.rows(output[i : i + 1], target[i : i + 1]), ["v"])
    whole = protocol.case(protocol.rows(output, target))
    assert meter.summary().per_case["v"] == pytest.approx(whole)


def test_meter_refuses_what_would_be_wrong() -> None:
    meter = Meter(get_protocol("unit"))
    with pytest.raises(ValueError, match="no case"):
        meter.summary()
    with pytest.raises(ValueError, match="case 'a' came in two places"):
        meter.add({"psnr": torch.zeros(3)}, ["a", "b", "a"])
    with pytest.raises(ValueError, match="unknown metric protocol 'hify': did you mean 'hifi'"):
        get_protocol("hify")
    with pytest.raises(ValueError, match="unknown metric protocol 'brats'"):  # of labels, not of images
        get_protocol("brats")
    merged = aggregate({"a": {"psnr": 1.0}, "b": {"psnr": 2.0}}, get_protocol("unit"))
    assert str(merged["psnr"]) == "1.500 ± 0.50 (unit, 2 cases)"
