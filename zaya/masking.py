"""What each token may read: attention masks, padding, and the starts of packed documents.

Attention, the convolution and the delayed value must agree on where a document begins, so all three are told here.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from zaya.cache import is_empty
from zaya.errors import UserError

_MASK_OF_LAYER = {"hybrid": create_causal_mask, "hybrid_sliding": create_sliding_window_causal_mask}


class Layout(NamedTuple):
    """Who reads whom in one forward call of B sequences and S tokens."""

    masks: dict[str, Any]  # per layer type, in the form that the attention implementation takes; None is plain causal
    real: torch.Tensor | None  # [B, S] bool, False at padding; None when there is none
    depth: torch.Tensor | None  # [B, S] int64, tokens since the document's start; None when nothing is packed
    flash: dict[str, Any]  # extra arguments of FlashAttention for packed documents

    def attention_mask(self, layer_type: str) -> Any:
        """The mask for layers of `layer_type`."""
        return self.masks[layer_type]


def make_layout(config, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache) -> Layout:
    """Lay out inputs_embeds [B, S, D].

    attention_mask: [B, past + S], nonzero at real tokens; or 4-D, or a dict by layer type, taken as they are for the
    attention, and read for where documents start (`depth_from_mask`).
    position_ids: [B or 1, S] as the caller gave them, or None. Where they restart, a document starts, as long as the
    cache holds nothing. cu_seqlens: [n + 1] document bounds in the B x S tokens laid end to end.
    """
    if isinstance(attention_mask, dict):
        real = attention_mask.get("conv")
        told = [m for m in attention_mask.values() if isinstance(m, torch.Tensor) and m.ndim == 4]
        depth = depth_from_mask(told[0], position_ids, cache) if told and "conv" not in attention_mask else None
        return Layout(attention_mask, None if real is None else real.bool(), depth, {})
    length = inputs_embeds.shape[1]
    if attention_mask is not None and attention_mask.ndim == 4:
        if cu_seqlens is not None:
            raise UserError("attention_mask is 4-D and cu_seqlens says where documents start; give one or the other")
        depth, mask = depth_from_mask(attention_mask, position_ids, cache), attention_mask
        if mask.dtype == torch.bool and config._attn_implementation == "eager":
            mask = _additive(mask, inputs_embeds.dtype)
        return Layout(dict.fromkeys(config.layer_types, mask), None, depth, {})
    real = None
    if attention_mask is not None and attention_mask.ndim == 2:
        real = attention_mask[:, -length:].bool()
    depth = _document_depth(inputs_embeds, real, position_ids, cu_seqlens, cache)
    if depth is not None:
        return _packed(config, inputs_embeds, attention_mask, real, depth, cache)
    masks = {t: _MASK_OF_LAYER[t](config, inputs_embeds, attention_mask, cache) for t in set(config.layer_types)}
    return Layout(masks, real, None, {})


def depth_from_cu_seqlens(cu_seqlens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """[batch, length] int64: tokens since the start of each token's document. Every row starts a document.

    Raises UserError when bounds that lie on the CPU do not cover the tokens.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise UserError("cu_seqlens must be one row of document bounds, [0, end of the first document, ...]")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != batch * length or bool((cu_seqlens.diff() < 0).any()):
            raise UserError(
                f"cu_seqlens goes from {first} to {last}; it must rise from 0 to the {batch * length} tokens"
            )
    token = torch.arange(batch * length, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    start = cu_seqlens.long()[document].view(batch, length)
    row_start = token.view(batch, length)[:, :1]
    return token.view(batch, length) - torch.maximum(start, row_start)


def depth_from_positions(position_ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """[B, S] int64: tokens since the last start, where position_ids [B, S] did not rise from the real token before."""
    index = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    known = index if real is None else index.where(real, -1)
    before = F.pad(known.cummax(1).values, (1, -1), value=-1)
    position_before = position_ids.gather(1, before.clamp_min(0))
    starts = (before < 0) | (position_ids <= position_before)
    if real is not None:
        starts = starts & real
    return index - index.where(starts, 0).cummax(1).values


_HIDDEN = -1000.0  # an additive mask hides a key with -inf, the dtype's minimum, -1e9 or -1e4; biases are smaller


def depth_from_mask(mask: torch.Tensor, position_ids: torch.Tensor | None, cache) -> torch.Tensor | None:
    """[B, S] int64 tokens since the document's start, of a 4-D mask [B, 1 or H, S, past + S]; None for one document.

    A token that does not see the one before it starts a document (padding hides it as well). Bool masks are True, and
    additive ones above -1000, where a key is seen. Raises UserError where position_ids restart elsewhere, and for a
    mask under which a document sees another one or its own future: the convolution could not follow it.
    """
    seen = (mask > _HIDDEN if mask.dtype.is_floating_point else mask != 0)[:, 0]
    length, past = mask.shape[2], 0 if cache is None else cache.get_seq_length()
    index = torch.arange(length, device=mask.device)
    before = (index + past - 1).clamp_min(0).view(1, length, 1).expand(seen.shape[0], -1, -1)
    starts = ~seen.gather(2, before).squeeze(2)
    if is_empty(cache):
        starts = starts | (index == 0)
    depth = index - index.where(starts, 0).cummax(1).values
    if torch.compiler.is_compiling():
        return depth
    if not bool(starts[:, 1:].any() or starts[:, 0].any() and not is_empty(cache)):
        return None
    if is_empty(cache):
        _check_documents(seen[:, :, :length], starts, position_ids)
    return depth


def _check_documents(seen: torch.Tensor, starts: torch.Tensor, position_ids: torch.Tensor | None) -> None:
    document = starts.cumsum(1)
    inside = (document.unsqueeze(2) == document.unsqueeze(1)).tril()
    if bool((seen & ~inside).any()):
        raise UserError(
            "attention_mask is 4-D and lets a token see another document or its own future; ZAYA1's convolution needs "
            "documents in blocks, causal inside (or give cu_seqlens or position_ids that restart)"
        )
    if position_ids is None:
        return
    restarts = F.pad(position_ids.expand(starts.shape).diff(dim=1) <= 0, (1, 0), value=True)
    alone = starts & F.pad(starts[:, 1:], (0, 1), value=True)  # one token, or padding, whose position says nothing
    unclear = alone | (starts & F.pad(alone[:, :-1], (1, 0), value=True))
    differs = ((restarts != starts) & ~unclear).nonzero()
    if len(differs):
        row, token = differs[0].tolist()
        mask_says, positions_say = "starts" if starts[row, token] else "goes on with", restarts[row, token]
        raise UserError(
            f"attention_mask is 4-D and {mask_says} a document at token {token} of row {row}, where position_ids "
            f"{'restart' if positions_say else 'go on'}; let both say the same"
        )


def _document_depth(inputs_embeds, real, position_ids, cu_seqlens, cache):
    batch, length = inputs_embeds.shape[:2]
    if cu_seqlens is not None:
        if not is_empty(cache):
            raise UserError(
                "cu_seqlens was given with a cache that holds tokens; packed documents need an empty cache"
            )
        return depth_from_cu_seqlens(cu_seqlens.to(inputs_embeds.device), batch, length)
    if position_ids is None or length == 1 or not is_empty(cache):
        return None
    position_ids = position_ids.expand(batch, length)
    rises = position_ids.diff(dim=1) > 0
    if real is not None:
        rises = rises | ~real[:, 1:] | ~real[:, :-1]
    if not torch.compiler.is_compiling() and bool(rises.all()):
        return None
    return depth_from_positions(position_ids, real)


def _packed(config, inputs_embeds, attention_mask, real, depth, cache) -> Layout:
    implementation = config._attn_implementation
    if implementation.startswith("flash"):
        return Layout(dict.fromkeys(set(config.layer_types)), real, depth, _flash_bounds(depth, real))
    if implementation not in ("eager", "sdpa"):
        raise UserError(f"packed documents: attn_implementation {implementation!r} is not supported; use 'sdpa'")
    length = inputs_embeds.shape[1]
    kv_length = length if cache is None else int(cache.get_mask_sizes(length, 0)[0])
    masks = {}
    for layer_type in set(config.layer_types):
        window = config.sliding_window if layer_type == "hybrid_sliding" else None
        if window is not None and cache is not None:
            kv_length = length
        mask = _document_mask(depth, real, kv_length, window)
        masks[layer_type] = mask if implementation == "sdpa" else _additive(mask, inputs_embeds.dtype)
    return Layout(masks, real, depth, {})


def _document_mask(depth, real, kv_length, window):
    """[B, 1, S, kv_length] bool: causal, within the document, within the window, real keys; a token sees itself."""
    length = depth.shape[1]
    query = torch.arange(length, device=depth.device)
    key = torch.arange(kv_length, device=depth.device)
    back = query[:, None] - key[None, :]
    allowed = (back >= 0) & (back <= depth[:, :, None])
    if window is not None:
        allowed = allowed & (back < window)
    if real is not None:
        allowed = allowed & F.pad(real, (0, kv_length - length))[:, None, :]
    return (allowed | (back == 0)).unsqueeze(1)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _flash_bounds(depth, real) -> dict[str, Any]:
    if depth.shape[0] != 1 or real is not None:
        raise UserError("packed documents with FlashAttention: lay them end to end in one row without padding")
    starts = (depth[0] == 0).nonzero().flatten().to(torch.int32)
    bounds = F.pad(starts, (0, 1), value=depth.shape[1])
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
