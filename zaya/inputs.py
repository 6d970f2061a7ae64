"""Checks of what is given to the model. Values are read only where that costs no synchronisation."""

import torch

from zaya.errors import UserError


def check_inputs(config, input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache) -> None:
    """Raise UserError for inputs that cannot be meant: none or two, empty, too long, ids outside the vocabulary (read
    on a CPU only), nothing but padding (likewise)."""
    if (input_ids is None) == (inputs_embeds is None):
        raise UserError("give exactly one of input_ids and inputs_embeds")
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given.shape[0] == 0 or given.shape[1] == 0:
        raise UserError(f"the inputs are empty (shape {tuple(given.shape)}); give at least one sequence of one token")
    if torch.compiler.is_compiling():
        return
    _check_positions(config, given.shape[1], cache, position_ids, cu_seqlens)
    if input_ids is not None and input_ids.device.type == "cpu":
        check_ids(input_ids, config.vocab_size)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
        return
    if attention_mask.shape[1] < given.shape[1] or attention_mask.shape[0] != given.shape[0]:
        raise UserError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; {given.shape[0]} x {given.shape[1]} inputs need "
            "one row each, as long as cache and inputs together"
        )
    if attention_mask.device.type == "cpu" and cache is None and not bool(attention_mask.any()):
        raise UserError("attention_mask is all zero: every token is padding; give at least one real token")


def _check_positions(config, length: int, cache, position_ids, cu_seqlens) -> None:
    """Raise UserError for a position beyond the limit. Padding and the start of another document take no positions.

    Values on a GPU are read only where the columns alone are too many; `generate` has checked its whole sum before.
    """
    limit = config.max_position_embeddings
    past = 0 if cache is None else cache.get_seq_length()
    if isinstance(past, torch.Tensor):
        past = int(past) if past.device.type == "cpu" else 0
    told = position_ids if cu_seqlens is None else cu_seqlens
    if told is None:
        found = past + length
    elif told.device.type == "cpu" or past + length > limit:
        found = int(position_ids.max()) + 1 if cu_seqlens is None else int(cu_seqlens.diff().max())
    else:
        return
    if found > limit:
        raise UserError(f"the sequence has {found} tokens, more than max_position_embeddings = {limit}; shorten it")


def check_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Raise UserError when a token id is outside the vocabulary."""
    low, high = (int(x) for x in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"input_ids holds {low if low < 0 else high}, outside the vocabulary of {vocab_size}; "
            "use the model's own tokenizer"
        )


def check_prompts(config, input_ids, attention_mask) -> None:
    """What `generate` checks once, on any device: ids in the vocabulary, a real token in every row."""
    if isinstance(input_ids, torch.Tensor) and input_ids.numel():
        check_ids(input_ids, config.vocab_size)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        empty = (attention_mask != 0).any(1).logical_not().nonzero().flatten().tolist()
        if empty:
            raise UserError(f"attention_mask: prompt {empty[0]} has no real token; drop it from the batch")
