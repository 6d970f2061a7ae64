"""Hostile input gives one line that names the cause."""

import pytest
import torch

from tests.zaya.support import make, tokens
from zaya.errors import UserError


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda m: m(torch.zeros(0, 4, dtype=torch.long)), "empty"),
        (lambda m: m(torch.zeros(2, 0, dtype=torch.long)), "empty"),
        (lambda m: m(), "exactly one"),
        (lambda m: m(tokens(m, 1, 3), inputs_embeds=torch.zeros(1, 3, 32)), "exactly one"),
        (lambda m: m(torch.tensor([[3, 256]])), "256"),
        (lambda m: m(torch.tensor([[3, -1]])), "-1"),
        (lambda m: m(tokens(m, 1, 513)), "max_position_embeddings"),
        (lambda m: m(tokens(m, 2, 4), attention_mask=torch.zeros(2, 4)), "padding"),
        (lambda m: m(tokens(m, 2, 4), attention_mask=torch.ones(2, 3)), "attention_mask"),
        (lambda m: m(tokens(m, 2, 4), attention_mask=torch.ones(1, 4)), "attention_mask"),
        (lambda m: m.generate(torch.tensor([[3, 256]])), "256"),
        (lambda m: m.generate(tokens(m, 2, 4), attention_mask=torch.tensor([[1] * 4, [0] * 4])), "prompt 1"),
    ],
)
def test_hostile_input(call, named):
    model = make()
    with pytest.raises(UserError, match=named) as error:
        call(model)
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_a_row_of_padding_stays_finite():
    model = make()
    ids, mask = tokens(model, 2, 6), torch.tensor([[1] * 6, [0] * 6])
    out = model(ids, attention_mask=mask).logits
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out[:1], model(ids[:1]).logits, atol=1e-5, rtol=1e-5)
