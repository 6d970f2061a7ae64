"""What matrix products in Triton share."""

import os

import triton
import triton.language as tl

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a, b, acc):
    """a b + acc, accumulated in fp32; fp32 operands are not rounded to TF32."""
    if INTERPRET:  # the interpreter's bf16 products are wrong: widen first
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tile_at(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles share a column before the next column."""
    band = tile // (GROUP * col_tiles)
    height = tl.minimum(row_tiles - band * GROUP, GROUP)
    inside = tile - band * (GROUP * col_tiles)
    return band * GROUP + inside % height, inside // height


@triton.jit
def halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    """Left and right half of the columns; free on matrix accumulators, whose columns lie in registers."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
