"""Parameters and floating-point operations of a model, counted from its tensors."""

import torch

from zaya.errors import UserError


def count_parameters(model: torch.nn.Module) -> dict[str, int]:
    """total: all that is stored, tied tensors once. embedding: the token table, and the head where it is not tied.
    active: of the rest, what one token's forward pass uses, which is one expert of each layer's stack."""
    total = embedding = active = 0
    for name, p in model.named_parameters():
        total += p.numel()
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            embedding += p.numel()
        else:
            active += p.numel() // p.shape[0] if ".mlp.experts." in name else p.numel()
    return {"total": total, "embedding": embedding, "active": active}


def train_flops_per_token(model: torch.nn.Module, sequence_length: int) -> int:
    """Forward and backward of one token: 6 per active weight that is multiplied, the head included and the embedding
    look-up not, and 12 L H d S / 2 for causal attention's scores and values (Chinchilla's count, halved by the mask).
    A token that skips its expert costs less than this."""
    counts, config = count_parameters(model), model.config
    head = config.vocab_size * config.hidden_size
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * sequence_length
    return 6 * (counts["active"] + head) + attention


def check_same_active(ours: torch.nn.Module, other: torch.nn.Module, tolerance: float) -> float:
    """Relative difference of the active parameters of `other`. Raises UserError when it is above `tolerance`."""
    a, b = count_parameters(ours)["active"], count_parameters(other)["active"]
    difference = b / a - 1
    if abs(difference) > tolerance:
        raise UserError(
            f"baseline: {b} active parameters beside {a} of model ({difference:+.1%}, allowed {tolerance:.1%}); "
            "change baseline.intermediate_size"
        )
    return difference
