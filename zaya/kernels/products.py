"""The one matrix product of all kernels."""

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
