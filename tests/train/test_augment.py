"""Slices are changed the same way for the same seed, stay what they are otherwise, and take their labels along."""

import torch

from chasm.data import Batch
from chasm.mri.phase import smooth_phase
from chasm.train import augment
from chasm.train.augment import vary


def discs(n: int, size: tuple[int, int] = (64, 48)) -> Batch:
    """A bright disc away from the centre, and a label of it."""
    y, x = torch.meshgrid(*(torch.arange(s) - s / 2 + 0.5 for s in size), indexing="ij")
    disc = ((x - 5) ** 2 + (y + 8) ** 2 < 36).expand(n, *size)
    return Batch(disc[:, None] * 0.8 + 0.1, disc.long(), ["a"] * n, [0] * n, "test")


def test_the_same_seed_changes_a_slice_in_the_same_way() -> None:
    batch = discs(6)
    a, b = vary(batch, range(6)), vary(discs(6), range(6))
    assert torch.equal(a.image, b.image)
    one = vary(discs(1), [4])
    torch.testing.assert_close(one.image[0], a.image[4])
    assert not torch.equal(a.image, vary(batch, range(6, 12)).image)


def test_some_slices_keep_their_place_and_some_their_contrast() -> None:
    batch = discs(60)
    got = vary(batch, range(60))
    same_place = [bool(torch.equal(g, w)) for g, w in zip(got.label, batch.label, strict=True)]
    values = [float(image.amin()) for image in got.image]
    same_contrast = [kept and abs(low - 0.1) < 1e-6 for kept, low in zip(same_place, values, strict=True)]
    assert 15 <= sum(same_place) <= 33
    assert 3 <= sum(same_contrast) < sum(same_place)
    unchanged = [bool(torch.equal(g, w)) for g, w in zip(got.image, batch.image, strict=True)]
    assert unchanged == same_contrast


def test_the_label_lies_on_the_disc_and_the_disc_stays_round(monkeypatch) -> None:
    monkeypatch.setattr(augment, "MAX_SHEAR", 0.0)
    got = vary(discs(40), range(40))
    moved = 0
    for image, label in zip(got.image[:, 0], got.label, strict=True):
        bright = image > 0.5 * image.max()
        assert (bright != (label > 0)).sum() <= 0.2 * label.sum() + 12
        rows, columns = label.any(1).nonzero().flatten(), label.any(0).nonzero().flatten()
        inside = rows.numel() and rows[0] > 0 and rows[-1] < 63 and columns[0] > 0 and columns[-1] < 47
        if inside:
            moved += 1
            assert abs(len(rows) - len(columns)) <= 2
    assert moved > 20


def test_the_phase_goes_with_the_magnitude() -> None:
    batch = discs(8, (64, 64))
    phase = smooth_phase((64, 64), 1)
    turned = vary(Batch(batch.image * phase, None, batch.case, batch.index, "test"), range(8))
    plain = vary(Batch(batch.image.to(torch.complex64), None, batch.case, batch.index, "test"), range(8))
    assert turned.image.is_complex()
    assert turned.label is None
    ratio = turned.image.abs() - plain.image.abs()
    assert ratio.abs().mean() < 0.01
    assert turned.image.imag.abs().max() > 0.1


def test_a_blank_slice_stays_blank_and_finite() -> None:
    blank = Batch(torch.zeros(5, 2, 16, 16), None, ["a"] * 5, [0] * 5, "test")
    assert torch.equal(vary(blank, range(5)).image, blank.image)
