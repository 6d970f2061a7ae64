"""Group tokens by expert without a sort, and move rows between token order and expert order.

Layout. Expert e owns the rows [offs[e], offs[e + 1]) of every grouped buffer, `offs` being multiples of the tile
height PAD; the rows after its last token are padding. After offs[E] come the skipped tokens, which no product reads.

    rows [R_max] int32   >= 0: the token of this row;  -1: padding;  <= -2: skipped token -2 - rows[r]
    slot [T]     int32   the row of a token, or -1 for a skipped one
    offs [E + 2] int32   first row of each expert; offs[E] ends the last expert, offs[E + 1] the skipped tokens

Tokens keep their order inside an expert, there are no atomics, and the host reads nothing.
"""

import functools

import torch
import triton
import triton.language as tl

from zaya.kernels.launch import Launch

BLOCK = 256  # tokens per program, for up to 31 experts (see `_classes`)
CHUNK = 64  # blocks whose counts are added at once, likewise


@triton.jit
def _one_hot(ids_ptr, t, T, E: tl.constexpr, E_PAD: tl.constexpr):
    """[BLOCK, E_PAD] int32; a token outside 0..E - 1 is a skipped one (class E)."""
    ids = tl.load(ids_ptr + t, mask=t < T, other=0).to(tl.int32)
    ids = tl.where((ids < 0) | (ids > E), E, ids)
    hot = (ids[:, None] == tl.arange(0, E_PAD)[None, :]) & (t < T)[:, None]
    return ids, hot.to(tl.int32)


@triton.jit
def moe_count_kernel(ids_ptr, counts_ptr, T, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """counts [blocks, E_PAD]: tokens of each class in each block."""
    b = tl.program_id(0)
    _, hot = _one_hot(ids_ptr, b * BLOCK + tl.arange(0, BLOCK), T, E, E_PAD)
    tl.store(counts_ptr + b * E_PAD + tl.arange(0, E_PAD), tl.sum(hot, 0))


@triton.jit
def _class_totals(counts_ptr, block, n_blocks, E_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """(tokens of each class in all blocks, the same in the blocks before `block`), each [E_PAD]."""
    e = tl.arange(0, E_PAD)
    total = tl.zeros((E_PAD,), tl.int32)
    before = tl.zeros((E_PAD,), tl.int32)
    for b0 in range(0, n_blocks, CHUNK):
        b = b0 + tl.arange(0, CHUNK)
        c = tl.load(counts_ptr + b[:, None] * E_PAD + e[None, :], mask=(b < n_blocks)[:, None], other=0)
        total += tl.sum(c, 0)
        before += tl.sum(tl.where((b < block)[:, None], c, 0), 0)
    return total, before


@triton.jit
def _store_layout(rows_ptr, offs_ptr, first, total, E: tl.constexpr, E_PAD: tl.constexpr, PAD: tl.constexpr):
    """Offsets, and -1 in the padding rows of every expert."""
    e = tl.arange(0, E_PAD)
    tl.store(offs_ptr + e, first, mask=e <= E)
    tl.store(offs_ptr + E + 1, tl.sum(tl.where(e == E, first + total, 0), 0))
    i = tl.arange(0, PAD)
    pads = tl.where(e < E, (total + PAD - 1) // PAD * PAD - total, 0)
    row = (first + total)[:, None] + i[None, :]
    tl.store(rows_ptr + row, tl.full((E_PAD, PAD), -1, tl.int32), mask=i[None, :] < pads[:, None])


@triton.jit
def moe_place_kernel(
    ids_ptr,  # [T]
    counts_ptr,  # [blocks, E_PAD]; not read if SINGLE
    rows_ptr,  # out [R_max]
    slot_ptr,  # out [T]
    offs_ptr,  # out [E + 2]
    T,
    n_blocks,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SINGLE: tl.constexpr,
):
    block = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    t = block * BLOCK + tl.arange(0, BLOCK)
    ids, hot = _one_hot(ids_ptr, t, T, E, E_PAD)
    if SINGLE:
        total = tl.sum(hot, 0)
        before = tl.zeros((E_PAD,), tl.int32)
    else:
        total, before = _class_totals(counts_ptr, block, n_blocks, E_PAD, CHUNK)
    room = tl.where(e < E, (total + PAD - 1) // PAD * PAD, total)
    first = tl.cumsum(room, 0) - room
    if block == 0:
        _store_layout(rows_ptr, offs_ptr, first, total, E, E_PAD, PAD)
    # A token's row: where its class starts, plus those of its class in earlier blocks and earlier in this block.
    rank = tl.cumsum(hot, 0) - hot + (first + before)[None, :]
    row = tl.sum(hot * rank, 1)
    tl.store(rows_ptr + row, tl.where(ids < E, t, -2 - t), mask=t < T)
    tl.store(slot_ptr + t, tl.where(ids < E, row, -1), mask=t < T)


@triton.jit
def moe_gather_kernel(
    src_ptr,  # [T, D], read if COPY
    src2_ptr,  # [T, D], read if PAIR
    dst_ptr,  # out [R_max, D], written if COPY
    dst2_ptr,  # out [R_max, D], written if PAIR
    zero_ptr,  # out [T, D]: rows of skipped tokens are set to 0
    rows_ptr,
    offs_ptr,
    D,
    stride_src,
    stride_src2,
    E: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    COPY: tl.constexpr,
    PAIR: tl.constexpr,
):
    """Rows into expert order (padding becomes 0), and zeros for the tokens that no product writes."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    if COPY:
        start = 0
    else:
        start = tl.load(offs_ptr + E)
    end = tl.load(offs_ptr + E + 1)
    if (tl.program_id(0) * BR < end) & ((tl.program_id(0) + 1) * BR > start):
        code = tl.load(rows_ptr + r, mask=(r >= start) & (r < end), other=-1)
        inside = r < tl.load(offs_ptr + E)
        skipped = code <= -2
        token = tl.where(code >= 0, code, 0).to(tl.int64)[:, None]
        at = tl.where(skipped, -2 - code, 0).to(tl.int64)[:, None] * D
        r64 = r.to(tl.int64)[:, None] * D
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)[None, :]
            if COPY:
                v = tl.load(src_ptr + token * stride_src + d, mask=(code >= 0)[:, None] & (d < D), other=0.0)
                tl.store(dst_ptr + r64 + d, v, mask=inside[:, None] & (d < D))
            if PAIR:
                v2 = tl.load(src2_ptr + token * stride_src2 + d, mask=(code >= 0)[:, None] & (d < D), other=0.0)
                tl.store(dst2_ptr + r64 + d, v2, mask=inside[:, None] & (d < D))
            tl.store(zero_ptr + at + d, tl.zeros((BR, BD), zero_ptr.dtype.element_ty), mask=skipped[:, None] & (d < D))


def max_rows(tokens: int, num_experts: int, pad: int) -> int:
    """Rows that the grouped buffers need whatever the routing: every expert may waste pad - 1."""
    return (tokens + num_experts * (pad - 1) + pad - 1) // pad * pad


def permutation(
    expert_ids: torch.Tensor, num_experts: int, pad: int, room: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """expert_ids [T] of classes 0..E -> (rows [room], slot [T], offs [E + 2]), int32; see the top of this file.

    `room` is max_rows(T, E, pad) or more.
    """
    (tokens,) = expert_ids.shape
    ints = functools.partial(torch.empty, dtype=torch.int32, device=expert_ids.device)
    rows = ints(room)
    slot = ints(tokens)
    offs = ints(num_experts + 2)
    classes = _classes(num_experts)
    blocks = max(-(-tokens // classes["BLOCK"]), 1)
    counts = ints(blocks, classes["E_PAD"]) if blocks > 1 else offs
    if blocks > 1:
        _count(num_experts)((blocks,), expert_ids, counts, tokens)
    _place(num_experts, pad, blocks == 1)((blocks,), expert_ids, counts, rows, slot, offs, tokens, blocks)
    return rows, slot, offs


def _classes(num_experts: int) -> dict[str, int]:
    """Constants of the kernels. Their tiles are tokens or blocks x classes, and shared memory holds one of 8,192."""
    padded = 1 << num_experts.bit_length()
    return {"E": num_experts, "E_PAD": padded, "BLOCK": BLOCK * 32 // max(padded, 32)}


@functools.cache
def _count(num_experts: int) -> Launch:
    return Launch(moe_count_kernel, **_classes(num_experts))


@functools.cache
def _place(num_experts: int, pad: int, single: bool) -> Launch:
    classes = _classes(num_experts)
    chunk = CHUNK * classes["BLOCK"] // BLOCK
    return Launch(moe_place_kernel, PAD=pad, CHUNK=chunk, SINGLE=single, **classes)


@functools.cache
def _gather(num_experts: int, width: int, copy: bool, pair: bool) -> Launch:
    block = min(1024, triton.next_power_of_2(width))
    return Launch(moe_gather_kernel, E=num_experts, BR=8, BD=block, COPY=copy, PAIR=pair, num_warps=8)


def gather(src, src2, zero, rows, offs):
    """(src in expert order or None, src2 likewise), and zeros the skipped tokens' rows of `zero` [T, D] in place."""
    num_experts, width = offs.numel() - 2, zero.shape[1]
    dst = src.new_empty(rows.numel(), width) if src is not None else None
    dst2 = src2.new_empty(rows.numel(), width) if src2 is not None else None
    a, b = src if src is not None else zero, src2 if src2 is not None else zero
    _gather(num_experts, width, src is not None, src2 is not None)(
        (-(-rows.numel() // 8),), a, b, dst if dst is not None else zero, dst2 if dst2 is not None else zero,
        zero, rows, offs, width, a.stride(0), b.stride(0),
    )  # fmt: skip
    return dst, dst2
