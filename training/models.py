"""The two models that a recipe describes, with fresh weights."""

from typing import Any

import torch

from zaya.training.metrics.flops import check_same_active
from zaya.training.recipe import Recipe

SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # training/data/tokenize.py gives them


def zaya_fields(recipe: Recipe) -> dict[str, Any]:
    """The fields of ZayaConfig that a recipe gives, as stock's config takes them too."""
    fields = recipe.model.model_dump(exclude={"rope_theta", "partial_rotary_factor", "vocab_size"})
    rope = {"rope_type": "default", "partial_rotary_factor": recipe.model.partial_rotary_factor}
    rope_parameters = {
        "hybrid": rope | {"rope_theta": recipe.model.rope_theta},
        "hybrid_sliding": rope | {"rope_theta": 10_000.0},
    }
    return fields | SPECIAL_IDS | {"vocab_size": recipe.tokenizer.vocab_size, "rope_parameters": rope_parameters}


def zaya_model(recipe: Recipe) -> torch.nn.Module:
    """A ZAYA model in training mode, fp32, initialised from the recipe's seed."""
    from zaya import ZayaConfig, ZayaForCausalLM

    config = ZayaConfig(**zaya_fields(recipe))
    torch.manual_seed(recipe.seed)
    model = ZayaForCausalLM(config).train()
    for name, bias in model.named_buffers():
        if name.endswith("balancing_biases"):
            bias[-1] = recipe.train.balance.initial_skip_bias
    return model


def baseline_model(recipe: Recipe) -> torch.nn.Module:
    """The baseline in training mode, fp32, initialised from the recipe's seed.

    Raises UserError when its active parameters are not those of the ZAYA model within the recipe's tolerance.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if recipe.baseline is None:
        raise ValueError("the recipe has no baseline")
    fields = recipe.baseline.model_dump(exclude={"architecture", "rope_theta", "active_parameters_tolerance"})
    config = Qwen3Config(
        vocab_size=recipe.tokenizer.vocab_size,
        max_position_embeddings=recipe.model.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.baseline.rope_theta},
        tie_word_embeddings=recipe.model.tie_word_embeddings,
        **SPECIAL_IDS,
        **fields,
    )
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(config).train()
    check_same_active(zaya_model(recipe), model, recipe.baseline.active_parameters_tolerance)
    return model


def build(recipe: Recipe, arm: str) -> torch.nn.Module:
    """The model of an arm: `zaya` or `baseline`."""
    return zaya_model(recipe) if arm == "zaya" else baseline_model(recipe)
