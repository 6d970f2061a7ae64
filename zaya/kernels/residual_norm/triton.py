"""Residual scaling and RMSNorm in Triton: one pass over the stream forwards, one backwards. One source for ROCm and
CUDA.

Nothing is kept for the backward pass but the inputs: r' is cheaper to form again than to read. A program of the
backward kernel walks over its own rows and keeps four column sums in registers; they are added afterwards in a fixed
order, so gradients are the same bits from run to run.
"""

from typing import Any

import triton
import triton.language as tl

from zaya.kernels.aot import AotVariant
from zaya.kernels.tiles import RESIDUAL_NORM


@triton.jit
def _row(ptr, at, ok):
    return tl.load(ptr + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def residual_norm_fwd_kernel(
    residual_ptr,  # [T, D]
    branch_ptr,  # [T, D], read if BRANCH, as the four vectors below
    s_ptr,  # [D]
    b_ptr,
    rs_ptr,
    rb_ptr,
    weight_ptr,  # [D], read if NORM
    joined_ptr,  # out [T, D] if BRANCH, in the residual's dtype
    y_ptr,  # out [T, D] if NORM
    T,
    eps,
    stride_residual,
    stride_branch,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BRANCH: tl.constexpr,
    NORM: tl.constexpr,
):
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
    d = tl.arange(0, BD)[None, :]
    inside, ok = d < D, (t < T) & (d < D)
    r = _row(residual_ptr, t * stride_residual + d, ok)
    if BRANCH:
        h = _row(branch_ptr, t * stride_branch + d, ok)
        r = (h + _row(b_ptr, d, inside)) * _row(s_ptr, d, inside) + (r + _row(rb_ptr, d, inside)) * _row(
            rs_ptr, d, inside
        )
        tl.store(joined_ptr + t * D + d, r.to(joined_ptr.dtype.element_ty), mask=ok)
    if NORM:
        inverse = tl.rsqrt(tl.sum(r * r, 1) / D + eps)[:, None]
        y = r * inverse * _row(weight_ptr, d, inside)
        tl.store(y_ptr + t * D + d, y.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def residual_norm_bwd_kernel(
    djoined_ptr,  # [T, D] gradient of r', read if JOINED
    dy_ptr,  # [T, D] gradient of y, read if NORM
    residual_ptr,
    branch_ptr,
    s_ptr,
    b_ptr,
    rs_ptr,
    rb_ptr,
    weight_ptr,
    dresidual_ptr,  # out [T, D]
    dbranch_ptr,  # out [T, D] if BRANCH
    sums_ptr,  # out [programs, 4, D] fp32: sums of g, g (h + b), g (r + b') and dy r' / rms; g: gradient of r'
    T,
    rows,
    eps,
    stride_residual,
    stride_branch,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BRANCH: tl.constexpr,
    NORM: tl.constexpr,
    JOINED: tl.constexpr,
):
    d = tl.arange(0, BD)[None, :]
    inside = d < D
    sum_g = tl.zeros((BT, BD), tl.float32)
    sum_gh = tl.zeros((BT, BD), tl.float32)
    sum_gr = tl.zeros((BT, BD), tl.float32)
    sum_w = tl.zeros((BT, BD), tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows
    if BRANCH:
        s, b = _row(s_ptr, d, inside), _row(b_ptr, d, inside)
        rs, rb = _row(rs_ptr, d, inside), _row(rb_ptr, d, inside)
    if NORM:
        weight = _row(weight_ptr, d, inside)
    for i in range(0, rows, BT):
        t = first + i + tl.arange(0, BT)[:, None]
        ok = (t < T) & inside
        r = _row(residual_ptr, t * stride_residual + d, ok)
        g = tl.zeros((BT, BD), tl.float32)
        if BRANCH:
            h = _row(branch_ptr, t * stride_branch + d, ok) + b
            shifted = r + rb
            r = h * s + shifted * rs
        if JOINED:
            g = _row(djoined_ptr, t * D + d, ok)
        if NORM:
            inverse = tl.rsqrt(tl.sum(tl.where(ok, r * r, 0.0), 1) / D + eps)[:, None]
            dy, unit = _row(dy_ptr, t * D + d, ok), tl.where(ok, r * inverse, 0.0)
            sum_w += dy * unit
            dy *= weight
            g += inverse * (dy - unit * (tl.sum(dy * unit, 1) / D)[:, None])
        if BRANCH:
            sum_g += g
            sum_gh += g * tl.where(ok, h, 0.0)
            sum_gr += g * tl.where(ok, shifted, 0.0)
            tl.store(dbranch_ptr + t * D + d, (g * s).to(dbranch_ptr.dtype.element_ty), mask=ok)
            g *= rs
        tl.store(dresidual_ptr + t * D + d, g.to(dresidual_ptr.dtype.element_ty), mask=ok)
    column = tl.arange(0, BD)
    out = sums_ptr + tl.program_id(0).to(tl.int64) * (4 * D) + column
    if BRANCH:
        tl.store(out, tl.sum(sum_g, 0), mask=column < D)
        tl.store(out + D, tl.sum(sum_gh, 0), mask=column < D)
        tl.store(out + 2 * D, tl.sum(sum_gr, 0), mask=column < D)
    if NORM:
        tl.store(out + 3 * D, tl.sum(sum_w, 0), mask=column < D)


FORMS = {"join and norm": (True, True), "join": (True, False), "norm": (False, True)}


def aot_variants(backend: str) -> list[AotVariant]:
    """Every form and tile for `backend` at the model's width, bf16 beside the fp32 stream."""
    types = {"residual_ptr": "*fp32", "joined_ptr": "*fp32", "djoined_ptr": "*fp32", "dresidual_ptr": "*fp32"}
    types |= {"sums_ptr": "*fp32", "T": "i32", "rows": "i32", "eps": "fp32"}
    found = []
    for (name, where), rows in RESIDUAL_NORM.items():
        for limit, tile in rows if where == backend else ():
            kernel = {"fwd": residual_norm_fwd_kernel, "bwd": residual_norm_bwd_kernel}[name]
            for form, (branch, norm) in FORMS.items():
                fixed = {"D": 2048, "BD": 2048, "BRANCH": branch, "NORM": norm, "JOINED": True} | tile.blocks
                fixed = {k: v for k, v in fixed.items() if k in kernel.arg_names}
                signature = {
                    a: types.get(a, "i32" if a.startswith("stride_") else "*bf16")
                    for a in kernel.arg_names
                    if a not in fixed
                }
                work = ("residual_norm" if name == "fwd" else "residual_norm.backward", int(min(limit, 32768)))
                rest: dict[str, Any] = {"matrix": "none", "work": work if form == "join and norm" else None}
                upto = "any T" if limit == float("inf") else f"T<={limit:g}"
                found.append(AotVariant(kernel, f"{name}, {form}, {upto}", signature, fixed, tile.options, **rest))
    return found
