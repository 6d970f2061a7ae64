"""What a ZAYA1 layer remembers between calls: keys and values, the last convolution columns, and the delayed value.

`ZayaCache` can be rolled back; transformers' own `DynamicCache(config=...)` and `StaticCache` work as well. The model
reads and writes all of them through `read_state` and `write_state`.
"""

import torch

from zaya.errors import UserError


def is_empty(cache) -> bool:
    """Whether `cache` (or None) holds no token yet. Reads no tensor."""
    return cache is None or not cache.has_previous_state(0)


def read_state(cache, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The layer's (convolution columns [B, W, C], delayed value [B, 1, G d / 2]), or None at the start."""
    if cache is None or not cache.has_previous_state(layer_idx):
        return None
    layer = cache.layers[layer_idx]
    return layer.conv_states[0].transpose(1, 2), layer.recurrent_states[0].unsqueeze(1)


def write_state(cache, layer_idx: int, columns: torch.Tensor, delayed: torch.Tensor) -> None:
    """Remember the layer's newest columns [B, n, C] and delayed value [B, m, G d / 2]."""
    if layer_idx >= len(cache.layers) or not hasattr(cache.layers[layer_idx], "conv_states"):
        raise UserError(
            "this cache has no place for the convolution state; make it with zaya.ZayaCache(config) or "
            "DynamicCache(config=model.config)"
        )
    cache.update_conv_state(columns.transpose(1, 2), layer_idx)
    cache.update_recurrent_state(delayed[:, -1], layer_idx)
