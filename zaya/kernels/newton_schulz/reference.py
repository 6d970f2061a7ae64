"""The quintic Newton-Schulz iteration of Muon (Jordan et al., 2024) in plain torch, on stacks of matrices.

    X <- x / |x|_F,   then `steps` times   A = X X^T,   X <- a X + (b A + c A^2) X

transposed where the matrix is tall. The singular values come to lie between about 0.7 and 1.2, not at 1.
"""

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # torch.optim.Muon's
EPS = 1e-7


@torch.no_grad()
def newton_schulz_reference(x, steps=5, coefficients=COEFFICIENTS, eps=EPS, dtype=torch.bfloat16):
    """`newton_schulz` in plain torch."""
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    stack = (x.mT if tall else x).to(dtype).reshape(-1, *sorted(x.shape[-2:]))
    stack = stack / stack.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(stack, stack.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        stack = torch.baddbmm(stack, polynomial, stack, beta=a)
    out = stack.reshape(*x.shape[:-2], *stack.shape[1:])
    return out.mT if tall else out
