"""ZAYA1 in plain PyTorch, top to bottom.

Shapes: B batch, S tokens, D hidden size, H query heads, G key/value heads, d head size, C = (H + G) d convolution
channels, E experts, R router width, V vocabulary, T = B S tokens laid end to end.

One layer, on a residual stream r that stays in fp32:

    r = (attention(norm(r)) + b1) * s1 + (r + b2) * s2
    r = (experts(norm(r)) + b3) * s3 + (r + b4) * s4

Attention is compressed convolutional attention (arXiv 2510.04476); the experts are top-1 with a skip class, chosen by
a router whose state is carried from layer to layer (arXiv 2511.17127). docs/architecture.md explains both.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from zaya.cache import ZayaCache, read_state, write_state
from zaya.configuration_zaya import ZayaConfig
from zaya.generation import CACHE_FIELD, ZayaGenerationMixin
from zaya.inputs import check_inputs
from zaya.kernels.cca import assemble, cca, convolve_called, normalise, with_past
from zaya.kernels.linear_cross_entropy import linear_cross_entropy
from zaya.kernels.moe import moe
from zaya.kernels.residual_norm import residual_norm
from zaya.kernels.router import choose, count_classes, router, router_from_hidden
from zaya.masking import Layout, depth_from_cu_seqlens, make_layout
from zaya.plain import plain, readable

_FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@readable
class ZayaRMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the mean square is taken in fp32."""

    def __init__(self, size: int, config: ZayaConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return residual_norm(x, norm=(self.weight, self.eps), backend=self.config.kernels)[1]


class ZayaRotaryEmbedding(nn.Module):
    """Cosines and sines [B, S, rotated / 2] in fp32 for each layer type (RoFormer, arXiv 2104.09864)."""

    def __init__(self, config: ZayaConfig):
        super().__init__()
        self.config = config
        self.scaling = {}
        for layer_type in sorted(set(config.layer_types)):
            frequencies, self.scaling[layer_type] = self.frequencies(layer_type)
            self.register_buffer(f"{layer_type}_inv_freq", frequencies, persistent=False)

    def frequencies(self, layer_type: str) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [rotated / 2] and the factor on cosines and sines."""
        rope = self.config.rope_parameters[layer_type]
        if rope["rope_type"] != "default":
            return ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, layer_type=layer_type)
        rotated = int(self.config.head_dim * rope["partial_rotary_factor"])
        return rope["rope_theta"] ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated), 1.0

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * getattr(self, f"{layer_type}_inv_freq").float()
        return angles.cos() * self.scaling[layer_type], angles.sin() * self.scaling[layer_type]


class ZayaCCA(nn.Module):
    """Queries, keys and values of compressed convolutional attention (arXiv 2510.04476, section 3).

        q = Wq h, k = Wk h                      mq = (q + repeat(k)) / 2,  mk = mean of mq over a group's heads
        (q', k') = grouped(depthwise(q || k))   two causal convolutions with nothing between them
        query = q' + mq,  key = k' + mk,  value_t = Wv_current h_t || Wv_delayed h_{t-1}

    Before a document's first token q, k and h are zero, so the grouped convolution sees the depthwise bias there.
    """

    def __init__(self, config: ZayaConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.hidden_size = hidden = config.hidden_size
        bias = config.attention_bias
        q_size, kv_size = self.heads * self.head_dim, self.groups * self.head_dim
        self.q_proj = nn.Linear(hidden, q_size, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.v_proj_current = nn.Linear(hidden, kv_size // 2, bias=bias)
        self.v_proj_delayed = nn.Linear(hidden, kv_size // 2, bias=bias)
        c = q_size + kv_size
        self.conv_qk_depthwise = nn.Conv1d(c, c, config.cca_time0, groups=c)
        self.conv_qk_grouped = nn.Conv1d(c, c, config.cca_time1, groups=self.heads + self.groups)
        self.reach = config.cca_time0 + config.cca_time1 - 2  # columns before a token that its query and key read

    def forward(self, h: torch.Tensor, layout: Layout, rope, norm_of, cache=None):
        """h [B, S, D] -> query [B, S, H, d], key and value [B, S, G, d], normalised and rotated, in h's dtype.

        norm_of: () -> the ZayaQKNorm. A module among the arguments would be moved with them by accelerate's hooks.
        """
        qk_norm = norm_of()
        if layout.real is not None:
            h = h * layout.real.unsqueeze(-1).to(h.dtype)
        qkv = self._project(h)
        delayed = qkv[..., -self.groups * self.head_dim // 2 :]
        first, state = self._first_delayed(delayed), read_state(cache, self.layer_idx)
        depthwise, grouped = self.conv_qk_depthwise, self.conv_qk_grouped
        if plain(depthwise, grouped, qk_norm):
            weights = (depthwise.weight, depthwise.bias), (grouped.weight, grouped.bias), qk_norm.temp
            start = None if first is None else first[0, 0]
            out = cca(qkv, *weights, rope, start, state, layout.depth, self.config.kernels)
        else:
            mix = lambda x: self._convolve(x, layout.depth)
            sizes = self.heads, self.groups, self.head_dim
            out = assemble(mix, qk_norm, qkv, sizes, self.reach, rope, first, state, layout.depth)
        if cache is not None:  # last: a cache may replace in place the state that was read
            self._remember(cache, state, qkv, delayed, first, layout.real)
        return out

    def _project(self, h: torch.Tensor) -> torch.Tensor:
        """q, k, current and delayed values side by side, [B, S, (H + 2 G) d]; on a GPU one product makes them all."""
        parts = self.q_proj, self.k_proj, self.v_proj_current, self.v_proj_delayed
        if not h.is_cuda or not plain(*parts):
            return torch.cat([part(h) for part in parts], dim=-1)
        bias = None if self.q_proj.bias is None else torch.cat([part.bias for part in parts])
        return F.linear(h, torch.cat([part.weight for part in parts]), bias)

    def _remember(self, cache, state, qkv, delayed, first, real) -> None:
        columns = qkv[..., : (self.heads + self.groups) * self.head_dim]
        before = first if state is None else state[1]
        before = torch.zeros_like(delayed[:, :1]) if before is None else before
        columns = with_past(columns, state, self.reach)
        write_state(cache, self.layer_idx, columns, torch.cat([before, delayed], dim=1), real, self.reach)

    def _convolve(self, columns: torch.Tensor, depth: torch.Tensor | None) -> torch.Tensor:
        """By calling the convolutions, whatever modules stand in their places."""
        mixed = convolve_called(columns, self.conv_qk_depthwise, self.conv_qk_grouped, self.reach, depth)
        return mixed.unflatten(-1, (-1, self.head_dim))

    def _first_delayed(self, like: torch.Tensor) -> torch.Tensor | None:
        """The delayed value of a document's first token: the projection of zero, [B, 1, G d / 2]; None for zero."""
        if not plain(self.v_proj_delayed):
            return self.v_proj_delayed(like.new_zeros(like.shape[0], 1, self.hidden_size))
        bias = self.v_proj_delayed.bias
        return None if bias is None else bias.to(like.dtype).expand(like.shape[0], 1, -1)


@readable
class ZayaQKNorm(nn.Module):
    """Queries and keys at length sqrt(d); keys times a learned temperature per key/value head."""

    def __init__(self, config: ZayaConfig):
        super().__init__()
        self.temp = nn.Parameter(torch.ones(config.num_key_value_heads))

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """query [B, S, H, d], key [B, S, G, d] -> the same in fp32."""
        return normalise(query, key, self.temp)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """softmax(q k / sqrt(d)) v: query [B, H, S, d], key and value [B, G, K, d] -> [B, S, H, d] and the weights."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.dropout(scores.float().softmax(-1).to(query.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class ZayaAttention(nn.Module):
    """Grouped-query attention over what CCA makes."""

    is_causal = True

    def __init__(self, config: ZayaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.layer_type = config.layer_types[layer_idx]
        self.sliding_window = config.sliding_window if self.layer_type == "hybrid_sliding" else None
        self.scaling = config.head_dim**-0.5
        self.qkv_proj = ZayaCCA(config, layer_idx)
        self.qk_norm = ZayaQKNorm(config)
        heads = config.num_attention_heads * config.head_dim
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=config.attention_bias)

    def forward(self, h: torch.Tensor, layout: Layout, rope, cache=None, **kwargs: Any):
        """h [B, S, D] -> output [B, S, D] and attention weights (eager only)."""
        query, key, value = (x.transpose(1, 2) for x in self.qkv_proj(h, layout, rope, lambda: self.qk_norm, cache))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        options = {"dropout": dropout, "scaling": self.scaling, "sliding_window": self.sliding_window}
        mask = layout.attention_mask(self.layer_type)
        out, weights = attend(self, query, key, value, mask, **options, **layout.flash, **kwargs)
        return self.o_proj(out.flatten(2)), weights


@readable
class ZayaRouterMLP(nn.Module):
    """W3 gelu(W2 gelu(W1 RMSNorm(u))); `zaya.kernels.router` reads the weights where they are plain."""

    def __init__(self, config: ZayaConfig):
        super().__init__()
        size = config.router_hidden_size
        self.norm = ZayaRMSNorm(size, config)
        self.fc1 = nn.Linear(size, size)
        self.fc2 = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, config.num_experts + 1, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """u [T, R] -> logits [T, E + 1]."""
        return self.out_proj(F.gelu(self.fc2(F.gelu(self.fc1(self.norm(u))))))


class ZayaRouter(nn.Module):
    """Chooses one of E experts or the skip class for each token (arXiv 2511.17127, section on the router).

        u = W h + b + u_before * scale           exponential depth averaging: u goes on to the next layer
        p = softmax(MLP(RMSNorm(u))),  e = argmax(p + balancing_biases),  weight = p_e

    The balancing biases move the choice only; training shifts them towards equal loads (`pop_expert_counts`).
    """

    def __init__(self, config: ZayaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.down_proj = nn.Linear(config.hidden_size, config.router_hidden_size)
        self.router_states_scale = nn.Parameter(torch.ones(config.router_hidden_size)) if layer_idx else None
        self.router_mlp = ZayaRouterMLP(config)
        self.register_buffer("balancing_biases", torch.zeros(config.num_experts + 1, dtype=torch.float32))
        self.balancing_biases[-1] = -1.0

    def forward(self, h: torch.Tensor, state: torch.Tensor | None, keep_logits: bool = False):
        """h [T, D] and the layer before's state [T, R] -> Routing."""
        mlp, backend = self.router_mlp, self.config.kernels
        if not plain(mlp, mlp.norm, mlp.fc1, mlp.fc2, mlp.out_proj):
            u = self.down_proj(h)
            if state is not None and self.router_states_scale is not None:
                u = u + state * self.router_states_scale
            return choose(mlp(u), u, self.balancing_biases)
        weights = (
            mlp.norm.weight,
            (mlp.fc1.weight, mlp.fc1.bias),
            (mlp.fc2.weight, mlp.fc2.bias),
            mlp.out_proj.weight,
        )
        rest = (self.router_states_scale, *weights, self.balancing_biases, mlp.norm.eps)
        # Training always takes one path: reentrant checkpointing runs the first forward without gradients, and its
        # choices must be those of the recomputation to the last bit.
        trains = self.training or torch.is_grad_enabled()
        if keep_logits or trains or not plain(self.down_proj):
            return router(self.down_proj(h), state, *rest, backend=backend, keep_logits=keep_logits)
        return router_from_hidden(h, self.down_proj.weight, self.down_proj.bias, state, *rest, backend=backend)

    def _apply(self, fn, recurse=True):
        # biases in bf16 choose other experts: they stay in fp32 through .bfloat16(), .half() and .to(dtype)
        before = self.balancing_biases
        super()._apply(fn, recurse)
        after = self.balancing_biases
        if after.dtype != torch.float32:
            self.balancing_biases = before.float().to(after.device)
        return self


class ZayaExperts(nn.Module):
    """E SwiGLU experts: weight * W_down (silu(W_gate h) * W_up h)."""

    def __init__(self, config: ZayaConfig):
        super().__init__()
        self.config = config
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, h: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """h [T, D], expert_ids [T] in 0..E, weights [T] -> [T, D]; zero where the id is E."""
        decode = not self.training  # see ZayaRouter.forward: training takes one path
        return moe(h, self.gate_up_proj, self.down_proj, expert_ids, weights, self.config.kernels, decode)


class ZayaMoE(nn.Module):
    """weight * expert_e(h), and for the skip class nothing, or weight * h with the `input` semantics."""

    def __init__(self, config: ZayaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.gate = ZayaRouter(config, layer_idx)
        self.experts = ZayaExperts(config)

    def forward(self, h: torch.Tensor, state: torch.Tensor | None, keep_logits: bool = False):
        """h [B, S, D], state [T, R] or None -> y [B, S, D] and Routing over the T tokens."""
        flat = h.flatten(0, 1)
        routing = self.gate(flat, state, keep_logits)
        y = self.experts(flat, routing.expert_ids, routing.gate_weights)
        if self.config.skip_semantics == "input":
            skipped = (routing.expert_ids == self.config.num_experts).unsqueeze(1)
            y = torch.where(skipped, (flat * routing.gate_weights.unsqueeze(1)).to(y.dtype), y)
        return y.view_as(h), routing


@readable
class ZayaResidualScaling(nn.Module):
    """(h + b) * s + (r + b') * s': the branch h joins the fp32 residual stream r."""

    def __init__(self, config: ZayaConfig):
        super().__init__()
        self.config, size = config, config.hidden_size
        self.hidden_states_scale = nn.Parameter(torch.ones(size))
        self.hidden_states_bias = nn.Parameter(torch.zeros(size))
        self.residual_scale = nn.Parameter(torch.ones(size))
        self.residual_bias = nn.Parameter(torch.zeros(size))

    def forward(self, h: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual_norm(residual, h, self.vectors(), backend=self.config.kernels)[0]

    def vectors(self) -> tuple[torch.Tensor, ...]:
        """(s, b, s', b')."""
        return self.hidden_states_scale, self.hidden_states_bias, self.residual_scale, self.residual_bias


class ZayaDecoderLayer(nn.Module):
    """Attention, then experts, each behind a norm and joined to the residual stream."""

    def __init__(self, config: ZayaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.input_layernorm = ZayaRMSNorm(config.hidden_size, config)
        self.self_attn = ZayaAttention(config, layer_idx)
        self.post_attention_residual_scale = ZayaResidualScaling(config)
        self.post_attention_layernorm = ZayaRMSNorm(config.hidden_size, config)
        self.mlp = ZayaMoE(config, layer_idx)
        self.post_mlp_residual_scale = ZayaResidualScaling(config)

    def forward(self, residual, state, layout, rope, cache=None, count=False, keep_logits=False, **kwargs):
        """residual [B, S, D] fp32 and router state [T, R] -> (residual, state, expert counts [E + 1] int64 or None,
        router logits [T, E + 1] or None, attention weights or None)."""
        a, attention = self.self_attn(self.input_layernorm(residual), layout, rope, cache, **kwargs)
        scaling, norm = self.post_attention_residual_scale, self.post_attention_layernorm
        if plain(scaling, norm):
            residual, h = residual_norm(residual, a, scaling.vectors(), (norm.weight, norm.eps), self.config.kernels)
        else:
            residual = scaling(a, residual)
            h = norm(residual)
        m, routing = self.mlp(h, state, keep_logits)
        residual = self.post_mlp_residual_scale(m, residual)
        counts = count_classes(routing, layout.real, self.config.num_experts + 1) if count else None
        return residual, routing.state, counts, routing.logits if keep_logits else None, attention


class ZayaPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = ZayaConfig
    config: ZayaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ZayaDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _keep_in_fp32_modules_strict = ["balancing_biases"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial weights for training: stock's, but temperatures of 1, so that attention does not start uniform."""
        super()._init_weights(module)
        if isinstance(module, ZayaResidualScaling):
            init.ones_(module.hidden_states_scale)
            init.zeros_(module.hidden_states_bias)
            init.ones_(module.residual_scale)
            init.zeros_(module.residual_bias)
        elif isinstance(module, ZayaModel):
            init.ones_(module.input_hidden_states_scale)
            init.zeros_(module.input_hidden_states_bias)
        elif isinstance(module, ZayaQKNorm):
            init.ones_(module.temp)
        elif isinstance(module, ZayaRouter):
            if module.router_states_scale is not None:
                init.ones_(module.router_states_scale)
            biases = torch.zeros(module.config.num_experts + 1)
            biases[-1] = -1.0
            init.copy_(module.balancing_biases, biases)
        elif isinstance(module, ZayaExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=self.config.initializer_range)
            init.normal_(module.down_proj, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, ZayaRotaryEmbedding):
            for layer_type in module.scaling:
                init.copy_(getattr(module, f"{layer_type}_inv_freq"), module.frequencies(layer_type)[0])


class ZayaModel(ZayaPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: ZayaConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.input_hidden_states_scale = nn.Parameter(torch.ones(config.hidden_size))
        self.input_hidden_states_bias = nn.Parameter(torch.zeros(config.hidden_size))
        self.layers = nn.ModuleList(ZayaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = ZayaRMSNorm(config.hidden_size, config)
        self.rotary_emb = ZayaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self._expert_counts: torch.Tensor | None = None
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache=None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ):
        """Last hidden states [B, S, D], and the cache.

        input_ids [B, S] or inputs_embeds [B, S, D]; attention_mask [B, past + S], nonzero at real tokens.
        position_ids [B, S]: where they restart, a document of its own begins; cu_seqlens [n + 1] says the same as
        bounds in the B x S tokens laid end to end. `past_key_values` and `cache` are two names of one argument.
        output_hidden_states, output_attentions, output_router_logits and return_dict are as in transformers.
        """
        cache = past_key_values if cache is None else cache
        flash = {name: kwargs.pop(name, None) for name in _FLASH_ARGUMENTS}  # of transformers' flattening collator
        cu_seqlens = flash["cu_seq_lens_q"] if cu_seqlens is None else cu_seqlens
        check_inputs(self.config, input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache = False
        if use_cache and cache is None:
            cache = ZayaCache(self.config)
        layout = make_layout(self.config, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache)
        if position_ids is None:
            position_ids = self._positions(inputs_embeds, cu_seqlens, cache)
        return_dict, want = kwargs.pop("return_dict", None), self._wanted(kwargs)
        out = self._run_layers(inputs_embeds, layout, position_ids, cache, want, kwargs)
        out = MoeModelOutputWithPast(**out, **{CACHE_FIELD: cache if use_cache else None})
        return out if return_dict is not False else out.to_tuple()

    def _wanted(self, kwargs: dict[str, Any]) -> dict[str, bool]:
        asked = {name: kwargs.pop(f"output_{name}", None) for name in ("hidden_states", "attentions", "router_logits")}
        return {k: bool(getattr(self.config, f"output_{k}", False)) if v is None else v for k, v in asked.items()}

    def _positions(self, inputs_embeds, cu_seqlens, cache) -> torch.Tensor:
        batch, length = inputs_embeds.shape[:2]
        if cu_seqlens is not None:
            return depth_from_cu_seqlens(cu_seqlens.to(inputs_embeds.device), batch, length)
        past = 0 if cache is None else cache.get_seq_length()
        return (torch.arange(length, device=inputs_embeds.device) + past).unsqueeze(0)

    def _run_layers(self, inputs_embeds, layout, position_ids, cache, want, kwargs) -> dict[str, Any]:
        residual = ((inputs_embeds + self.input_hidden_states_bias) * self.input_hidden_states_scale).float()
        rope = {t: self.rotary_emb(position_ids, t) for t in self.rotary_emb.scaling}
        count = self.training and torch.is_grad_enabled()
        hidden_states, attentions, router_logits, counts, state = [], [], [], [], None
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states.append(residual if want["hidden_states"] else None)
            residual, state, counted, logits, attention = self._run(
                layer, residual, state, layout, rope[layer_type], cache, count, want["router_logits"], **kwargs
            )
            counts.append(counted)
            attentions.append(attention if want["attentions"] else None)
            router_logits.append(logits)
        if count:
            self._add_counts(torch.stack(counts))
        last = self.norm(residual)
        return {
            "last_hidden_state": last,
            "hidden_states": (*hidden_states, last) if want["hidden_states"] else None,
            "attentions": tuple(attentions) if want["attentions"] else None,
            "router_logits": tuple(router_logits) if want["router_logits"] else None,
        }

    def _run(self, layer, *args, **kwargs):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(partial(layer.__call__, **kwargs), *args)
        return layer(*args, **kwargs)

    def _add_counts(self, counts: torch.Tensor) -> None:
        # not a buffer: DistributedDataParallel would overwrite it with rank 0's at every forward
        self._expert_counts = counts if self._expert_counts is None else self._expert_counts + counts

    def pop_expert_counts(self) -> torch.Tensor:
        """Tokens that chose each class since the last call, [L, E + 1] int64, then start again from zero.

        Counted in training mode with gradients on; padding is left out and checkpointing's recomputation not counted
        again. The sum is of this process: reduce it over the ranks before moving the balancing biases.
        """
        counts, self._expert_counts = self._expert_counts, None
        if counts is None:
            shape = (self.config.num_hidden_layers, self.config.num_experts + 1)
            counts = torch.zeros(shape, dtype=torch.int64, device=self.norm.weight.device)
        return counts


class ZayaForCausalLM(ZayaPreTrainedModel, ZayaGenerationMixin):
    """ZayaModel with its language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: ZayaConfig):
        super().__init__(config)
        self.model = ZayaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache=None,
        cu_seqlens: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
        skip_logits: bool = False,
        **kwargs: Any,
    ):
        """Logits [B, kept, V], and the loss in nats per token when labels [B, S] are given (-100 is not counted).

        logits_to_keep: the last n positions (0 is all), or an index of positions. num_items_in_batch: divide the
        summed loss by this instead of by the labels counted here. skip_logits: with labels, make the loss without
        storing the logits, which are then None. The rest is as in `ZayaModel.forward`.
        """
        return_dict = kwargs.pop("return_dict", None)
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden, logits, loss = out.last_hidden_state[:, kept], None, None
        if labels is None or not skip_logits or not plain(self.lm_head):
            logits = self.lm_head(hidden)
        if labels is not None:
            loss = self._loss(hidden, logits, labels, num_items_in_batch)
            logits = None if skip_logits else logits
        result = MoeCausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            router_logits=out.router_logits,
            **{CACHE_FIELD: out.get(CACHE_FIELD)},
        )
        return result if return_dict is not False else result.to_tuple()

    def _loss(self, hidden: torch.Tensor, logits: torch.Tensor | None, labels: torch.Tensor, items) -> torch.Tensor:
        """From the logits, or without storing them where there are none. 0 when no label counts, never 0 / 0."""
        items = (labels[:, 1:] != -100).sum() if items is None else torch.as_tensor(items)
        items = items.to(hidden.device).clamp(min=1)
        if logits is not None:
            return self.loss_function(logits, labels, self.vocab_size, num_items_in_batch=items)
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten().to(hidden.device)
        head, hidden = self.lm_head, hidden.flatten(0, 1)
        return linear_cross_entropy(hidden, head.weight, targets, head.bias, backend=self.config.kernels) / items

    def count_parameters(self) -> tuple[int, int]:
        """Parameters in all, and active per token: all but E - 1 experts of each layer. Works on the meta device."""
        total = sum(p.numel() for p in self.parameters())
        experts = sum(p.numel() for layer in self.model.layers for p in layer.mlp.experts.parameters())
        return total, total - experts + experts // self.config.num_experts

    def pop_expert_counts(self) -> torch.Tensor:
        """See `ZayaModel.pop_expert_counts`."""
        return self.model.pop_expert_counts()
