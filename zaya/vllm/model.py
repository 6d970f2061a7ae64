"""ZAYA1 for vLLM. Parameter names are those of the Hugging Face folder; shapes as in `zaya.modeling_zaya`."""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from zaya.errors import UserError
from zaya.vllm import LOADED_LINE
from zaya.vllm.attention import ZayaAttention, state_dtypes, state_shapes
from zaya.vllm.compat import fused_experts, kept_by_reload, laid_out, reloading, unwrap_loaders

logger = init_logger("vllm.plugins.zaya")  # a name below vllm's, whose handler and level it takes


def _frozen(size: int, value: float, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.full((size,), value, dtype=dtype), requires_grad=False)


class ZayaRouterMLP(nn.Module):
    """Logits of the E + 1 classes from a token's router state."""

    def __init__(self, config, prefix: str):
        super().__init__()
        size, classes = config.router_hidden_size, config.num_experts + 1
        self.norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.fc1 = ReplicatedLinear(size, size, prefix=f"{prefix}.fc1", return_bias=False)
        self.fc2 = ReplicatedLinear(size, size, prefix=f"{prefix}.fc2", return_bias=False)
        self.out_proj = ReplicatedLinear(size, classes, bias=False, prefix=f"{prefix}.out_proj", return_bias=False)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """state [T, R] -> [T, E + 1] fp32."""
        return self.out_proj(F.gelu(self.fc2(F.gelu(self.fc1(self.norm(state)))))).float()


@kept_by_reload
class ZayaRouter(nn.Module):
    """Chooses an expert or the skip class for each token; its state goes on to the next layer's router."""

    def __init__(self, config, prefix: str):
        super().__init__()
        self.skip = config.num_experts
        self.down_proj = ReplicatedLinear(
            config.hidden_size, config.router_hidden_size, prefix=f"{prefix}.down_proj", return_bias=False
        )
        first = extract_layer_index(prefix) == 0
        self.router_states_scale = None if first else _frozen(config.router_hidden_size, 1.0)
        self.router_mlp = ZayaRouterMLP(config, f"{prefix}.router_mlp")
        self.balancing_biases = _frozen(config.num_experts + 1, 0.0, torch.float32)

    def forward(self, h: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """h [T, D], the layer before's state [T, R] -> logits [T, E + 1] fp32, this layer's state."""
        own = self.down_proj(h)
        if self.router_states_scale is not None:
            assert state is not None
            own = own + state * self.router_states_scale
        return self.router_mlp(own), own

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E + 1] -> class [T, 1] int64 and its probability, without the bias, [T, 1] fp32."""
        probabilities = logits.float().softmax(-1)
        chosen = (probabilities + self.balancing_biases).argmax(-1, keepdim=True)
        return chosen, probabilities.gather(1, chosen)

    def route(self, hidden_states, gating_output, topk, renormalize) -> tuple[torch.Tensor, torch.Tensor]:
        """vLLM's custom routing function. Skipped tokens go to expert 0 with weight 0: no kernel takes fewer rows."""
        chosen, weight = self.choose(gating_output)
        skipped = chosen == self.skip
        return weight.masked_fill(skipped, 0), chosen.masked_fill(skipped, 0).to(torch.int32)


class ZayaMoE(nn.Module):
    """Router and experts."""

    def __init__(self, config, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.skip_adds_input = getattr(config, "skip_semantics", "zero") == "input"
        self.gate = ZayaRouter(config, f"{prefix}.gate")
        self.experts = fused_experts(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            quant_config=vllm_config.quant_config,
            custom_routing_function=self.gate.route,
            router_logits_dtype=torch.float32,
            prefix=f"{prefix}.experts",
        )

    def forward(self, h: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """h [T, D], router state [T, R] or None -> [T, D], router state."""
        logits, state = self.gate(h, state)
        y = self.experts(hidden_states=h, router_logits=logits)
        if self.skip_adds_input:
            chosen, weight = self.gate.choose(logits)
            y = torch.where(chosen == self.gate.skip, (h * weight).to(y.dtype), y)
        return y, state


@kept_by_reload
class ZayaResidualScaling(nn.Module):
    """(h + b) * s + (r + b') * s': the branch h joins the fp32 residual stream r."""

    def __init__(self, size: int):
        super().__init__()
        self.hidden_states_scale, self.hidden_states_bias = _frozen(size, 1.0), _frozen(size, 0.0)
        self.residual_scale, self.residual_bias = _frozen(size, 1.0), _frozen(size, 0.0)

    def forward(self, h: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        branch = (h + self.hidden_states_bias) * self.hidden_states_scale
        return branch + (residual + self.residual_bias) * self.residual_scale


class ZayaDecoderLayer(nn.Module):
    """Attention, then experts."""

    def __init__(self, config, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.self_attn = ZayaAttention(config, vllm_config, f"{prefix}.self_attn")
        self.post_attention_residual_scale = ZayaResidualScaling(size)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = ZayaMoE(config, vllm_config, f"{prefix}.mlp")
        self.post_mlp_residual_scale = ZayaResidualScaling(size)

    def forward(self, positions, residual, state):
        """positions [T], residual [T, D] fp32, router state [T, R] or None -> residual, router state."""
        dtype = self.input_layernorm.weight.dtype
        h = self.self_attn(positions, self.input_layernorm(residual.to(dtype)))
        residual = self.post_attention_residual_scale(h, residual)
        h, state = self.mlp(self.post_attention_layernorm(residual.to(dtype)), state)
        return self.post_mlp_residual_scale(h, residual), state


@kept_by_reload
@support_torch_compile
class ZayaModel(nn.Module):
    """Embedding, this pipeline rank's layers, final norm. The router state crosses ranks beside the residual."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: ZayaDecoderLayer(config, vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.input_hidden_states_scale = _frozen(config.hidden_size, 1.0)
        self.input_hidden_states_bias = _frozen(config.hidden_size, 0.0)
        last = get_pp_group().is_last_rank
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if last else PPMissingLayer()

    def make_empty_intermediate_tensors(self, batch_size, dtype, device) -> IntermediateTensors:
        """What a pipeline rank gets from the one before, as zeros."""
        residual = torch.zeros(batch_size, self.config.hidden_size, dtype=torch.float32, device=device)
        state = torch.zeros(batch_size, self.config.router_hidden_size, dtype=dtype, device=device)
        return IntermediateTensors({"residual": residual, "router_state": state})

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ):
        state: torch.Tensor | None = None
        if get_pp_group().is_first_rank:
            h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            residual = ((h + self.input_hidden_states_bias) * self.input_hidden_states_scale).float()
        else:
            assert intermediate_tensors is not None
            residual, state = intermediate_tensors["residual"], intermediate_tensors["router_state"]
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            residual, state = layer(positions, residual, state)
        if not get_pp_group().is_last_rank:
            assert state is not None
            return IntermediateTensors({"residual": residual, "router_state": state})
        return self.norm(residual.to(self.input_hidden_states_scale.dtype))


class ZayaForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsPP):
    """What vLLM loads for the architecture of this name."""

    packed_modules_mapping = {"qk_proj": ["q_proj", "k_proj"]}
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".qkv_proj.q_proj": (".qkv_proj.qk_proj", 0),
            ".qkv_proj.k_proj": (".qkv_proj.qk_proj", 1),
        }
    )

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig):
        return state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig):
        return state_shapes(vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_copy_func(cls):
        return get_conv_copy_spec, get_temporal_copy_spec

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        logger.info(LOADED_LINE)
        self.model = ZayaModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = self._head(config, vllm_config, prefix)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def _head(self, config, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        if not get_pp_group().is_last_rank:
            return PPMissingLayer()
        head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            bias=config.lm_head_bias,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        return head.tie_weights(self.model.embed_tokens) if config.tie_word_embeddings else head

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states, getattr(self.lm_head, "bias", None))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a Hugging Face folder's tensors by name, all or some. Raises ValueError for a name that the model does
        not have, and UserError where vLLM has packed the weights and nobody would pack these."""
        if not reloading(self):
            if laid_out(self):
                raise UserError(
                    "load_weights was called on a served model whose weights vLLM has packed for its kernels, and "
                    'nothing was loaded; send them by llm.collective_rpc("reload_weights", ...), which packs them anew'
                )
            unwrap_loaders(self)
        if self.config.tie_word_embeddings:
            weights = _tied(weights, again=reloading(self) and get_pp_group().is_last_rank)
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _tied(weights: Iterable[tuple[str, torch.Tensor]], again: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights without an output head; `again`: with the embedding as the head, for a reload takes the two layers
    apart, and a head that it gives nothing keeps what was packed of the old one."""
    for name, weight in weights:
        if name != "lm_head.weight":
            yield name, weight
        if again and name == "model.embed_tokens.weight":
            yield "lm_head.weight", weight
