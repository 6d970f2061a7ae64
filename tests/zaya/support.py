"""Small models whose routers use every expert and the skip class, and their twins of stock transformers' class."""

import copy
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers.models.zaya import ZayaConfig as StockConfig
from transformers.models.zaya import ZayaForCausalLM as Stock

import zaya

WINDOW = 5
_MADE: dict = {}


def mixed_config(**overrides) -> zaya.ZayaConfig:
    """Tiny, with a sliding layer between two full ones."""
    layers = {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": WINDOW}
    return zaya.ZayaConfig.tiny(**{**layers, **overrides})


@torch.enable_grad()
def spread(model, seed: int = 0):
    """Give `model` random weights, and biases under which every class of every layer gets tokens."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith(("norm.weight", "layernorm.weight", "scale", "temp")):
            p.data.normal_(1.0, 0.2, generator=generator)
        elif p.ndim == 1:
            p.data.normal_(0.0, 0.2, generator=generator)
        else:
            fan_in = p[0].numel() if "conv" in name else p.shape[-1]
            p.data.normal_(0.0, fan_in**-0.5, generator=generator)
        if name.endswith("gate.router_mlp.out_proj.weight"):
            p.data.mul_(2)
    biases = [b for n, b in model.named_buffers() if n.endswith("balancing_biases")]
    for bias in biases:
        bias.zero_()
    ids = torch.randint(0, model.config.vocab_size, (6, 96), generator=generator)
    model.train()
    best, kept = -1.0, None
    for step in range(100):
        model(ids)
        counts = model.pop_expert_counts()
        least = float((counts / counts.sum(1, keepdim=True)).min()) * counts.shape[1]
        if least > best:
            best, kept = least, [b.clone() for b in biases]
        if best > 0.5:
            break
        for bias, row in zip(biases, counts, strict=True):
            bias -= 0.05 * 0.96**step * (row / row.sum() - 1 / len(row)).sign()
    for bias, value in zip(biases, kept, strict=True):
        bias.copy_(value)
    assert best > 0, f"the emptiest class gets {best:.2f} of an even share"
    return model.eval()


def make(config=None, seed: int = 0) -> zaya.ZayaForCausalLM:
    """One of our models, spread; what was made before in this process is copied."""
    model = zaya.ZayaForCausalLM(config or mixed_config())
    key = (model.config.to_json_string(), seed)
    if key not in _MADE:
        _MADE[key] = copy.deepcopy(spread(model, seed).state_dict())
    model.load_state_dict(_MADE[key])
    return model.eval()


def twin(model) -> Stock:
    """Stock's model with the same weights, biases included, in the same implementation of attention."""
    config = StockConfig(**{k: v for k, v in model.config.to_dict().items() if k not in ("kernels", "skip_semantics")})
    stock = Stock._from_config(config, attn_implementation=model.config._attn_implementation).to(model.dtype)
    stock.load_state_dict(model.state_dict())
    return stock.train(model.training)


def tokens(model, batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)


def used(model, ids, **kwargs) -> torch.Tensor:
    """Tokens per layer and class, [L, E + 1], when `model` reads `ids`."""
    training = model.training
    model.train().pop_expert_counts()
    model(ids, **kwargs)
    model.train(training)
    return model.pop_expert_counts()
