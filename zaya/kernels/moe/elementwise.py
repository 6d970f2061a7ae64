"""Row-wise kernels around a grouped product that the library computes: activation, its gradient, and the way back to
token order."""

import torch
import triton
import triton.language as tl


@triton.jit
def moe_swiglu_kernel(pre_ptr, act_ptr, offs_ptr, F, E: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr):
    """act [R, F] = silu(gate) * up from pre [R, 2F], for the rows below offs[E]."""
    r0 = tl.program_id(0) * BR
    if r0 < tl.load(offs_ptr + E):
        r = (r0 + tl.arange(0, BR)).to(tl.int64)[:, None]
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)[None, :]
            gate = tl.load(pre_ptr + r * (2 * F) + f, mask=f < F, other=0.0).to(tl.float32)
            up = tl.load(pre_ptr + r * (2 * F) + F + f, mask=f < F, other=0.0).to(tl.float32)
            tl.store(act_ptr + r * F + f, (gate * tl.sigmoid(gate) * up).to(act_ptr.dtype.element_ty), mask=f < F)


@triton.jit
def moe_swiglu_gradient_kernel(
    g_ptr,  # [R, F]: gradient of weight * act before the weight
    pre_ptr,  # [R, 2F]
    dpre_ptr,  # out [R, 2F]
    act_ptr,  # out [R, F]: weight * silu(gate) * up
    sums_ptr,  # out [R] fp32
    weight_ptr,  # [T]
    rows_ptr,
    offs_ptr,
    F,
    E: tl.constexpr,
    BR: tl.constexpr,
    BF: tl.constexpr,
):
    r0 = tl.program_id(0) * BR
    if r0 < tl.load(offs_ptr + E):
        code = tl.load(rows_ptr + r0 + tl.arange(0, BR))
        p = tl.load(weight_ptr + tl.where(code >= 0, code, 0), mask=code >= 0, other=0.0).to(tl.float32)[:, None]
        r = (r0 + tl.arange(0, BR)).to(tl.int64)[:, None]
        total = tl.zeros((BR,), tl.float32)
        dtype = dpre_ptr.dtype.element_ty
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)[None, :]
            g = tl.load(g_ptr + r * F + f, mask=f < F, other=0.0).to(tl.float32)
            gate = tl.load(pre_ptr + r * (2 * F) + f, mask=f < F, other=0.0).to(tl.float32)
            up = tl.load(pre_ptr + r * (2 * F) + F + f, mask=f < F, other=0.0).to(tl.float32)
            s = tl.sigmoid(gate)
            silu = gate * s
            total += tl.sum(g * silu * up, 1)
            tl.store(act_ptr + r * F + f, (p * silu * up).to(dtype), mask=f < F)
            g = g * p
            tl.store(dpre_ptr + r * (2 * F) + f, (g * up * (s + silu * (1.0 - s))).to(dtype), mask=f < F)
            tl.store(dpre_ptr + r * (2 * F) + F + f, (g * silu).to(dtype), mask=f < F)
        tl.store(sums_ptr + r0 + tl.arange(0, BR), total)


@triton.jit
def moe_combine_kernel(rows_in_ptr, weight_ptr, slot_ptr, out_ptr, D, BD: tl.constexpr, WEIGHTED: tl.constexpr):
    """out[t] = weight[t] * rows_in[slot[t]], or 0 for a skipped token."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + t).to(tl.int64)
    p = 1.0
    if WEIGHTED:
        p = tl.load(weight_ptr + t).to(tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        v = tl.load(rows_in_ptr + slot * D + d, mask=(d < D) & (slot >= 0), other=0.0).to(tl.float32)
        v = tl.where(slot >= 0, v * p, 0.0)
        tl.store(out_ptr + t * D + d, v.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def moe_weight_gradient_kernel(parts_ptr, slot_ptr, out_ptr, T, R, COUNT: tl.constexpr, BT: tl.constexpr):
    """out[t] = sum over COUNT parts [COUNT, R] at slot[t], in order, or 0 for a skipped token."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    slot = tl.load(slot_ptr + t, mask=t < T, other=-1).to(tl.int64)
    total = tl.zeros((BT,), tl.float32)
    for c in range(COUNT):
        total += tl.load(parts_ptr + c * R + slot, mask=slot >= 0, other=0.0)
    tl.store(out_ptr + t, total, mask=t < T)


def swiglu(pre, act, offs):
    """Fill act [R, F] from pre [R, 2F]."""
    hidden = act.shape[1]
    block = min(1024, triton.next_power_of_2(hidden))
    moe_swiglu_kernel[(triton.cdiv(act.shape[0], 4),)](pre, act, offs, hidden, E=offs.numel() - 2, BR=4, BF=block)


def swiglu_gradient(g, pre, dpre, act, weights, rows, offs):
    """Fill dpre [R, 2F] and act [R, F]; return the weights' gradient per row, [1, R] fp32."""
    hidden = act.shape[1]
    sums = torch.empty(1, act.shape[0], dtype=torch.float32, device=g.device)
    moe_swiglu_gradient_kernel[(triton.cdiv(act.shape[0], 4),)](
        g, pre, dpre, act, sums, weights, rows, offs, hidden, E=offs.numel() - 2, BR=4,
        BF=min(1024, triton.next_power_of_2(hidden)),
    )  # fmt: skip
    return sums


def combine(grouped, weights, slot, out):
    """Fill out [T, D] from grouped rows [R, D], times weights [T] unless None."""
    if out.shape[0]:
        moe_combine_kernel[(out.shape[0],)](
            grouped, weights if weights is not None else out, slot, out, out.shape[1],
            BD=min(2048, triton.next_power_of_2(out.shape[1])), WEIGHTED=weights is not None,
        )  # fmt: skip


def weight_gradient(parts, slot):
    """[T] fp32 from partial sums [COUNT, R] fp32 in expert order."""
    out = torch.empty(slot.shape[0], dtype=torch.float32, device=parts.device)
    grid = (max(triton.cdiv(slot.shape[0], 256), 1),)
    moe_weight_gradient_kernel[grid](parts, slot, out, slot.shape[0], parts.shape[1], COUNT=parts.shape[0], BT=256)
    return out
