"""Muon: momentum, then the nearest semi-orthogonal matrix of every logical matrix.

    M <- mu M + (1 - mu) G,   U = NS((1 - mu) G + mu M),   W <- (1 - lr d) W - lr 0.2 sqrt(max(m, n)) U

NS is five steps of X <- a X + b (X X^T) X + c (X X^T)^2 X from X = G / ||G||_F (Jordan et al., 2024), transposed where
the matrix is tall. The factor 0.2 sqrt(max(m, n)) gives updates the RMS that AdamW's have (Liu et al.,
arXiv 2502.16982). torch.optim.Muon takes one 2-D matrix at a time; here a tensor may be a stack of experts [E, m, n],
each of which may hold several maps along its rows, and matrices of one shape go through NS together.
"""

from collections import defaultdict

import torch

from zaya.kernels.newton_schulz import newton_schulz

CHUNK_BYTES = 1 << 20  # on a CPU: its cache should hold a stack and its Gram matrices
CHUNK_BYTES_GPU = 1 << 29


def as_matrices(tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """View [..., blocks * m, n] as [N, m, n], one entry per logical matrix."""
    m, n = tensor.shape[-2] // blocks, tensor.shape[-1]
    return tensor.reshape(-1, m, n)


class Muon(torch.optim.Optimizer):
    """Muon over 2-D parameters and stacks of matrices. Each parameter group has its `blocks` and `weight_decay`."""

    def __init__(
        self, params, lr: float, momentum: float, weight_decay: float, ns_steps: int = 5, ns_dtype=torch.bfloat16
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "blocks": 1}
        super().__init__(params, defaults)
        self.ns_steps, self.ns_dtype = ns_steps, ns_dtype

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("closures are not supported: compute the gradient before calling step")
        by_shape = defaultdict(list)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = as_matrices(self._momentum(p, group), group["blocks"])
                target = as_matrices(p, group["blocks"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                tall = update.shape[-2] > update.shape[-1]
                update, target = (update.mT, target.mT) if tall else (update, target)
                by_shape[update.shape[-2:]].append((target, update, group["lr"]))
        for (_, n), entries in by_shape.items():
            self._apply(entries, 0.2 * n**0.5)

    def _momentum(self, p: torch.Tensor, group: dict) -> torch.Tensor:
        """The Nesterov update before orthogonalisation, in the gradient's shape."""
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(p.grad, 1 - group["momentum"])
        return p.grad.lerp(state["momentum"], group["momentum"])

    def _apply(self, entries: list[tuple[torch.Tensor, torch.Tensor, float]], scale: float) -> None:
        """Orthogonalise updates of one shape in batches and subtract them."""
        targets = [t for target, _, _ in entries for t in target.unbind()]
        rates = [lr for target, _, lr in entries for _ in range(len(target))]
        updates = torch.cat([update for _, update, _ in entries]) if len(entries) > 1 else entries[0][1]
        limit = CHUNK_BYTES if updates.device.type == "cpu" else CHUNK_BYTES_GPU
        size = max(1, limit // (updates[0].numel() * self.ns_dtype.itemsize))
        for start in range(0, len(targets), size):
            chunk = newton_schulz(updates[start : start + size], self.ns_steps, dtype=self.ns_dtype)
            for target, update, lr in zip(targets[start:], chunk.unbind(), rates[start:], strict=False):
                target.add_(update, alpha=-lr * scale)
