"""One token of a few sequences: the convolutions as products of vectors, with the state read and replaced in place."""

import triton
import triton.language as tl

from zaya.kernels.cca.triton import store_rotated


@triton.jit
def cca_vector_kernel(
    qkv_ptr,  # [B, N]; all arguments as in cca_fwd_kernel, with S = 1
    w0_ptr,
    b0_ptr,
    w1_ptr,  # [C, D, 2] contiguous, as nn.Conv1d holds it
    b1_ptr,
    temp_ptr,
    cos_ptr,  # [B or 1, HALF]
    sin_ptr,
    conv_ptr,
    delayed_ptr,
    slots_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    eps,
    stride,
    stride_cos,
    stride_slot,
    stride_back,
    stride_column,
    stride_delayed,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROOT: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    REP: tl.constexpr = H // G
    W: tl.constexpr = G * D // 2
    head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + b).to(tl.int64) if HAS_SLOTS else b
    dtype = query_ptr.dtype.element_ty
    j = tl.arange(0, D // 2)
    a = j // HALF * (2 * HALF) + j % HALF
    m = tl.arange(0, 2 * D)
    w = w1_ptr + head * (2 * D * D) + m[None, :]
    w_a = tl.load(w + a[:, None] * (2 * D))
    w_b = tl.load(w + (a + HALF)[:, None] * (2 * D))
    column = head * D + m // 2  # inputs of the product: channel by channel, the token before and this one
    now = m % 2 == 1
    conv = conv_ptr + slot * stride_slot
    row = qkv_ptr + b * stride
    last = tl.load(conv + stride_back + column * stride_column).to(tl.float32)
    x0 = tl.where(now, tl.load(row + column).to(tl.float32), last)
    x1 = tl.where(now, last, tl.load(conv + column * stride_column).to(tl.float32))
    z = tl.load(b0_ptr + column).to(tl.float32)
    z += tl.load(w0_ptr + column * 2 + 1).to(tl.float32) * x0 + tl.load(w0_ptr + column * 2).to(tl.float32) * x1
    z = z.to(dtype).to(tl.float32)[None, :]
    group = tl.where(head < H, head // REP, head - H)
    y_a = tl.sum(w_a.to(tl.float32) * z, 1) + tl.load(b1_ptr + head * D + a).to(tl.float32)
    y_b = tl.sum(w_b.to(tl.float32) * z, 1) + tl.load(b1_ptr + head * D + a + HALF).to(tl.float32)
    y_a += _mean(row, head, group, a, H, REP, D)
    y_b += _mean(row, head, group, a + HALF, H, REP, D)
    scale = ROOT / tl.maximum(tl.sqrt(tl.sum(y_a * y_a, 0) + tl.sum(y_b * y_b, 0)), eps)
    if head >= H:
        scale *= tl.load(temp_ptr + group).to(tl.float32)
    y_a *= scale
    y_b *= scale
    cos = tl.load(cos_ptr + b * stride_cos + j, mask=j < HALF, other=1.0)
    sin = tl.load(sin_ptr + b * stride_cos + j, mask=j < HALF, other=0.0)
    if head < H:
        store_rotated(query_ptr, (b * H + head) * D + a, y_a, y_b, cos, sin, j >= 0, HALF)
    else:
        store_rotated(key_ptr, (b * G + group) * D + a, y_a, y_b, cos, sin, j >= 0, HALF)
    k = tl.arange(0, D)
    current = tl.load(row + head * D + k)
    older = tl.load(conv + stride_back + (head * D + k) * stride_column)
    if head >= H:
        c = group * D + k
        made = tl.load(row + (H + G) * D + c)
        kept = delayed_ptr + slot * stride_delayed + c - W
        tl.store(value_ptr + b * (G * D) + c, tl.where(c >= W, tl.load(kept, mask=c >= W, other=0.0).to(dtype), made))
        tl.debug_barrier()
        tl.store(kept, made, mask=c >= W)
    tl.debug_barrier()  # every thread has read the state that is now replaced
    place = conv + (head * D + k) * stride_column
    tl.store(place, older)
    tl.store(place + stride_back, current.to(older.dtype))


@triton.jit
def _mean(row, head, group, column, H: tl.constexpr, REP: tl.constexpr, D: tl.constexpr):
    key = tl.load(row + (H + group) * D + column).to(tl.float32)
    if head < H:
        return (tl.load(row + head * D + column).to(tl.float32) + key) * 0.5
    total = key * 0.0
    for r in tl.static_range(REP):
        total += tl.load(row + (group * REP + r) * D + column).to(tl.float32)
    return (total / REP + key) * 0.5
