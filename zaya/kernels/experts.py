"""`experts_implementation="zaya"`: stock transformers' ZAYA experts, applied by our op."""

import torch

from zaya.kernels.moe import moe


def experts_forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
    """What stock's experts module computes: hidden_states [T, D], top_k_index and top_k_weights [T, 1] -> [T, D].

    Stock sends a skipped token to expert 0 with weight 0; here it gets no rows.
    """
    if top_k_index.shape[-1] != 1:
        raise ValueError(
            f'experts_implementation="zaya" is for top-1 routing; this model chose {top_k_index.shape[-1]}'
        )
    weights = top_k_weights[:, 0]
    experts = self.gate_up_proj.shape[0]
    ids = top_k_index[:, 0].masked_fill(weights == 0, experts)
    return moe(hidden_states, self.gate_up_proj, self.down_proj, ids, weights, decode=not self.training)
