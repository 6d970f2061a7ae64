"""Paired comparisons of two models on the same items. Everything is seeded, so a page is the same from run to run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CHUNK = 500  # resamples at a time: bounds the memory of large suites
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Difference:
    """`value` = first minus second, its 95 % interval, and the two-sided p of no difference; n items."""

    value: float
    low: float
    high: float
    p: float
    n: int


def mcnemar_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Exact two-sided p of McNemar (1947) for paired outcomes, 0 or 1 each: a sign test of the items that differ."""
    gained = sum(a > b for a, b in zip(first, second, strict=True))
    lost = sum(a < b for a, b in zip(first, second, strict=True))
    n, k = gained + lost, min(gained, lost)
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p of a paired permutation test: the sum of differences against sums with random signs.

    Monte Carlo with the add-one rule of Phipson and Smyth (2010), so that p is never 0.
    """
    d = np.asarray(differences, dtype=np.float64)
    rng, observed, extreme = np.random.default_rng(seed), abs(d.sum()), 0
    for size in _chunks():
        signs = rng.integers(0, 2, (size, len(d)), dtype=np.int8) * 2.0 - 1.0
        extreme += int((np.abs(signs @ d) >= observed * (1 - 1e-12)).sum())
    return (extreme + 1) / (RESAMPLES + 1)


def bootstrap_interval(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0):
    """95 % percentile interval of sum(numerators) / sum(denominators) over resampled items (Efron, 1979)."""
    x, w = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    rng, ratios = np.random.default_rng(seed), []
    for size in _chunks():
        drawn = rng.integers(0, len(x), (size, len(x)))
        ratios.append(x[drawn].sum(1) / w[drawn].sum(1))
    low, high = np.percentile(np.concatenate(ratios), [2.5, 97.5])
    return float(low), float(high)


def _chunks() -> list[int]:
    return [CHUNK] * (RESAMPLES // CHUNK)


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of `n` items (Wilson, 1927): it keeps its width where every item is right or wrong."""
    middle = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def compare_accuracy(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Difference of two accuracies on the same items (0 or 1 each): bootstrap interval, McNemar's exact p."""
    d = [a - b for a, b in zip(first, second, strict=True)]
    low, high = bootstrap_interval(d, [1.0] * len(d))
    return Difference(sum(d) / len(d), low, high, mcnemar_p(first, second), len(d))


def compare_bits(first: Sequence[float], second: Sequence[float], sizes: Sequence[float]) -> Difference:
    """Difference of two bits per byte on the same documents: bootstrap interval over documents, sign-flip p.

    first, second: nats per document; sizes: bytes per document.
    """
    d = [(a - b) / math.log(2) for a, b in zip(first, second, strict=True)]
    low, high = bootstrap_interval(d, sizes)
    return Difference(sum(d) / sum(sizes), low, high, sign_flip_p(d), len(d))
