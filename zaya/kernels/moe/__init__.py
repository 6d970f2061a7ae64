"""`moe`: top-1 mixture of experts with a skip class. The mathematics is in reference.py; the kernels are in triton.py
(grouped products), decode.py (a few tokens) and permute.py (rows by expert), their launches in ops.py."""

from zaya.kernels import log_once, pick_backend
from zaya.kernels.moe.reference import moe_reference


def moe(x, gate_up_proj, down_proj, expert_ids, gate_weights, backend="auto", decode=True):
    """Apply each token's expert.

    x [T, D]; gate_up_proj [E, 2F, D], gate rows first; down_proj [E, D, F]; expert_ids [T] integers in 0..E, where E
    means skip; gate_weights [T], the router's probability of the chosen class. Returns y [T, D] in x's dtype; rows of
    skipped tokens are exactly zero. Differentiable in x, both weights and gate_weights.

    `decode=False` keeps the kernels of training for a few tokens too: a forward pass without gradients that a
    checkpoint will recompute with them then has the recomputation's bits.

    Gradient accumulation: when a weight has an attribute `main_grad` (contiguous float32 of its shape), the kernels'
    backward adds its gradient there instead of returning it. The reference does not: it leaves the gradient in
    `.grad`, so a trainer that sets `main_grad` adds a `.grad` that is not None to it after each backward.

    Raises ValueError for an unknown backend, and for a `main_grad` of another dtype, shape or layout.
    """
    if pick_backend(x.device, backend) == "triton":
        from zaya.kernels.moe import ops

        reason = ops.unsupported(x, gate_up_proj, down_proj)
        if reason is None:
            return ops.moe_triton(x, gate_up_proj, down_proj, expert_ids, gate_weights, decode)
        log_once(f"moe: the reference instead of the kernels, because of {reason}")
    return moe_reference(x, gate_up_proj, down_proj, expert_ids, gate_weights)
