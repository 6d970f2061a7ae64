"""The MoE block of one layer, router included, as ours and as rivals compute it, on the same weights and tokens."""

import copy
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import zaya
from zaya.flops import Shape

SMALL = Shape(hidden=128, ffn=96, experts=4, router=32)  # what a CPU measures in seconds


@dataclass
class Layer:
    """One layer's weights, as stock's module, and the tokens that it gets."""

    stock: nn.Module
    h: Tensor  # [1, T, D]
    state: Tensor  # [1, T, R]
    dy: Tensor  # [1, T, D]


def stock_config(shape: Shape, implementation: str = "eager"):
    """Stock's config of a layer of this shape; `implementation` is its `experts_implementation`."""
    from transformers.models.zaya import ZayaConfig

    sizes = {"hidden_size": shape.hidden, "moe_intermediate_size": shape.ffn, "router_hidden_size": shape.router}
    config = ZayaConfig(num_experts=shape.experts, num_hidden_layers=2, **sizes)
    config._experts_implementation = implementation
    return config


def make_layer(shape: Shape, tokens: int, seed: int, device: str, dtype: torch.dtype) -> Layer:
    """Random weights and tokens, and balancing biases that give each expert the same share of these tokens."""
    from transformers.models.zaya.modeling_zaya import ZayaSparseMoeBlock

    with torch.random.fork_rng(devices=[torch.device(device)] if device != "cpu" else []), torch.device(device):
        torch.manual_seed(seed)
        stock = ZayaSparseMoeBlock(stock_config(shape), 1)
        for name, p in stock.named_parameters():
            scale = (2.0 if ".fc" in name else 1.0) / p.shape[-1] ** 0.5
            nn.init.normal_(p, std=scale if p.ndim > 1 else 0.1)
            if name.endswith(("norm.weight", "scale")):
                p.data.add_(1.0)
        many = max(tokens, 1024)  # the biases are made on these: a few tokens would be balanced into ties
        h, dy = (torch.randn(1, many, shape.hidden, dtype=dtype) for _ in range(2))
        state = torch.randn(1, many, shape.router, dtype=dtype)
    biases = stock.gate.balancing_biases
    stock.to(dtype)
    stock.gate.balancing_biases = biases.float()
    _balance(stock, h, state)
    return Layer(stock, *(x[:, :tokens].contiguous() for x in (h, state, dy)))


@torch.no_grad()
def _balance(stock: nn.Module, h: Tensor, state: Tensor, rounds: int = 200) -> None:
    """Move the biases until the experts get equal shares of these tokens; the skip class stays at -1."""
    probs = stock.gate(h, router_states=state)[0].float().softmax(-1)
    biases = stock.gate.balancing_biases
    experts = biases.numel() - 1
    for i in range(rounds):
        chosen = (probs + biases).argmax(-1)
        load = torch.zeros_like(biases).index_add_(0, chosen, torch.ones_like(chosen, dtype=biases.dtype))
        biases[:experts] -= 0.1 * 0.98**i * (load[:experts] / load.sum() * experts - 1).clamp(-1, 1)


@dataclass(frozen=True)
class Implementation:
    """A way to compute the block. `build` makes of a layer the call h [1, T, D], state [1, T, R] -> y [1, T, D]."""

    name: str
    package: str  # whose version is reported
    build: Callable[[Layer], Callable[[Tensor, Tensor], Tensor]]
    largest: int = 1 << 30  # tokens beyond which it is not run, with the reason
    reason: str = ""
    graph: bool = True  # False: it waits for the device on the host, which no CUDA graph can hold

    def version(self) -> str | None:
        """Installed version of its package, None when it is not installed."""
        if self.package == "zaya":  # it runs from a source tree too
            return zaya.__version__
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


def ours(layer: Layer) -> nn.Module:
    """The package's own module, over stock's weights (not copied)."""
    from zaya.configuration_zaya import ZayaConfig
    from zaya.modeling_zaya import ZayaMoE

    config = ZayaConfig(**{k: v for k, v in layer.stock.gate.config.to_dict().items() if k in _SIZES})
    with torch.device("meta"):
        block = ZayaMoE(config, 1)
    block.load_state_dict(layer.stock.state_dict(keep_vars=True), assign=True)
    block.gate.balancing_biases = layer.stock.gate.balancing_biases
    return block.eval()  # as a server has it; with gradients it is the training path all the same


def build_ours(layer: Layer):
    """Ours, as a rival is built."""
    block = ours(layer)
    return lambda h, state: block(h, state.flatten(0, 1))[0]


_SIZES = ("hidden_size", "moe_intermediate_size", "router_hidden_size", "num_experts", "num_hidden_layers")


def build_stock(implementation: str):
    """Stock's block with one of transformers' expert implementations."""

    def build(layer: Layer):
        block = copy.copy(layer.stock)
        block._modules = dict(layer.stock._modules)
        block.experts = copy.copy(layer.stock.experts)
        block.experts.config = stock_config(_shape(layer), implementation)
        return lambda h, state: block(h, state)[0]

    return build


def _shape(layer: Layer) -> Shape:
    experts = layer.stock.experts
    width = layer.stock.gate.down_proj.out_features
    return Shape(experts.hidden_dim, experts.intermediate_dim, experts.num_experts, width)


def build_liger(layer: Layer):
    """liger-kernel's fused MoE behind stock's router."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    experts, gate = layer.stock.experts, layer.stock.gate

    def call(h: Tensor, state: Tensor) -> Tensor:
        _, weights, ids, _ = gate(h, router_states=state)
        flat = h.flatten(0, 1)
        y = LigerFusedMoEFunction.apply(flat, experts.gate_up_proj, experts.down_proj, ids.int(), weights)
        return y.view_as(h)

    return call


def build_products(layer: Layer):
    """The two grouped products of torch alone, forward, on rows that were sorted beforehand: no router, no activation,
    no weighting. A block built on the library cannot be faster than this plus its router."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    up, down = layer.stock.experts.gate_up_proj.detach(), layer.stock.experts.down_proj.detach()
    with torch.no_grad():
        ids = layer.stock.gate(layer.h, router_states=layer.state)[2].flatten()
    offsets = torch.bincount(ids, minlength=up.shape[0]).cumsum(0).to(torch.int32)
    rows = layer.h.flatten(0, 1)[ids.argsort()].contiguous()
    hidden = torch.randn(rows.shape[0], down.shape[2], device=rows.device, dtype=rows.dtype)

    def call(_h: Tensor, _state: Tensor) -> Tensor:
        grouped(rows, up.transpose(1, 2), offs=offsets)
        return grouped(hidden, down.transpose(1, 2), offs=offsets)

    return call


def build_sonic(layer: Layer):
    """Not written: the rival could not be run beside the torch that the others need."""
    raise RuntimeError("no adapter: sonic-moe 0.1.2 wants torch <= 2.9.1, older than the other rivals run on")


COPIES = "copies each token's expert weights: 25 MB a token"
IMPLEMENTATIONS = (
    Implementation("zaya", "zaya", build_ours),
    Implementation("transformers grouped_mm", "transformers", build_stock("grouped_mm")),
    Implementation("transformers batched_mm", "transformers", build_stock("batched_mm"), 512, COPIES),
    Implementation("grouped_mm products alone", "torch", build_products),
    Implementation("transformers eager", "transformers", build_stock("eager"), graph=False),
    Implementation("liger-kernel", "liger-kernel", build_liger, graph=False),
    Implementation("sonic-moe", "sonic-moe", build_sonic),
)
