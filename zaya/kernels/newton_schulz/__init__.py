"""`newton_schulz`: the nearest semi-orthogonal matrix, nearly, for Muon. The mathematics is in reference.py, the
kernels in triton.py, their launches in ops.py."""

import torch

from zaya.kernels import log_once, pick_backend
from zaya.kernels.newton_schulz.reference import COEFFICIENTS, EPS, newton_schulz_reference

__all__ = ["COEFFICIENTS", "newton_schulz"]


def newton_schulz(x, steps=5, coefficients=COEFFICIENTS, eps=EPS, dtype=torch.bfloat16, backend="auto"):
    """x [..., M, N], wide or tall, a stack of any shape -> the same shape in `dtype`, singular values about 1.

    `steps` steps of X <- a X + (b A + c A^2) X, A = X X^T, from X = x / max(|x|, eps); `coefficients` are (a, b, c).
    Products have operands in `dtype` and add up in fp32. No gradient.
    """
    if pick_backend(x.device, backend) == "triton":
        from zaya.kernels.newton_schulz import ops

        reason = ops.unsupported(x, dtype)
        if reason is None:
            return ops.newton_schulz_triton(x, steps, coefficients, eps, dtype)
        log_once(f"newton_schulz: the reference instead of the kernels, because of {reason}")
    return newton_schulz_reference(x, steps, coefficients, eps, dtype)
