"""How evenly the experts are used."""

import math

import torch


def load_metrics(counts: torch.Tensor) -> dict[str, list[float] | list[list[int]]]:
    """Per-layer numbers from integer counts [L, E + 1], the skip class last.

    load_entropy: entropy of the experts' shares over log E, 1 is even, 0 is one expert only; load_min and load_max:
    smallest and largest share times E, 1 is even; skip_share: tokens that no expert saw, of all tokens.
    """
    experts = counts[:, :-1].double()
    routed, total = experts.sum(1, keepdim=True), counts.sum(1).double()
    share = experts / routed.clamp(min=1)
    entropy = torch.special.entr(share).sum(1) / math.log(max(2, share.shape[1]))
    return {
        "load_entropy": entropy.tolist(),
        "load_min": (share.min(1).values * share.shape[1]).tolist(),
        "load_max": (share.max(1).values * share.shape[1]).tolist(),
        "skip_share": (counts[:, -1].double() / total.clamp(min=1)).tolist(),
        "expert_counts": counts.tolist(),
    }
