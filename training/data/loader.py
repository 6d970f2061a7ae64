"""Which tokens a step sees: a pure function of (seed, epoch, tokens consumed), whatever the number of ranks.

An epoch is the training tokens cut into windows of `sequence_length` (each with the one token after it, the last
target), in a pseudo-random order that a four-round Feistel network on the window's number gives without a table.
"""

import numpy as np
import torch

from zaya.errors import UserError
from zaya.shards import TokenShards

_MASK = (1 << 64) - 1


def _mix(x: np.ndarray, key: int) -> np.ndarray:
    """splitmix64's finalizer of x + key, element by element, on uint64."""
    z = x + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of range(size), chosen by (seed, epoch), sends each position. int64 in and out.

    Luby and Rackoff's construction on the smallest even number of bits that holds `size`, walked on until the result
    is in range: a bijection by construction, in constant memory.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    start = int(_mix(np.array([seed], np.uint64), (epoch + 1) * 0x9E3779B97F4A7C15 & _MASK)[0])
    keys = [(start + r * 0xD1B54A32D192ED03) & _MASK for r in range(1, 5)]
    out = positions.astype(np.uint64)
    todo = np.ones(len(out), bool)
    while todo.any():
        left, right = out[todo] >> np.uint64(half), out[todo] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        out[todo] = (left << np.uint64(half)) | right
        todo[todo] = out[todo] >= size
    return out.astype(np.int64)


class Loader:
    """Batches of a training split by the number of tokens consumed before them."""

    def __init__(self, shards: TokenShards, sequence_length: int, seed: int):
        self.shards, self.length, self.seed = shards, sequence_length, seed
        self.windows = (len(shards) - 1) // sequence_length
        if self.windows < 1:
            raise UserError(
                f"{shards.folder}: {len(shards)} training tokens are less than one sequence of {sequence_length}; "
                "add text or shorten train.sequence_length"
            )

    def windows_of(self, first: int, count: int) -> np.ndarray:
        """Windows of the sequences numbered first … first + count - 1 since the start of training. int64 [count]."""
        numbers = np.arange(first, first + count, dtype=np.int64)
        epochs, positions = numbers // self.windows, numbers % self.windows
        out = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = permute(positions[chosen], self.windows, self.seed, int(epoch))
        return out

    def batch(self, tokens: int, sequences: int, rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one rank's share of the step that follows `tokens` consumed tokens.

        sequences: of the whole step; rank r takes the r-th of `ranks` equal blocks. Returns two int64 tensors
        [sequences / ranks, sequence_length]; targets are the inputs one token later.
        """
        share = sequences // ranks
        first = tokens // self.length + rank * share
        rows = [self.shards.read(int(w) * self.length, self.length + 1) for w in self.windows_of(first, share)]
        both = torch.from_numpy(np.stack(rows))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def heldout_batch(shards: TokenShards, sequence_length: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """About `tokens` held-out tokens as sequences spread evenly over the split: inputs and targets [N, length].

    Raises UserError when the split is shorter than one sequence.
    """
    room = len(shards) - sequence_length - 1
    if room < 0:
        raise UserError(
            f"{shards.folder}: {len(shards)} held-out tokens are less than one sequence of {sequence_length}; "
            "raise corpus.heldout_fraction or shorten train.sequence_length"
        )
    count = max(1, min(tokens, len(shards)) // sequence_length)
    starts = [i * room // max(1, count - 1) for i in range(count)]
    both = torch.from_numpy(np.stack([shards.read(s, sequence_length + 1) for s in starts]))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
