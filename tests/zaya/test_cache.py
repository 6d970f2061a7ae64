"""Every cache, cut in every way, against one full pass without a cache. Also run under other transformers versions."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

import zaya
from tests.zaya.support import make, mixed_config, tokens, twin
from zaya.errors import UserError

MAKERS = {
    "ours": lambda c: zaya.ZayaCache(c),
    "dynamic": lambda c: DynamicCache(config=c),
    "static": lambda c: StaticCache(config=c, max_cache_len=40),
}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def feed(model, ids, chunks, cache, mask=None):
    """Logits of `ids` [B, S] read in `chunks`, through `cache`."""
    out, start = [], 0
    for size in chunks:
        part = None if mask is None else mask[:, : start + size]
        out.append(model(ids[:, start : start + size], attention_mask=part, past_key_values=cache).logits)
        start += size
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("chunks", [[24], [1] * 24, [7, 1, 2, 3, 11], [10] + [1] * 14])
@torch.no_grad()
def test_chunks_equal_one_pass(kind, chunks):
    model = make()
    ids = tokens(model, 3, 24)
    want = model(ids, use_cache=False).logits
    torch.testing.assert_close(feed(model, ids, chunks, MAKERS[kind](model.config)), want, **CLOSE)


@pytest.mark.parametrize("kind", MAKERS)
@torch.no_grad()
def test_padded_prompts_equal_the_prompts_alone(kind):
    """Left and right padding in prefill, then decoding: each row as if it had never been padded. Full attention only:
    a sliding window counts the places of padding between tokens."""
    model = make(zaya.ZayaConfig.tiny())
    ids = tokens(model, 2, 14)
    for side in ("left", "right"):
        mask = torch.ones(2, 14, dtype=torch.long)
        mask[0, : 4 if side == "left" else 0] = 0
        if side == "right":
            mask[0, 6:10] = 0
        short = ids[:1][mask[:1].bool()][None]
        want = model(short, use_cache=False).logits
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        cache, out = MAKERS[kind](model.config), []
        for start, size in ((0, 10), (10, 1), (11, 3)):
            end = start + size
            out.append(
                model(
                    ids[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                    past_key_values=cache,
                ).logits
            )
        got = torch.cat(out, dim=1)[:1][mask[:1].bool()][None]
        torch.testing.assert_close(got, want, **CLOSE)
        torch.testing.assert_close(torch.cat(out, dim=1)[1:], model(ids[1:], use_cache=False).logits, **CLOSE)


@settings(max_examples=15, deadline=None)
@given(st.data())
@torch.no_grad()
def test_any_chunking_with_any_left_and_right_padding(data):
    model = make()
    length = data.draw(st.integers(1, 14))
    lefts = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2))
    rights = [data.draw(st.integers(0, length - 1 - left)) for left in lefts]
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=4)) | {length})
    ids, mask = tokens(model, 2, length), torch.ones(2, length, dtype=torch.long)
    for row, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        mask[row, :left] = 0
        mask[row, length - right :] = 0
    want = model(ids, attention_mask=mask, use_cache=False).logits
    chunks = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    for kind in MAKERS.values():
        got = feed(model, ids, chunks, kind(model.config), mask)
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], **CLOSE)


@pytest.mark.parametrize("removed", [1, 2, 9])
@torch.no_grad()
def test_rollback(removed):
    model = make()
    ids = tokens(model, 2, 24)
    want = model(ids, use_cache=False).logits
    for recorded in (False, True):
        cache = zaya.ZayaCache(model.config)
        if recorded:
            cache.activate_past_recording()
        model(ids[:, :15], past_key_values=cache)
        model(tokens(model, 2, removed, seed=9), past_key_values=cache)
        cache.crop(-removed)
        assert cache.get_seq_length() == 15
        torch.testing.assert_close(model(ids[:, 15:], past_key_values=cache).logits, want[:, 15:], **CLOSE)
    cache = zaya.ZayaCache(model.config)
    model(ids, past_key_values=cache)
    cache.crop(24 - removed)
    torch.testing.assert_close(model(ids[:, -removed:], past_key_values=cache).logits, want[:, -removed:], **CLOSE)


def test_rollback_further_than_kept_is_refused():
    model = make()
    cache = zaya.ZayaCache(model.config, rollback=2)
    model(tokens(model, 1, 12), past_key_values=cache)
    with pytest.raises(UserError, match="rollback=3"):
        cache.crop(-3)


@torch.no_grad()
def test_reorder_select_repeat_and_a_saved_cache():
    model = make()
    ids, more = tokens(model, 3, 12), tokens(model, 3, 6, seed=4)
    base = zaya.ZayaCache(model.config)
    model(ids, past_key_values=base)
    pick = torch.tensor([2, 0, 2])
    for change, rows in (
        (lambda c: c.reorder_cache(pick), pick),
        (lambda c: c.batch_select_indices(torch.tensor([2, 1])), torch.tensor([2, 1])),
        (lambda c: c.batch_repeat_interleave(2), torch.tensor([0, 0, 1, 1, 2, 2])),
        (lambda c: None, torch.arange(3)),
    ):
        cache = copy.deepcopy(base)
        change(cache)
        want = model(torch.cat([ids[rows], more[rows]], dim=1), use_cache=False).logits[:, 12:]
        torch.testing.assert_close(model(more[rows], past_key_values=cache).logits, want, **CLOSE)
    base.reset()
    assert base.get_seq_length() == 0
    torch.testing.assert_close(model(ids, past_key_values=base).logits, model(ids, use_cache=False).logits, **CLOSE)


@torch.no_grad()
def test_a_cache_without_a_place_is_refused():
    model = make()
    with pytest.raises(UserError, match="ZayaCache"):
        model(tokens(model, 1, 4), past_key_values=DynamicCache())


GENERATE = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "chunked prefill": {"prefill_chunk_size": 3},
    "dynamic": {"cache_implementation": "dynamic"},
}


@pytest.mark.parametrize("how", GENERATE)
def test_generate_equals_stock(how):
    model = make()
    prompt = tokens(model, 3, 9)
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | GENERATE[how]
    ours = model.generate(prompt, attention_mask=mask, **options)
    if how == "chunked prefill":  # stock's chunked prefill is not what is tested
        del options["prefill_chunk_size"]
    assert torch.equal(ours, twin(model).generate(prompt, attention_mask=mask, **options))


def test_static_and_assisted_generation_equal_greedy():
    model, helper = make(), make(mixed_config(), seed=3)
    prompt = tokens(model, 1, 9)
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    want = model.generate(prompt, **options)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(prompt, **options, **static), want)
    assert torch.equal(model.generate(prompt, **options, prompt_lookup_num_tokens=3), want)
    assert torch.equal(model.generate(prompt, **options, assistant_model=helper), want)


def test_continuing_from_the_cache_of_a_generation():
    model = make()
    prompt = tokens(model, 1, 9)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    whole = model.generate(prompt, max_new_tokens=16, **options)
    cache = zaya.ZayaCache(model.config)
    half = model.generate(prompt, max_new_tokens=8, past_key_values=cache, **options)
    assert torch.equal(model.generate(half, max_new_tokens=8, past_key_values=cache, **options), whole)
