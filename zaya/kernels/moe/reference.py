"""Top-1 mixture of experts with a skip class, in plain torch.

    y_t = p_t * W_down[e_t] (silu(W_gate[e_t] x_t) * W_up[e_t] x_t)   for e_t < E,   y_t = 0   for e_t = E (skip)

`gate_up_proj` stacks W_gate above W_up. Skipped tokens get no rows in the products.
"""

import torch
import torch.nn.functional as F


def moe_reference(x, gate_up_proj, down_proj, expert_ids, gate_weights):
    """x [T, D], gate_up_proj [E, 2F, D], down_proj [E, D, F], expert_ids [T] in 0..E, gate_weights [T] -> y [T, D].

    The products run in x's dtype. No host synchronisation and static shapes: it compiles without a graph break.
    """
    num_experts = gate_up_proj.shape[0]
    order = torch.argsort(expert_ids, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=x.device)
    counts = counts.scatter_add(0, expert_ids.long(), torch.ones_like(expert_ids, dtype=torch.int32))
    offsets = counts[:num_experts].cumsum(0, dtype=torch.int32)
    # grouped_mm leaves the rows past the last offset unwritten, forward and backward: masked on both sides.
    routed = (torch.arange(x.shape[0], device=x.device) < offsets[-1]).unsqueeze(1)
    rows = x[order].where(routed, 0)
    gate, up = F.grouped_mm(rows, gate_up_proj.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    hidden = (F.silu(gate) * up).where(routed, 0)
    out = F.grouped_mm(hidden, down_proj.transpose(1, 2), offs=offsets).where(routed, 0)
    out = (out * gate_weights[order].unsqueeze(1).to(out.dtype)).to(x.dtype)
    return torch.zeros_like(x).index_copy(0, order, out)
