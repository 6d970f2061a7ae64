"""docs/finetune.md, run; and the callback's update against its formula."""

import re
from pathlib import Path

import pytest
import torch

import zaya
from tests.zaya.support import Stock, make, mixed_config, tokens
from zaya.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "finetune.md"
CHATS = [
    [{"role": "user", "content": f"what is {i} plus 1?"}, {"role": "assistant", "content": f"it is {i + 1}."}]
    for i in range(8)
]


def save_tokenizer(folder):
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    raw = ByteLevelBPETokenizer()
    raw.train_from_iterator([t["content"] for c in CHATS for t in c], 320, special_tokens=["<pad>", "<bos>", "<eos>"])
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=raw._tokenizer, **special).save_pretrained(folder)


def test_the_page_runs(tmp_path):
    folder, out = tmp_path / "folder", tmp_path / "out"
    model = make(mixed_config(vocab_size=320))
    zaya.pin_skip_bias(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0]
    names = {"folder": folder, "out": out, "steps": 12, "chats": CHATS}
    exec(compile(code, str(PAGE), "exec"), names)
    losses = [names["trainer"].state.log_history[-1]["train_loss"]]
    ids = torch.tensor([names["encode"](CHATS[0])["input_ids"]])
    labels = torch.tensor([names["encode"](CHATS[0])["labels"]])
    with torch.no_grad():
        before = model(ids, labels=labels).loss
        tuned, stock = zaya.ZayaForCausalLM.from_pretrained(out), Stock.from_pretrained(out)
        after = tuned(ids, labels=labels)
        torch.testing.assert_close(stock(ids).logits, after.logits, atol=1e-5, rtol=0)
    assert after.loss < before
    assert losses[0] > 0
    moved = [
        n for n, b in tuned.named_buffers() if "balancing" in n and not torch.equal(b, dict(model.named_buffers())[n])
    ]
    assert len(moved) == 3


def test_update_follows_adam():
    callback = zaya.BalanceCallback(learning_rate=0.01)
    biases, expected = [torch.zeros(4)], torch.zeros(4, requires_grad=True)
    adam = torch.optim.Adam([expected], lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    for row in ([10, 0, 5, 5], [3, 3, 3, 1], [0, 0, 0, 9]):
        counts = torch.tensor([row])
        callback.update(biases, counts)
        expected.grad = (counts[0] / counts.sum() - 0.25).float()
        adam.step()
    torch.testing.assert_close(biases[0], (expected - expected.mean()).detach(), atol=1e-6, rtol=1e-4)
    again = zaya.BalanceCallback.from_state(callback.state())
    other = [biases[0].clone()]
    for c, b in ((callback, biases), (again, other)):
        c.update(b, torch.tensor([[1, 2, 3, 4]]))
    torch.testing.assert_close(other[0], biases[0])


def test_the_callback_balances_and_names_what_is_wrong():
    model = make().train()
    biases = [b for n, b in model.named_buffers() if n.endswith("balancing_biases")]
    biases[0][0] += 1.0  # everything to expert 0
    callback, ids = zaya.BalanceCallback(learning_rate=0.05), tokens(model, 4, 32)
    shares = []
    for _ in range(30):
        model(ids)
        counts = model.pop_expert_counts()
        shares.append(float(counts[0, 0] / counts[0].sum()))
        callback.update(biases, counts)
    assert shares[0] > 0.9
    assert shares[-1] < 0.6
    with pytest.raises(UserError, match="import zaya"):
        callback.on_step_end(None, None, None, model=torch.nn.Linear(1, 1))
    with pytest.raises(UserError, match="learning_rate"):
        zaya.BalanceCallback(learning_rate=0)
