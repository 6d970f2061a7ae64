"""A small ZAYA checkpoint with a tokenizer, spread routing and skip biases that a training would leave."""

from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from zaya import ZayaConfig, ZayaForCausalLM
from zaya.training.checkpoint.writer import Writer
from zaya.training.parallel.group import Group


class NoOptimizer:
    def state_tensors(self):
        return {}


def make_tokenizer(folder: Path) -> Path:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        ["def f(x):\n    return x\n"] * 4, vocab_size=300, special_tokens=["<pad>", "<bos>", "<eos>"]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    wrapped.save_pretrained(folder)
    return folder


def make_model(vocab_size: int = 300, **fields) -> ZayaForCausalLM:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "router_hidden_size": 16, "max_position_embeddings": 256}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = ZayaForCausalLM(ZayaConfig(vocab_size=vocab_size, **(shape | experts | ids | fields)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "router_mlp" in name and p.ndim == 2:
                p.normal_(0, 1.0)
            elif p.ndim >= 2:
                p.mul_(4)
        for name, b in model.named_buffers():
            if name.endswith("balancing_biases"):
                b.copy_(torch.randn_like(b) * 0.05)
    return model


def make_checkpoint(run: Path, **fields) -> Path:
    """Write a checkpoint below `run` and return its folder."""
    tokenizer = make_tokenizer(run / "tokenizer")
    writer = Writer(run, Group(), keep=1, tokenizer=tokenizer, identity={"arm": "zaya"})
    return writer.save(make_model(**fields), NoOptimizer(), step=3, tokens=1000)
