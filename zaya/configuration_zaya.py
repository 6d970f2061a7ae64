"""The configuration of a ZAYA1 model: stock transformers' fields, read more tolerantly, and two of our own.

A config saved here is read by stock transformers, and the reverse. Fields of our own are written only when they differ
from their default.
"""

from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers.models.zaya.configuration_zaya import ZayaConfig as StockZayaConfig

from zaya.errors import UserError

LAYER_TYPES = ("hybrid", "hybrid_sliding")
SKIP_SEMANTICS = ("zero", "input")
KERNELS = ("auto", "reference", "triton")
ROPE_TYPES = ("default", "linear", "yarn", "llama3")

_OWN_DEFAULTS = {"skip_semantics": "zero", "kernels": "auto"}
_LEGACY_KEYS = ("cca_num_q_heads", "ffn_hidden_size", "kv_channels", "num_query_groups", "zaya_mlp_expansion")
_ROPE_THETA = {"hybrid": 5_000_000.0, "hybrid_sliding": 10_000.0}
# Not a number, so that stock's strict config stops here, and says why, instead of computing something else.
_INPUT_SKIP_MARK = "1, with skip_semantics=input, which needs the zaya package: import zaya first"

_NANO = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "router_hidden_size": 64,
    "max_position_embeddings": 2048,
}
_TINY = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "router_hidden_size": 16,
    "max_position_embeddings": 512,
}


@strict
class ZayaConfig(StockZayaConfig):
    """Sizes of a ZAYA1 model; the defaults are ZAYA1-8B.

    Beside the fields of `transformers.models.zaya.ZayaConfig`:

    skip_semantics: what the skip class adds to the residual stream: "zero" (nothing; stock transformers) or "input"
        (p_skip times the normed input; the legacy layout). A model with "input" is saved with a mark that makes stock
        transformers refuse the folder.
    kernels: "auto" (Triton on a GPU, else plain torch), "reference" or "triton".

    Raises UserError, naming the field and the mend, for values that no ZAYA1 model can have.
    """

    kernels: str = "auto"
    skip_semantics: str = "zero"
    if TYPE_CHECKING:  # filled in by __post_init__
        layer_types: list[str]  # type: ignore[assignment]
        rope_parameters: dict[str, dict[str, Any]]  # type: ignore[assignment]

    def __post_init__(self, **kwargs: Any) -> None:
        _refuse_legacy(kwargs)
        self.rope_parameters = _nested_rope(self.rope_parameters, kwargs)
        super().__post_init__(**kwargs)
        _check(self)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """Build from a JSON object; a legacy config raises UserError."""
        _refuse_legacy(config_dict)
        if config_dict.get("num_experts_per_tok") == _INPUT_SKIP_MARK:
            config_dict = {**config_dict, "num_experts_per_tok": 1, "skip_semantics": "input"}
        return super().from_dict(config_dict, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds: own fields only where they differ from their default."""
        out = super().to_diff_dict()
        for key, default in _OWN_DEFAULTS.items():
            if out.get(key) == default:
                del out[key]
        if self.skip_semantics == "input":
            out["num_experts_per_tok"] = _INPUT_SKIP_MARK
        return out

    @classmethod
    def zaya1_8b(cls, **overrides: Any) -> "ZayaConfig":
        """Zyphra/ZAYA1-8B: 40 layers, 16 experts, context of 131,072 tokens."""
        return cls(**overrides)

    @classmethod
    def zaya1_base(cls, **overrides: Any) -> "ZayaConfig":
        """Zyphra/ZAYA1-base: as 8B, with context of 32,768 tokens, rope theta 1e6 and end-of-text token 1."""
        rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
        base = {"max_position_embeddings": 32768, "rope_parameters": {"hybrid": rope}, "eos_token_id": 1}
        return cls(**{**base, **overrides})

    @classmethod
    def nano(cls, **overrides: Any) -> "ZayaConfig":
        """About 12 M parameters: trains on one CPU or any GPU in minutes."""
        return cls(**{**_NANO, **_small_rope(), "eos_token_id": 1, **overrides})

    @classmethod
    def tiny(cls, **overrides: Any) -> "ZayaConfig":
        """About 0.1 M parameters, every mechanism on: for tests."""
        return cls(**{**_TINY, **_small_rope(), "eos_token_id": 1, **overrides})


def _small_rope() -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return {"rope_parameters": {"hybrid": rope, "hybrid_sliding": dict(rope)}}


def _refuse_legacy(fields: dict[str, Any]) -> None:
    found = [key for key in _LEGACY_KEYS if key in fields]
    if found:
        raise UserError(
            f"config.json is of the legacy ZAYA layout (it has {', '.join(found)}); "
            "take the model in the native layout, which stock transformers 5.13 or newer loads"
        )


def _nested_rope(rope: Any, kwargs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One parameter set per layer type, from the nested form, the flat form, or top-level rope_theta."""
    rope = dict(rope or {})
    flat = {key: value for key, value in rope.items() if key not in LAYER_TYPES}
    for key in ("rope_theta", "partial_rotary_factor"):
        if kwargs.get(key) is not None:
            flat.setdefault(key, kwargs.pop(key))
    nested = {}
    for layer_type in LAYER_TYPES:
        own = dict(rope.get(layer_type) or {})
        # a flat theta is that of full attention; sliding layers keep their short-range one
        shared = {k: v for k, v in flat.items() if layer_type == "hybrid" or k == "partial_rotary_factor"}
        if layer_type in rope:
            shared = {}
        defaults = {"rope_type": "default", "rope_theta": _ROPE_THETA[layer_type], "partial_rotary_factor": 0.5}
        nested[layer_type] = {**defaults, **shared, **own}
    return nested


def _check(config: ZayaConfig) -> None:
    """Raise UserError for the first field that is wrong."""
    for field in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "moe_intermediate_size",
        "num_experts",
        "router_hidden_size",
        "cca_time0",
        "cca_time1",
        "max_position_embeddings",
    ):
        if getattr(config, field) < 1:
            raise UserError(f"{field} is {getattr(config, field)}; it must be at least 1")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % groups:
        raise UserError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({groups})")
    if groups * config.head_dim % 2:
        raise UserError(
            f"num_key_value_heads x head_dim ({groups} x {config.head_dim}) must be even: half of the value channels "
            "come from the token before; change head_dim"
        )
    if config.num_experts_per_tok != 1:
        raise UserError(f"num_experts_per_tok is {config.num_experts_per_tok}; ZAYA1 routes top-1, set it to 1")
    if config.hidden_act not in ("silu", "swish"):
        raise UserError(f"hidden_act is {config.hidden_act!r}; ZAYA1's experts are SwiGLU, set it to 'silu'")
    _check_layers(config)
    _check_choice(config, "skip_semantics", SKIP_SEMANTICS)
    _check_choice(config, "kernels", KERNELS)


def _check_choice(config: ZayaConfig, field: str, allowed: tuple[str, ...]) -> None:
    if getattr(config, field) not in allowed:
        raise UserError(f"{field} is {getattr(config, field)!r}; use one of {', '.join(allowed)}")


def _check_layers(config: ZayaConfig) -> None:
    types = config.layer_types
    if len(types) != config.num_hidden_layers:
        raise UserError(
            f"layer_types has {len(types)} entries; it needs num_hidden_layers = {config.num_hidden_layers}"
        )
    unknown = sorted(set(types) - set(LAYER_TYPES))
    if unknown:
        raise UserError(f"layer_types has {unknown[0]!r}; use {' or '.join(LAYER_TYPES)}")
    if "hybrid_sliding" in types and not config.sliding_window:
        raise UserError(
            "sliding_window must be set (tokens, the current one included): layer_types has hybrid_sliding"
        )
    for layer_type in set(types):
        rope = config.rope_parameters[layer_type]
        if rope["rope_type"] not in ROPE_TYPES:
            raise UserError(
                f"rope_parameters.{layer_type}.rope_type is {rope['rope_type']!r}; use one of {', '.join(ROPE_TYPES)}"
            )
        rotated = config.head_dim * rope["partial_rotary_factor"]
        if rotated % 2:
            raise UserError(
                f"rope_parameters.{layer_type}.partial_rotary_factor rotates {rotated:g} channels; "
                "it must rotate an even number"
            )
