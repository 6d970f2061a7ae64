"""Which parameter is updated by which algorithm, decided by its name and by nothing else.

A parameter that no rule names is an error: a new kind of parameter must be thought about, not fall to a default.
"""

import re
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Rule:
    """Parameters whose whole name matches `pattern`. `blocks`: matrices stacked along the rows of one tensor."""

    pattern: str
    algorithm: Literal["muon", "adamw"]
    blocks: int = 1
    decay: bool = False
    why: str = ""


_LAYER = r"model\.layers\.\d+\."
RULES = (
    Rule(_LAYER + r"self_attn\.qkv_proj\.(q_proj|k_proj|v_proj_current|v_proj_delayed)\.weight", "muon", decay=True),
    Rule(_LAYER + r"self_attn\.(q_proj|k_proj|v_proj|o_proj)\.weight", "muon", decay=True),
    Rule(_LAYER + r"mlp\.experts\.gate_up_proj", "muon", blocks=2, decay=True, why="gate above up: two maps"),
    Rule(_LAYER + r"mlp\.experts\.down_proj", "muon", decay=True, why="one matrix per expert"),
    Rule(_LAYER + r"mlp\.gate\.(down_proj|router_mlp\.(fc1|fc2|out_proj))\.weight", "muon", decay=True),
    Rule(_LAYER + r"mlp\.(gate_proj|up_proj|down_proj)\.weight", "muon", decay=True, why="a dense MLP"),
    Rule(r"model\.embed_tokens\.weight|lm_head\.weight", "adamw", decay=True, why="rows are tokens, not a map"),
    Rule(_LAYER + r"self_attn\.qkv_proj\.conv_qk_(depthwise|grouped)\.(weight|bias)", "adamw", why="convolutions"),
    Rule(_LAYER + r"self_attn\.qk_norm\.temp", "adamw"),
    Rule(_LAYER + r"mlp\.gate\.(down_proj|router_mlp\.(fc1|fc2))\.bias", "adamw"),
    Rule(_LAYER + r"mlp\.gate\.router_states_scale", "adamw"),
    Rule(_LAYER + r"post_(attention|mlp)_residual_scale\.(hidden_states|residual)_(scale|bias)", "adamw"),
    Rule(r"model\.input_hidden_states_(scale|bias)", "adamw"),
    Rule(_LAYER + r"(input_layernorm|post_attention_layernorm)\.weight|model\.norm\.weight", "adamw"),
    Rule(_LAYER + r"mlp\.gate\.router_mlp\.norm\.weight|" + _LAYER + r"self_attn\.(q_norm|k_norm)\.weight", "adamw"),
)


def rule_for(name: str) -> Rule:
    """The rule of a parameter. Raises ValueError when none, or more than one, names it."""
    found = [rule for rule in RULES if re.fullmatch(rule.pattern, name)]
    if len(found) != 1:
        raise ValueError(
            f"parameter {name} is named by {len(found)} rules of training/optim/groups.py; add the one that says "
            "which algorithm updates it"
        )
    return found[0]


def classify(parameters: list[tuple[str, torch.Tensor]]) -> dict[str, Rule]:
    """Rule of every trainable parameter, by name, in the given order."""
    rules = {name: rule_for(name) for name, p in parameters if p.requires_grad}
    shapes = {name: p.shape for name, p in parameters}
    for name, rule in rules.items():
        if rule.algorithm == "muon" and (len(shapes[name]) < 2 or shapes[name][-2] % rule.blocks):
            raise ValueError(
                f"parameter {name} of shape {tuple(shapes[name])} cannot be {rule.blocks} stacked matrices"
            )
    return rules
