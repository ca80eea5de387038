"""Parameters at C = 96, with a complex number counted once and as two."""

import pytest

from chasm.mixers import AFNO, FFC, FNOD, FSEL, DiffFNO, GFNet, SpectFormer, create_mixer
from chasm.mixers.fsel import EntangledFFN, FrequencyAttention, SpatialAttention
from chasm.surgery.count import count_parameters

C = 96


@pytest.mark.parametrize(
    ("name", "options", "once", "twice"),
    [
        ("gfnet", {"size": (128, 128)}, 798_720, 1_597_440),
        # The paper's column prints the second number of AFNO and SpectFormer, the first of GFNet and FNO.
        ("afno", {}, 4_800, 9_600),
        ("ffc", {}, 69_552, 69_552),
        ("fno-d", {}, 4_738_946, 9_457_538),
        ("fno-d", {"deform": False}, 4_737_216, 9_455_808),
        ("difffno", {}, 4_774_976, 9_493_568),
        ("fsel", {}, 79_330, 79_330),
        ("fsel", {"part": "f+effn"}, 64_670, 64_670),
        ("spectformer", {}, 10_752, 21_504),
        ("spectformer", {"size": (128, 128)}, 10_752, 21_504),
    ],
)
def test_both_counts(name, options, once, twice):
    assert count_parameters(create_mixer(name, channels=C, device="meta", **options)) == (once, twice)


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
@pytest.mark.parametrize("factor", [1, 3])
def test_afno_formula(blocks, factor):
    m = AFNO(C, blocks=blocks, hidden_factor=factor)
    assert count_parameters(m)[1] == 4 * factor * C**2 // blocks + 2 * C * (factor + 1)


@pytest.mark.parametrize(
    ("ratio", "lfu", "expected"),
    [(0.5, True, 69_552), (0.5, False, 67_152), (0.75, True, 52_392), (0.75, False, 47_064),
     (0.25, True, 79_800), (0.25, False, 79_176)],
)  # fmt: skip
def test_ffc_formula(ratio, lfu, expected):
    g = int(ratio * C)
    assert 9 * (C**2 - g**2) + g**2 * (2 + lfu) + g + 2 * g * (1 + lfu) + 2 * C == expected
    assert count_parameters(FFC(C, ratio=ratio, lfu=lfu)) == (expected, expected)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (FrequencyAttention(C, 8, "official"), 19_706),
        (SpatialAttention(C, 8), 59_432),
        (EntangledFFN(C, "ortho"), 44_964),
    ],
)
def test_fsel_parts(part, expected):
    assert count_parameters(part)[0] == expected


def test_fno_formulas():
    m1, m2, c = 5, 3, 32
    spectral = 2 * c**2 * m1 * m2
    assert count_parameters(FNOD(c, modes=(m1, m2)))[0] == spectral + 2 * (c**2 + c) + 18 * c + 2
    attention, gate = 3 * c**2 + 4 * c, 2 * c**2 + c
    expected = spectral + 2 * m1 * m2 + c**2 + c + attention + gate
    assert count_parameters(DiffFNO(c, modes=(m1, m2)))[0] == expected


def test_filters_follow_their_grid():
    assert count_parameters(GFNet(8, size=(9, 11)))[0] == 8 * 9 * 6
    assert count_parameters(SpectFormer(8, size=(9, 11), grid=(4, 6)))[0] == 8 * 4 * 4


def test_fsel_formula():
    c, r = 64, 4
    frequency = 2 * c**2 + 8 + 2 * c * r + 3 * r + c
    spatial = 5 * c**2 + 139 * c + 8
    assert count_parameters(FSEL(c))[0] == frequency + spatial + 2 * c
