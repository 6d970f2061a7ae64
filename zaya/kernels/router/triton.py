"""The router in Triton: one kernel after the down projection, and its backward. One source for ROCm and CUDA.

The forward kernel gives each program a block of tokens. A slice of the first layer feeds the second layer at once, so
nothing but the state, the choice and its weight is written. The backward kernel recomputes both layers from the state,
writes what the weight gradients need, and leaves per-block partial sums of the vector gradients; a second kernel forms
weight gradients over a fixed number of token ranges, a third adds the ranges. Every floating-point sum has a fixed
order (only the integer counts are added atomically), so results are the same bits from run to run.
"""

from typing import Any

import triton
import triton.language as tl

from zaya.kernels.aot import AotVariant
from zaya.kernels.products import dot
from zaya.kernels.tiles import ROUTER, router_tile


@triton.jit
def _normal(x):
    """Standard normal distribution of x: (cdf, exp(-x^2 / 2)). Abramowitz and Stegun 7.1.26, error under 8e-8.

    The library's erf costs three times as many instructions, and they were a third of the forward kernel's time.
    """
    e = tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
    tail = t * e * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return tl.where(x < 0.0, tail, 1.0 - tail), e


@triton.jit
def _gelu(x):
    return x * _normal(x)[0]


@triton.jit
def _gelu_slope(x):
    cdf, e = _normal(x)
    return cdf + 0.3989422804014327 * x * e


@triton.jit
def _vector(ptr, at):
    return tl.load(ptr + at).to(tl.float32)[None, :]


@triton.jit
def _normalise(state, eps, R: tl.constexpr):
    inverse = tl.rsqrt(tl.sum(state * state, 1) / R + eps)[:, None]
    return state * inverse, inverse


@triton.jit
def _first_layer(h, w1_ptr, b1_ptr, cc, R: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr):
    k = tl.arange(0, R)
    w1 = tl.load(w1_ptr + cc[None, :] * R + k[:, None]).to(h.dtype)
    return dot(h, w1, tl.zeros((BT, BC), tl.float32)) + _vector(b1_ptr, cc)


@triton.jit
def _second_layer(acc, g1, w2_ptr, cc, R: tl.constexpr):
    n = tl.arange(0, R)
    return dot(g1, tl.load(w2_ptr + n[None, :] * R + cc[:, None]).to(g1.dtype), acc)


@triton.jit
def _probabilities(g2, w3_ptr, BT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr):
    e = tl.arange(0, C_PAD)
    k = tl.arange(0, R)
    w3 = tl.load(w3_ptr + e[None, :] * R + k[:, None], mask=e[None, :] < C, other=0.0).to(g2.dtype)
    return _softmax(dot(g2, w3, tl.zeros((BT, C_PAD), tl.float32)), C, C_PAD)


@triton.jit
def _softmax(logits, C: tl.constexpr, C_PAD: tl.constexpr):
    """softmax over C classes in fp32, [BT, C_PAD]; the padding has probability 0."""
    logits = tl.where(tl.arange(0, C_PAD)[None, :] < C, logits, -float("inf"))
    p = tl.exp(logits - tl.max(logits, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def _choose(p, balance, C: tl.constexpr, C_PAD: tl.constexpr):
    """argmax(p + balance), the lowest class on ties, and the probability of that class. A row of NaN gets class 0, as
    torch's argmax gives, so that the NaN reaches the output instead of an address."""
    e = tl.arange(0, C_PAD)
    score = tl.where(e[None, :] < C, p + balance[None, :], -float("inf"))
    broken = tl.sum((score != score).to(tl.int32), 1) > 0
    pick = tl.where(broken, 0, tl.argmax(score, 1, tie_break_left=True).to(tl.int32))
    return pick, tl.sum(tl.where(e[None, :] == pick[:, None], p, 0.0), 1)


@triton.jit
def router_fwd_kernel(
    u_ptr,  # [T, R]
    prev_ptr,  # [T, R], read if HAS_PREV
    scale_ptr,  # [R], likewise
    norm_ptr,  # [R]
    w1_ptr,  # [R, R]
    b1_ptr,
    w2_ptr,
    b2_ptr,
    w3_ptr,  # [C, R]
    balance_ptr,  # [C] fp32
    state_ptr,  # out [T, R]
    ids_ptr,  # out [T] int64
    weights_ptr,  # out [T] fp32
    counts_ptr,  # [C] int32, zero on entry: tokens of each class are added; not used unless COUNT
    T,
    eps,
    stride_u,
    stride_prev,
    R: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    HAS_PREV: tl.constexpr,
    COUNT: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    ok = t < T
    k = tl.arange(0, R)
    dtype = state_ptr.dtype.element_ty
    state = tl.load(u_ptr + t[:, None] * stride_u + k[None, :], mask=ok[:, None], other=0.0).to(tl.float32)
    if HAS_PREV:
        prev = tl.load(prev_ptr + t[:, None] * stride_prev + k[None, :], mask=ok[:, None], other=0.0)
        state += prev.to(tl.float32) * _vector(scale_ptr, k)
    state = state.to(dtype)
    tl.store(state_ptr + t[:, None] * R + k[None, :], state, mask=ok[:, None])
    h = (_normalise(state.to(tl.float32), eps, R)[0] * _vector(norm_ptr, k)).to(dtype)
    acc = tl.zeros((BT, R), tl.float32)
    for c0 in range(0, R, BC):
        cc = c0 + tl.arange(0, BC)
        g1 = _gelu(_first_layer(h, w1_ptr, b1_ptr, cc, R, BC, BT)).to(dtype)
        acc = _second_layer(acc, g1, w2_ptr, cc, R)
    g2 = _gelu(acc + _vector(b2_ptr, k)).to(dtype)
    p = _probabilities(g2, w3_ptr, BT, R, C, C_PAD)
    e = tl.arange(0, C_PAD)
    pick, weight = _choose(p, tl.load(balance_ptr + e, mask=e < C, other=0.0), C, C_PAD)
    tl.store(ids_ptr + t, pick.to(tl.int64), mask=ok)
    tl.store(weights_ptr + t, weight, mask=ok)
    if COUNT:
        counts = tl.sum(((e[None, :] == pick[:, None]) & ok[:, None]).to(tl.int32), 0)
        tl.atomic_add(counts_ptr + e, counts, mask=(e < C) & (counts > 0), sem="relaxed")


@triton.jit
def router_bwd_outer_kernel(
    dweights_ptr,  # [T] fp32
    state_ptr,  # [T, R]
    ids_ptr,  # [T] int64
    norm_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    w3_ptr,
    acts_ptr,  # out [T, 3R]: inputs of the three layers
    grads_ptr,  # out [T, 2R + C_PAD]: gradients of their outputs; all but the first R columns
    sums_ptr,  # out [programs, 4, R] fp32: partial gradients of b1, b2, norm weight, state scale; here b2
    T,
    eps,
    R: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    ok = t < T
    row = ok[:, None]
    k = tl.arange(0, R)
    e = tl.arange(0, C_PAD)
    dtype = state_ptr.dtype.element_ty
    acts = acts_ptr + t[:, None] * (3 * R)
    grads = grads_ptr + t[:, None] * (2 * R + C_PAD)
    state = tl.load(state_ptr + t[:, None] * R + k[None, :], mask=row, other=0.0).to(tl.float32)
    h = (_normalise(state, eps, R)[0] * _vector(norm_ptr, k)).to(dtype)
    tl.store(acts + k[None, :], h, mask=row)
    acc = tl.zeros((BT, R), tl.float32)
    for c0 in range(0, R, BC):
        cc = c0 + tl.arange(0, BC)
        g1 = _gelu(_first_layer(h, w1_ptr, b1_ptr, cc, R, BC, BT)).to(dtype)
        tl.store(acts + R + cc[None, :], g1, mask=row)
        acc = _second_layer(acc, g1, w2_ptr, cc, R)
    z2 = acc + _vector(b2_ptr, k)
    g2 = _gelu(z2).to(dtype)
    tl.store(acts + 2 * R + k[None, :], g2, mask=row)

    p = _probabilities(g2, w3_ptr, BT, R, C, C_PAD)
    chosen = e[None, :] == tl.load(ids_ptr + t, mask=ok, other=0).to(tl.int32)[:, None]
    weight = tl.sum(tl.where(chosen, p, 0.0), 1)
    dweight = tl.load(dweights_ptr + t, mask=ok, other=0.0)
    dlogits = ((dweight * weight)[:, None] * (tl.where(chosen, 1.0, 0.0) - p)).to(dtype)
    tl.store(grads + 2 * R + e[None, :], dlogits, mask=row)
    w3 = tl.load(w3_ptr + e[:, None] * R + k[None, :], mask=e[:, None] < C, other=0.0).to(dtype)
    dz2 = dot(dlogits, w3, tl.zeros((BT, R), tl.float32)) * _gelu_slope(z2)
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * (4 * R) + R + k, tl.sum(dz2, 0))
    tl.store(grads + R + k[None, :], dz2.to(dtype), mask=row)


@triton.jit
def router_bwd_inner_kernel(
    dstate_ptr,  # [T, R]
    state_ptr,  # [T, R]
    prev_ptr,  # [T, R], read if HAS_PREV
    scale_ptr,
    norm_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    acts_ptr,  # [T, 3R]
    grads_ptr,  # [T, 2R + C_PAD]; the first R columns are written here
    du_ptr,  # out [T, R]
    dprev_ptr,  # out [T, R], written if HAS_PREV
    sums_ptr,  # out [programs, 4, R] fp32; here b1, norm weight, state scale
    T,
    eps,
    stride_prev,
    R: tl.constexpr,
    C_PAD: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    HAS_PREV: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    row = (t < T)[:, None]
    k = tl.arange(0, R)
    dtype = state_ptr.dtype.element_ty
    grads = grads_ptr + t[:, None] * (2 * R + C_PAD)
    sums = sums_ptr + tl.program_id(0).to(tl.int64) * (4 * R)
    h = tl.load(acts_ptr + t[:, None] * (3 * R) + k[None, :], mask=row, other=0.0)
    dz2 = tl.load(grads + R + k[None, :], mask=row, other=0.0)
    dh = tl.zeros((BT, R), tl.float32)
    for c0 in range(0, R, BC):
        cc = c0 + tl.arange(0, BC)
        slope = _gelu_slope(_first_layer(h, w1_ptr, b1_ptr, cc, R, BC, BT))
        w2 = tl.load(w2_ptr + k[:, None] * R + cc[None, :]).to(dtype)
        dz1 = dot(dz2, w2, tl.zeros((BT, BC), tl.float32)) * slope
        tl.store(sums + cc, tl.sum(dz1, 0))
        dz1 = dz1.to(dtype)
        tl.store(grads + cc[None, :], dz1, mask=row)
        dh = dot(dz1, tl.load(w1_ptr + cc[:, None] * R + k[None, :]).to(dtype), dh)

    state = tl.load(state_ptr + t[:, None] * R + k[None, :], mask=row, other=0.0).to(tl.float32)
    normed, inverse = _normalise(state, eps, R)
    tl.store(sums + 2 * R + k, tl.sum(dh * normed, 0))
    dnormed = dh * _vector(norm_ptr, k)
    dstate = (dnormed - normed * (tl.sum(dnormed * normed, 1) / R)[:, None]) * inverse
    dstate += tl.load(dstate_ptr + t[:, None] * R + k[None, :], mask=row, other=0.0).to(tl.float32)
    tl.store(du_ptr + t[:, None] * R + k[None, :], dstate.to(dtype), mask=row)
    if HAS_PREV:
        prev = tl.load(prev_ptr + t[:, None] * stride_prev + k[None, :], mask=row, other=0.0).to(tl.float32)
        tl.store(sums + 3 * R + k, tl.sum(dstate * prev, 0))
        dprev = dstate * _vector(scale_ptr, k)
        tl.store(dprev_ptr + t[:, None] * R + k[None, :], dprev.to(dprev_ptr.dtype.element_ty), mask=row)


@triton.jit
def router_dw_kernel(
    grads_ptr,  # [T, 2R + C_PAD]
    acts_ptr,  # [T, 3R]
    parts_ptr,  # out [SPLITS, 2R + C_PAD, R] fp32
    T,
    rows,  # tokens of one range, a multiple of BT
    R: tl.constexpr,
    C_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    M: tl.constexpr = 2 * R + C_PAD
    m0 = tl.program_id(0) // (R // BN) * BM
    m = m0 + tl.arange(0, BM)
    n = tl.program_id(0) % (R // BN) * BN + tl.arange(0, BN)
    start = tl.program_id(1).to(tl.int64) * rows
    end = tl.minimum(start + rows, T)
    acc = tl.zeros((BM, BN), tl.float32)
    for t0 in range(start, end, BT):
        t = (t0 + tl.arange(0, BT)).to(tl.int64)
        a = tl.load(grads_ptr + t[None, :] * M + m[:, None], mask=(t < end)[None, :] & (m < M)[:, None], other=0.0)
        b = tl.load(acts_ptr + t[:, None] * (3 * R) + m0 // R * R + n[None, :], mask=(t < end)[:, None], other=0.0)
        acc = dot(a, b, acc)
    part = parts_ptr + tl.program_id(1).to(tl.int64) * M * R
    tl.store(part + m[:, None] * R + n[None, :], acc, mask=(m < M)[:, None])


@triton.jit
def router_add_kernel(parts_ptr, out_ptr, count, N, stride_part, BP: tl.constexpr, BN: tl.constexpr):
    """out[n] = the sum of parts[:count, n], always in the same order; parts [count, stride_part] fp32, n < N."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for i in range(0, count, BP):
        part = i + tl.arange(0, BP)
        at = part.to(tl.int64)[:, None] * stride_part + n[None, :]
        total += tl.sum(tl.load(parts_ptr + at, mask=(part < count)[:, None] & (n < N)[None, :], other=0.0), 0)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def aot_variants(backend: str) -> list[AotVariant]:
    """Every tile that the router ships for `backend`, at the model's shapes (R = 256, 17 classes, bf16)."""
    from zaya.kernels.router import decode

    eda = {"C": 17, "HAS_PREV": True}
    tail = {"work": "router.tail", "matrix": "body", "buffer_loads": False}  # scratch behind run-time offsets
    one = {"divisible": (), "matrix": "none"}
    kernels: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "fwd": (router_fwd_kernel, eda, {"work": "router.tail"}),
        "bwd_outer": (router_bwd_outer_kernel, {"C": 17}, {"work": "router.backward_outer"}),
        "bwd_inner": (router_bwd_inner_kernel, {"HAS_PREV": True}, {"work": "router.backward_inner"}),
        "dw": (router_dw_kernel, {}, {"work": "router.weight_gradients", "divisible": ("rows",)}),
        "add_vectors": (router_add_kernel, {}, {"matrix": "none", "divisible": ("N",)}),
        "add_matrices": (router_add_kernel, {}, {"matrix": "none", "divisible": ("N",)}),
        "project": (decode.router_project_kernel, {}, {"work": "router.down_proj", "divisible": ("D",)}),
        "decode": (decode.router_decode_kernel, eda, tail),
        "project_vec": (decode.router_project_vec_kernel, {"D": 2048}, one | {"work": "router.down_proj"}),
        "decode_vec": (decode.router_decode_vec_kernel, eda, tail | {"matrix": "none"}),
    }
    variants = []
    for (name, found), rows in ROUTER.items():
        for limit, tile in rows if found == backend else ():
            kernel, constants, rest = kernels[name]
            fixed = {"R": 256, "C_PAD": 32, "SPLITS": tile.splits, "PDL": tile.pdl} | constants | tile.blocks
            if name == "decode":
                fixed["SPLITS"] = router_tile("project", backend, int(limit), 256).splits
            rest = rest | {"allowances": ALLOWANCES.get((name, backend, tile.blocks.get("BT")), {})}
            for count in (True, False) if name == "fwd" else (None,):
                title = f"{name}{' counting' if count else ''} {_upto(limit)}"
                variants.append(_variant(title, kernel, fixed | {"COUNT": count}, tile.options, limit, rest))
    return variants


SPILLS = "spills a little, and was faster (61 µs at T = 32,768) than the best tile that spills nothing (85 µs)"
ALLOWANCES: dict[tuple[str, str, int | None], dict[str, tuple[int, str]]] = {
    ("fwd", "cuda", 128): dict.fromkeys(("spill_store_bytes", "spill_load_bytes"), (60, SPILLS))
}


def _upto(limit: float) -> str:
    return "any T" if limit == float("inf") else f"T<={limit:g}"


def _variant(name: str, kernel: Any, constants: dict, options: dict, limit: float, rest: dict) -> AotVariant:
    """Types by name: these kernels take bf16 but for what is listed here."""
    types = {"T": "i32", "count": "i32", "D": "i32", "N": "i32", "rows": "i32", "eps": "fp32", "ids_ptr": "*i64"}
    types |= {"counts_ptr": "*i32", "ticket_ptr": "*i32"}
    types |= dict.fromkeys(
        ("balance_ptr", "weights_ptr", "dweights_ptr", "sums_ptr", "parts_ptr", "slices_ptr"), "*fp32"
    )
    arguments = kernel.arg_names
    signature = {
        a: types.get(a, "i32" if a.startswith("stride_") else "*bf16") for a in arguments if a not in constants
    }
    floor = {"work": (rest["work"], int(min(limit, 32768)))} if "work" in rest else {}
    used = {a: constants[a] for a in arguments if a in constants}
    return AotVariant(kernel, name, signature, used, options, **(rest | floor))
