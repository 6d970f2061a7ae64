"""The backward pass of compressed convolutional attention in Triton: three kernels.

The first forms what it needs of the forward pass again and leaves dy, the gradient of what the convolutions and the
mean add up to. The second makes the gradient of the projections from dy, and column sums for the depthwise weights.
The third makes the weights of the grouped convolution. Sums over tokens are left as parts that are added in a fixed
order, so gradients are the same bits from run to run.
"""

import triton
import triton.language as tl

from zaya.kernels.cca.triton import columns_back, convolved_back, depth_of, mixed, rotation
from zaya.kernels.products import dot


@triton.jit
def cca_bwd_dy_kernel(
    dquery_ptr,  # [T, H, D]
    dkey_ptr,  # [T, G, D]
    qkv_ptr,  # from here on as in cca_fwd_kernel
    w0_ptr,
    b0_ptr,
    w1_ptr,
    b1_ptr,
    temp_ptr,
    cos_ptr,
    sin_ptr,
    conv_ptr,
    depth_ptr,
    dy_ptr,  # out [T, C]
    dtemp_ptr,  # out [blocks, G] fp32
    T,
    S,
    eps,
    stride,
    stride_cos,
    stride_slot,
    stride_back,
    stride_column,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROOT: tl.constexpr,
    BT: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_DEPTH: tl.constexpr,
):
    head = tl.program_id(0)
    t0 = tl.program_id(1) * BT
    t = t0 + tl.arange(0, BT)
    row = t // S
    s = t - row * S
    depth = depth_of(depth_ptr, t, T, HAS_DEPTH)
    j = tl.arange(0, D // 2)
    a = j // HALF * (2 * HALF) + j % HALF
    u_a, u_b = mixed(
        qkv_ptr, w0_ptr, b0_ptr, w1_ptr, b1_ptr, conv_ptr, row.to(tl.int64), t0, t, s, depth, head, a, T, stride,
        stride_slot, stride_back, stride_column, H, H // G, D, HALF,
        BT, HAS_STATE,
    )  # fmt: skip
    length = tl.sqrt(tl.sum(u_a * u_a, 1) + tl.sum(u_b * u_b, 1))
    scale = ROOT / tl.maximum(length, eps)
    ok = (t < T)[:, None]
    wide = t.to(tl.int64)[:, None]
    cos, sin = rotation(cos_ptr, sin_ptr, row, s, j, ok, stride_cos, HALF)
    is_query = ok & (head < H)
    at = wide * (H * D) + head * D + a[None, :]
    out_a = tl.load(dquery_ptr + at, mask=is_query, other=0.0).to(tl.float32)
    out_b = tl.load(dquery_ptr + at + HALF, mask=is_query, other=0.0).to(tl.float32)
    is_key = ok & (head >= H)
    at = wide * (G * D) + (head - H) * D + a[None, :]
    out_a += tl.load(dkey_ptr + at, mask=is_key, other=0.0).to(tl.float32)
    out_b += tl.load(dkey_ptr + at + HALF, mask=is_key, other=0.0).to(tl.float32)
    g_a = out_a * cos + out_b * sin
    g_b = out_b * cos - out_a * sin
    along = tl.sum(u_a * g_a, 1) + tl.sum(u_b * g_b, 1)
    if head >= H:
        total = tl.sum(along * scale, 0)
        tl.store(dtemp_ptr + tl.program_id(1) * G + head - H, total)
        scale *= tl.load(temp_ptr + head - H).to(tl.float32)
    turned = tl.where(length > eps, along / (length * length), 0.0)[:, None]
    g_a = (g_a - u_a * turned) * scale[:, None]
    g_b = (g_b - u_b * turned) * scale[:, None]
    out = dy_ptr + wide * ((H + G) * D) + head * D + a[None, :]
    tl.store(out, g_a.to(dy_ptr.dtype.element_ty), mask=ok)
    tl.store(out + HALF, g_b.to(dy_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _ahead(dy_ptr, depth_ptr, t0, t, s, ahead, least, column, T, S, C: tl.constexpr, HAS_DEPTH: tl.constexpr):
    """[BT, D] of dy `ahead` tokens after t, zero where the sequence ends before, or a document began `least` or fewer
    tokens before that token."""
    ok = (t + ahead < T) & (s + ahead < S)
    if HAS_DEPTH:
        ok = ok & (tl.load(depth_ptr + t + ahead, mask=ok, other=0) >= least)
    here = dy_ptr + (t0.to(tl.int64) + ahead) * C
    return tl.load(here + (t - t0)[:, None] * C + column[None, :], mask=ok[:, None], other=0.0)


@triton.jit
def cca_bwd_dx_kernel(
    dy_ptr,  # [T, C]
    dvalue_ptr,  # [T, G, D]
    qkv_ptr,
    w0_ptr,
    w1_ptr,
    conv_ptr,
    depth_ptr,
    dqkv_ptr,  # out [T, N], laid out as qkv, N contiguous
    sums_ptr,  # out [blocks, 3, C] fp32: dz times the token before, dz times the token, dz
    T,
    S,
    stride,
    stride_slot,
    stride_back,
    stride_column,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_DEPTH: tl.constexpr,
):
    C: tl.constexpr = (H + G) * D
    N: tl.constexpr = C + G * D
    REP: tl.constexpr = H // G
    head = tl.program_id(0)
    t0 = tl.program_id(1) * BT
    t = t0 + tl.arange(0, BT)
    row = t // S
    s = t - row * S
    depth = depth_of(depth_ptr, t, T, HAS_DEPTH)
    k = tl.arange(0, D)
    column = head * D + k
    dz = tl.zeros((BT, D), tl.float32)
    dz_next = tl.zeros((BT, D), tl.float32)
    for tap in range(2):
        back = 1 - tap
        w = w1_ptr + (head * 2 + tap) * (D * D) + k[None, :] * D + k[:, None]
        w = tl.load(w).to(dy_ptr.dtype.element_ty)
        dz = dot(_ahead(dy_ptr, depth_ptr, t0, t, s, back, back, column, T, S, C, HAS_DEPTH), w, dz)
        after = _ahead(dy_ptr, depth_ptr, t0, t, s, back + 1, back, column, T, S, C, HAS_DEPTH)
        dz_next = dot(after, w, dz_next)
    ok = (t < T)[:, None]
    goes_on = (t + 1 < T) & (s + 1 < S)
    if HAS_DEPTH:
        goes_on = goes_on & (tl.load(depth_ptr + t + 1, mask=goes_on, other=0) >= 1)
    w_back = tl.load(w0_ptr + column * 2).to(tl.float32)[None, :]
    w_now = tl.load(w0_ptr + column * 2 + 1).to(tl.float32)[None, :]
    dx = dz * w_now + tl.where(goes_on[:, None], dz_next, 0.0) * w_back
    x = columns_back(
        qkv_ptr, conv_ptr, row.to(tl.int64), t0, t, s, depth, 0, column, T, stride, stride_slot, stride_back,
        stride_column, HAS_STATE,
    ).to(tl.float32)  # fmt: skip
    before = columns_back(
        qkv_ptr, conv_ptr, row.to(tl.int64), t0, t, s, depth, 1, column, T, stride, stride_slot, stride_back,
        stride_column, HAS_STATE,
    ).to(tl.float32)  # fmt: skip
    out = sums_ptr + tl.program_id(1).to(tl.int64) * (3 * C) + column
    tl.store(out, tl.sum(dz * before, 0))
    tl.store(out + C, tl.sum(dz * x, 0))
    tl.store(out + 2 * C, tl.sum(dz, 0))
    here = dy_ptr + t0.to(tl.int64) * C + (t - t0)[:, None] * C + k[None, :]
    dx += tl.load(here + head * D, mask=ok, other=0.0).to(tl.float32) * 0.5
    wide = t.to(tl.int64)[:, None]
    if head < H:
        dx += tl.load(here + (H + head // REP) * D, mask=ok, other=0.0).to(tl.float32) * (0.5 / REP)
    else:
        for r in range(REP):
            dx += tl.load(here + ((head - H) * REP + r) * D, mask=ok, other=0.0).to(tl.float32) * 0.5
        c = (head - H) * D + k
        late = (c >= G * D // 2)[None, :]
        given = dvalue_ptr + wide * (G * D) + c[None, :]
        dv = tl.load(given, mask=ok & ~late, other=0.0)
        dv += tl.load(given + G * D, mask=goes_on[:, None] & late, other=0.0)
        tl.store(dqkv_ptr + wide * N + C + c[None, :], dv, mask=ok)
    tl.store(dqkv_ptr + wide * N + column[None, :], dx.to(dqkv_ptr.dtype.element_ty), mask=ok)


@triton.jit
def cca_bwd_dw_kernel(
    dy_ptr,  # [T, C]
    qkv_ptr,
    w0_ptr,
    b0_ptr,
    conv_ptr,
    depth_ptr,
    parts_ptr,  # out [spans, H + G, 2, D, D] fp32: head, tap, in, out
    vectors_ptr,  # out [spans, H + G, 2, D] fp32: sums of dy over documents' first tokens, and over all
    T,
    S,
    span,
    stride,
    stride_slot,
    stride_back,
    stride_column,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_DEPTH: tl.constexpr,
):
    C: tl.constexpr = (H + G) * D
    head = tl.program_id(0) // 2
    back = 1 - tl.program_id(0) % 2
    k = tl.arange(0, D)
    column = head * D + k
    acc = tl.zeros((D, D), tl.float32)
    total = tl.zeros((D,), tl.float32)
    start = tl.program_id(1) * span
    for i in range(0, span, BT):
        t0 = start + i
        t = t0 + tl.arange(0, BT)
        row = t // S
        s = t - row * S
        depth = depth_of(depth_ptr, t, T, HAS_DEPTH)
        z = convolved_back(
            qkv_ptr, w0_ptr, b0_ptr, conv_ptr, row.to(tl.int64), t0, t, s, depth, back, column, T, stride,
            stride_slot, stride_back, stride_column, HAS_STATE,
        )  # fmt: skip
        ok = t < T
        here = dy_ptr + t0.to(tl.int64) * C + (t - t0)[:, None] * C + column[None, :]
        dy = tl.load(here, mask=ok[:, None], other=0.0)
        acc = dot(tl.trans(z), dy, acc)
        begins = depth < back
        if not HAS_STATE:
            begins = begins | (s < back)
        total += tl.sum(tl.where((begins | (back == 0))[:, None], dy.to(tl.float32), 0.0), 0)
    at = tl.program_id(1).to(tl.int64) * (2 * C) + head * (2 * D) + (1 - back) * D
    tl.store(vectors_ptr + at + k, total)
    tl.store(parts_ptr + at * D + k[:, None] * D + k[None, :], acc)
