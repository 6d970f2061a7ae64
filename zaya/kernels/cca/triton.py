"""Compressed convolutional attention between its projections and the attention, in Triton. One source for ROCm and
CUDA; the mathematics is in reference.py.

A program makes one head of a block of tokens: both convolutions, the mean, the norm, the temperature and the rotation
stay in registers, and only what the attention reads is written. Channels come as pairs (a, b) that rotate together:
pair j of a head is channel (j // HALF) 2 HALF + j % HALF and the one HALF further, so nothing is exchanged between
threads. The grouped convolution is a product whose inner loop is its taps. The backward kernels are in backward.py.
"""

from typing import Any

import triton
import triton.language as tl

from zaya.kernels.aot import AotVariant
from zaya.kernels.products import dot
from zaya.kernels.tiles import CCA


@triton.jit
def depth_of(depth_ptr, t, T, HAS_DEPTH: tl.constexpr):
    """Tokens since the document's start; without documents, more than any tap reaches."""
    if HAS_DEPTH:
        return tl.load(depth_ptr + t, mask=t < T, other=0).to(tl.int32)
    return t * 0 + 1024


@triton.jit
def state_row(slots_ptr, row, ok, HAS_SLOTS: tl.constexpr):
    """Where in the state tensors a sequence's state is."""
    if HAS_SLOTS:
        return tl.load(slots_ptr + row, mask=ok, other=0).to(tl.int64)
    return row.to(tl.int64)


@triton.jit
def columns_back(
    qkv_ptr,
    conv_ptr,
    slot,
    t0,
    t,
    s,
    depth,
    back,
    column,
    T,
    stride,
    stride_slot,
    stride_back,
    stride_column,
    HAS_STATE: tl.constexpr,
):
    """[BT, columns] of the tokens `back` before t = t0, t0 + 1, …: from this call, from the state before it, or zero
    before the document. s is t's place in its sequence."""
    seen = (t < T) & (depth >= back)
    here = qkv_ptr + (t0.to(tl.int64) - back) * stride
    x = tl.load(here + (t - t0)[:, None] * stride + column[None, :], mask=(seen & (s >= back))[:, None], other=0.0)
    if HAS_STATE:
        at = slot * stride_slot + (2 - back + s) * stride_back
        past = (seen & (s < back))[:, None]
        x += tl.load(conv_ptr + at[:, None] + column[None, :] * stride_column, mask=past, other=0.0).to(x.dtype)
    return x


@triton.jit
def mean_of(qkv_ptr, t0, t, head, column, T, stride, H: tl.constexpr, REP: tl.constexpr, D: tl.constexpr):
    """[BT, columns] fp32: what the projections add to a head past the convolutions."""
    here = qkv_ptr + t0.to(tl.int64) * stride
    at = (t - t0)[:, None] * stride + column[None, :]
    ok = (t < T)[:, None]
    group = tl.where(head < H, head // REP, head - H)
    key = tl.load(here + (H + group) * D + at, mask=ok, other=0.0).to(tl.float32)
    if head < H:
        return (tl.load(here + head * D + at, mask=ok, other=0.0).to(tl.float32) + key) * 0.5
    total = key * 0.0
    for r in range(REP):
        total += tl.load(here + (group * REP + r) * D + at, mask=ok, other=0.0).to(tl.float32)
    return (total / REP + key) * 0.5


@triton.jit
def cca_fwd_kernel(
    qkv_ptr,  # [T, N]: columns q [H D], k [G D], current values [G D / 2], delayed values [G D / 2]
    w0_ptr,  # [C, 2]
    b0_ptr,  # [C]
    w1_ptr,  # [H + G, 2, D, D]: head, tap, in, out
    b1_ptr,  # [C]
    temp_ptr,  # [G]
    cos_ptr,  # [sequences or 1, S, HALF] fp32
    sin_ptr,
    first_ptr,  # [G D / 2], read if HAS_FIRST: the delayed value of a document's first token
    conv_ptr,  # state before the call, by its strides [slot, 2, C]; read if HAS_STATE, written if UPDATE
    delayed_ptr,  # [slot, G D / 2], likewise
    slots_ptr,  # [sequences], read if HAS_SLOTS
    depth_ptr,  # [T], read if HAS_DEPTH
    query_ptr,  # out [T, H, D]
    key_ptr,  # out [T, G, D]
    value_ptr,  # out [T, G, D]
    T,
    S,
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
    ROOT: tl.constexpr,  # sqrt(D)
    BT: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_DEPTH: tl.constexpr,
    UPDATE: tl.constexpr,
):
    head = tl.program_id(0)
    t0 = tl.program_id(1) * BT
    t = t0 + tl.arange(0, BT)
    row = t // S
    s = t - row * S
    depth = depth_of(depth_ptr, t, T, HAS_DEPTH)
    slot = state_row(slots_ptr, row, t < T, HAS_SLOTS)
    j = tl.arange(0, D // 2)
    a = j // HALF * (2 * HALF) + j % HALF
    u_a, u_b = mixed(
        qkv_ptr, w0_ptr, b0_ptr, w1_ptr, b1_ptr, conv_ptr, slot, t0, t, s, depth, head, a, T, stride, stride_slot,
        stride_back, stride_column, H, H // G, D, HALF, BT, HAS_STATE,
    )  # fmt: skip
    length = tl.sqrt(tl.sum(u_a * u_a, 1) + tl.sum(u_b * u_b, 1))
    scale = ROOT / tl.maximum(length, eps)
    ok = (t < T)[:, None]
    wide = t.to(tl.int64)[:, None]
    cos, sin = rotation(cos_ptr, sin_ptr, row, s, j, ok, stride_cos, HALF)
    if head >= H:
        scale *= tl.load(temp_ptr + head - H).to(tl.float32)
    u_a *= scale[:, None]
    u_b *= scale[:, None]
    # no pointer is chosen by a branch: ROCm's compiler does not take that
    if head < H:
        store_rotated(query_ptr, wide * (H * D) + head * D + a[None, :], u_a, u_b, cos, sin, ok, HALF)
    else:
        store_rotated(key_ptr, wide * (G * D) + (head - H) * D + a[None, :], u_a, u_b, cos, sin, ok, HALF)
    dtype = query_ptr.dtype.element_ty
    if head >= H:
        W: tl.constexpr = G * D // 2
        c = (head - H) * D + tl.arange(0, D)
        now = tl.load(qkv_ptr + wide * stride + (H + G) * D + c[None, :], mask=ok, other=0.0)
        late = (c >= W)[None, :]
        inside = (s >= 1) & (depth >= 1)
        before = qkv_ptr + (wide - 1) * stride + (H + G) * D + c[None, :]
        value = tl.where(late, tl.load(before, mask=ok & late & inside[:, None], other=0.0), now)
        outside = late & ok
        if HAS_STATE:
            outside = outside & (depth < 1)[:, None]
            kept = delayed_ptr + slot[:, None] * stride_delayed + (c - W)[None, :]
            past = late & ok & ((s < 1) & (depth >= 1))[:, None]
            value += tl.load(kept, mask=past, other=0.0).to(dtype)
        else:
            outside = outside & ~inside[:, None]
        if HAS_FIRST:
            none = c[None, :] + t[:, None] * 0
            value += tl.load(first_ptr + none - W, mask=outside, other=0.0).to(dtype)
        tl.store(value_ptr + wide * (G * D) + c[None, :], value, mask=ok)
        if UPDATE:
            tl.debug_barrier()  # every thread has read the state that is now replaced
            tl.store(delayed_ptr + slot[:, None] * stride_delayed + (c - W)[None, :], now, mask=ok & late)
    if UPDATE:
        c = head * D + tl.arange(0, D)
        place = conv_ptr + slot[:, None] * stride_slot + c[None, :] * stride_column
        x0 = tl.load(qkv_ptr + wide * stride + c[None, :], mask=ok)
        x1 = tl.load(place + stride_back, mask=ok)
        tl.debug_barrier()
        tl.store(place, x1, mask=ok)
        tl.store(place + stride_back, x0.to(x1.dtype), mask=ok)


@triton.jit
def store_rotated(out_ptr, at, u_a, u_b, cos, sin, ok, HALF: tl.constexpr):
    """Rotate pairs by cos and sin, and store them."""
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, (u_a * cos - u_b * sin).to(dtype), mask=ok)
    tl.store(out_ptr + at + HALF, (u_b * cos + u_a * sin).to(dtype), mask=ok)


@triton.jit
def mixed(
    qkv_ptr,
    w0_ptr,
    b0_ptr,
    w1_ptr,
    b1_ptr,
    conv_ptr,
    slot,
    t0,
    t,
    s,
    depth,
    head,
    a,  # [D / 2] first channel of each pair
    T,
    stride,
    stride_slot,
    stride_back,
    stride_column,
    H: tl.constexpr,
    REP: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BT: tl.constexpr,
    HAS_STATE: tl.constexpr,
):
    """Convolutions and mean of a head, fp32, as the pairs' first and second channels [BT, D / 2]."""
    k = tl.arange(0, D)
    acc_a = tl.zeros((BT, D // 2), tl.float32)
    acc_b = tl.zeros((BT, D // 2), tl.float32)
    for tap in range(2):
        z = convolved_back(
            qkv_ptr, w0_ptr, b0_ptr, conv_ptr, slot, t0, t, s, depth, 1 - tap, head * D + k, T, stride, stride_slot,
            stride_back, stride_column, HAS_STATE,
        )  # fmt: skip
        w = w1_ptr + (head * 2 + tap) * (D * D) + k[:, None] * D + a[None, :]
        acc_a = dot(z, tl.load(w).to(z.dtype), acc_a)
        acc_b = dot(z, tl.load(w + HALF).to(z.dtype), acc_b)
    b1 = b1_ptr + head * D + a
    acc_a += tl.load(b1).to(tl.float32)[None, :] + mean_of(qkv_ptr, t0, t, head, a, T, stride, H, REP, D)
    acc_b += tl.load(b1 + HALF).to(tl.float32)[None, :] + mean_of(qkv_ptr, t0, t, head, a + HALF, T, stride, H, REP, D)
    return acc_a, acc_b


@triton.jit
def convolved_back(
    qkv_ptr,
    w0_ptr,
    b0_ptr,
    conv_ptr,
    slot,
    t0,
    t,
    s,
    depth,
    back,
    column,
    T,
    stride,
    stride_slot,
    stride_back,
    stride_column,
    HAS_STATE: tl.constexpr,
):
    """[BT, columns]: the first convolution `back` tokens before t. Before a document it is the bias."""
    x0 = columns_back(
        qkv_ptr, conv_ptr, slot, t0, t, s, depth, back, column, T, stride, stride_slot, stride_back, stride_column,
        HAS_STATE,
    )  # fmt: skip
    x1 = columns_back(
        qkv_ptr, conv_ptr, slot, t0, t, s, depth, back + 1, column, T, stride, stride_slot, stride_back, stride_column,
        HAS_STATE,
    )  # fmt: skip
    w = w0_ptr + column * 2
    z = tl.load(b0_ptr + column).to(tl.float32)[None, :]
    z = z + tl.load(w + 1).to(tl.float32)[None, :] * x0.to(tl.float32)
    z = z + tl.load(w).to(tl.float32)[None, :] * x1.to(tl.float32)
    return z.to(x0.dtype)


@triton.jit
def rotation(cos_ptr, sin_ptr, row, s, j, ok, stride_cos, HALF: tl.constexpr):
    """Cosines and sines [BT, D / 2] of pairs j; pairs from HALF on do not rotate."""
    at = row.to(tl.int64)[:, None] * stride_cos + s[:, None] * HALF + j[None, :]
    turns = ok & (j < HALF)[None, :]
    return tl.load(cos_ptr + at, mask=turns, other=1.0), tl.load(sin_ptr + at, mask=turns, other=0.0)


SPILLS = "a few registers around the masks; no smaller or larger tile spills less"
ALLOWANCES: dict[tuple[str, str], dict[str, tuple[int, str]]] = {
    (name, "cuda"): dict.fromkeys(("spill_store_bytes", "spill_load_bytes"), (most, SPILLS))
    for name, most in (("fwd", 4), ("step", 44))
}


def aot_variants(backend: str) -> list[AotVariant]:
    """Every tile that CCA ships for `backend`, at the model's shapes (8 query and 2 key/value heads of 128, bf16)."""
    from zaya.kernels.cca import backward, decode

    whole = {"HAS_FIRST": False, "HAS_STATE": False, "HAS_SLOTS": False, "UPDATE": False}
    step = {"HAS_FIRST": False, "HAS_STATE": True, "HAS_SLOTS": False, "HAS_DEPTH": False, "UPDATE": True}
    kernels: dict[str, tuple[Any, str | None]] = {
        "fwd": (cca_fwd_kernel, "cca"),
        "step": (cca_fwd_kernel, None),
        "vector": (decode.cca_vector_kernel, None),
        "bwd_dy": (backward.cca_bwd_dy_kernel, None),
        "bwd_dx": (backward.cca_bwd_dx_kernel, None),
        "bwd_dw": (backward.cca_bwd_dw_kernel, None),
    }
    found = []
    for (name, where), rows in CCA.items():
        for limit, tile in rows if where == backend else ():
            kernel, work = kernels[name]
            matrix = "none" if name == "vector" else "body"  # the loop over two taps may be unrolled
            for packed in (False, True) if name not in ("step", "vector") else (False,):
                fixed = {"H": 8, "G": 2, "D": 128, "HALF": 32, "ROOT": 128**0.5, "HAS_DEPTH": packed}
                fixed |= (step if name in ("step", "vector") else whole) | tile.blocks
                title = f"{name}{' packed' if packed else ''} {'any T' if limit == float('inf') else f'T<={limit:g}'}"
                rest = {"matrix": matrix, "buffer_loads": False, "allowances": ALLOWANCES.get((name, backend), {})}
                found.append(_variant(title, kernel, fixed, tile.options, work, limit, rest))
    return found


def _variant(title: str, kernel: Any, fixed: dict, options: dict, work: str | None, limit: float, rest: dict):
    types = {"T": "i32", "S": "i32", "span": "i32", "eps": "fp32", "depth_ptr": "*i64", "slots_ptr": "*i64"}
    fp32 = ("cos_ptr", "sin_ptr", "dtemp_ptr", "sums_ptr", "parts_ptr", "vectors_ptr")
    types |= dict.fromkeys(fp32, "*fp32")
    names = kernel.arg_names
    used = {a: fixed[a] for a in names if a in fixed}
    signature = {a: types.get(a, "i32" if a.startswith("stride") else "*bf16") for a in names if a not in used}
    floor = (work, int(min(limit, 32768))) if work else None
    return AotVariant(kernel, title, signature, used, options, divisible=("stride",), work=floor, **rest)
