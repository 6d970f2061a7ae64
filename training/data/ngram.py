"""Unigram and bigram models counted on the training tokens: what a model must beat before it has learned anything."""

import numpy as np


def cross_entropies(train: np.ndarray, heldout: np.ndarray, vocab_size: int) -> tuple[float, float]:
    """Held-out cross-entropy, nats per token, of a unigram and a bigram model of `train`.

    train, heldout: 1-D integer ids. Unigrams get half a count each beforehand. Bigrams are interpolated with them
    after Witten and Bell (1991): p(b|a) = (n(a,b) + k(a) p(b)) / (n(a) + k(a)), where k(a) is the number of different
    successors of a; after an a never seen, p(b).
    """
    train, heldout = train.astype(np.int64), heldout.astype(np.int64)
    unigram = np.bincount(train, minlength=vocab_size) + 0.5
    unigram /= unigram.sum()
    pairs, counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    seen = np.bincount(train[:-1], minlength=vocab_size)
    kinds = np.bincount(pairs // vocab_size, minlength=vocab_size)
    a, b = heldout[:-1], heldout[1:]
    wanted = a * vocab_size + b
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    together = np.where(pairs[at] == wanted, counts[at], 0)
    known = seen[a] + kinds[a]
    bigram = np.where(known == 0, unigram[b], (together + kinds[a] * unigram[b]) / np.maximum(known, 1))
    return float(-np.log(unigram[heldout]).mean()), float(-np.log(bigram).mean())
