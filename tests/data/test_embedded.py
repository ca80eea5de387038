"""The drawn data: repeatable, split by subject, and anatomy enough that a model has something to learn."""

import pickle
import socket

import numpy as np
import pytest
import torch

from chasm.data import DataError, open_dataset
from chasm.data.embedded import CONTENTS, Embedded
from chasm.data.phantom import CONTRASTS, SIGNAL, TISSUES, Head, as_scanned, draw, signal_table
from chasm.mri import create_mask, fft2c, ifft2c

EYE = np.eye(len(TISSUES), dtype=np.float32)  # as a signal table it paints one channel per tissue


def small(split="all", **options):
    return Embedded(split, **{"size": 64, "cases": 4, "slices": 3, **options})


def tissue_maps(head, z, shape=(256, 256), skull=True):
    maps, _ = draw(head, z, shape, EYE, skull)
    return dict(zip(TISSUES, maps, strict=True))


def edge(mask):
    """Pixels of a mask with a neighbour outside it: about its perimeter."""
    inner = mask[1:-1, 1:-1] & mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:]
    return (mask[1:-1, 1:-1] & ~inner).sum()


@pytest.mark.parametrize("content", CONTENTS)
def test_a_slice_depends_on_case_and_index_alone(content):
    first, second = small(content=content), small(content=content)
    backwards = {i: second[i] for i in reversed(range(len(second)))}
    for i, a in enumerate(first):
        b = backwards[i]
        assert (a.case, a.index, a.source) == (b.case, b.index, b.source)
        assert torch.equal(a.image, b.image)
        assert a.label is None or torch.equal(a.label, b.label)
    part = small("test", content=content)
    whole = {(s.case, s.index): s.image for s in first}
    assert all(torch.equal(s.image, whole[s.case, s.index]) for s in part)
    assert torch.equal(pickle.loads(pickle.dumps(first))[2].image, first[2].image)  # as in a worker
    assert first[2] is first[2]  # drawn once, then kept


def test_seeds_cases_and_levels_differ():
    images = [s.image.abs() for s in [*small(), *small(seed=1)]]
    assert all((images[i] - images[j]).abs().mean() > 0.03 for i in range(len(images)) for j in range(i))


def test_splits_are_by_case_and_none_is_empty():
    for content in CONTENTS:
        parts = [set(small(s, content=content).cases) for s in ("train", "val", "test")]
        assert all(parts)
        assert sum(map(len, parts)) == len(set.union(*parts))
        assert set.union(*parts) == set(small(content=content).cases)
    data = small("train")
    assert len(data) == 3 * len(data.cases)
    assert {s.case for s in data} == set(data.cases)


def test_what_a_slice_is():
    brain, tumour, photo = (small(content=c)[4] for c in CONTENTS)
    assert brain.image.dtype == torch.complex64
    assert brain.image.shape == (1, 64, 64)
    assert brain.label is None
    assert tumour.image.shape == (4, 64, 64)
    assert tumour.image.dtype == photo.image.dtype == torch.float32
    assert tumour.label.shape == (64, 64)
    assert tumour.label.dtype == torch.int64
    assert photo.image.shape == (3, 64, 64)
    for image in (tumour.image, photo.image):
        assert image.min() >= 0
        assert 0.5 < image.max() <= 1
    assert (tumour.image[:, 0] == 0).all()  # the skull is stripped: nothing, not even noise, outside


@pytest.mark.parametrize("size", [(97, 120), (128, 77), (33, 16), (31, 31)])
def test_any_matrix_size(size):
    brain, tumour = small(size=size)[1], small(size=size, content="tumour")[1]
    assert brain.image.shape == (1, *size)
    assert tumour.label.shape == size
    assert torch.isfinite(brain.image).all()
    border = torch.cat([brain.image[0, [0, -1]].flatten(), brain.image[0, :, [0, -1]].flatten()]).abs()
    assert border.max() < 0.15 * brain.image.abs().max()  # the head is inside the field of view
    assert brain.image.abs().mean() > 0.05


def test_a_subject_looks_the_same_at_any_size():
    head = Head(3, 1)
    fine, coarse = (draw(head, 20, (n, n), EYE)[0] for n in (256, 64))
    averaged = fine.reshape(-1, 64, 4, 64, 4).mean((2, 4))
    assert np.abs(averaged - coarse).mean((1, 2)).max() < 0.006  # share of each tissue, thin lines too


def test_neighbouring_levels_resemble_each_other_more_than_another_subject():
    here, above = (draw(Head(0, 0), z, (128, 128), EYE[:, [TISSUES.index("white")]])[0].ravel() for z in (40, 42))
    other = draw(Head(0, 1), 40, (128, 128), EYE[:, [TISSUES.index("white")]])[0].ravel()
    assert np.corrcoef(here, above)[0, 1] > 0.75 > np.corrcoef(here, other)[0, 1] + 0.05


@pytest.mark.parametrize("case", range(3))
def test_anatomy(case):
    head = Head(11, case)
    low, high = tissue_maps(head, 6), tissue_maps(head, 50)
    for maps in (low, high):
        total = sum(maps.values())
        assert total.min() >= 0
        assert total.max() < 1.001
        inside = maps["grey"] + maps["white"] > 0.5
        assert 0.15 < inside.mean() < 0.45
        assert 0.7 < maps["grey"].sum() / maps["white"].sum() < 2.5
        # folded: the border of white matter is far longer than that of the brain
        scalp = sum(maps[t] for t in ("skin", "fat", "muscle", "bone", "marrow", "dura"))
        assert edge(maps["white"] > 0.5) > 2.2 * edge((total > 0.5) & (scalp < 0.5))
    # ventricles and nuclei: only at low levels is there fluid in blobs, not lines, and a striatum
    blob = [(m["csf"] > 0.9)[64:192, 88:168] for m in (low, high)]
    assert blob[0].sum() - edge(blob[0]) > 150
    assert blob[1].sum() - edge(blob[1]) < 20
    assert low["striatum"].sum() > 800
    assert high["striatum"].sum() < 10
    # skull all around: bone between the brain and the scalp along each ray from the middle
    bone, fat = low["bone"] > 0.5, low["fat"] > 0.3
    for ray_bone, ray_fat in ((bone[128], fat[128]), (bone[:, 128], fat[:, 128])):
        where = np.flatnonzero(ray_bone)
        assert np.flatnonzero(ray_fat)[0] < where[0]
        assert where[-1] < np.flatnonzero(ray_fat)[-1]


def test_contrasts_are_ordered_as_on_a_scanner():
    head = Head(0, 4, tumour=True)
    z = head.mass.z
    image = np.abs(as_scanned(np.random.default_rng(0), draw(head, z, (256, 256), signal_table(*CONTRASTS))[0]))
    maps = tissue_maps(head, z)
    mean = {
        t: dict(zip(CONTRASTS, image[:, maps[t] > 0.9].mean(1), strict=True))
        for t in ("csf", "grey", "white", "bone", "oedema", "enhancing", "necrosis")
    }
    assert mean["csf"]["t2"] > 1.4 * mean["grey"]["t2"] > 1.4 * 1.2 * mean["white"]["t2"]
    assert mean["white"]["t1"] > 1.2 * mean["grey"]["t1"] > 1.2 * 1.5 * mean["csf"]["t1"]
    assert mean["oedema"]["flair"] > 1.4 * mean["grey"]["flair"] > mean["white"]["flair"] > 3 * mean["csf"]["flair"]
    assert mean["enhancing"]["t1ce"] > 1.4 * mean["white"]["t1ce"]
    assert mean["enhancing"]["t1"] < mean["white"]["t1"]
    assert mean["necrosis"]["t1ce"] < mean["grey"]["t1ce"]
    assert max(mean["bone"].values()) < 0.1
    assert set(SIGNAL) == set(TISSUES)


def test_tumour_classes_are_present_and_nested():
    data = Embedded("all", content="tumour", size=240, cases=3, slices=5, seed=2)
    assert {int(c) for s in data for c in s.label.unique()} == {0, 1, 2, 3}
    touching = rim = 0
    for s in data:
        core, label = s.label == 1, s.label
        if not core.any():
            continue
        around = torch.zeros_like(core)
        for shift in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            around |= core.roll(shift, (0, 1))
        around &= ~core
        touching += int(around.sum())
        rim += int((label[around] == 3).sum())
        y, x = core.nonzero().float().mean(0)
        far = [
            ((c - torch.stack([y, x])) ** 2).sum(1).mean()
            for c in ((label == k).nonzero() for k in (1, 3, 2))
            if len(c)
        ]
        assert far == sorted(far)  # necrosis inside, then the rim, then oedema
        t1ce, flair = s.image[1], s.image[3]
        assert t1ce[label == 3].mean() > t1ce[label == 1].mean()
        if (label == 2).any():
            assert flair[label == 2].mean() > 1.3 * flair[(label == 0) & (flair > 0.1)].mean()
    assert touching > 50
    assert rim == touching


def test_the_mass_displaces_what_is_near():
    with_mass, without = Head(0, 4, tumour=True), Head(0, 4)
    assert with_mass.mass is not None
    (a, label), (b, none) = (draw(h, with_mass.mass.z, (128, 128), EYE) for h in (with_mass, without))
    assert not none.any()
    bone, grey = TISSUES.index("bone"), TISSUES.index("grey")
    assert np.abs(a - b)[bone].mean() < 1e-4  # the skull stays
    assert (np.abs(a - b)[grey][label == 0] > 0.6).sum() > 50  # cortex moves, outside of the tumour too


@pytest.mark.parametrize("contrast", CONTRASTS)
def test_the_spectrum_reaches_the_edge_of_k_space(contrast):
    image = Embedded("all", contrast=contrast, cases=1, slices=3)[1].image[0]
    power = fft2c(image).abs().square()
    y, x = torch.meshgrid(torch.arange(-128.0, 128), torch.arange(-128.0, 128), indexing="ij")
    outer = power[torch.hypot(x, y) > 0.8 * 128].mean() / power.mean()
    assert 10 * outer.log10() > -26  # real whole-head scans on their native grid: about -18 dB
    clean = torch.from_numpy(draw(Head(0, 0), 20, (256, 256), signal_table(contrast))[0][0])
    power = fft2c(clean.to(torch.complex64)).abs().square()
    assert 10 * (power[torch.hypot(x, y) > 0.8 * 128].mean() / power.mean()).log10() > -32  # not by noise alone


def test_phase_is_smooth_but_not_flat():
    for s in small(size=256, slices=1):
        image = s.image[0]
        both = image.abs() > 0.15
        for axis in (0, 1):
            step = (image * image.roll(1, axis).conj()).angle()[both & both.roll(1, axis)]
            assert step.abs().quantile(0.99) < 0.25
        smooth = torch.nn.functional.avg_pool2d(torch.view_as_real(image).permute(2, 0, 1), 16)  # noise averages out
        values = torch.complex(smooth[0], smooth[1])
        values = values[values.abs() > 0.1]
        assert (values / values.mean()).angle().std() > 0.05


@pytest.mark.parametrize("contrast", ["t1", "t2"])
def test_undersampling_costs_about_what_it_costs_on_real_brains(contrast):
    mask = create_mask("equispaced", 256, acceleration=4).tensor()
    psnr = []
    for s in Embedded("all", contrast=contrast, cases=2, slices=3):
        x = s.image.abs()
        x = (x - x.min()) / (x.max() - x.min())
        zero_filled = ifft2c(fft2c(x.to(torch.complex64)) * mask[0]).abs()
        psnr.append(-10 * (zero_filled - x).square().mean().log10())
    assert 21 < torch.stack(psnr).mean() < 27


def test_photographs_come_from_the_wheel_without_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    from skimage import data as photos

    test = Embedded("test", content="photos", size=(150, 200), slices=100)
    assert test.domain == "photo"
    assert test.cases == ["chelsea", "coffee", "coins"]
    cat = torch.from_numpy(photos.chelsea()).permute(2, 0, 1).float() / 255
    crops = [s.image for s in test if s.case == "chelsea"]
    assert len(crops) == 4
    assert torch.equal(crops[0], cat[:, :150, :200])
    assert torch.equal(crops[-1], cat[:, -150:, -200:])
    half = Embedded("test", content="photos", size=(75, 100), slices=100)  # the same four places, at half the size
    small_crops = torch.stack([s.image for s in half if s.case == "chelsea"])
    reduced = torch.nn.functional.interpolate(torch.stack(crops), size=(75, 100), mode="area")
    assert small_crops.shape == reduced.shape
    assert (small_crops - reduced).abs().mean() < 0.03
    assert len(small(content="photos", slices=2)) == 2 * 13


def test_options_that_make_no_sense_say_so():
    for options, words in (
        ({"content": "brian"}, "did you mean 'brain'"),
        ({"contrast": "t3"}, "unknown contrast 't3'"),
        ({"split": "trian"}, "did you mean 'train'"),
        ({"size": 8}, "16 to 2048"),
        ({"cases": 0}, "at least 1"),
        ({"seed": -1}, "seed -1"),
        ({"content": "photos", "size": 512}, "choose a size below"),
    ):
        with pytest.raises(ValueError, match=words):
            Embedded(**options)
    with pytest.raises(DataError, match="split 'val' has no case"):
        Embedded("val", cases=1)
    with pytest.raises(ValueError, match="no option 'slice'"):
        open_dataset("embedded", slice=3)
    with pytest.raises(IndexError):
        small()[12]


def test_opens_by_name_and_goes_to_memory():
    data = open_dataset("embedded", split="test", content="tumour", size=32, cases=3, slices=2)
    resident = data.to_memory()
    batch = resident.batch([1, 0])
    assert batch.image.shape == (2, 4, 32, 32)
    assert torch.equal(batch.label[1], data[0].label)
    assert batch.source == "embedded tumour"


@pytest.mark.parametrize("size", [[], [32], [32, 32, 32], None, "large", ["a", "b"]])
def test_a_size_of_another_shape_is_one_line(size):
    with pytest.raises(ValueError, match="expected a number of pixels, or height and width"):
        open_dataset("embedded", size=size)
