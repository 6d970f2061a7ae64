"""The experts for a handful of tokens (decoding), where reading weights is all the time there is.

No permutation: program (column block, j) takes the j-th expert that has a token, finds that expert's tokens in the ids
by itself, and streams its panel of weights once. One launch per product, and no row is padded or copied. Nothing is
split over the reduction, so sums have one order; the columns alone give enough programs to keep every multiprocessor
reading. With PDL (CUDA only) each kernel starts while the one before runs, and the second reads weights until it must
wait (zaya/kernels/overlap.py). VEC multiplies one token at a time with the panel in fp32 vector arithmetic instead of
16-row matrix tiles.
"""

import triton
import triton.language as tl

from zaya.kernels.overlap import gdc_launch_dependents, gdc_wait
from zaya.kernels.products import dot


@triton.jit
def _pick_expert(ids_ptr, T, j, E: tl.constexpr, E_PAD: tl.constexpr, T_PAD: tl.constexpr):
    """(class of each token, the j-th expert with a token, whether there is one)."""
    t = tl.arange(0, T_PAD)
    ids = tl.load(ids_ptr + t, mask=t < T, other=E).to(tl.int32)
    if T_PAD == 1:
        expert = tl.sum(ids, 0)
        found = (expert >= 0) & (expert < E)
    else:
        e = tl.arange(0, E_PAD)
        used = tl.max(((ids[:, None] == e[None, :]) & (e < E)[None, :]).to(tl.int32), 0)
        hit = (used > 0) & (tl.cumsum(used, 0) - used == j)
        expert = tl.sum(tl.where(hit, e, 0), 0)
        found = tl.sum(hit.to(tl.int32), 0) > 0
    return ids, expert, found


@triton.jit
def _nth_tokens(ids, expert, m0, BM: tl.constexpr, T_PAD: tl.constexpr):
    """(tokens m0 .. m0 + BM of the expert, which exist)."""
    mine = (ids == expert).to(tl.int32)
    rank = tl.cumsum(mine, 0) - mine
    wanted = m0 + tl.arange(0, BM)
    found = (rank[None, :] == wanted[:, None]) & (mine > 0)[None, :]
    token = tl.sum(tl.where(found, tl.arange(0, T_PAD)[None, :], 0), 1)
    return token, wanted < tl.sum(mine, 0)


@triton.jit
def _panel(a, w, K, token, live, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """[BM, BN] = a[token] W^T over the BN weight rows at w."""
    k = tl.arange(0, BK)
    n = tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        rows = tl.load(a + token[:, None] * K + k0 + k[None, :], mask=live[:, None], other=0.0)
        acc = dot(rows, tl.load(w + n[None, :] * K + k0 + k[:, None]), acc)
    return acc


@triton.jit
def _dot_by_8(w, x, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK // 8] fp32: w * x summed over each 8 neighbours, which one thread holds: an eighth of the registers."""
    return tl.sum(tl.reshape(w.to(tl.float32) * x.to(tl.float32), (BN, BK // 8, 8)), 2)


@triton.jit
def _panel_vec(a, w, K, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """[BN] = W a over the BN weight rows at w, for the one row at a, which the kernel before this one writes."""
    at = tl.arange(0, BN)[:, None] * K + tl.arange(0, BK)[None, :]
    row = a + tl.zeros((BN, 1), tl.int32) + tl.arange(0, BK)[None, :]  # read in the panel's layout: no exchange
    panel = tl.load(w + at)  # before the wait: weights do not depend on the kernel before
    if PDL:
        gdc_wait()
    acc = _dot_by_8(panel, tl.load(row), BN, BK)
    for k0 in range(BK, K, BK):
        acc += _dot_by_8(tl.load(w + at + k0), tl.load(row + k0), BN, BK)
    return tl.sum(acc, 1)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _panels_vec(a, w, v, K, BN: tl.constexpr, BK: tl.constexpr):
    """(W a, V a), both panels read in one loop, the next step's weights before this step's are added up."""
    at = tl.arange(0, BN)[:, None] * K + tl.arange(0, BK)[None, :]
    row = a + tl.zeros((BN, 1), tl.int32) + tl.arange(0, BK)[None, :]
    left = tl.zeros((BN, BK // 8), tl.float32)
    right = tl.zeros((BN, BK // 8), tl.float32)
    first = tl.load(w + at)
    second = tl.load(v + at)
    x = tl.load(row)
    for k0 in range(BK, K, BK):
        next_first = tl.load(w + at + k0)
        next_second = tl.load(v + at + k0)
        next_x = tl.load(row + k0)
        left += _dot_by_8(first, x, BN, BK)
        right += _dot_by_8(second, x, BN, BK)
        first, second, x = next_first, next_second, next_x
    left += _dot_by_8(first, x, BN, BK)
    right += _dot_by_8(second, x, BN, BK)
    return tl.reduce((left, right), 1, _add_both)  # one exchange between warps instead of two


@triton.jit
def _panels(a, w, v, K, token, live, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, stride_a):
    k = tl.arange(0, BK)
    n = tl.arange(0, BN)
    left = tl.zeros((BM, BN), tl.float32)
    right = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        rows = tl.load(a + token[:, None] * stride_a + k0 + k[None, :], mask=live[:, None], other=0.0)
        left = dot(rows, tl.load(w + n[None, :] * K + k0 + k[:, None]), left)
        right = dot(rows, tl.load(v + n[None, :] * K + k0 + k[:, None]), right)
    return left, right


@triton.jit
def moe_decode_up_kernel(
    x_ptr,  # [T, D]
    w_ptr,  # [E, 2F, D]
    act_ptr,  # out [T, F], token order
    ids_ptr,  # [T]
    T,
    D,
    F,
    stride_x,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    T_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: the next kernel then reads ids and weights before its own
    ids, expert, found = _pick_expert(ids_ptr, T, tl.program_id(1), E, E_PAD, T_PAD)
    if found:
        n0 = tl.program_id(0) * BN
        w = w_ptr + (expert.to(tl.int64) * 2 * F + n0) * D
        n = n0 + tl.arange(0, BN)
        count = 1 if T_PAD == 1 else tl.sum((ids == expert).to(tl.int32), 0)
        for m0 in range(0, count, 1 if VEC else BM):
            token, live = _nth_tokens(ids, expert, m0, BM, T_PAD)
            if VEC:
                one = tl.sum(tl.where(tl.arange(0, BM) == 0, token, 0), 0).to(tl.int64)
                gate, up = _panels_vec(x_ptr + one * stride_x, w, w + F.to(tl.int64) * D, D, BN, BK)
                tl.store(act_ptr + one * F + n, (gate * tl.sigmoid(gate) * up).to(act_ptr.dtype.element_ty))
            else:
                token = token.to(tl.int64)
                gate, up = _panels(x_ptr, w, w + F.to(tl.int64) * D, D, token, live, BM, BN, BK, stride_x)
                y = (gate * tl.sigmoid(gate) * up).to(act_ptr.dtype.element_ty)
                tl.store(act_ptr + token[:, None] * F + n[None, :], y, mask=live[:, None])


@triton.jit
def _zero_skipped(out_ptr, ids, n, T, D, E: tl.constexpr, BN: tl.constexpr, T_PAD: tl.constexpr):
    if tl.program_id(1) == 0:
        t = tl.arange(0, T_PAD)
        idle = (t < T) & ((ids < 0) | (ids >= E))
        zero = tl.zeros((T_PAD, BN), out_ptr.dtype.element_ty)
        tl.store(out_ptr + t.to(tl.int64)[:, None] * D + n[None, :], zero, mask=idle[:, None])


@triton.jit
def moe_decode_down_kernel(
    act_ptr,  # [T, F]
    w_ptr,  # [E, D, F]
    out_ptr,  # out [T, D]; rows of skipped tokens become 0
    weight_ptr,  # [T]
    ids_ptr,  # [T]
    T,
    D,
    F,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    T_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    VEC: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    ids, expert, found = _pick_expert(ids_ptr, T, tl.program_id(1), E, E_PAD, T_PAD)
    n0 = tl.program_id(0) * BN
    n = n0 + tl.arange(0, BN)
    if not VEC:
        if PDL:
            gdc_wait()
        _zero_skipped(out_ptr, ids, n, T, D, E, BN, T_PAD)
    if found:
        w = w_ptr + (expert.to(tl.int64) * D + n0) * F
        count = 1 if T_PAD == 1 else tl.sum((ids == expert).to(tl.int32), 0)
        for m0 in range(0, count, 1 if VEC else BM):
            token, live = _nth_tokens(ids, expert, m0, BM, T_PAD)
            if VEC:
                one = tl.sum(tl.where(tl.arange(0, BM) == 0, token, 0), 0).to(tl.int64)
                p = tl.load(weight_ptr + one).to(tl.float32)
                y = _panel_vec(act_ptr + one * F, w, F, BN, BK, PDL) * p
                tl.store(out_ptr + one * D + n, y.to(out_ptr.dtype.element_ty))
            else:
                token = token.to(tl.int64)
                p = tl.load(weight_ptr + token, mask=live, other=0.0).to(tl.float32)
                y = _panel(act_ptr, w, F, token, live, BM, BN, BK) * p[:, None]
                tl.store(out_ptr + token[:, None] * D + n[None, :], y.to(out_ptr.dtype.element_ty), mask=live[:, None])
    if VEC:  # behind the panel, which is read before the wait
        if PDL:
            gdc_wait()
        _zero_skipped(out_ptr, ids, n, T, D, E, BN, T_PAD)
