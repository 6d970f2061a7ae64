"""What a ZAYA1 layer remembers between calls: keys and values, the last convolution columns, and the delayed value.

`ZayaCache` rolls back, reorders and selects all three; transformers' own `DynamicCache(config=...)` and `StaticCache`
work as well. The model reads and writes all of them through `read_state` and `write_state`.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from zaya.errors import UserError


class _Memory:
    """The convolution columns and delayed values of a layer's last tokens, newest last; mixed into a K/V layer.

    `reach` columns and one delayed value are needed to go on; `rollback` more are kept, so that tokens can be removed.
    """

    def _start(self, reach: int, rollback: int | None) -> None:
        self.reach, self.rollback, self.record_past = reach, rollback, False
        self.columns: torch.Tensor | None = None  # [B, reach + kept, C]
        self.delayed: torch.Tensor | None = None  # [B, 1 + kept, G d / 2]

    def remember(self, columns: torch.Tensor, delayed: torch.Tensor, real: torch.Tensor | None) -> None:
        """Add columns [B, reach + S, C] and delayed values [B, 1 + S, G d / 2], which begin with the old state."""
        if self.columns is not None:
            assert self.delayed is not None
            columns = torch.cat([self.columns, columns[:, self.reach :]], dim=1)
            delayed = torch.cat([self.delayed, delayed[:, 1:]], dim=1)
        if real is not None:
            columns, delayed = _align(columns, real), _align(delayed, real)
        self.columns, self.delayed = self._trim(columns, self.reach), self._trim(delayed, 1)

    def _trim(self, x: torch.Tensor, needed: int) -> torch.Tensor:
        if self.record_past or self.rollback is None:
            return x
        return x[:, -(needed + self.rollback) :].clone()  # a view would keep the whole prompt's columns

    def activate_past_recording(self) -> None:
        """Keep everything until the next `crop`."""
        self.record_past = True

    def _forget(self, tokens: int, length: int) -> None:
        """Drop the newest `tokens` of `length`. Raises UserError when what is needed then was not kept."""
        assert self.columns is not None
        assert self.delayed is not None
        if tokens and self.columns.shape[1] - tokens < self.reach:
            raise UserError(
                f"cannot remove {tokens} tokens: the cache keeps {self.columns.shape[1] - self.reach} for going back; "
                f"make it with zaya.ZayaCache(config, rollback={tokens})"
            )
        self.columns = self._trim(self.columns[:, : self.columns.shape[1] - tokens], self.reach)
        self.delayed = self._trim(self.delayed[:, : self.delayed.shape[1] - tokens], 1)

    def _map(self, pick) -> None:
        if self.columns is not None:
            self.columns, self.delayed = pick(self.columns), pick(self.delayed)


class _FullLayer(_Memory, DynamicLayer):
    is_croppable = True
    keys: Any
    values: Any

    def __init__(self, reach: int, rollback: int | None):
        DynamicLayer.__init__(self)
        self._start(reach, rollback)

    def crop(self, tokens_to_remove: int) -> None:
        tokens, length = _tokens(tokens_to_remove, self.get_seq_length())
        if length:
            self._forget(tokens, length)
            self.keys, self.values = self.keys[:, :, : length - tokens], self.values[:, :, : length - tokens]

    def reset(self) -> None:
        self.columns = self.delayed = None
        self.keys = self.values = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx) -> None:
        super().reorder_cache(beam_idx)
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._map(lambda x: x[indices])


class _SlidingLayer(_FullLayer, DynamicSlidingWindowLayer):
    """Keeps `sliding_window - 1` keys and values, and `rollback` more."""

    def __init__(self, sliding_window: int, reach: int, rollback: int | None):
        DynamicSlidingWindowLayer.__init__(self, sliding_window=sliding_window)
        self._start(reach, rollback)

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen, new = min(self.cumulative_length, self.sliding_window - 1), key_states.shape[2]
        self.cumulative_length += new
        keys = torch.cat([self.keys, key_states], dim=2)
        values = torch.cat([self.values, value_states], dim=2)
        self.keys, self.values = self._recent(keys), self._recent(values)
        return keys[:, :, -(seen + new) :], values[:, :, -(seen + new) :]

    def _recent(self, x: torch.Tensor) -> torch.Tensor:
        if self.record_past or self.rollback is None:
            return x
        kept = self.sliding_window - 1 + self.rollback
        return x[:, :, max(0, x.shape[2] - kept) :]

    def crop(self, tokens_to_remove: int) -> None:
        tokens, length = _tokens(tokens_to_remove, self.get_seq_length())
        if length:
            self._forget(tokens, length)
            kept = self.keys.shape[2] - tokens
            self.keys, self.values = self._recent(self.keys[:, :, :kept]), self._recent(self.values[:, :, :kept])
            self.cumulative_length = length - tokens

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0


class ZayaCache(Cache):
    """Cache of a ZAYA1 model that can be rolled back.

    config: the model's. rollback: how many of the newest tokens `crop` may remove at once; None is all of them, at
    2 (C + G d / 2) bytes per token and layer in bf16. `crop(-n)` removes the newest n tokens, `crop(n)` keeps n.
    """

    def __init__(self, config, rollback: int | None = 64):
        reach = config.cca_time0 + config.cca_time1 - 2
        layers: list[Any] = [
            _FullLayer(reach, rollback)
            if layer_type == "hybrid"
            else _SlidingLayer(config.sliding_window, reach, rollback)
            for layer_type in config.layer_types
        ]
        super().__init__(layers=layers)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the layer (by default the last) holds a token."""
        layer: Any = self.layers[-1 if layer_idx is None else layer_idx]
        return layer.columns is not None


def _tokens(tokens_to_remove: int, length: int) -> tuple[int, int]:
    """How many tokens to remove of `length`: -n removes n, n > 0 keeps n."""
    tokens = -tokens_to_remove if tokens_to_remove <= 0 else max(0, length - tokens_to_remove)
    return min(tokens, length), length


def _align(x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Shift each row of x [B, n + S, C], whose last S belong to `real` [B, S], right over its padding at the end.

    What is left at the front is zero, as before a document. Padding that tokens follow stays where it is.
    """
    length = real.shape[1]
    index = torch.arange(1, length + 1, device=real.device)
    shift = length - index.where(real, 0).amax(1)
    place = torch.arange(x.shape[1], device=x.device) - shift[:, None]
    rows = x.gather(1, place.clamp_min(0).unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return rows.where((place >= 0).unsqueeze(-1), 0)


def is_empty(cache) -> bool:
    """Whether `cache` (or None) holds no token yet. Reads no tensor."""
    return cache is None or not cache.has_previous_state(0)


def read_state(cache, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The layer's (convolution columns [B, reach, C], delayed value [B, 1, G d / 2]), or None at the start."""
    if cache is None or not cache.has_previous_state(layer_idx):
        return None
    layer = cache.layers[layer_idx]
    if isinstance(layer, _Memory):
        assert layer.columns is not None
        assert layer.delayed is not None
        return layer.columns[:, layer.columns.shape[1] - layer.reach :], layer.delayed[:, -1:]
    return layer.conv_states[0].transpose(1, 2), layer.recurrent_states[0].unsqueeze(1)


def write_state(cache, layer_idx: int, columns: torch.Tensor, delayed: torch.Tensor, real, reach: int) -> None:
    """Remember a layer's columns [B, reach + S, C] and delayed values [B, 1 + S, G d / 2], old state included.

    real [B, S] or None: padding at a row's end is left out, so that the next token reads the last real one.
    Raises UserError for a cache without a place for them.
    """
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if isinstance(layer, _Memory):
        return layer.remember(columns, delayed, real)
    if not hasattr(layer, "conv_states"):
        raise UserError(
            "this cache has no place for the convolution state; make it with zaya.ZayaCache(model.config) or "
            "DynamicCache(config=model.config)"
        )
    if real is not None:
        columns, delayed = _align(columns, real), _align(delayed, real)

    cache.update_conv_state(columns[:, columns.shape[1] - reach :].transpose(1, 2), layer_idx)
    cache.update_recurrent_state(delayed[:, -1], layer_idx)
