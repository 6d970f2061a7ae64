"""Where vLLM 0.26 to 0.33 differ, and nothing else."""

from typing import Any

import torch

try:
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory as _FusedMoE
except ImportError:  # before the factory, the class of this name was called directly
    from vllm.model_executor.layers.fused_moe import FusedMoE as _FusedMoE  # type: ignore[attr-defined,no-redef]


def fused_experts(**options: Any) -> torch.nn.Module:
    """vLLM's mixture-of-experts layer, called with `hidden_states` and `router_logits`, summed over tensor ranks."""
    return _FusedMoE(renormalize=False, reduce_results=True, **options)


def decode_slots(metadata: Any) -> torch.Tensor:
    """State slot of each decoding request, [num_decodes]: the first column where there are several."""
    slots = metadata.state_indices_tensor_d[: metadata.num_decodes]
    return slots if slots.dim() == 1 else slots[:, 0]


def prefill_slots(metadata: Any) -> torch.Tensor:
    """State slot of each request in prefill, [num_prefills]."""
    slots = metadata.state_indices_tensor_p[: metadata.num_prefills]
    return slots if slots.dim() == 1 else slots[:, 0]
