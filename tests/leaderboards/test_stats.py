"""Statistics against scipy."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from zaya.leaderboards import stats

RNG = np.random.default_rng(3)


@pytest.mark.parametrize(("n", "level"), [(100, 0.1), (100, 0.02), (7, 0.4), (1000, 0.03)])
def test_mcnemar_is_the_exact_sign_test_of_items_that_differ(n, level):
    first = RNG.integers(0, 2, n)
    second = np.where(RNG.random(n) < level, 1 - first, first)
    gained, lost = int(((first == 1) & (second == 0)).sum()), int(((first == 0) & (second == 1)).sum())
    expected = scipy_stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert stats.mcnemar_p(first, second) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_equal_models_is_one():
    assert stats.mcnemar_p([0, 1, 1], [0, 1, 1]) == 1.0


@pytest.mark.parametrize("shift", [0.0, 0.25, 2.0])
def test_sign_flips_agree_with_a_permutation_test(shift):
    d = RNG.normal(shift, 1, 60)
    ours = stats.sign_flip_p(d)
    reference = scipy_stats.permutation_test(
        (d,), lambda x, axis: x.sum(axis=axis), permutation_type="samples", n_resamples=9999, vectorized=True, rng=1
    )
    assert ours == pytest.approx(reference.pvalue, abs=0.02)
    assert ours > 0


def test_sign_flips_of_few_items_approach_the_exact_p():
    d = [0.4, 1.3, 0.2, 2.0, -0.1, 0.9]
    signs = np.array(np.meshgrid(*[[-1, 1]] * 6)).reshape(6, -1)
    exact = (np.abs(np.array(d) @ signs) >= sum(d) - 1e-12).mean()
    assert stats.sign_flip_p(d) == pytest.approx(exact, abs=0.01)


def test_bootstrap_of_a_mean_agrees_with_scipy():
    x = RNG.exponential(1.0, 80)
    low, high = stats.bootstrap_interval(x, np.ones(80))
    reference = scipy_stats.bootstrap((x,), np.mean, n_resamples=20000, method="percentile", rng=5).confidence_interval
    assert low == pytest.approx(reference.low, abs=0.02)
    assert high == pytest.approx(reference.high, abs=0.02)


def test_bootstrap_of_a_ratio_agrees_with_scipy():
    w = RNG.integers(100, 4000, 90).astype(float)
    x = w * RNG.normal(1.5, 0.3, 90)
    low, high = stats.bootstrap_interval(x, w)
    ratio = lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis)
    reference = scipy_stats.bootstrap(
        (x, w), ratio, paired=True, vectorized=True, n_resamples=20000, method="percentile", rng=5
    ).confidence_interval
    assert low == pytest.approx(reference.low, abs=0.005)
    assert high == pytest.approx(reference.high, abs=0.005)


def test_bits_of_documents_of_equal_size_agree_with_the_paired_t_test():
    a, b = RNG.normal(900, 40, 200), RNG.normal(903, 40, 200)
    d = stats.compare_bits(a, b, [600.0] * 200)
    t = scipy_stats.ttest_rel(a, b)
    interval = t.confidence_interval(0.95)
    assert d.value == pytest.approx((a - b).mean() / 600 / math.log(2))
    assert d.p == pytest.approx(t.pvalue, abs=0.02)
    assert d.low == pytest.approx(interval.low / 600 / math.log(2), abs=1e-3)
    assert d.high == pytest.approx(interval.high / 600 / math.log(2), abs=1e-3)


@pytest.mark.parametrize(("right", "n"), [(0, 4), (31, 100), (100, 100), (1, 2), (5000, 10042)])
def test_the_interval_of_a_share_is_wilsons(right, n):
    expected = scipy_stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert stats.wilson_interval(right / n, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_an_accuracy_that_is_better_is_positive_and_repeatable():
    first, second = [1.0] * 60 + [0.0] * 40, [1.0] * 40 + [0.0] * 60
    d = stats.compare_accuracy(first, second)
    assert (d.value, d.n) == (pytest.approx(0.2), 100)
    assert 0 < d.low < 0.2 < d.high
    assert d == stats.compare_accuracy(first, second)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng, hits = np.random.default_rng(11), 0
    for seed in range(100):
        low, high = stats.bootstrap_interval(rng.normal(0.3, 1.0, 60), np.ones(60), seed)
        hits += low <= 0.3 <= high
    assert 85 <= hits <= 100


def test_holm_is_the_closed_step_down_procedure():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.9, 0.6]) == [1.0, 1.0]
    assert stats.holm([]) == []


def test_holm_keeps_the_family_wise_error():
    rng = np.random.default_rng(5)
    wrong = sum(min(stats.holm(rng.random(12).tolist())) < 0.05 for _ in range(2000))
    assert 60 <= wrong <= 140  # 5 % of 2000, five standard deviations


def clustered(rng, n_clusters: int, effect: float = 0.0) -> tuple[list[float], list[float], list[int]]:
    """Two models' answers: the items of a cluster are nearly always gained or lost together."""
    sizes = rng.integers(1, 16, n_clusters)
    clusters = np.repeat(np.arange(n_clusters), sizes)
    side = np.repeat(rng.random(n_clusters) < 0.5 + effect, sizes)
    first = np.where(side, 1.0, 0.0)
    return first.tolist(), (1 - first).tolist(), clusters.tolist()


def test_clusters_keep_the_error_rate_that_single_items_break():
    rng, naive, kept = np.random.default_rng(1), 0, 0
    for _ in range(60):
        first, second, clusters = clustered(rng, 30)
        naive += stats.compare_accuracy(first, second).p < 0.05
        kept += stats.compare_accuracy(first, second, clusters).p < 0.05
    assert naive > 20  # items that are not independent look like evidence
    assert kept <= 9  # 5 % of 60 is 3


def test_the_clustered_interval_covers_and_its_error_is_that_of_resampled_clusters():
    first, second, clusters = clustered(np.random.default_rng(2), 80)
    d = stats.compare_accuracy(first, second, clusters)
    assert (d.n, d.clusters) == (len(first), 80)
    plain = stats.compare_accuracy(first, second)
    assert d.value == plain.value
    assert d.high - d.low > 2 * (plain.high - plain.low)
    assert d.stderr == pytest.approx((d.high - d.low) / 2 / 1.96, rel=0.05)


@pytest.mark.parametrize("power_at", [1.0, 1.6])
def test_the_detectable_difference_is_found_about_four_times_in_five(power_at):
    rng, stderr = np.random.default_rng(9), 0.02
    true = stats.detectable(stderr) * power_at
    found = np.mean(np.abs(rng.normal(true, stderr, 20_000)) / stderr > 1.96)
    assert found == pytest.approx(0.8, abs=0.01) if power_at == 1.0 else found > 0.98
    assert stats.detectable(None) is None
    assert stats.detectable(stderr, 0.05 / 20) > stats.detectable(stderr)


def test_an_effective_number_of_items_gives_the_clustered_error_back():
    assert stats.effective_items(0.3, 1000, math.sqrt(0.3 * 0.7 / 250)) == 250
    assert stats.effective_items(0.3, 1000, 0.001) == 1000  # never more than were asked
    assert stats.effective_items(1.0, 1000, 0.0) == 1000


def test_the_mean_over_tasks_is_the_z_test_of_independent_differences():
    parts = [stats.compare_accuracy(RNG.integers(0, 2, 200), RNG.integers(0, 2, 200)) for _ in range(4)]
    mean = stats.mean_difference(parts)
    stderr = math.sqrt(sum(d.stderr**2 for d in parts)) / 4
    assert mean.value == pytest.approx(np.mean([d.value for d in parts]))
    assert mean.p == pytest.approx(2 * scipy_stats.norm.sf(abs(mean.value) / stderr))
    assert mean.n == 800


def test_scores_between_nought_and_one_are_flipped_not_counted():
    first, second = RNG.random(50), RNG.random(50)
    d = stats.compare_accuracy(first.tolist(), second.tolist())
    assert d.p == stats.sign_flip_p(first - second)
