"""Residual scaling (ZAYA1, arXiv 2511.17127) and RMSNorm (arXiv 1910.07467) in plain torch.

r' = (h + b) * s + (r + b') * s'            in fp32 where r is
y  = r' / sqrt(mean(r'^2) + eps) * w        the mean in fp32, r' first rounded to w's dtype
"""

import torch


def residual_norm_reference(residual, branch, scaling, norm):
    """residual [..., D] -> (r' [..., D], y [..., D] in the norm weight's dtype or None).

    branch [..., D] with scaling (s, b, s', b'), four vectors [D]; or both None, and r' is the residual itself.
    norm: (weight [D], eps), or None.
    """
    if branch is not None:
        s, b, residual_s, residual_b = scaling
        residual = (branch + b) * s + (residual + residual_b) * residual_s
    if norm is None:
        return residual, None
    weight, eps = norm
    x = residual.to(weight.dtype)
    wide = x.float()
    return residual, weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
