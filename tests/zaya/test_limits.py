"""Lengths, labels and masks at their limits: decided before anything is lost, alike for every cache and path."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

import zaya
from tests.zaya.support import make, mixed_config, tokens
from zaya.errors import UserError

LIMIT = 64
WAYS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "beams": {"num_beams": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.fixture(scope="module")
def model():
    made = make(mixed_config())
    made.config.max_position_embeddings = LIMIT
    return made


class Heard:
    """A streamer that counts what it is given."""

    def __init__(self):
        self.calls = 0

    def put(self, value):
        self.calls += 1

    def end(self):
        pass


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_beyond_the_positions_is_refused_before_the_first_token(model, way, monkeypatch):
    ids, heard = tokens(model, 1, 30), Heard()
    monkeypatch.setattr(model.model, "forward", lambda *a, **k: pytest.fail("computed before it was decided"))
    with pytest.raises(UserError, match="30 tokens and 35 new ones .* = 64; ask for at most 34"):
        model.generate(ids, max_new_tokens=35, streamer=None if way == "beams" else heard, **WAYS[way])
    assert heard.calls <= 1  # transformers hands over the prompt first


@pytest.mark.parametrize("way", WAYS)
def test_the_whole_sum_is_generated_and_padding_takes_no_position(model, way):
    ids = tokens(model, 1, 10)
    alone = model.generate(ids, max_new_tokens=54, min_new_tokens=54, do_sample=False, **WAYS[way])
    assert alone.shape[1] == LIMIT
    padded = torch.cat([torch.zeros(1, 20, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(30) >= 20).long()[None]
    more = model.generate(
        padded, attention_mask=mask, max_new_tokens=54, min_new_tokens=54, do_sample=False, **WAYS[way]
    )
    assert torch.equal(more[:, 20:], alone)


@pytest.mark.parametrize("make_cache", [None, DynamicCache, StaticCache, zaya.ZayaCache])
def test_a_forward_beyond_the_positions_is_refused(model, make_cache):
    options = {"max_cache_len": 80} if make_cache is StaticCache else {}
    cache = make_cache and (make_cache(config=model.config, **options))
    ids = tokens(model, 1, 70)
    with torch.no_grad():
        model(ids[:, :60], past_key_values=cache, use_cache=cache is not None)
        with pytest.raises(UserError, match="max_position_embeddings = 64"):
            model(ids[:, 60:] if cache else ids, past_key_values=cache)


def test_packed_documents_may_be_more_tokens_than_positions(model):
    ids, positions = tokens(model, 1, 100), torch.arange(50).repeat(2)[None]
    with torch.no_grad():
        by_position = model(ids, position_ids=positions).logits
        torch.testing.assert_close(model(ids, cu_seqlens=torch.tensor([0, 50, 100])).logits, by_position)
        torch.testing.assert_close(by_position[:, 50:], model(ids[:, 50:]).logits, atol=3e-6, rtol=0)
    with pytest.raises(UserError, match="has 70 tokens"):
        model(ids, cu_seqlens=torch.tensor([0, 70, 100]))


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0), 7, torch.tensor(7)])
@pytest.mark.parametrize("skip_logits", [False, True])
def test_a_batch_without_a_label_has_loss_zero_and_gradients_of_zero(skip_logits, items):
    model = make().train()
    ids = tokens(model, 2, 9)
    loss = model(ids, labels=torch.full_like(ids, -100), skip_logits=skip_logits, num_items_in_batch=items).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())  # NaN counts as any


def test_both_losses_agree_where_some_labels_count():
    model = make()
    ids = tokens(model, 2, 9)
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, -100)
    for items in (None, 5, torch.tensor(5)):
        both = [model(ids, labels=labels, skip_logits=s, num_items_in_batch=items).loss for s in (False, True)]
        torch.testing.assert_close(*both)
    mean = model(ids, labels=labels).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(model(ids, labels=labels).loss, -mean[labels[:, 1:] != -100].mean())


def blocks(document: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, S] bool of documents [B, S]; 0 is padding, which sees itself."""
    same = (document[:, :, None] == document[:, None]) & (document > 0)[:, None]
    return (same.tril() | torch.eye(document.shape[1], dtype=torch.bool))[:, None]


def forms(mask):
    low = torch.finfo(torch.float32).min
    yield "bool", mask
    for value in (low, -1e9, -1e4, float("-inf")):
        yield f"additive {value:g}", torch.zeros(mask.shape).masked_fill(~mask, value)


DOCUMENTS = torch.tensor([[1] * 7 + [2] + [3] * 9 + [0] * 3, [0] * 3 + [1] * 10 + [2] * 7])
SPANS = [(0, 0, 7), (0, 7, 8), (0, 8, 17), (1, 3, 13), (1, 13, 20)]
POSITIONS = torch.tensor([[*range(7), 0, *range(9), 0, 0, 0], [0, 0, 0, *range(10), *range(7)]])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["no positions", "positions"])
def test_documents_of_a_4d_mask_are_as_alone(attention, positions):
    model = make(zaya.ZayaConfig.tiny())
    model.set_attn_implementation(attention)
    ids = tokens(model, 2, 20)
    with torch.no_grad():
        for name, mask in forms(blocks(DOCUMENTS)):
            got = model(ids, attention_mask=mask, position_ids=positions).logits
            as_dict = (
                model(ids, attention_mask={"hybrid": mask}, position_ids=positions).logits if name != "bool" else got
            )
            torch.testing.assert_close(as_dict, got)
            for row, start, end in SPANS:
                alone = model(ids[row : row + 1, start:end]).logits
                torch.testing.assert_close(got[row : row + 1, start:end], alone, atol=2e-6, rtol=0, msg=name)


def test_a_causal_4d_mask_is_one_document_and_continues_a_cache():
    model = make(zaya.ZayaConfig.tiny())
    ids, causal = tokens(model, 1, 20), torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    with torch.no_grad():
        want = model(ids).logits
        torch.testing.assert_close(model(ids, attention_mask=causal).logits, want, atol=2e-6, rtol=0)
        first = model(ids[:, :12], use_cache=True)
        cache = first.get("cache", first.get("past_key_values"))
        rest = model(ids[:, 12:], attention_mask=causal[:, :, 12:], past_key_values=cache).logits
        torch.testing.assert_close(rest, want[:, 12:], atol=2e-6, rtol=0)


def test_a_4d_mask_that_the_convolution_cannot_follow_is_refused():
    model = make(zaya.ZayaConfig.tiny())
    ids, mask = tokens(model, 2, 20), blocks(DOCUMENTS)
    wrong = POSITIONS.clone()
    wrong[1] = torch.arange(20)
    with pytest.raises(UserError, match="starts a document at token 13 of row 1, where position_ids go on"):
        model(ids, attention_mask=mask, position_ids=wrong)
    wrong[1] = torch.arange(10).repeat(2)
    with pytest.raises(UserError, match="goes on with a document at token 10 of row 1, where position_ids restart"):
        model(ids, attention_mask=mask, position_ids=wrong)
    across = mask.clone()
    across[0, 0, 12, 2] = True
    with pytest.raises(UserError, match="see another document"):
        model(ids, attention_mask=across)
    with pytest.raises(UserError, match="cu_seqlens"):
        model(ids, attention_mask=mask, cu_seqlens=torch.tensor([0, 20, 40]))


@pytest.mark.parametrize("name", ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"])
def test_continuous_batching_is_refused_in_one_line(model, name):
    with pytest.raises(UserError, match="zaya serve"):
        getattr(model, name)([[3, 4, 5]], generation_config=GenerationConfig(max_new_tokens=2))
