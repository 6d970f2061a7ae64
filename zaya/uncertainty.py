"""Standard errors of means and ratios over items that may come in clusters, as questions on one passage do."""

import math
from collections.abc import Hashable, Sequence

import numpy as np


def cluster_sums(values: Sequence[float], clusters: Sequence[Hashable] | None) -> np.ndarray:
    """Sum of `values` in each cluster, in the order in which clusters first appear. None: every item is its own."""
    x = np.asarray(values, dtype=np.float64)
    if clusters is None:
        return x
    place: dict[Hashable, int] = {}
    index = [place.setdefault(c, len(place)) for c in clusters]
    if len(index) != len(x):
        raise ValueError(f"{len(x)} values and {len(index)} clusters; give one cluster per value")
    return np.bincount(index, weights=x, minlength=len(place)) if index else x


def ratio_error(
    numerators: Sequence[float], denominators: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> tuple[float, float | None]:
    """sum(numerators) / sum(denominators) and its standard error, with clusters as the sampling unit.

    That of a ratio estimator (Cochran, Sampling Techniques, 1977, eq. 6.13 without the finite-population term). With
    denominators of 1 and no clusters it is the usual s / sqrt(n) of a mean; with clusters it is the cluster-robust
    error times sqrt(c / (c - 1)). None for fewer than two clusters.
    """
    x, w = cluster_sums(numerators, clusters), cluster_sums(denominators, clusters)
    n, total = len(x), float(w.sum())
    value = float(x.sum()) / total
    if n < 2:
        return value, None
    spread = float(((x - value * w) ** 2).sum()) / (n - 1)
    return value, math.sqrt(n * spread) / total
