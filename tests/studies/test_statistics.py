"""Intervals against closed forms and cases with a known answer."""

import math

import numpy as np
import pytest

from chasm.studies.statistics import Interval, central_interval, difference, drop, holm, resampled, spread, two_sided


def named(values):
    return {f"case{i}": float(v) for i, v in enumerate(values)}


def test_spread_of_the_values_and_of_their_source():
    assert spread([1, 2, 3, 4]) == (2.5, pytest.approx(np.sqrt(1.25)))
    assert spread([1, 2, 3, 4], sample=True) == (2.5, pytest.approx(np.sqrt(5 / 3)))
    assert np.isnan(spread([1], sample=True)[1])


def test_interval_approaches_the_normal_one():
    d = np.random.default_rng(0).normal(0.3, 2.0, 2000)
    found = difference([named(d)], [named(0 * d)])
    half = 1.96 * d.std() / np.sqrt(d.size)
    assert found.mean == pytest.approx(d.mean())
    assert (found.low, found.high) == (
        pytest.approx(d.mean() - half, abs=0.01),
        pytest.approx(d.mean() + half, abs=0.01),
    )


def test_with_one_seed_it_is_the_bootstrap_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    d = np.random.default_rng(6).exponential(size=40)
    found = difference([named(d)], [named(0 * d)], draws=40_000)
    theirs = stats.bootstrap((d,), np.mean, method="percentile", n_resamples=40_000, rng=np.random.default_rng(7))
    limits = theirs.confidence_interval
    assert (found.low, found.high) == (pytest.approx(limits.low, abs=0.01), pytest.approx(limits.high, abs=0.01))


def test_p_agrees_with_the_interval_and_with_a_normal_test():
    rng = np.random.default_rng(8)
    for shift in (0.0, 0.1, 0.2, 0.3, 0.5):
        d = rng.normal(shift, 1, 200)
        found = difference([named(d)], [named(0 * d)])
        assert (found.p < 0.05) == (found.low > 0 or found.high < 0)
        z = abs(d.mean()) / (d.std() / np.sqrt(d.size))
        assert found.p == pytest.approx(2 * (1 - 0.5 * (1 + math.erf(z / np.sqrt(2)))), abs=0.02)


def test_p_is_never_zero_nor_more_than_one():
    assert two_sided(np.ones(3999)) == pytest.approx(1 / 2000)
    assert two_sided(np.zeros(10)) == 1


def test_holm_by_hand():
    """The example of Holm's paper's kind: sorted p times n, n - 1, .., never falling, never above 1."""
    assert holm([0.01, 0.02, 0.022, 0.09, 0.6]) == pytest.approx([0.05, 0.08, 0.08, 0.18, 0.6])
    assert holm([0.6, 0.01]) == pytest.approx([0.6, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_many_comparisons_without_a_difference_rarely_call_one():
    """Ten comparisons each: uncorrected, four tables in ten would have a false verdict."""
    rng, false, tables = np.random.default_rng(9), 0, 60
    for i in range(tables):
        p = [difference([named(rng.normal(size=40))], [named(np.zeros(40))], draws=999, seed=i).p for _ in range(10)]
        false += min(holm(p)) < 0.05
    assert false / tables < 0.15


def test_resampled_means_of_two_cases():
    """0 and 1 drawn twice: 0, 1/2 and 1 with probabilities 1/4, 1/2 and 1/4."""
    values, counts = np.unique(resampled(np.array([[0.0, 1.0]]), draws=40_000), return_counts=True)
    assert values.tolist() == [0, 0.5, 1]
    assert counts / 40_000 == pytest.approx([0.25, 0.5, 0.25], abs=0.01)


def test_variance_with_several_seeds():
    """Crossed additive effects a_s + b_c: the bootstrap variance is var(a)/S + var(b)/C."""
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=5), rng.normal(size=30)
    means = resampled(a[:, None] + b[None], draws=100_000)
    assert means.var() == pytest.approx(a.var() / 5 + b.var() / 30, rel=0.02)


def test_pairing_removes_the_difficulty_of_the_cases():
    rng = np.random.default_rng(2)
    hard, noise = rng.normal(30, 5, 20), rng.normal(0.1, 0.05, 20)
    found = difference([named(hard + noise)], [named(hard)])
    assert found.verdict == "win"
    assert found.high - found.low < 0.1  # unpaired it would be several dB wide


@pytest.mark.parametrize(
    ("low", "high", "cases", "verdict"),
    [(0.1, 0.2, 6, "win"), (-0.2, -0.1, 6, "loss"), (-0.1, 0.2, 6, "level"), (0.0, 0.2, 6, "level"),
     (0.1, 0.2, 5, "too few cases")],
)  # fmt: skip
def test_verdict(low, high, cases, verdict):
    assert Interval(0.0, low, high, cases, 1).verdict == verdict


def test_what_prints_as_zero_is_level():
    """+0.0004 dB on every case: the interval excludes zero, and the report would call "0.000 dB" a win."""
    base = named(np.arange(20.0))
    ahead = {case: v + 0.0004 for case, v in base.items()}
    assert difference([ahead], [base]).verdict == "win"
    assert difference([ahead], [base], "psnr").verdict == "level"
    assert difference([base], [ahead], "psnr").verdict == "level"
    assert difference([{case: v + 0.0006 for case, v in base.items()}], [base], "psnr").verdict == "win"
    assert difference([ahead], [base], "ssim").verdict == "win"  # which has a digit more


def test_no_difference_is_rarely_called_one():
    rng = np.random.default_rng(3)
    wrong = sum(
        difference([named(rng.normal(size=30))], [named(np.zeros(30))], draws=500, seed=i).verdict != "level"
        for i in range(400)
    )
    assert 0.02 < wrong / 400 < 0.11


def test_same_seed_same_interval():
    a, b = [named(np.arange(9.0) ** 2)], [named(np.ones(9))]
    assert difference(a, b) == difference(a, b) != difference(a, b, seed=1)


def test_unpaired_input_is_refused():
    with pytest.raises(ValueError, match="same cases"):
        difference([{"a": 1.0, "b": 1.0}], [{"a": 1.0}])
    with pytest.raises(ValueError, match="same seeds"):
        difference([{"a": 1.0}], [{"a": 1.0}, {"a": 1.0}])


def test_drop_of_a_gain():
    rng = np.random.default_rng(4)
    gain = 1 + 0.1 * rng.normal(size=(1, 50))
    value, low, high = drop(gain, 0.25 * gain)
    assert (value, low, high) == (pytest.approx(75), pytest.approx(75), pytest.approx(75))  # drawn together: exact
    _, low, high = drop(rng.normal(size=(1, 50)), gain)
    assert (low, high) == (-np.inf, np.inf)
    assert np.isnan(drop(0.003 * gain, gain, digits=2)[0])  # a gain that prints as zero
    value, low, high = drop(-gain, -0.25 * gain)
    assert np.isnan(value)
    assert (low, high) == (-np.inf, np.inf)


def test_several_masks_are_drawn_as_seeds_are():
    """Crossed additive effects of masks, seeds and cases: the bootstrap variance is the sum of var / number."""
    rng = np.random.default_rng(6)
    masks, seeds, cases = rng.normal(size=4), rng.normal(size=3), rng.normal(size=30)
    effects = masks[:, None, None] + seeds[:, None] + cases
    expected = masks.var() / 4 + seeds.var() / 3 + cases.var() / 30
    assert resampled(effects, draws=100_000).var() == pytest.approx(expected, rel=0.03)


def test_several_masks_lose_an_exact_share_when_they_are_alike():
    gain = 1 + 0.1 * np.random.default_rng(7).normal(size=(2, 50))
    assert drop(gain, 0.25 * np.stack([gain] * 3)) == pytest.approx((75, 75, 75))


def test_many_cases_are_drawn_in_blocks():
    d = np.random.default_rng(5).normal(size=(2, 700_000))
    means = resampled(d, draws=5)
    assert means.shape == (5,)
    assert np.abs(means).max() < 0.01


def test_interval_keeps_the_middle():
    assert central_interval(np.arange(1001.0)) == (pytest.approx(25), pytest.approx(975))
