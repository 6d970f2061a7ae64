"""`moe`: top-1 mixture of experts with a skip class. The mathematics is in reference.py."""

from zaya.kernels import pick_backend
from zaya.kernels.moe.reference import moe_reference


def moe(x, gate_up_proj, down_proj, expert_ids, gate_weights, backend="auto"):
    """Apply each token's expert.

    x [T, D]; gate_up_proj [E, 2F, D], gate rows first; down_proj [E, D, F]; expert_ids [T] integers in 0..E, where E
    means skip; gate_weights [T], the router's probability of the chosen class. Returns y [T, D] in x's dtype; rows of
    skipped tokens are exactly zero. Differentiable in x, both weights and gate_weights.
    """
    if pick_backend(x.device, backend) == "triton":
        raise NotImplementedError
    return moe_reference(x, gate_up_proj, down_proj, expert_ids, gate_weights)
