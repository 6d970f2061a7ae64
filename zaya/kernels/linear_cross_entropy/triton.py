"""What the head needs beside the library's products: the softmax of a block of logits with its loss and gradient in
one kernel, and the sum over tokens of the weight's gradient in fp32 where the library has none."""

import triton
import triton.language as tl

from zaya.kernels import tiles
from zaya.kernels.aot import AotVariant
from zaya.kernels.products import dot, halves, tile_at
from zaya.kernels.tiles import Tile

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _log2_of_sum(line, V, BV: tl.constexpr, STAGES: tl.constexpr):
    """log2 of the sum of exp over one row of V logits. Every lane keeps its own maximum: no barrier in the loop."""
    top = tl.full((BV,), -1e38, tl.float32)
    total = tl.zeros((BV,), tl.float32)
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        v = v0 + tl.arange(0, BV)
        x = tl.load(line + v, mask=v < V, other=-float("inf")).to(tl.float32) * LOG2E
        new = tl.maximum(top, x)
        total = total * tl.exp2(top - new) + tl.exp2(x - new)
        top = new
    highest = tl.max(top, 0)
    return highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))


@triton.jit
def head_softmax_kernel(
    logits_ptr,  # [T, V], rows `stride` apart
    grad_ptr,  # out, written if GRAD: gradient of the logits; the logits themselves when the dtypes are one
    labels_ptr,  # [T]
    losses_ptr,  # out [T] fp32
    T,
    V,
    stride,
    ignore_index,
    z_loss,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    GRAD: tl.constexpr,
):
    """A row at a time: two reads, one write. A label outside 0..V-1 makes its loss and gradient NaN."""
    dtype = grad_ptr.dtype.element_ty
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        label = tl.load(labels_ptr + row)
        line = logits_ptr + tl.cast(row, tl.int64) * stride
        to = grad_ptr + tl.cast(row, tl.int64) * stride
        if label != ignore_index:
            inside = (label >= 0) & (label < V)
            at_label = tl.load(line + label, mask=inside, other=float("nan")).to(tl.float32)
            log2_sum = _log2_of_sum(line, V, BV, STAGES)
            lse = log2_sum * LN2
            tl.store(losses_ptr + row, lse - at_label + z_loss * lse * lse)
            if GRAD:
                scale = tl.where(inside, 1.0 + 2.0 * z_loss * lse, float("nan"))
                for v0 in tl.range(0, V, BV, num_stages=STAGES):
                    v = v0 + tl.arange(0, BV)
                    x = tl.load(line + v, mask=v < V, other=0.0).to(tl.float32)
                    g = tl.exp2(x * LOG2E - log2_sum) * scale
                    tl.store(to + v, tl.where(v == label, g - 1.0, g).to(dtype), mask=v < V)
        else:
            tl.store(losses_ptr + row, 0.0)
            if GRAD:
                for v0 in range(0, V, BV):
                    v = v0 + tl.arange(0, BV)
                    tl.store(to + v, tl.zeros((BV,), dtype), mask=v < V)


@triton.jit
def _store_sum(out, m, n, M, N, value, ADD: tl.constexpr):
    at = out + m.to(tl.int64)[:, None] * N + n[None, :]
    ok = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        value += tl.load(at, mask=ok, other=0.0)
    tl.store(at, value, mask=ok)


@triton.jit
def head_dw_kernel(
    a,  # [T, M], rows stride_a apart
    b,  # [T, N], rows stride_b apart
    out_ptr,  # out [M, N] fp32; added to if ADD
    T,
    M,
    N,
    stride_a,
    stride_b,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    ADD: tl.constexpr,
    SPLIT: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out (+)= a^T b, summed over T in fp32."""
    row_tiles = tl.cdiv(M, BM)
    col_tiles = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        i, j = tile_at(tile, row_tiles, col_tiles, GROUP)
        m0 = i * BM
        n0 = j * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for t0 in range(0, T, BK):
            if TMA:
                acc = dot(a.load([t0, m0]).T, b.load([t0, n0]), acc)
            else:
                t = t0 + tl.arange(0, BK)
                m = m0 + tl.arange(0, BM)
                n = n0 + tl.arange(0, BN)
                at = a + t.to(tl.int64)[None, :] * stride_a + m[:, None]
                bt = b + t.to(tl.int64)[:, None] * stride_b + n[None, :]
                left = tl.load(at, mask=(t < T)[None, :] & (m < M)[:, None], other=0.0)
                acc = dot(left, tl.load(bt, mask=(t < T)[:, None] & (n < N)[None, :], other=0.0), acc)
        m = m0 + tl.arange(0, BM)
        if SPLIT:
            left, right = halves(acc, BM, BN)
            n = n0 + tl.arange(0, BN // 2)
            _store_sum(out_ptr, m, n, M, N, left, ADD)
            _store_sum(out_ptr, m, n + BN // 2, M, N, right, ADD)
        else:
            _store_sum(out_ptr, m, n0 + tl.arange(0, BN), M, N, acc, ADD)


def dw_constants(tile: Tile, tma: bool, add: bool) -> dict:
    """Constants of `head_dw_kernel` with this tile."""
    shape = {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": tile.group}
    return shape | {"TMA": tma, "ADD": add, "SPLIT": tile.split > 1, "FLATTEN": tile.flatten}


def aot_variants(backend: str) -> list[AotVariant]:
    """Every tile that the head ships for `backend`, in bf16."""
    head = tiles.HEAD[backend]
    types = {"logits_ptr": "*bf16", "grad_ptr": "*bf16", "labels_ptr": "*i64", "losses_ptr": "*fp32", "T": "i32"}
    types |= {"V": "i32", "stride": "i32", "ignore_index": "i32", "z_loss": "fp32"}
    blocks = {"BV": head.block, "STAGES": head.stages}
    found = [
        AotVariant(
            head_softmax_kernel, "loss and gradient" if grad else "loss", types, blocks | {"GRAD": grad},
            {"num_warps": head.warps}, ("V", "stride"), matrix="none", buffer_loads=False,  # rows at 64-bit offsets
        )
        for grad in (True, False)
    ]  # fmt: skip
    t = head.dw
    for tma in (True, False) if head.tma else (False,):
        block = "tensordesc<bf16[{}, {}]>".format
        types = {"a": block(t.bk, t.bm) if tma else "*bf16", "b": block(t.bk, t.bn) if tma else "*bf16"}
        types |= {"out_ptr": "*fp32"} | dict.fromkeys(("T", "M", "N", "stride_a", "stride_b"), "i32")
        for add in (True, False):
            title = f"dw{' adding' if add else ''}{'' if tma or not head.tma else ', by pointers'}"
            found.append(
                AotVariant(
                    head_dw_kernel, title, types, dw_constants(t, tma, add), t.launch, ("T", "M", "N"),
                    buffer_loads=not add,  # the sum is over 2 GiB
                )
            )  # fmt: skip
    return found
