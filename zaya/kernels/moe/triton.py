"""The expert products in Triton, on rows grouped by expert (permute.py). One source for ROCm and CUDA.

The constexpr TMA says how operands are read: tensor descriptors over grouped copies (CUDA), or pointers that gather
token rows on the way (ROCm). Every kernel walks its tiles with a stride of its grid, so a grid of one program per
multiprocessor is a persistent schedule and a larger one is an ordinary launch.
Tiles go down the rows of an expert first, so that neighbours in time share a panel of weights in L2.
"""

import triton
import triton.language as tl

from zaya.kernels.aot import AotVariant
from zaya.kernels.products import dot, halves, tile_at


@triton.jit
def _expert_of(row, offs_ptr, E: tl.constexpr, E_PAD: tl.constexpr):
    e = tl.arange(0, E_PAD)
    ends = tl.load(offs_ptr + 1 + e, mask=e < E, other=2147483647)
    return tl.sum((ends <= row).to(tl.int32), 0)


@triton.jit
def _token_rows(rows_ptr, r, GATHER: tl.constexpr):
    """(source row of each tile row, which of them hold a token)."""
    code = tl.load(rows_ptr + r)
    live = code >= 0
    return tl.where(live, code, 0).to(tl.int64) if GATHER else r.to(tl.int64), live


@triton.jit
def _load_rows(a, src, live, r0, k0, stride_a, BK: tl.constexpr, TMA: tl.constexpr):
    """[BM, BK] of the left operand."""
    if TMA:
        tile = a.load([r0, k0])
    else:
        k = k0 + tl.arange(0, BK)
        tile = tl.load(a + src[:, None] * stride_a + k[None, :], mask=live[:, None], other=0.0)
    return tile


@triton.jit
def _load_weight(w, w_row, k0, n0, width, BK: tl.constexpr, BN: tl.constexpr, NT: tl.constexpr, TMA: tl.constexpr):
    """[BK, BN] of one expert's weight, which starts at row w_row of w [all rows, width]: W^T if NT, else W."""
    if TMA and NT:
        tile = w.load([w_row + n0, k0]).T
    elif TMA:
        tile = w.load([w_row + k0, n0])
    else:
        base = w + w_row.to(tl.int64) * width
        k = k0 + tl.arange(0, BK)[:, None]
        n = n0 + tl.arange(0, BN)[None, :]
        tile = tl.load(base + n * width + k if NT else base + k * width + n)
    return tile


@triton.jit
def _store_tile(out, r0, n0, stride, value, BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr):
    """A tile into a grouped buffer [rows, stride]; padding rows belong to the buffer and are written too."""
    if TMA:
        out.store([r0, n0], value)
    else:
        r = (r0 + tl.arange(0, BM)).to(tl.int64)[:, None]
        tl.store(out + r * stride + n0 + tl.arange(0, BN)[None, :], value)


@triton.jit
def moe_up_kernel(
    x,  # [R, D] grouped if TMA, else [T, D]
    w,  # gate_up_proj as [E * 2F, D], or [E, 2, F, D] if WIDE
    pre,  # out [R, 2F]: gate and up before the activation, written if SAVE
    act,  # out [R, F]: silu(gate) * up
    rows_ptr,
    offs_ptr,
    D,
    F,
    stride_x,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,  # gate columns of a tile; as many up columns come with them
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
    SAVE: tl.constexpr,
    DTYPE: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    row_tiles = tl.load(offs_ptr + E) // BM
    tiles = row_tiles * (F // BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        m, c = tile_at(tile, row_tiles, F // BN, GROUP)
        r0 = m * BM
        n0 = c * BN
        expert = _expert_of(r0, offs_ptr, E, E_PAD)
        src, live = _token_rows(rows_ptr, r0 + tl.arange(0, BM), True)
        if WIDE:
            acc = tl.zeros((BM, 2 * BN), tl.float32)
            for k0 in range(0, D, BK):
                b = w.load([expert, 0, n0, k0]).reshape(2 * BN, BK)
                acc = dot(_load_rows(x, src, live, r0, k0, stride_x, BK, TMA), b.T, acc)
            gate, up = halves(acc, BM, 2 * BN)
        else:
            gate = tl.zeros((BM, BN), tl.float32)
            up = tl.zeros((BM, BN), tl.float32)
            for k0 in range(0, D, BK):
                a = _load_rows(x, src, live, r0, k0, stride_x, BK, TMA)
                gate = dot(a, _load_weight(w, expert * 2 * F, k0, n0, D, BK, BN, True, TMA), gate)
                up = dot(a, _load_weight(w, expert * 2 * F, k0, F + n0, D, BK, BN, True, TMA), up)
        if SAVE:
            _store_tile(pre, r0, n0, 2 * F, gate.to(DTYPE), BM, BN, TMA)
            _store_tile(pre, r0, F + n0, 2 * F, up.to(DTYPE), BM, BN, TMA)
        _store_tile(act, r0, n0, F, (gate * tl.sigmoid(gate) * up).to(DTYPE), BM, BN, TMA)


@triton.jit
def moe_rows_kernel(
    a,  # [R, K] grouped
    w,  # [E * N, K] if NT, else [E * K, N]
    out_ptr,  # out [T, N], token order
    weight_ptr,  # [T], read if WEIGHTED
    rows_ptr,
    offs_ptr,
    K,
    N,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    NT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLIT: tl.constexpr,  # column halves stored one after the other
    FLATTEN: tl.constexpr,
):
    """out[token of r] = weight * a[r] W_e^T (NT) or a[r] W_e: the down projection, and the gradient of the input."""
    row_tiles = tl.load(offs_ptr + E) // BM
    tiles = row_tiles * (N // BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        m, c = tile_at(tile, row_tiles, N // BN, GROUP)
        r0 = m * BM
        n0 = c * BN
        w_row = _expert_of(r0, offs_ptr, E, E_PAD) * (N if NT else K)
        src, live = _token_rows(rows_ptr, r0 + tl.arange(0, BM), False)
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            b = _load_weight(w, w_row, k0, n0, K if NT else N, BK, BN, NT, TMA)
            acc = dot(_load_rows(a, src, live, r0, k0, K, BK, TMA), b, acc)
        token, live = _token_rows(rows_ptr, r0 + tl.arange(0, BM), True)
        if WEIGHTED:
            acc = acc * tl.load(weight_ptr + token, mask=live, other=0.0).to(tl.float32)[:, None]
        to = out_ptr + token[:, None] * N + n0
        if SPLIT:
            left, right = halves(acc, BM, BN)
            n = tl.arange(0, BN // 2)[None, :]
            tl.store(to + n, left.to(out_ptr.dtype.element_ty), mask=live[:, None])
            tl.store(to + BN // 2 + n, right.to(out_ptr.dtype.element_ty), mask=live[:, None])
        else:
            tl.store(to + tl.arange(0, BN)[None, :], acc.to(out_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def _swiglu_gradient(
    g, pre, dpre, act, r0, n0, F, weight, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """From g = d(out)/d(weight * act): stores the gradients of gate and up, and weight * act; returns sum(g * act)."""
    r = (r0 + tl.arange(0, BM)).to(tl.int64)[:, None]
    n = n0 + tl.arange(0, BN)[None, :]
    wide = r * (2 * F) + n
    gate = tl.load(pre + wide).to(tl.float32)
    up = tl.load(pre + wide + F).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    hidden = silu * up
    part = tl.sum(g * hidden, 1)
    tl.store(act + r * F + n, (hidden * weight).to(DTYPE))
    g = g * weight
    tl.store(dpre + wide + F, (g * silu).to(DTYPE))
    tl.store(dpre + wide, (g * up * (s + silu * (1.0 - s))).to(DTYPE))
    return part


@triton.jit
def moe_dact_kernel(
    dy,  # [R, D] grouped if TMA, else [T, D]
    w,  # down_proj as [E * D, F]
    pre,  # [R, 2F]
    dpre,  # out [R, 2F]
    act,  # out [R, F]: weight * silu(gate) * up, what the gradient of down_proj needs
    parts_ptr,  # out [F / BN, R] fp32: per column tile, the sums whose total is the gradient of the weight
    weight_ptr,  # [T]
    rows_ptr,
    offs_ptr,
    D,
    F,
    R,
    stride_dy,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    SUB: tl.constexpr,  # 1, 2 or 4 column parts of the tile go through the activation one after the other
    DTYPE: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    row_tiles = tl.load(offs_ptr + E) // BM
    tiles = row_tiles * (F // BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        m, c = tile_at(tile, row_tiles, F // BN, GROUP)
        r0 = m * BM
        n0 = c * BN
        w_row = _expert_of(r0, offs_ptr, E, E_PAD) * D
        src, live = _token_rows(rows_ptr, r0 + tl.arange(0, BM), True)
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, D, BK):
            b = _load_weight(w, w_row, k0, n0, F, BK, BN, False, TMA)
            acc = dot(_load_rows(dy, src, live, r0, k0, stride_dy, BK, TMA), b, acc)
        token, live = _token_rows(rows_ptr, r0 + tl.arange(0, BM), True)
        p = tl.load(weight_ptr + token, mask=live, other=0.0).to(tl.float32)[:, None]
        if SUB == 1:
            total = _swiglu_gradient(acc, pre, dpre, act, r0, n0, F, p, DTYPE, BM, BN)
        else:
            H: tl.constexpr = BN // 2
            a, b = halves(acc, BM, BN)
            if SUB == 2:
                total = _swiglu_gradient(a, pre, dpre, act, r0, n0, F, p, DTYPE, BM, H)
                total += _swiglu_gradient(b, pre, dpre, act, r0, n0 + H, F, p, DTYPE, BM, H)
            else:
                Q: tl.constexpr = BN // 4
                aa, ab = halves(a, BM, H)
                total = _swiglu_gradient(aa, pre, dpre, act, r0, n0, F, p, DTYPE, BM, Q)
                total += _swiglu_gradient(ab, pre, dpre, act, r0, n0 + Q, F, p, DTYPE, BM, Q)
                ba, bb = halves(b, BM, H)
                total += _swiglu_gradient(ba, pre, dpre, act, r0, n0 + H, F, p, DTYPE, BM, Q)
                total += _swiglu_gradient(bb, pre, dpre, act, r0, n0 + H + Q, F, p, DTYPE, BM, Q)
        tl.store(parts_ptr + c.to(tl.int64) * R + r0 + tl.arange(0, BM), total)


@triton.jit
def moe_dw_kernel(
    a,  # [R, M] grouped, or [T, M] if A_TOKENS
    b,  # [R, N] grouped, or [T, N] if B_TOKENS
    dw_ptr,  # out [E, M, N]; added to if ADD
    rows_ptr,
    offs_ptr,
    M,
    N,
    stride_a,
    stride_b,
    E: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    A_TOKENS: tl.constexpr,
    B_TOKENS: tl.constexpr,
    ADD: tl.constexpr,
    SPLIT: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """dW[e] = sum over the rows of expert e of a[r]^T b[r]. An expert without rows writes zeros."""
    per_expert = (M // BM) * (N // BN)
    for tile in tl.range(tl.program_id(0), E * per_expert, tl.num_programs(0), flatten=FLATTEN):
        expert = tile // per_expert
        mt, nt = tile_at(tile % per_expert, M // BM, N // BN, GROUP)
        m0 = mt * BM
        n0 = nt * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for r0 in range(tl.load(offs_ptr + expert), tl.load(offs_ptr + expert + 1), BT):
            if TMA:
                acc = dot(a.load([r0, m0]).T, b.load([r0, n0]), acc)
            else:
                r = r0 + tl.arange(0, BT)
                ra, live = _token_rows(rows_ptr, r, A_TOKENS)
                rb, live = _token_rows(rows_ptr, r, B_TOKENS)
                at = a + ra[None, :] * stride_a + m0 + tl.arange(0, BM)[:, None]
                bt = b + rb[:, None] * stride_b + n0 + tl.arange(0, BN)[None, :]
                left = tl.load(at, mask=live[None, :], other=0.0)
                acc = dot(left, tl.load(bt, mask=live[:, None], other=0.0), acc)
        to = dw_ptr + (expert.to(tl.int64) * M + m0 + tl.arange(0, BM)[:, None]) * N + n0
        if SPLIT:
            left, right = halves(acc, BM, BN)
            _store_gradient(to + tl.arange(0, BN // 2)[None, :], left, ADD)
            _store_gradient(to + BN // 2 + tl.arange(0, BN // 2)[None, :], right, ADD)
        else:
            _store_gradient(to + tl.arange(0, BN)[None, :], acc, ADD)


@triton.jit
def _store_gradient(to, value, ADD: tl.constexpr):
    if ADD:
        value += tl.load(to).to(tl.float32)
    tl.store(to, value.to(to.dtype.element_ty))


@triton.jit
def moe_weight_sums_kernel(parts_ptr, slot_ptr, out_ptr, T, R, count, BT: tl.constexpr):
    """out[t] = sum over the count parts [count, R] at slot[t], in order, or 0 for a skipped token."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    slot = tl.load(slot_ptr + t, mask=t < T, other=-1).to(tl.int64)
    total = tl.zeros((BT,), tl.float32)
    part = parts_ptr + slot
    for _ in range(count):
        total += tl.load(part, mask=slot >= 0, other=0.0)
        part += R
    tl.store(out_ptr + t, total, mask=t < T)


def aot_variants(backend: str) -> list[AotVariant]:
    """Every tile that `moe` ships for `backend`, for the ahead-of-time gate (zaya/kernels/aot.py)."""
    from zaya.kernels.moe.variants import variants

    return variants(backend)
