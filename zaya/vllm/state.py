"""The stateful part of compressed convolutional attention (arXiv 2510.04476) over vLLM's paged state.

Each request carries, per layer, the last L = k0 + k1 - 2 pre-convolution columns of its queries and keys, and the
last delayed value. The batch is the requests' new tokens laid end to end; every request gets its L columns put in
front of its tokens, and one pass serves prefill, chunked prefill and decode alike, with no host sync and no loop.

Shapes: T tokens, R requests, C = (H + G) d convolution channels, W = G d / 2 delayed channels.
"""

from typing import Any, NamedTuple

import torch
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from zaya.vllm import STATE_OP
from zaya.vllm.compat import decode_slots, prefill_slots


class Requests(NamedTuple):
    """How a batch divides into requests, and where the state of each is."""

    slots: torch.Tensor  # [R] int64 rows of the state tensors
    resumed: torch.Tensor  # [R] bool, False where a request starts and its slot holds another's leavings
    starts: torch.Tensor  # [R + 1] int64, first token of each request, and T


class ConvWeights(NamedTuple):
    """The two convolutions, laid out for products: see `by_taps` and `by_heads`."""

    depthwise: torch.Tensor  # [k0, C]
    depthwise_bias: torch.Tensor  # [C]
    grouped: torch.Tensor  # [H + G, k1 d, d]
    grouped_bias: torch.Tensor  # [C]


def by_taps(weight: torch.Tensor) -> torch.Tensor:
    """nn.Conv1d's depthwise weight [C, 1, k0] -> [k0, C]."""
    return weight[:, 0].T.contiguous()


def by_heads(weight: torch.Tensor) -> torch.Tensor:
    """nn.Conv1d's weight with one group per head [C, d, k1] -> [H + G, k1 d, d], rows are inputs, tap by tap."""
    channels, size, taps = weight.shape
    heads = channels // size
    return weight.view(heads, size, size, taps).permute(0, 3, 2, 1).reshape(heads, taps * size, size)


def convolve(columns: torch.Tensor, weights: ConvWeights) -> torch.Tensor:
    """columns [P, C] -> [P - k0 - k1 + 2, C]; the depthwise sum is in fp32, as in `zaya.kernels.cca`."""
    taps0, (heads, rows, size) = weights.depthwise.shape[0], weights.grouped.shape
    taps1, length = rows // size, columns.shape[0] - taps0 + 1
    narrow = weights.depthwise_bias.float()
    for j in range(taps0):
        narrow = narrow + columns[j : j + length] * weights.depthwise[j].float()
    narrow = narrow.to(columns.dtype)
    length = length - taps1 + 1
    stacked = torch.stack([narrow[j : j + length] for j in range(taps1)], dim=1).view(length, taps1, heads, size)
    stacked = stacked.permute(2, 0, 1, 3).reshape(heads, length, rows)
    out = torch.baddbmm(weights.grouped_bias.view(heads, 1, size), stacked, weights.grouped)
    return out.transpose(0, 1).reshape(length, heads * size)


def mix(
    qk: torch.Tensor,
    delayed: torch.Tensor,
    first_delayed: torch.Tensor,
    weights: ConvWeights,
    conv_state: torch.Tensor,
    value_state: torch.Tensor,
    requests: Requests,
) -> tuple[torch.Tensor, torch.Tensor]:
    """qk [T, C], delayed [T, W], first_delayed [W] -> convolved [T, C] and the value of the token before [T, W].

    conv_state [slots, L, C] and value_state [slots, W] are read where a request is resumed, and updated in place.
    """
    slots, resumed, starts = requests
    reach, device = conv_state.shape[1], qk.device
    order, back = torch.arange(slots.shape[0], device=device), torch.arange(reach, device=device)
    tokens = torch.arange(qk.shape[0], device=device)
    # row of a token among the extended columns: every request up to its own adds `reach` rows
    rows = tokens + (torch.searchsorted(starts[1:], tokens, right=True) + 1) * reach
    extended = qk.new_empty(qk.shape[0] + slots.shape[0] * reach, qk.shape[1])
    extended[rows] = qk
    past = torch.where(resumed[:, None, None], conv_state[slots].to(qk.dtype), 0)
    extended[(starts[:-1] + order * reach)[:, None] + back] = past
    mixed = convolve(extended, weights)[rows - reach]
    conv_state[slots] = extended[(starts[1:] + order * reach)[:, None] + back].to(conv_state.dtype)

    before = torch.cat([delayed[:1], delayed[:-1]])
    before[starts[:-1]] = torch.where(resumed[:, None], value_state[slots].to(delayed.dtype), first_delayed)
    value_state[slots] = delayed[starts[1:] - 1].to(value_state.dtype)
    return mixed, before


def requests_of(metadata: Any, device: torch.device) -> Requests:
    """Requests of vLLM's short-convolution metadata: decodes first, one token each, then prefills."""
    decodes, prefills = metadata.num_decodes, metadata.num_prefills
    assert metadata.num_decode_tokens == decodes, "speculative decoding is not supported"
    slots, resumed, starts = [], [], [torch.arange(decodes + 1, device=device)]
    if decodes:
        slots.append(decode_slots(metadata))
        resumed.append(torch.ones(decodes, dtype=torch.bool, device=device))
    if prefills:
        slots.append(prefill_slots(metadata))
        resumed.append(metadata.has_initial_states_p[:prefills])
        starts.append(metadata.query_start_loc_p[1 : prefills + 1] + decodes)
    return Requests(torch.cat(slots).long(), torch.cat(resumed), torch.cat(starts).long())


def _fresh(layer, qk: torch.Tensor, delayed: torch.Tensor) -> tuple[Requests, torch.Tensor, torch.Tensor]:
    """One new request and a state of its own, for vLLM's profiling run, which has no metadata."""
    zero = torch.zeros(1, dtype=torch.long, device=qk.device)
    starts = torch.tensor([0, qk.shape[0]], device=qk.device)
    conv, value = (x.new_zeros(1, *shape) for x, shape in zip((qk, delayed), layer.get_state_shape(), strict=True))
    return Requests(zero, zero.bool(), starts), conv, value


def _state(
    qk: torch.Tensor, delayed: torch.Tensor, mixed: torch.Tensor, before: torch.Tensor, layer_name: str
) -> None:
    """The op: finds its layer and this step's requests in vLLM's forward context. Rows of padding stay as they are."""
    context: Any = get_forward_context()
    layer = context.no_compile_layers[layer_name]
    if context.attn_metadata is None:
        requests, conv, value = _fresh(layer, qk, delayed)
        count = qk.shape[0]
    else:
        metadata = context.attn_metadata[layer_name]
        requests, (conv, value) = requests_of(metadata, qk.device), layer.kv_cache
        count = metadata.num_decodes + metadata.num_prefill_tokens
    first = layer.first_delayed(delayed)
    mixed[:count], before[:count] = mix(
        qk[:count], delayed[:count], first, layer.conv_weights(), conv, value, requests
    )


def _state_fake(
    qk: torch.Tensor, delayed: torch.Tensor, mixed: torch.Tensor, before: torch.Tensor, layer_name: str
) -> None:
    return None


if not hasattr(torch.ops.vllm, STATE_OP):
    direct_register_custom_op(
        op_name=STATE_OP, op_func=_state, mutates_args=["mixed", "before"], fake_impl=_state_fake
    )
