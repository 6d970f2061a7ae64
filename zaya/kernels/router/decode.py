"""The router of a few tokens (decoding) in Triton: two kernels from the hidden state, each spread over the chip.

At T <= 64 the work is reading weights: 1 MB of the down projection and 0.26 MB of the two layers. The first kernel
splits the projection over output columns and over its inner dimension. In the second, each program takes a slice of
the first layer and what that slice adds to the second; the last program to finish adds the slices in their order (so
the bits do not depend on which was last) and makes the choice. The counter that finds the last one is zeroed by the
first kernel, so no state outlives a call and any number of streams may run.
"""

import triton
import triton.language as tl

from zaya.kernels.router.triton import _choose, _dot, _gelu, _normalise, _softmax, _vector


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
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # the second kernel may start, read its weights, and wait for the end
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
        acc = _dot(x, w.to(x.dtype), acc)
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
    PDL: tl.constexpr,
):
    SLICES: tl.constexpr = R // BC
    slice_id = tl.program_id(0)
    row = tl.arange(0, BT)
    t = tl.program_id(1).to(tl.int64) * BT + row
    ok = t < T
    k = tl.arange(0, R)
    e = tl.arange(0, C_PAD)
    c = tl.arange(0, BC)
    dtype = state_ptr.dtype.element_ty
    # Weights first: they do not wait for the first kernel. Scalar offsets apart, for ROCm's buffer loads.
    first = slice_id * BC
    w1 = tl.load(w1_ptr + first * R + (c[None, :] * R + k[:, None])).to(dtype)
    w2 = tl.load(w2_ptr + first + (k[None, :] * R + c[:, None])).to(dtype)
    w3 = tl.load(w3_ptr + (e[None, :] * R + k[:, None]), mask=e[None, :] < C, other=0.0).to(dtype)
    b1, b2, norm, bias = _vector(b1_ptr + first, c), _vector(b2_ptr, k), _vector(norm_ptr, k), _vector(bias_ptr, k)
    balance = tl.load(balance_ptr + e, mask=e < C, other=0.0)
    eda = tl.zeros((BT, R), tl.float32)
    if HAS_PREV:
        eda = tl.load(prev_ptr + t[:, None] * stride_prev + k[None, :], mask=ok[:, None], other=0.0).to(tl.float32)
        eda *= _vector(scale_ptr, k)
    if PDL:
        tl.extra.cuda.gdc_wait()
    u = tl.zeros((BT, R), tl.float32) + bias
    for i in tl.static_range(SPLITS):
        u += tl.load(parts_ptr + i * T * R + (t[:, None] * R + k[None, :]), mask=ok[:, None], other=0.0)
    state = (u.to(dtype).to(tl.float32) + eda).to(dtype)
    tl.store(state_ptr + t[:, None] * R + k[None, :], state, mask=ok[:, None] & (slice_id == 0))
    h = (_normalise(state.to(tl.float32), eps, R)[0] * norm).to(dtype)
    g1 = _gelu(_dot(h, w1, tl.zeros((BT, BC), tl.float32)) + b1).to(dtype)
    share = _dot(g1, w2, tl.zeros((BT, R), tl.float32))
    block = slices_ptr + tl.program_id(1).to(tl.int64) * (SLICES * BT * R)
    cell = row[:, None] * R + k[None, :]
    tl.store(block + slice_id * (BT * R) + cell, share)
    tl.debug_barrier()  # every thread's part is stored before one thread says so
    done = tl.atomic_add(ticket_ptr + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
    if done == SLICES - 1:
        acc = tl.zeros((BT, R), tl.float32)
        for j in tl.range(0, SLICES, num_stages=4):  # unrolled, it spills: the compiler stages loads of a loop itself
            acc += tl.load(block + j * (BT * R) + cell, cache_modifier=".cg")
        acc += b2
        p = _softmax(_dot(_gelu(acc).to(dtype), w3, tl.zeros((BT, C_PAD), tl.float32)), C, C_PAD)
        pick, weight = _choose(p, balance, C, C_PAD)
        tl.store(ids_ptr + t, pick.to(tl.int64), mask=ok)
        tl.store(weights_ptr + t, weight, mask=ok)
