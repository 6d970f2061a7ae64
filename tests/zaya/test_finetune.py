"""docs/finetune.md, run; and the callback's update against its formula."""

import re
from pathlib import Path

import peft
import pytest
import torch
from transformers import Trainer, TrainingArguments

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


def rows(count: int = 32) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(3, 256, (24,), generator=generator).tolist() for _ in range(count)]
    return [{"input_ids": r, "labels": r} for r in made]


def trainer(model, out, callback, **options):
    settings = {"max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=str(out), report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False, seed=0,
        **settings | options,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=rows(), callbacks=[callback])


def biases(model) -> torch.Tensor:
    return torch.stack([layer.mlp.gate.balancing_biases for layer in model.model.layers])


@pytest.mark.parametrize("restore", [False, True])
def test_a_resumed_run_has_the_biases_of_one_that_never_stopped(tmp_path, restore):
    """With Trainer's own restoring of callbacks, which is off by default, and without it."""
    models = []
    for name, resume in (("whole", None), ("resumed", tmp_path / "whole" / "checkpoint-4")):
        models.append(make())
        options = {"save_strategy": "steps", "save_steps": 4, "restore_callback_states_from_checkpoint": restore}
        run = trainer(models[-1], tmp_path / name, zaya.BalanceCallback(learning_rate=1e-2), **options)
        run.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert (biases(models[0]) - biases(make())).abs().max() > 1e-3
    for (name, a), b in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert torch.equal(a, b), name


LORA = {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["experts.down_proj"], "r": 4}


def test_an_adapter_that_would_lose_the_biases_is_refused_before_the_first_step(tmp_path):
    model = peft.get_peft_model(make(), peft.LoraConfig(**LORA))
    with pytest.raises(UserError, match=r"modules_to_save=\[\"gate\"\]"):
        trainer(model, tmp_path, zaya.BalanceCallback()).train()


def test_an_adapter_with_the_routers_carries_the_biases(tmp_path):
    make().save_pretrained(tmp_path / "base")
    load = lambda: zaya.ZayaForCausalLM.from_pretrained(tmp_path / "base")
    model, before = peft.get_peft_model(load(), peft.LoraConfig(**LORA, modules_to_save=["gate"])), biases(load())
    run = trainer(model, tmp_path / "run", zaya.BalanceCallback(learning_rate=1e-2))
    run.train()
    moved = biases(model.base_model.model)
    assert (moved - before).abs().max() > 1e-2
    ids = tokens(load(), 2, 24)
    with torch.no_grad():
        want = model.eval()(ids).logits
        zaya.pin_skip_bias(model)
        assert torch.equal(biases(model.base_model.model)[:, -1], torch.full((3,), -1.0))
        run.save_model(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter").eval()
        torch.testing.assert_close(again(ids).logits, want, atol=1e-6, rtol=0)
        torch.testing.assert_close(biases(again.base_model.model), biases(model.base_model.model), atol=0, rtol=0)
        merged = again.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, want, atol=1e-5, rtol=0)
        merged.save_pretrained(tmp_path / "merged")
        stock = Stock.from_pretrained(tmp_path / "merged")  # resets the skip bias to -1, where it is
        torch.testing.assert_close(stock(ids).logits, want, atol=1e-5, rtol=0)
