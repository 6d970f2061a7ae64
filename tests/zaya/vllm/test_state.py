"""The paged state of CCA against the written-out formula on whole sequences, whatever the batches look like."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("vllm")

from zaya.vllm.state import ConvWeights, Requests, by_heads, by_taps, mix

HEADS, SIZE, WIDTH, SLOTS = 3, 8, 10, 7


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """`new_empty` gives NaN: what is read must have been written."""
    real = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: real(*a, **k).fill_(float("nan")))


def make_weights(taps0: int, taps1: int) -> tuple[list[torch.Tensor], ConvWeights]:
    """Weights as nn.Conv1d holds them, and as the op takes them."""
    channels = HEADS * SIZE
    shapes = [(channels, 1, taps0), (channels,), (channels, SIZE, taps1), (channels,)]
    w0, b0, w1, b1 = (torch.randn(s, dtype=torch.float64) for s in shapes)
    return [w0, b0, w1, b1], ConvWeights(by_taps(w0), b0, by_heads(w1), b1)


def whole(qk, delayed, first, w0, b0, w1, b1):
    """Both outputs for one sequence from its start, by torch's own convolution of the zero-padded sequence."""
    padded = F.pad(qk.T[None], (w0.shape[2] + w1.shape[2] - 2, 0))
    y = F.conv1d(F.conv1d(padded, w0, b0, groups=HEADS * SIZE), w1, b1, groups=HEADS)
    return y[0].T, torch.cat([first[None], delayed[:-1]])


@pytest.mark.parametrize(("taps0", "taps1"), [(2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_any_batching_gives_what_whole_sequences_give(taps0, taps1, seed):
    torch.manual_seed(seed)
    (as_saved, w), first = make_weights(taps0, taps1), torch.randn(WIDTH, dtype=torch.float64)
    lengths = [1, 2, 5, 17, 30]
    sequences = [(torch.randn(n, HEADS * SIZE).double(), torch.randn(n, WIDTH).double()) for n in lengths]
    # slots that were used before hold another request's state, which must not be seen
    conv, value = (
        torch.full((SLOTS, *s), 1e3, dtype=torch.float64) for s in ((taps0 + taps1 - 2, HEADS * SIZE), (WIDTH,))
    )
    slots, done = torch.randperm(SLOTS)[: len(lengths)], [0] * len(lengths)
    got = [[] for _ in lengths]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        active = [i for i, n in enumerate(lengths) if done[i] < n and torch.rand(()) < 0.7]
        if not active:
            continue
        take = [min(int(torch.randint(1, 8, ())), lengths[i] - done[i]) for i in active]
        chunk = [
            torch.cat([sequences[i][k][done[i] : done[i] + t] for i, t in zip(active, take, strict=True)])
            for k in (0, 1)
        ]
        starts = torch.tensor([0, *take]).cumsum(0)
        resumed = torch.tensor([done[i] > 0 for i in active])
        outs = mix(*chunk, first, w, conv, value, Requests(slots[active], resumed, starts))
        for r, i in enumerate(active):
            got[i].append([o[starts[r] : starts[r + 1]] for o in outs])
            done[i] += take[r]
    for i, (qk, delayed) in enumerate(sequences):
        for mine, expected in zip(zip(*got[i], strict=True), whole(qk, delayed, first, *as_saved), strict=True):
            torch.testing.assert_close(torch.cat(mine), expected, rtol=1e-5, atol=1e-5)


def test_only_the_slots_of_the_batch_change():
    _, w = make_weights(2, 2)
    conv, value = torch.randn(SLOTS, 2, HEADS * SIZE).double(), torch.randn(SLOTS, WIDTH).double()
    before = conv.clone(), value.clone()
    batch = torch.randn(3, HEADS * SIZE).double(), torch.randn(3, WIDTH).double()
    requests = Requests(torch.tensor([5, 2]), torch.tensor([True, False]), torch.tensor([0, 1, 3]))
    mix(*batch, torch.zeros(WIDTH).double(), w, conv, value, requests)
    others = [0, 1, 3, 4, 6]
    assert torch.equal(conv[others], before[0][others])
    assert torch.equal(value[others], before[1][others])
    assert torch.equal(conv[5], torch.stack([before[0][5, 1], batch[0][0]]))
    assert torch.equal(value[2], batch[1][2])
