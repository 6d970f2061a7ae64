"""What `generate` needs to know of ZAYA1: its cache, its masks, and one check of the prompts."""

from typing import Any

import torch
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import MoeModelOutputWithPast

from zaya.cache import ZayaCache
from zaya.errors import UserError
from zaya.inputs import check_prompts
from zaya.masking import make_layout

# transformers 5.23 renamed the cache
CACHE_FIELD = "cache" if "cache" in MoeModelOutputWithPast.__dataclass_fields__ else "past_key_values"


class ZayaGenerationMixin(GenerationMixin):
    """transformers' generation with a `ZayaCache`, which assisted decoding can roll back."""

    config: Any

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any):
        """transformers' `generate`, after one check of the prompts: ids in the vocabulary, no row of padding only."""
        check_prompts(self.config, kwargs.get("input_ids") if inputs is None else inputs, kwargs.get("attention_mask"))
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, *args: Any, **kwargs: Any):
        """Refused: transformers' continuous batching pages keys and values, and has no place for CCA's state."""
        raise UserError(
            "ZAYA1 does not run under transformers' continuous batching (generate_batch), which pages keys and values "
            "only; use generate with a padded batch, or vLLM (`zaya serve`), which batches continuously"
        )

    init_continuous_batching = continuous_batching_context_manager = generate_batch

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        generation_config._zaya_new_tokens = generation_config.max_length - input_ids_length

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        self._check_length(model_kwargs["position_ids"], generation_config._zaya_new_tokens)
        given = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        dynamic = generation_config.cache_implementation in (None, "dynamic")
        if given is None and dynamic and generation_config.use_cache is not False:
            given = model_kwargs[CACHE_FIELD] = ZayaCache(self.config)
            generation_config.cache_implementation = None
            if generation_config.is_assistant:
                given.activate_past_recording()
        if "assisted" in str(generation_mode).lower() and not isinstance(given, ZayaCache):
            raise UserError("assisted decoding takes tokens back, which only zaya.ZayaCache can; leave the cache out")
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)

    def _check_length(self, position_ids: torch.Tensor, new: int) -> None:
        """Refuse, before the first token, a prompt and new tokens that together pass the limit of positions."""
        prompt, limit = int(position_ids.max()) + 1, self.config.max_position_embeddings
        if prompt + new > limit:
            raise UserError(
                f"a prompt of {prompt} tokens and {new} new ones are more than max_position_embeddings = {limit}; "
                f"ask for at most {max(0, limit - prompt)} (max_new_tokens), or shorten the prompt"
            )

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, cache=None, position_ids=None, **kwargs):
        """Masks by layer type and, under "conv", the padding mask of this call's tokens."""
        cache = kwargs.get("past_key_values", cache)
        layout = make_layout(config.get_text_config(), inputs_embeds, attention_mask, None, None, cache)
        real = layout.real if inputs_embeds.shape[1] > 1 else None  # a generated token is never padding
        return {**layout.masks, "conv": real}
