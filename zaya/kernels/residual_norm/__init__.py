"""`residual_norm`: a branch joins the fp32 residual stream, and the next norm. The mathematics is in reference.py."""

from zaya.kernels import log_once, pick_backend
from zaya.kernels.residual_norm.reference import residual_norm_reference

__all__ = ["residual_norm"]


def residual_norm(residual, branch=None, scaling=None, norm=None, backend="auto"):
    """Join `branch` to `residual`, then normalise: see `residual_norm_reference` for shapes and the two results.

    Either half may be left out: without `branch` and `scaling` it is an RMSNorm, without `norm` only the joining.
    Differentiable in every tensor. Raises UserError when "triton" is forced where there is no GPU.
    """
    if pick_backend(residual.device, backend) == "triton":
        from zaya.kernels.residual_norm import ops

        reason = ops.unsupported(residual, branch, norm)
        if reason is None:
            return ops.apply(residual, branch, scaling, norm)
        log_once(f"residual_norm: reference instead of the Triton kernel: {reason}")
    return residual_norm_reference(residual, branch, scaling, norm)
