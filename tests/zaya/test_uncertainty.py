"""Standard errors against the textbook's and against resampling."""

import math

import numpy as np
import pytest

from zaya.uncertainty import cluster_sums, ratio_error


def test_without_clusters_it_is_the_error_of_a_mean():
    x = np.random.default_rng(0).normal(0, 1, 40)
    value, error = ratio_error(x, np.ones(40))
    assert value == pytest.approx(x.mean())
    assert error == pytest.approx(x.std(ddof=1) / math.sqrt(40))
    assert ratio_error([1.0], [1.0]) == (1.0, None)
    assert ratio_error([1.0, 0.0], [1.0, 1.0], ["a", "a"]) == (0.5, None)


def test_with_clusters_it_is_the_cluster_robust_error():
    rng = np.random.default_rng(1)
    clusters = rng.integers(0, 25, 300)
    x = (rng.random(300) < 0.3 + 0.4 * (clusters % 2)).astype(float)
    value, error = ratio_error(x, np.ones(300), clusters.tolist())
    # Cameron and Miller (2015), of an intercept alone: sum over clusters of squared sums of residuals
    sums = [((x - value)[clusters == c]).sum() for c in np.unique(clusters)]
    groups = len(sums)
    assert error == pytest.approx(math.sqrt(sum(s * s for s in sums) * groups / (groups - 1)) / 300)
    assert error > ratio_error(x, np.ones(300))[1]


def test_sums_come_in_the_order_of_first_appearance():
    assert cluster_sums([1, 2, 4, 8], ["b", "a", "b", "c"]).tolist() == [5, 2, 8]
    with pytest.raises(ValueError, match="3 values and 2 clusters"):
        cluster_sums([1, 2, 3], ["a", "b"])
