"""Top-1 mixture of experts with a skip class, in plain torch.

    y_t = p_t * W_down[e_t] (silu(W_gate[e_t] x_t) * W_up[e_t] x_t)   for e_t < E,   y_t = 0   for e_t = E (skip)

`gate_up_proj` stacks W_gate above W_up. Skipped tokens get no rows in the products.
"""

import torch
import torch.nn.functional as F


def moe_reference(x, gate_up_proj, down_proj, expert_ids, gate_weights):
    """x [T, D], gate_up_proj [E, 2F, D], down_proj [E, D, F], expert_ids [T] in 0..E, gate_weights [T] -> y [T, D].

    The products run in x's dtype. Static shapes and, on a GPU, no host synchronisation: it compiles without a graph
    break.
    """
    num_experts = gate_up_proj.shape[0]
    order = torch.argsort(expert_ids, stable=True)
    classes = torch.arange(num_experts, device=x.device)
    offsets = (expert_ids.unsqueeze(1) == classes).sum(0).cumsum(0, dtype=torch.int32)
    gate, up = grouped_linear(x[order], gate_up_proj, offsets).chunk(2, dim=-1)
    out = grouped_linear(F.silu(gate) * up, down_proj, offsets)
    out = (out * gate_weights[order].unsqueeze(1).to(out.dtype)).to(x.dtype)
    return torch.zeros_like(x).index_copy(0, order, out)


@torch.library.custom_op("zaya::grouped_linear", mutates_args=())
def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """rows [T, K] times weight[e] [M, K] transposed -> [T, M], for rows offsets[e - 1] : offsets[e] of each expert e.

    offsets [E] int32 are the ends of the groups; rows past the last are zero in the result and in every gradient.
    An op of its own, because torch's grouped_mm refuses fp32 under torch.compile.
    """
    if rows.device.type != "cpu":
        return _routed(F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets), offsets)
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        torch.mm(rows[start:end], weight[expert].t(), out=out[start:end])
        start = end
    out[start:] = 0
    return out


@grouped_linear.register_fake
def _(rows, weight, offsets):
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("zaya::grouped_outer", mutates_args=())
def _grouped_outer(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """left [T, M], right [T, K] -> [E, M, K]: the sum over each expert's rows of left_t right_t^T; zero where it has
    none."""
    if left.device.type != "cpu":
        return F.grouped_mm(_routed(left, offsets).t(), _routed(right, offsets), offs=offsets)
    out = left.new_empty(offsets.shape[0], left.shape[1], right.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        torch.mm(left[start:end].t(), right[start:end], out=out[expert])
        start = end
    return out


@_grouped_outer.register_fake
def _(left, right, offsets):
    return left.new_empty(offsets.shape[0], left.shape[1], right.shape[1])


def _routed(x, offsets):
    """x [T, M] with zeros past the last group, which grouped_mm leaves unwritten."""
    return x.where((torch.arange(x.shape[0], device=x.device) < offsets[-1]).unsqueeze(1), 0)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    rows, weight, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    grad_rows = grouped_linear(grad, weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    grad_weight = _grouped_outer(grad, rows, offsets) if ctx.needs_input_grad[1] else None
    return grad_rows, grad_weight, None


grouped_linear.register_autograd(_backward, setup_context=_save)
