"""`cca` as `torch.library` operators, with fake kernels and autograd, and the decode step that keeps its state."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from zaya.kernels.cca import backward, decode
from zaya.kernels.cca import triton as kernels
from zaya.kernels.cca.reference import halo_gradients
from zaya.kernels.launch import Launch, eager, ready
from zaya.kernels.tiles import CCA, CCA_VECTOR_TOKENS, LaunchTile, tile_for

BACKEND = "hip" if torch.version.hip else "cuda"


def unsupported(qkv: Tensor, depthwise, grouped, cos: Tensor) -> str | None:
    """Why the kernels do not take these tensors, in a few words; None when they do."""
    size, half = grouped[0].shape[1], cos.shape[-1]
    if depthwise[0].shape[2] != 2 or grouped[0].shape[2] != 2:
        return f"{depthwise[0].shape[2]} and {grouped[0].shape[2]} taps; they take 2 and 2"
    if size not in (32, 64, 128):
        return f"heads of {size}; they take 32, 64 and 128"
    if half == 0 or half & (half - 1) or 2 * half > size:
        return f"{2 * half} rotated channels, which are no power of two"
    if qkv.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {qkv.dtype}"
    if qkv.dtype == torch.float32 and qkv.is_cuda:
        return "dtype torch.float32 on a GPU"
    return None


@functools.cache
def _launch(kernel: Any, tile: LaunchTile, heads: int, groups: int, size: int, **constants: Any) -> Launch:
    shape = {"H": heads, "G": groups, "D": size, "ROOT": math.sqrt(size)} | constants | tile.blocks
    return Launch(kernel, **{k: v for k, v in shape.items() if k in kernel.arg_names}, **tile.options)


def _sizes(temp: Tensor, w1: Tensor) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size)."""
    return w1.shape[0] // w1.shape[1] - temp.shape[0], temp.shape[0], w1.shape[1]


def _by_heads(w1: Tensor) -> Tensor:
    """nn.Conv1d's grouped weight [C, d, 2] as [H + G, 2, d, d]: head, tap, in, out."""
    size = w1.shape[1]
    return w1.view(-1, size, size, 2).permute(0, 3, 2, 1).contiguous()


def _state(like: Tensor, conv: Tensor | None, delayed: Tensor | None) -> tuple[Tensor, Tensor, list[int]]:
    """Both states, or stand-ins, and the strides (slot, token, column, slot of delayed)."""
    if conv is None or delayed is None:
        return like, like, [0, 0, 0, 0]
    return conv, delayed, [*conv.stride(), delayed.stride(0)]


def _outputs(qkv: Tensor, temp: Tensor, w1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups, size = _sizes(temp, w1)
    lead = qkv.shape[:2]
    return tuple(qkv.new_empty(*lead, n, size) for n in (heads, groups, groups))  # type: ignore[return-value]


def _rotation(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int]:
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0)


def _forward(
    qkv: Tensor, w0: Tensor, b0: Tensor, w1: Tensor, b1: Tensor, temp: Tensor, cos: Tensor, sin: Tensor,
    first: Tensor | None, conv: Tensor | None, delayed: Tensor | None, depth: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """query [B, S, H, d], key and value [B, S, G, d]."""
    outputs = _outputs(qkv, temp, w1)
    _run("fwd", qkv, (w0, b0, w1, b1, temp), (cos, sin), first, conv, delayed, None, depth, outputs, False)
    return outputs


def _run(name, qkv, weights, rope, first, conv, delayed, slots, depth, outputs, update):
    qkv = qkv.contiguous()
    (batch, length, width), (w0, b0, w1, b1, temp) = qkv.shape, (w.contiguous() for w in weights)
    tokens, sizes = batch * length, _sizes(temp, w1)
    if not tokens:
        return
    cos, sin, stride_cos = _rotation(*rope)
    tile = tile_for(CCA[name, BACKEND], tokens)
    launch = _launch(
        kernels.cca_fwd_kernel, tile, *sizes, HALF=cos.shape[-1], HAS_FIRST=first is not None,
        HAS_STATE=conv is not None, HAS_SLOTS=slots is not None, HAS_DEPTH=depth is not None, UPDATE=update,
    )  # fmt: skip
    state, kept, (slot, back, column, stride_delayed) = _state(qkv, conv, delayed)
    with ready(qkv, kernels.cca_fwd_kernel):
        launch(
            (sum(sizes[:2]), -(-tokens // tile.blocks["BT"])), qkv, w0, b0, _by_heads(w1), b1, temp, cos, sin,
            qkv if first is None else first.contiguous(), state, kept, qkv if slots is None else slots,
            qkv if depth is None else depth.contiguous(), *outputs, tokens, length, torch.finfo(qkv.dtype).eps, width,
            stride_cos, slot, back, column, stride_delayed,
        )  # fmt: skip


cca_op = torch.library.custom_op("zaya::cca", _forward, mutates_args=())


@cca_op.register_fake
def _(qkv, w0, b0, w1, b1, temp, cos, sin, first, conv, delayed, depth):
    return _outputs(qkv, temp, w1)


def _gradients(
    dquery: Tensor, dkey: Tensor, dvalue: Tensor, qkv: Tensor, w0: Tensor, b0: Tensor, w1: Tensor, b1: Tensor,
    temp: Tensor, cos: Tensor, sin: Tensor, conv: Tensor | None, depth: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dqkv; dw0, db0, dw1, db1 and dtemp in fp32; dconv or empty)."""
    qkv, dquery, dkey, dvalue = (x.contiguous() for x in (qkv, dquery, dkey, dvalue))
    w0, b0, w1, b1, temp = (x.contiguous() for x in (w0, b0, w1, b1, temp))
    heads, groups, size = sizes = _sizes(temp, w1)
    tokens, length, channels = qkv.shape[0] * qkv.shape[1], qkv.shape[1], (heads + groups) * size
    if not tokens:
        none = [x.new_zeros(x.shape, dtype=torch.float32) for x in (w0, b0, w1, b1, temp)]
        dconv = qkv.new_empty(0) if conv is None else torch.zeros_like(conv)
        return torch.empty_like(qkv), none[0], none[1], none[2], none[3], none[4], dconv
    matrix, (cos, sin, stride_cos) = _by_heads(w1), _rotation(cos, sin)
    state, _, (slot, back, column, _) = _state(qkv, conv, conv)
    has = {"HAS_STATE": conv is not None, "HAS_DEPTH": depth is not None, "HALF": cos.shape[-1]}
    at = qkv if depth is None else depth.contiguous()
    tiles = {name: tile_for(CCA[name, BACKEND], tokens) for name in ("bwd_dy", "bwd_dx", "bwd_dw")}
    blocks = {name: -(-tokens // tile.blocks["BT"]) for name, tile in tiles.items()}
    dy, dqkv = qkv.new_empty(tokens, channels), torch.empty_like(qkv)
    dtemp = qkv.new_empty((blocks["bwd_dy"], groups), dtype=torch.float32)
    sums = qkv.new_empty((blocks["bwd_dx"], 3, channels), dtype=torch.float32)
    step = tiles["bwd_dw"].blocks["BT"]
    span = -(-blocks["bwd_dw"] // min(tiles["bwd_dw"].splits, blocks["bwd_dw"])) * step
    spans = -(-tokens // span)
    parts = qkv.new_empty((spans, heads + groups, 2, size, size), dtype=torch.float32)
    vectors = qkv.new_empty((spans, heads + groups, 2, size), dtype=torch.float32)
    tail = (qkv.shape[2], slot, back, column)
    launch = {
        name: _launch(getattr(backward, f"cca_{name}_kernel"), tile, *sizes, **has) for name, tile in tiles.items()
    }
    with ready(qkv, kernels.cca_fwd_kernel):
        launch["bwd_dy"](
            (heads + groups, blocks["bwd_dy"]), dquery, dkey, qkv, w0, b0, matrix, b1, temp, cos, sin, state, at, dy,
            dtemp, tokens, length, torch.finfo(qkv.dtype).eps, tail[0], stride_cos, *tail[1:],
        )  # fmt: skip
        launch["bwd_dx"](
            (heads + groups, blocks["bwd_dx"]), dy, dvalue, qkv, w0, matrix, state, at, dqkv, sums, tokens, length,
            *tail,
        )  # fmt: skip
        launch["bwd_dw"](
            (2 * (heads + groups), spans), dy, qkv, w0, b0, state, at, parts, vectors, tokens, length, span, *tail
        )
        sums, parts, vectors = sums.sum(0), parts.sum(0), vectors.sum(0)
    dw0 = sums[:2].t().reshape(w0.shape)
    # before a document's first token the grouped convolution reads the depthwise bias
    db0 = sums[2] + (matrix[:, 0].float() @ vectors[:, 0].unsqueeze(2)).flatten()
    dw1 = parts.permute(0, 3, 2, 1).reshape(w1.shape)
    dconv = qkv.new_empty(0)
    if conv is not None:
        dconv, more_w0, more_b0 = halo_gradients(dy.view(*qkv.shape[:2], channels), conv, w0, matrix, depth)
        dw0, db0 = dw0 + more_w0, db0 + more_b0
    return dqkv, dw0, db0, dw1, vectors[:, 1].flatten(), dtemp.sum(0), dconv


backward_op = torch.library.custom_op("zaya::cca_backward", _gradients, mutates_args=())
_eager_gradients = eager(backward_op, _gradients)


@backward_op.register_fake
def _(dquery, dkey, dvalue, qkv, w0, b0, w1, b1, temp, cos, sin, conv, depth):
    wide = (x.new_empty(x.shape, dtype=torch.float32) for x in (w0, b0, w1, b1, temp))
    return torch.empty_like(qkv), *wide, qkv.new_empty(0) if conv is None else torch.empty_like(conv)


def _keep(ctx, inputs, output):
    qkv, w0, b0, w1, b1, temp, cos, sin, first, conv, delayed, depth = inputs
    ctx.save_for_backward(qkv, w0, b0, w1, b1, temp, cos, sin, conv, depth)
    ctx.first, ctx.delayed = first is not None, delayed is not None


def _backward(ctx, dquery, dkey, dvalue):
    *saved, conv, depth = ctx.saved_tensors
    dqkv, dw0, db0, dw1, db1, dtemp, dconv = _eager_gradients(dquery, dkey, dvalue, *saved, conv, depth)
    weights = [d.to(w.dtype) for d, w in zip((dw0, db0, dw1, db1, dtemp), saved[1:6], strict=True)]
    late = dvalue.flatten(2).chunk(2, dim=2)[1]
    starts = torch.zeros(late.shape[:2], dtype=torch.bool, device=late.device) if depth is None else depth == 0
    if conv is None:
        starts = torch.cat([torch.ones_like(starts[:, :1]), starts[:, 1:]], 1)
    dfirst = late.float().where(starts.unsqueeze(2), 0).sum((0, 1)).to(late.dtype) if ctx.first else None
    ddelayed = late[:, 0].where(~starts[:, :1], 0) if ctx.delayed else None
    return dqkv, *weights, None, None, dfirst, dconv if conv is not None else None, ddelayed, None


cca_op.register_autograd(_backward, setup_context=_keep)
apply = eager(cca_op, _forward, (_keep, _backward))


def _step(
    qkv: Tensor, w0: Tensor, b0: Tensor, w1: Tensor, b1: Tensor, temp: Tensor, cos: Tensor, sin: Tensor,
    conv: Tensor, delayed: Tensor, slots: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One token of each sequence, [B, 1, …]; conv [slots, 2, C] and delayed [slots, W] are replaced in place."""
    outputs = _outputs(qkv, temp, w1)
    if qkv.shape[0] > CCA_VECTOR_TOKENS:
        _run("step", qkv, (w0, b0, w1, b1, temp), (cos, sin), None, conv, delayed, slots, None, outputs, True)
        return outputs
    qkv = qkv.contiguous()
    cos, sin, stride_cos = _rotation(cos, sin)
    heads, groups, size = sizes = _sizes(temp, w1)
    tile = tile_for(CCA["vector", BACKEND], qkv.shape[0])
    launch = _launch(decode.cca_vector_kernel, tile, *sizes, HALF=cos.shape[-1], HAS_SLOTS=slots is not None)
    with ready(qkv, decode.cca_vector_kernel):
        launch(
            (heads + groups, qkv.shape[0]), qkv, *(w.contiguous() for w in (w0, b0, w1, b1, temp)), cos, sin, conv,
            delayed, qkv if slots is None else slots, *outputs, torch.finfo(qkv.dtype).eps, qkv.shape[2], stride_cos,
            *conv.stride(), delayed.stride(0),
        )  # fmt: skip
    return outputs


step_op = torch.library.custom_op("zaya::cca_step", _step, mutates_args=("conv", "delayed"))
step = eager(step_op, _step)


@step_op.register_fake
def _(qkv, w0, b0, w1, b1, temp, cos, sin, conv, delayed, slots):
    return _outputs(qkv, temp, w1)
