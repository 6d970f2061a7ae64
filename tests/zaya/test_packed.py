"""Packed documents against each document alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zaya
from tests.zaya.support import make, mixed_config, tokens
from zaya.errors import UserError

CONFIGS = {
    "mixed": mixed_config,
    "three taps": lambda: zaya.ZayaConfig.tiny(cca_time0=3, cca_time1=3),
    "bias": lambda: zaya.ZayaConfig.tiny(attention_bias=True),
}


def alone(model, ids, lengths):
    """Logits of each document of one row, run by itself."""
    return torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, dim=1)], dim=1)


def restart(lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_packed_equals_alone(config, attention):
    model = make(CONFIGS[config]())
    model.set_attn_implementation(attention)
    rows = [[1, 2, 9, 1, 1, 3], [17], [2, 15]]
    ids = tokens(model, 3, 17)
    want = torch.cat([alone(model, ids[i : i + 1], lengths) for i, lengths in enumerate(rows)])
    positions = torch.cat([restart(lengths) for lengths in rows])
    bounds = torch.tensor([0] + [n for lengths in rows for n in lengths]).cumsum(0)
    for options in ({"position_ids": positions}, {"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds.int()}):
        for use_cache in (False, True):
            got = model(ids, use_cache=use_cache, **options).logits
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_packed_gradients_equal_alone():
    model = make()
    lengths, ids = [1, 5, 2, 12], tokens(model, 1, 20)
    weights = torch.randn(1, 20, model.config.vocab_size)
    gradients = []
    for logits in (alone(model, ids, lengths), model(ids, position_ids=restart(lengths), use_cache=False).logits):
        model.zero_grad()
        (logits * weights).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, want in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], want, atol=1e-3, rtol=1e-4)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 4))
@torch.no_grad()
def test_any_documents_with_padding_behind(lengths, padding):
    model = make()
    total = sum(lengths)
    ids = tokens(model, 1, total + padding)
    positions = torch.cat([restart(lengths), torch.zeros(1, padding, dtype=torch.long)], dim=1)
    mask = torch.cat([torch.ones(1, total), torch.zeros(1, padding)], dim=1)
    got = model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[:, :total], alone(model, ids[:, :total], lengths), atol=1e-5, rtol=1e-5)


def test_wrong_bounds_are_refused():
    model, ids = make(), torch.ones(1, 8, dtype=torch.long)
    for bounds in ([0, 4], [1, 8], [0, 9, 8], [[0, 8]]):
        with pytest.raises(UserError, match="cu_seqlens"):
            model(ids, cu_seqlens=torch.tensor(bounds))
    cache = zaya.ZayaCache(model.config)
    model(ids, past_key_values=cache)
    with pytest.raises(UserError, match="empty cache"):
        model(ids, cu_seqlens=torch.tensor([0, 8]), past_key_values=cache)
