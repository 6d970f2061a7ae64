"""Where vLLM 0.26 to 0.34 differ, and what its reloading of weights asks of a model."""

from typing import Any, TypeVar

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES
from vllm.platforms import current_platform

try:
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory as _FusedMoE
except ImportError:  # before the factory, the class of this name was called directly
    from vllm.model_executor.layers.fused_moe import FusedMoE as _FusedMoE  # type: ignore[attr-defined,no-redef]

try:
    from vllm.model_executor.model_loader.reload.lifecycle import weight_update_active
except ImportError:  # before 0.34
    weight_update_active = None

Module = TypeVar("Module", bound=type)
_AS_LOADED = ("TRITON", "BATCHED_TRITON")  # backends that keep the experts' weights in the checkpoint's layout


def fused_experts(**options: Any) -> torch.nn.Module:
    """vLLM's mixture-of-experts layer, called with `hidden_states` and `router_logits`, summed over tensor ranks."""
    layer = _FusedMoE(renormalize=False, reduce_results=True, **options)
    _lay_out_each_time(layer.routed_experts.quant_method)
    return layer


def _lay_out_each_time(method: Any) -> None:
    """Have reloaded experts packed as loaded ones are, and `method.laid_out` say that they are packed."""
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return
    patched: Any = method
    process = patched.process_weights_after_loading

    def process_again(layer: Any) -> None:
        if current_platform.is_cpu():
            # with a kernel there already, vLLM (0.32 to 0.34) leaves out packing for the CPU, and the kernel reads
            # plain weights as packed ones
            patched.moe_kernel = None
        process(layer)
        patched.laid_out = patched.unquantized_backend.name not in _AS_LOADED

    patched.process_weights_after_loading = process_again


def kept_by_reload(module: Module) -> Module:
    """Class decorator: a reload that brings some of the module's own parameters leaves the others as they are.

    vLLM otherwise makes all of them anew, uninitialized, and fills those that come."""
    SKIP_MODULES.add(module.__name__)
    return module


def reloading(model: torch.nn.Module) -> bool:
    """Whether vLLM is in the midst of a reload, which lays out what is loaded."""
    return get_layerwise_info(model).can_load() or (weight_update_active is not None and weight_update_active())


def laid_out(model: torch.nn.Module) -> bool:
    """Whether the weights are packed for kernels, so that a checkpoint's must not be copied over them."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return any(getattr(method, "laid_out", False) for method in methods)


def unwrap_loaders(model: torch.nn.Module) -> None:
    """Take off the loaders that a reload left on tensors it did not meet; outside a reload they drop what they get."""
    param: Any
    for param in model.parameters():
        while getattr(getattr(param, "weight_loader", None), "__name__", "") == "online_process_loader":
            param.weight_loader = param.weight_loader.__wrapped__


def decode_slots(metadata: Any) -> torch.Tensor:
    """State slot of each decoding request, [num_decodes]: the first column where there are several."""
    slots = metadata.state_indices_tensor_d[: metadata.num_decodes]
    return slots if slots.dim() == 1 else slots[:, 0]


def prefill_slots(metadata: Any) -> torch.Tensor:
    """State slot of each request in prefill, [num_prefills]."""
    slots = metadata.state_indices_tensor_p[: metadata.num_prefills]
    return slots if slots.dim() == 1 else slots[:, 0]
