"""What training minimises."""

import torch
from torch import nn

from zaya.kernels.linear_cross_entropy import linear_cross_entropy

IGNORE = -100  # a target that does not count


class LossModel(nn.Module):
    """A causal language model and its loss as one module, so that what wraps it (DDP) sees the whole forward pass.

    Takes any transformers model with `model`, whose first output is the hidden states, and a `lm_head`. The logits of
    the batch are never made: see zaya/kernels/linear_cross_entropy.
    """

    def __init__(self, language_model: nn.Module):
        super().__init__()
        self.language_model = language_model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """inputs, targets int64 [B, S] -> cross-entropy in nats, summed over the targets that are not IGNORE."""
        hidden = self.language_model.model(input_ids=inputs, use_cache=False)[0]
        head = self.language_model.lm_head
        return linear_cross_entropy(hidden.flatten(0, 1), head.weight, targets.flatten(), head.bias, IGNORE)
