"""Paired comparisons of two models on the same items. Everything is seeded, so a page is the same from run to run."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from zaya.uncertainty import cluster_sums, ratio_error

RESAMPLES = 10_000
CHUNK = 500  # resamples at a time: bounds the memory of large suites
Z95 = 1.959963984540054
Z80 = 0.8416212335729143  # of 80 % power
Clusters = Sequence[Hashable] | None


@dataclass(frozen=True)
class Difference:
    """`value` = first minus second, its 95 % interval, and the two-sided p of no difference.

    n: items. clusters: groups of items that stand or fall together, the sampling unit. stderr: of `value`, paired;
    None for one cluster.
    """

    value: float
    low: float
    high: float
    p: float
    n: int
    clusters: int
    stderr: float | None


def mcnemar_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Exact two-sided p of McNemar (1947) for paired outcomes, 0 or 1 each: a sign test of the items that differ."""
    gained = sum(bool(a > b) for a, b in zip(first, second, strict=True))  # bool: numpy's sums overflow in 2**n
    lost = sum(bool(a < b) for a, b in zip(first, second, strict=True))
    n, k = gained + lost, min(gained, lost)
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flip_p(differences: Sequence[float], seed: int = 0, clusters: Clusters = None) -> float:
    """Two-sided p of a paired permutation test: the sum of differences against sums with random signs.

    The items of a cluster change sign together. Monte Carlo with the add-one rule of Phipson and Smyth (2010), so
    that p is never 0.
    """
    d = cluster_sums(differences, clusters)
    rng, observed, extreme = np.random.default_rng(seed), abs(d.sum()), 0
    for size in _chunks(len(d)):
        signs = rng.integers(0, 2, (size, len(d)), dtype=np.int8) * 2.0 - 1.0
        extreme += int((np.abs(signs @ d) >= observed * (1 - 1e-12)).sum())
    return (extreme + 1) / (RESAMPLES + 1)


def bootstrap_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, clusters: Clusters = None
) -> tuple[float, float]:
    """95 % percentile interval of sum(numerators) / sum(denominators) over resampled clusters (Efron, 1979)."""
    x, w = cluster_sums(numerators, clusters), cluster_sums(denominators, clusters)
    rng, ratios = np.random.default_rng(seed), []
    for size in _chunks(len(x)):
        drawn = rng.integers(0, len(x), (size, len(x)))
        ratios.append(x[drawn].sum(1) / w[drawn].sum(1))
    low, high = np.percentile(np.concatenate(ratios), [2.5, 97.5])
    return float(low), float(high)


def _chunks(n: int) -> list[int]:
    """Numbers of resamples that are drawn at a time; smaller for more items, so that memory stays bounded."""
    size = CHUNK if n <= 4000 else max(1, CHUNK * 4000 // n)
    full, rest = divmod(RESAMPLES, size)
    return [size] * full + ([rest] if rest else [])


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of `n` items (Wilson, 1927): it keeps its width where every item is right or wrong."""
    middle = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def effective_items(share: float, n: int, stderr: float | None) -> int:
    """Independent items that would give a share the standard error that its clustered items give; at most `n`."""
    variance = share * (1 - share)
    if stderr is None or stderr <= 0 or variance <= 0:
        return n
    return max(1, min(n, round(variance / stderr**2)))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm, 1979): below a level, they keep the family-wise error below it."""
    order, adjusted, worst = sorted(range(len(ps)), key=lambda i: ps[i]), [1.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted


def detectable(stderr: float | None, level: float = 0.05) -> float | None:
    """The smallest true difference that a two-sided test at `level` finds with 80 % power, given its error."""
    return None if stderr is None else (NormalDist().inv_cdf(1 - level / 2) + Z80) * stderr


def compare_accuracy(first: Sequence[float], second: Sequence[float], clusters: Clusters = None) -> Difference:
    """Difference of two mean scores on the same items: bootstrap interval over clusters, exact or sign-flip p.

    McNemar's exact p where items are 0 or 1 and every one is its own cluster, else that of flipped clusters.
    """
    d = [a - b for a, b in zip(first, second, strict=True)]
    ones, groups = [1.0] * len(d), len(d) if clusters is None else len(set(clusters))
    value, stderr = ratio_error(d, ones, clusters)
    low, high = bootstrap_interval(d, ones, clusters=clusters)
    exact = groups == len(d) and {*first, *second} <= {0, 1}
    p = mcnemar_p(first, second) if exact else sign_flip_p(d, clusters=clusters)
    return Difference(value, low, high, p, len(d), groups, stderr)


def compare_bits(first: Sequence[float], second: Sequence[float], sizes: Sequence[float]) -> Difference:
    """Difference of two bits per byte on the same documents: bootstrap interval over documents, sign-flip p.

    first, second: nats per document; sizes: bytes per document.
    """
    d = [(a - b) / math.log(2) for a, b in zip(first, second, strict=True)]
    value, stderr = ratio_error(d, sizes)
    low, high = bootstrap_interval(d, sizes)
    return Difference(value, low, high, sign_flip_p(d), len(d), len(d), stderr)


def mean_difference(differences: Sequence[Difference]) -> Difference:
    """Mean over tasks of differences that are independent of each other, each task counting the same.

    Interval and p by the normal distribution. Tasks without an error of their own (one cluster) are refused.
    """
    m, errors = len(differences), [d.stderr for d in differences if d.stderr is not None]
    if not m or len(errors) != m:
        raise ValueError("every difference needs a standard error")
    value, stderr = sum(d.value for d in differences) / m, math.sqrt(sum(e * e for e in errors)) / m
    p = math.erfc(abs(value) / stderr / math.sqrt(2)) if stderr else float(value == 0)
    n, groups = sum(d.n for d in differences), sum(d.clusters for d in differences)
    return Difference(value, value - Z95 * stderr, value + Z95 * stderr, p, n, groups, stderr)
