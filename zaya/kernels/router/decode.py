"""The router of a few tokens (decoding) in Triton: two kernels from the hidden state, each spread over the chip.

At T <= 64 the work is reading weights: 1 MB of the down projection and 0.26 MB of the two layers. The first kernel
splits the projection over output columns and over its inner dimension. In the second, each program takes a slice of
the first layer and what that slice adds to the second; the last program to finish adds the slices in their order (so
the bits do not depend on which was last) and makes the choice. The counter that finds the last one is zeroed by the
first kernel, so no state outlives a call and any number of streams may run. With PDL (CUDA; the vector kernels of a
few tokens) each kernel starts while the one before runs: see zaya/kernels/overlap.py.
"""

import triton
import triton.language as tl

from zaya.kernels.overlap import gdc_launch_dependents, gdc_wait, prefetch_l2
from zaya.kernels.products import dot
from zaya.kernels.router.triton import (
    _choose,
    _first_layer,
    _gelu,
    _normalise,
    _probabilities,
    _second_layer,
    _vector,
)


@triton.jit
def router_project_kernel(
    x_ptr,  # [T, D]
    w_ptr,  # [R, D]
    parts_ptr,  # out [SPLITS, T, R] fp32
    ticket_ptr,  # out [token blocks] int32, zeroed
    T,
    D,
    stride_x,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    split = tl.program_id(1)
    t = tl.program_id(2).to(tl.int64) * BT + tl.arange(0, BT)
    ok = t < T
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    width = D // SPLITS
    acc = tl.zeros((BT, BN), tl.float32)
    for k0 in range(split * width, (split + 1) * width, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(x_ptr + t[:, None] * stride_x + k[None, :], mask=ok[:, None], other=0.0)
        w = tl.load(w_ptr + n[None, :].to(tl.int64) * D + k[:, None])
        acc = dot(x, w.to(x.dtype), acc)
    tl.store(parts_ptr + split * T * R + (t[:, None] * R + n[None, :]), acc, mask=ok[:, None])
    if (tl.program_id(0) == 0) & (split == 0):
        tl.store(ticket_ptr + tl.program_id(2), 0)


@triton.jit
def router_decode_kernel(
    parts_ptr,  # [SPLITS, T, R] fp32
    bias_ptr,  # [R], of the down projection
    prev_ptr,  # [T, R], read if HAS_PREV
    scale_ptr,
    norm_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    w3_ptr,
    balance_ptr,
    state_ptr,  # out [T, R]
    ids_ptr,  # out [T] int64
    weights_ptr,  # out [T] fp32
    slices_ptr,  # scratch [token blocks, R // BC, BT, R] fp32
    ticket_ptr,  # [token blocks] int32, zero on entry
    T,
    eps,
    stride_prev,
    R: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    HAS_PREV: tl.constexpr,
):
    SLICES: tl.constexpr = R // BC
    slice_id = tl.program_id(0)
    row = tl.arange(0, BT)
    t = tl.program_id(1).to(tl.int64) * BT + row
    ok = t < T
    k = tl.arange(0, R)
    dtype = state_ptr.dtype.element_ty
    u = tl.zeros((BT, R), tl.float32) + _vector(bias_ptr, k)
    for i in range(SPLITS):
        u += tl.load(parts_ptr + i * T * R + (t[:, None] * R + k[None, :]), mask=ok[:, None], other=0.0)
    state = u.to(dtype).to(tl.float32)
    if HAS_PREV:
        prev = tl.load(prev_ptr + t[:, None] * stride_prev + k[None, :], mask=ok[:, None], other=0.0)
        state += prev.to(tl.float32) * _vector(scale_ptr, k)
    state = state.to(dtype)
    tl.store(state_ptr + t[:, None] * R + k[None, :], state, mask=ok[:, None] & (slice_id == 0))
    h = (_normalise(state.to(tl.float32), eps, R)[0] * _vector(norm_ptr, k)).to(dtype)
    c0 = slice_id * BC  # in the scalar part of each address: ROCm's buffer loads want small offsets beside it
    cc = tl.arange(0, BC)
    g1 = _gelu(_first_layer(h, w1_ptr + c0 * R, b1_ptr + c0, cc, R, BC, BT)).to(dtype)
    share = _second_layer(tl.zeros((BT, R), tl.float32), g1, w2_ptr + c0, cc, R)
    block = slices_ptr + tl.program_id(1).to(tl.int64) * (SLICES * BT * R)
    cell = row[:, None] * R + k[None, :]
    tl.store(block + slice_id * (BT * R) + cell, share)
    tl.debug_barrier()  # every thread's part is stored before one thread says so
    done = tl.atomic_add(ticket_ptr + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
    if done == SLICES - 1:
        acc = tl.zeros((BT, R), tl.float32) + _vector(b2_ptr, k)
        for i in range(SLICES):
            acc += tl.load(block + i * (BT * R) + cell, cache_modifier=".cg")
        p = _probabilities(_gelu(acc).to(dtype), w3_ptr, BT, R, C, C_PAD)
        e = tl.arange(0, C_PAD)
        pick, weight = _choose(p, tl.load(balance_ptr + e, mask=e < C, other=0.0), C, C_PAD)
        tl.store(ids_ptr + t, pick.to(tl.int64), mask=ok)
        tl.store(weights_ptr + t, weight, mask=ok)


@triton.jit
def router_project_vec_kernel(
    x_ptr,  # [T, D]
    w_ptr,  # [R, D]
    bias_ptr,  # [R]
    u_ptr,  # out [T, R]
    ticket_ptr,  # out [T] int32, zeroed
    stride_x,
    D: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token a program column: products of vectors, without the padding and staging of the matrix units."""
    t = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    at = n[:, None] * D + k[None, :]
    if PDL:
        prefetch_l2(w_ptr + n[:, None] * D + tl.arange(0, BK // 16)[None, :] * 16)
        gdc_wait()
        gdc_launch_dependents()
    bias = tl.load(bias_ptr + n).to(tl.float32)
    row = tl.zeros((BN, 1), tl.int32) + k[None, :]
    acc = tl.load(w_ptr + at).to(tl.float32) * tl.load(x_ptr + t * stride_x + row).to(tl.float32)
    for k0 in tl.static_range(BK, D, BK):
        x = tl.load(x_ptr + t * stride_x + k0 + row).to(tl.float32)
        acc += tl.load(w_ptr + at + k0).to(tl.float32) * x
    u = tl.sum(acc, 1) + bias
    tl.store(u_ptr + t * R + n, u.to(u_ptr.dtype.element_ty))
    if tl.program_id(0) == 0:
        tl.store(ticket_ptr + t, 0)


@triton.jit
def _better(score, e, p, score2, e2, p2):
    """The higher score, the lower class on ties. NaN comes as infinity and wins, as in torch: all NaN is class 0."""
    first = (score > score2) | ((score == score2) & (e < e2))
    return tl.where(first, score, score2), tl.where(first, e, e2), tl.where(first, p, p2)


@triton.jit
def router_decode_vec_kernel(
    u_ptr,  # [T, R]
    prev_ptr,  # [T, R], read if HAS_PREV
    scale_ptr,
    norm_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    w3_ptr,
    balance_ptr,
    state_ptr,  # out [T, R]
    ids_ptr,  # out [T] int64
    weights_ptr,  # out [T] fp32
    slices_ptr,  # scratch [T, R // BC, R] fp32
    ticket_ptr,  # [T] int32, zero on entry
    eps,
    stride_prev,
    R: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    BC: tl.constexpr,
    HAS_PREV: tl.constexpr,
    PDL: tl.constexpr,
):
    """All weights are read first, with PDL while the first kernel runs: no step of the chain from u to the choice then
    waits for memory but for what the step before wrote."""
    SLICES: tl.constexpr = R // BC
    slice_id = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, R)
    c = tl.arange(0, BC)
    e = tl.arange(0, C_PAD)
    dtype = state_ptr.dtype.element_ty
    first = slice_id * BC
    w1 = tl.load(w1_ptr + first * R + c[:, None] * R + k[None, :])
    w2 = tl.load(w2_ptr + first + k[:, None] * R + c[None, :])
    b1, norm = tl.load(b1_ptr + first + c), tl.load(norm_ptr + k)
    if HAS_PREV:
        scale = tl.load(scale_ptr + k)
    w3 = tl.load(w3_ptr + e[:, None] * R + k[None, :], mask=e[:, None] < C, other=0.0)
    b2, balance = tl.load(b2_ptr + k).to(tl.float32), tl.load(balance_ptr + e, mask=e < C, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    state = tl.load(u_ptr + t * R + k).to(tl.float32)
    if HAS_PREV:
        state += tl.load(prev_ptr + t * stride_prev + k).to(tl.float32) * scale.to(tl.float32)
    state = state.to(dtype)
    tl.store(state_ptr + t * R + k, state, mask=slice_id == 0)
    state = state.to(tl.float32)
    h = state * tl.rsqrt(tl.sum(state * state, 0) / R + eps) * norm.to(tl.float32)
    h = h.to(dtype).to(tl.float32)
    g1 = _gelu(tl.sum(w1.to(tl.float32) * h[None, :], 1) + b1.to(tl.float32)).to(dtype).to(tl.float32)
    share = tl.sum(w2.to(tl.float32) * g1[None, :], 1)
    tl.store(slices_ptr + (t * SLICES + slice_id) * R + k, share)
    tl.debug_barrier()  # every thread's part is stored before one thread says so
    done = tl.atomic_add(ticket_ptr + t, 1, sem="acq_rel", scope="gpu")
    if done == SLICES - 1:
        z2 = b2
        for i in tl.static_range(SLICES):
            z2 += tl.load(slices_ptr + (t * SLICES + i) * R + k, cache_modifier=".cg")
        g2 = _gelu(z2).to(dtype).to(tl.float32)
        # gathered: each warp then holds all classes, and what follows needs no exchange between warps
        logits = tl.gather(tl.sum(w3.to(tl.float32) * g2[None, :], 1), e, 0)
        logits = tl.where(e < C, logits, -float("inf"))
        p = tl.exp(logits - tl.max(logits, 0))
        p = p / tl.sum(p, 0)
        score = p + balance
        score = tl.where(e < C, tl.where(score == score, score, float("inf")), -float("inf"))
        _, pick, weight = tl.reduce((score, e, p), 0, _better)
        tl.store(ids_ptr + t, pick.to(tl.int64))
        tl.store(weights_ptr + t, weight)
