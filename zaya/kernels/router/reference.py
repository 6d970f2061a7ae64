"""The ZAYA router after its down projection, in plain torch.

s = u + s_prev * scale                       (exponential depth averaging; the first layer has no s_prev)
p = softmax(W3 gelu(W2 gelu(W1 RMSNorm(s) + b1) + b2))      over E + 1 classes, in fp32; the last class is skip
e = argmax(p + balancing_biases),   gate weight = p_e        (the bias moves the choice only)
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Routing(NamedTuple):
    """What the router decides for T tokens of E experts."""

    expert_ids: torch.Tensor  # [T] int64, E means skip
    gate_weights: torch.Tensor  # [T] fp32, probability of the chosen class
    state: torch.Tensor  # [T, R] in u's dtype, handed to the next layer's router
    logits: torch.Tensor | None  # [T, E + 1] fp32, before the softmax; None where a kernel does not keep them
    counts: torch.Tensor | None = None  # [E + 1] int32, tokens of each class, where a kernel counted them


def router_reference(u, prev_state, state_scale, norm_weight, fc1, fc2, out_weight, balancing_biases, eps):
    """u [T, R]; prev_state [T, R] or None; state_scale [R] or None; fc1, fc2 = (weight [R, R], bias [R]);
    out_weight [E + 1, R]; balancing_biases [E + 1] fp32 -> Routing."""
    state = u if prev_state is None else u + prev_state * state_scale
    h = state.float()
    h = norm_weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(u.dtype)
    h = F.gelu(F.linear(h, *fc1))
    h = F.gelu(F.linear(h, *fc2))
    return choose(F.linear(h, out_weight), state, balancing_biases)


def choose(logits, state, balancing_biases):
    """logits [T, E + 1] and state [T, R] -> Routing: the class of each token and its probability."""
    logits = logits.float()
    probs = logits.softmax(-1)
    expert_ids = (probs.detach() + balancing_biases).argmax(-1)
    return Routing(expert_ids, probs.gather(1, expert_ids.unsqueeze(1)).squeeze(1), state, logits)


@torch.no_grad()
def count_classes(routing: Routing, real: torch.Tensor | None, classes: int) -> torch.Tensor:
    """Tokens that chose each class, [classes] int64; padding, where `real` [B, S] is False, is left out."""
    if real is None and routing.counts is not None:
        return routing.counts.long()
    chosen = routing.expert_ids.unsqueeze(1) == torch.arange(classes, device=routing.expert_ids.device)
    if real is not None:
        chosen = chosen & real.reshape(-1, 1)
    return chosen.sum(0)
