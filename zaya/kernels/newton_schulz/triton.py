"""The products of Newton-Schulz in Triton. The two whose result is symmetric are made on and above the diagonal only,
and mirrored; what is added to each is added before its only rounding.

Matrices are padded with zeros to multiples of the tiles (ops.py), which changes no element: no product needs a mask.
"""

import triton
import triton.language as tl

from zaya.kernels import tiles
from zaya.kernels.aot import AotVariant
from zaya.kernels.products import dot, halves, tile_at
from zaya.kernels.tiles import Tile


@triton.jit
def _load(x, batch, r0, c0, rows, columns, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr):
    """[BR, BC] of matrix `batch` of x [., rows, columns]."""
    if TMA:
        block = x.load([batch, r0, c0]).reshape(BR, BC)
    else:
        r = (r0 + tl.arange(0, BR))[:, None]
        c = (c0 + tl.arange(0, BC))[None, :]
        block = tl.load(x + batch.to(tl.int64) * rows * columns + r * columns + c)
    return block


@triton.jit
def _column_of(tile, RATIO: tl.constexpr):
    """The column tile of the tile-th tile on or above the diagonal, counted column by column, where column j has
    RATIO (j + 1) row tiles. Exact: the root is off by less than one."""
    j = ((tl.sqrt(8.0 * (tile // RATIO).to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(RATIO * (j * (j + 1) // 2) > tile, j - 1, j)
    return tl.where(RATIO * ((j + 1) * (j + 2) // 2) <= tile, j + 1, j)


@triton.jit
def _store_mirrored(out, add, m0, n0, M, acc, alpha, beta, ADD: tl.constexpr, B: tl.constexpr):
    """A square block, and its mirror image across the diagonal. Below the diagonal nothing."""
    m = m0 + tl.arange(0, B)
    n = n0 + tl.arange(0, B)
    at = m[:, None] * M + n[None, :]
    mine = tl.full((B, B), n0 - m0, tl.int32) >= 0  # one value for the whole block: stores stay wide
    acc = acc * alpha
    if ADD:
        acc += tl.load(add + at, mask=mine, other=0.0).to(tl.float32) * beta
    value = acc.to(out.dtype.element_ty)
    tl.store(out + at, value, mask=mine)
    above = tl.full((B, B), n0 - m0, tl.int32) > 0
    tl.store(out + n[:, None] * M + m[None, :], tl.trans(value), mask=above)


@triton.jit
def newton_schulz_symmetric_kernel(
    x,  # [S, M, K]
    y,  # x again, in blocks of BN rows
    add_ptr,  # [S, M, M], read if ADD
    out_ptr,  # out [S, M, M]
    M,
    K,
    each,  # tiles of one matrix
    tiles,  # tiles of all matrices
    alpha,
    beta,
    BM: tl.constexpr,
    BN: tl.constexpr,  # BM or 2 BM
    BK: tl.constexpr,
    TMA: tl.constexpr,
    ADD: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out = alpha x x^T (+ beta add), for a symmetric add. With a symmetric x that is alpha x^2 + beta add."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        batch = tile // each
        t = tile - batch * each
        j = _column_of(t, BN // BM)
        m0 = (t - (BN // BM) * (j * (j + 1) // 2)) * BM
        n0 = j * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            right = _load(y, batch, n0, k0, M, K, BN, BK, TMA)
            acc = dot(_load(x, batch, m0, k0, M, K, BM, BK, TMA), right.T, acc)
        base = batch.to(tl.int64) * M * M
        if BM == BN:
            _store_mirrored(out_ptr + base, add_ptr + base, m0, n0, M, acc, alpha, beta, ADD, BM)
        else:
            left, right = halves(acc, BM, BN)
            _store_mirrored(out_ptr + base, add_ptr + base, m0, n0, M, left, alpha, beta, ADD, BM)
            _store_mirrored(out_ptr + base, add_ptr + base, m0, n0 + BM, M, right, alpha, beta, ADD, BM)


@triton.jit
def _store_added(out, add, m0, n0, N, acc, beta, BM: tl.constexpr, BN: tl.constexpr):
    at = (m0 + tl.arange(0, BM))[:, None] * N + n0 + tl.arange(0, BN)[None, :]
    acc += tl.load(add + at).to(tl.float32) * beta
    tl.store(out + at, acc.to(out.dtype.element_ty))


@triton.jit
def newton_schulz_update_kernel(
    p,  # [S, M, M]
    x,  # [S, M, N]
    add_ptr,  # [S, M, N]: x again, as a pointer
    out_ptr,  # out [S, M, N]
    M,
    N,
    tiles,
    beta,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out = p x + beta x."""
    each = (M // BM) * (N // BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        batch = tile // each
        i, j = tile_at(tile - batch * each, M // BM, N // BN, GROUP)
        m0 = i * BM
        n0 = j * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, M, BK):
            right = _load(x, batch, k0, n0, M, N, BK, BN, TMA)
            acc = dot(_load(p, batch, m0, k0, M, M, BM, BK, TMA), right, acc)
        base = batch.to(tl.int64) * M * N
        if SPLIT:
            left, right = halves(acc, BM, BN)
            _store_added(out_ptr + base, add_ptr + base, m0, n0, N, left, beta, BM, BN // 2)
            _store_added(out_ptr + base, add_ptr + base, m0, n0 + BN // 2, N, right, beta, BM, BN // 2)
        else:
            _store_added(out_ptr + base, add_ptr + base, m0, n0, N, acc, beta, BM, BN)


def symmetric_constants(tile: Tile, tma: bool, add: bool) -> dict:
    """Constants of the symmetric kernel with this tile."""
    return {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "TMA": tma, "ADD": add, "FLATTEN": tile.flatten}


def update_constants(tile: Tile, tma: bool) -> dict:
    """Constants of the update kernel with this tile."""
    shape = {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": tile.group}
    return shape | {"TMA": tma, "SPLIT": tile.split > 1, "FLATTEN": tile.flatten}


def aot_variants(backend: str) -> list[AotVariant]:
    """Every tile that Newton-Schulz ships for `backend`, in bf16."""
    found = []
    types = dict.fromkeys(("x", "y", "p", "add_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("M", "N", "K", "each", "tiles"), "i32") | dict.fromkeys(("alpha", "beta"), "fp32")
    block = "tensordesc<bf16[1, {}, {}]>".format

    def variant(kernel, name, constants, tile, blocks, table):
        signature = {a: types[a] for a in kernel.arg_names if a not in constants} | (blocks if table.tma else {})
        return AotVariant(kernel, name, signature, constants, tile.launch, ("M", "N", "K"))

    for table in tiles.NEWTON_SCHULZ[backend]:
        limit = "any size" if table.elements == float("inf") else f"up to {table.elements / 2**20:g} M"
        t = table.gram
        for add in (False, True):
            name = f"{'polynomial' if add else 'gram'} {limit}"
            constants = symmetric_constants(t, table.tma, add)
            blocks = {"x": block(t.bm, t.bk), "y": block(t.bn, t.bk)}
            found.append(variant(newton_schulz_symmetric_kernel, name, constants, t, blocks, table))
        t = table.update
        blocks = {"p": block(t.bm, t.bk), "x": block(t.bk, t.bn)}
        constants = update_constants(t, table.tma)
        found.append(variant(newton_schulz_update_kernel, f"update {limit}", constants, t, blocks, table))
    return found
