"""Compressed convolutional attention (arXiv 2510.04476) as layers of vLLM, with tensor parallelism over heads.

T tokens of the batch, H query and G key/value heads (`heads` and `groups` are this rank's share), d head size.
"""

from collections.abc import Callable

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

import zaya.vllm.state  # noqa: F401 - registers the op
from zaya.errors import UserError
from zaya.vllm import STATE_OP
from zaya.vllm.compat import kept_by_reload
from zaya.vllm.state import ConvWeights, by_heads, by_taps


def state_shapes(config, ranks: int) -> tuple[tuple[int, int], tuple[int]]:
    """Shapes of one request's state in one layer: convolution columns [L, C / ranks], delayed value [G d / 2]."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if groups % ranks or heads % ranks:
        raise UserError(
            f"tensor_parallel_size is {ranks} and the model has {groups} key/value heads, which cannot be split that "
            f"far; use at most {groups}, and data parallelism beyond it"
        )
    return (config.cca_time0 + config.cca_time1 - 2, (heads + groups) // ranks * size), (groups * size // 2,)


def state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
    """dtypes of the two states: the model's, or vLLM's `mamba_cache_dtype` where it is set."""
    (dtype,) = MambaStateDtypeCalculator.short_conv_state_dtype(
        vllm_config.model_config.dtype, vllm_config.cache_config.mamba_cache_dtype
    )
    return dtype, dtype


def load_with(param: nn.Parameter, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have `param` loaded from `convert` of the checkpoint's tensor."""

    # vLLM's reload calls the loader again with another tensor, which it binds to the name `param`: under another name
    # the loader fills the tensor that is thrown away
    def load(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(convert(loaded_weight))

    set_weight_attrs(param, {"weight_loader": load})


@kept_by_reload
class Convolution(nn.Module):
    """Holds the weights of a convolution in the layout of the state op: `lay_out` of the checkpoint's tensor, after
    `own` has taken this rank's share of it."""

    def __init__(self, shape: tuple[int, ...], channels: int, own: Callable, lay_out: Callable):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False)
        load_with(self.weight, lambda loaded: lay_out(own(loaded)))
        load_with(self.bias, own)


class ZayaCCA(nn.Module, MambaBase):
    """Queries, keys and values; the formulas are those of `zaya.modeling_zaya.ZayaCCA`."""

    def __init__(self, config, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.config, self.vllm_config, self.prefix = config, vllm_config, prefix
        self.ranks, self.rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.shapes, self.dtypes = state_shapes(config, self.ranks), state_dtypes(vllm_config)
        self.size = config.head_dim
        self.heads = config.num_attention_heads // self.ranks
        self.groups = config.num_key_value_heads // self.ranks
        q_size, kv_size = config.num_attention_heads * self.size, config.num_key_value_heads * self.size
        options = {"bias": config.attention_bias, "quant_config": vllm_config.quant_config}
        self.qk_proj = MergedColumnParallelLinear(
            config.hidden_size, [q_size, kv_size], prefix=f"{prefix}.qk_proj", return_bias=False, **options
        )
        # The first half of all value heads reads this token and the second half the one before, so a rank's share of
        # the heads is no even share of the two projections: they are small, stay whole, and are sliced afterwards.
        self.v_proj_current, self.v_proj_delayed = (
            ReplicatedLinear(config.hidden_size, kv_size // 2, prefix=f"{prefix}.{name}", return_bias=False, **options)
            for name in ("v_proj_current", "v_proj_delayed")
        )
        heads, channels = self.heads + self.groups, (self.heads + self.groups) * self.size
        taps0, taps1 = config.cca_time0, config.cca_time1
        self.conv_qk_depthwise = Convolution((taps0, channels), channels, self._own_heads, by_taps)
        self.conv_qk_grouped = Convolution((heads, taps1 * self.size, self.size), channels, self._own_heads, by_heads)
        self._announce()

    def _announce(self) -> None:
        """Make the layer findable by the op, and its state known to vLLM, which binds `kv_cache` later."""
        context = get_current_vllm_config().compilation_config.static_forward_context
        assert self.prefix not in context, f"two layers are called {self.prefix}"
        context[self.prefix] = self
        self.kv_cache = (torch.tensor([]), torch.tensor([]))

    def _own_heads(self, loaded: torch.Tensor) -> torch.Tensor:
        """This rank's query heads, then its key heads, of a tensor with all of them on axis 0."""
        q, k = loaded.split([self.heads * self.ranks * self.size, self.groups * self.ranks * self.size])
        return torch.cat([q.chunk(self.ranks)[self.rank], k.chunk(self.ranks)[self.rank]])

    def conv_weights(self) -> ConvWeights:
        """The weights of both convolutions, as the state op takes them."""
        first, second = self.conv_qk_depthwise, self.conv_qk_grouped
        return ConvWeights(first.weight, first.bias, second.weight, second.bias)

    def first_delayed(self, like: torch.Tensor) -> torch.Tensor:
        """The delayed value of a sequence's first token, [G d / 2]: the projection of zero."""
        bias = self.v_proj_delayed.bias
        return like.new_zeros(like.shape[-1]) if bias is None else bias

    def get_state_shape(self):
        return self.shapes

    def get_state_dtype(self):
        return self.dtypes

    @property
    def mamba_type(self):
        return MambaAttentionBackendEnum.SHORT_CONV

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """h [T, D] -> query [T, heads, d], key [T, groups, d], value [T, groups d]."""
        qk, delayed = self.qk_proj(h), self.v_proj_delayed(h)
        mixed, before = torch.zeros_like(qk), torch.zeros_like(delayed)
        getattr(torch.ops.vllm, STATE_OP)(qk, delayed, mixed, before, self.prefix)
        value = torch.cat([self.v_proj_current(h), before], dim=-1)
        width = self.groups * self.size
        value = value[:, self.rank * width : (self.rank + 1) * width]
        q, k = qk.unflatten(-1, (-1, self.size)).split([self.heads, self.groups], dim=1)
        mean_q = (q.unflatten(1, (self.groups, -1)) + k.unsqueeze(2)) * 0.5
        mixed_q, mixed_k = mixed.unflatten(-1, (-1, self.size)).split([self.heads, self.groups], dim=1)
        return mixed_q + mean_q.flatten(1, 2), mixed_k + mean_q.mean(dim=2), value


class ZayaQKNorm(nn.Module):
    """Queries and keys at length sqrt(d); keys times a learned temperature per key/value head. In fp32."""

    def __init__(self, config):
        super().__init__()
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.length = config.head_dim**0.5
        self.temp = nn.Parameter(torch.zeros(config.num_key_value_heads // ranks), requires_grad=False)
        load_with(self.temp, lambda loaded: loaded.chunk(ranks)[rank])

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """query [T, heads, d], key [T, groups, d] -> the same, in the same dtype."""
        dtype, eps = query.dtype, torch.finfo(query.dtype).eps
        query, key = query.float(), key.float()
        query = query * (self.length / query.norm(dim=-1, keepdim=True).clamp_min(eps))
        key = key * (self.length * self.temp.float().unsqueeze(-1) / key.norm(dim=-1, keepdim=True).clamp_min(eps))
        return query.to(dtype), key.to(dtype)


class ZayaAttention(nn.Module):
    """vLLM's paged grouped-query attention over what CCA makes."""

    def __init__(self, config, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        layer_type = config.layer_types[extract_layer_index(prefix)]
        self.qkv_proj = ZayaCCA(config, vllm_config, f"{prefix}.qkv_proj")
        self.qk_norm = ZayaQKNorm(config)
        quant = vllm_config.quant_config
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            quant_config=quant,
            prefix=f"{prefix}.o_proj",
            return_bias=False,
        )
        self.rotary_emb = get_rope(
            config.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters[layer_type]),
            is_neox_style=True,
        )
        self.attn = Attention(
            self.qkv_proj.heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=self.qkv_proj.groups,
            cache_config=vllm_config.cache_config,
            quant_config=quant,
            per_layer_sliding_window=config.sliding_window if layer_type == "hybrid_sliding" else None,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """positions [T], h [T, D] -> [T, D]."""
        query, key, value = self.qkv_proj(h)
        query, key = self.qk_norm(query, key)
        # flat, because vLLM's rotary op for CPUs reads three-dimensional inputs with the wrong strides (0.32.0)
        query, key = self.rotary_emb(positions, query.flatten(1), key.flatten(1))
        return self.o_proj(self.attn(query, key, value))
