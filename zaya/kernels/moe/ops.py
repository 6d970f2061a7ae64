"""`moe` as torch.library ops: `zaya::moe_forward`, `zaya::moe_decode` and `zaya::moe_backward`, with fake kernels and
autograd. The host only sizes buffers and launches: it reads no device value, so everything can be captured in a graph.

In eager mode what the ops call is called without the dispatcher's detour through Python (`launch.eager`).
"""

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from zaya.errors import UserError
from zaya.kernels import log_once, tiles
from zaya.kernels.launch import Launch, backend_of, eager, on_device, processors
from zaya.kernels.moe import decode, permute
from zaya.kernels.moe import triton as kernels

Tensor = torch.Tensor
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def unsupported(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> str | None:
    """Why the kernels do not take these tensors, or None when they do."""
    num_experts, double, width = gate_up_proj.shape
    if x.device.type == "cpu" and not INTERPRET:
        return "the tensors are on the CPU"
    if x.dtype not in (torch.bfloat16, torch.float16) and not INTERPRET:
        return f"dtype {x.dtype}; they take bfloat16 and float16"
    if width % 16 or double % 32:
        return f"sizes D = {width}, F = {double // 2}; they take multiples of 16"
    if num_experts > 128:
        return f"{num_experts} experts; they take up to 128"
    if down_proj.shape != (num_experts, width, double // 2):
        return f"down_proj {tuple(down_proj.shape)} beside gate_up_proj {tuple(gate_up_proj.shape)}"
    return None


def _grid(table: tiles.MoeTiles, tile: tiles.Tile, tile_count: int, x: Tensor) -> tuple[int]:
    if not table.persistent:
        return (max(tile_count, 1),)
    return (max(min(tile_count, processors(x.device) * tile.per_sm), 1),)


def _operand(table: tiles.MoeTiles, t: Tensor, block: list[int]) -> Any:
    """A tensor as the kernels read it. One that starts off the 16-byte boundary that a descriptor needs is copied."""
    if not table.tma:
        return t
    if t.data_ptr() % 16:
        log_once("moe: a weight does not start at a multiple of 16 bytes, so it is copied at every call")
        t = t.clone()
    return TensorDescriptor.from_tensor(t, block)


@functools.cache
def _product(kernel, table: tiles.MoeTiles, tile: tiles.Tile, num_experts: int, **constants) -> Launch:
    """The launch of a product's kernel with this tile."""
    shape = {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": tile.group, "TMA": table.tma}
    shape |= {"E": num_experts, "E_PAD": triton.next_power_of_2(num_experts), "FLATTEN": tile.flatten}
    shape = {k: v for k, v in shape.items() if k in kernel.arg_names} | constants
    return Launch(kernel, **shape, **tile.launch)


def _up(table, x, w, pre, act, rows, offs, save):
    num_experts, double, width = w.shape
    hidden = double // 2
    tile = table.up.fit(hidden, width)
    out = [tile.bm, tile.bn]
    weight = w.view(-1, 2, hidden, width) if tile.wide else w.view(-1, width)
    to = _operand(table, act, out)
    launch = _product(
        kernels.moe_up_kernel, table, tile, num_experts, WIDE=tile.wide, SAVE=save, DTYPE=DTYPES[x.dtype]
    )
    launch(
        _grid(table, tile, rows.numel() // tile.bm * (hidden // tile.bn), x),
        _operand(table, x, [tile.bm, tile.bk]),
        _operand(table, weight, [1, 2, tile.bn, tile.bk] if tile.wide else [tile.bn, tile.bk]),
        _operand(table, pre, out) if save else to, to, rows, offs, width, hidden, x.stride(0),
    )  # fmt: skip


def _rows(table, tile, a, w, out, weights, rows, offs, nt):
    """out[token] = weight * a W^T (nt) or a W, per expert, for the routed tokens."""
    k, n = a.shape[1], out.shape[1]
    tile = tile.fit(n, k)
    weighted = weights is not None
    launch = _product(kernels.moe_rows_kernel, table, tile, w.shape[0], NT=nt, WEIGHTED=weighted, SPLIT=tile.split > 1)
    launch(
        _grid(table, tile, rows.numel() // tile.bm * (n // tile.bn), a),
        _operand(table, a, [tile.bm, tile.bk]),
        _operand(table, w.view(-1, w.shape[2]), [tile.bn, tile.bk] if nt else [tile.bk, tile.bn]),
        out, weights if weighted else out, rows, offs, k, n,
    )  # fmt: skip


def _dact(table, dy, w, pre, dpre, act, weights, rows, offs):
    """Fills dpre and act; returns the gradient of the weights as partial sums [parts, R]."""
    num_experts, width, hidden = w.shape
    tile = table.dact.fit(hidden, width)
    parts = torch.empty(hidden // tile.bn, rows.numel(), dtype=torch.float32, device=dy.device)
    launch = _product(kernels.moe_dact_kernel, table, tile, num_experts, SUB=tile.split, DTYPE=DTYPES[dy.dtype])
    launch(
        _grid(table, tile, rows.numel() // tile.bm * (hidden // tile.bn), dy),
        _operand(table, dy, [tile.bm, tile.bk]), _operand(table, w.view(-1, hidden), [tile.bk, tile.bn]),
        pre, dpre, act, parts, weights, rows, offs, width, hidden, rows.numel(), dy.stride(0),
    )  # fmt: skip
    return parts


def _dw(table, a, b, out, rows, offs, a_tokens=False, b_tokens=False, add=False):
    """out[e] (+)= a_e^T b_e."""
    num_experts, m, n = out.shape
    tile = table.dw.fit(n, table.dw.bk)
    assert table.pad % tile.bk == 0, "a step over the rows would run into the next expert"
    bm = min(tile.bm, m & -m)
    constants = {"A_TOKENS": a_tokens, "B_TOKENS": b_tokens, "ADD": add, "SPLIT": tile.split > 1}
    constants |= {"BM": bm, "BT": tile.bk}
    _product(kernels.moe_dw_kernel, table, tile, num_experts, **constants)(
        _grid(table, tile, num_experts * (m // bm) * (n // tile.bn), a),
        _operand(table, a, [tile.bk, bm]), _operand(table, b, [tile.bk, tile.bn]), out, rows, offs, m, n,
        a.stride(0), b.stride(0),
    )  # fmt: skip


_SUMS = Launch(kernels.moe_weight_sums_kernel, BT=256)


def _weight_sums(parts: Tensor, slot: Tensor) -> Tensor:
    """[T] fp32: the gradient of the gate weights from its partial sums [parts, R] in expert order."""
    out = torch.empty(slot.shape[0], dtype=torch.float32, device=parts.device)
    _SUMS((max(-(-slot.shape[0] // 256), 1),), parts, slot, out, slot.shape[0], parts.shape[1], parts.shape[0])
    return out


def _forward(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, ids: Tensor, weights: Tensor, save: bool,
    main_gate_up: Tensor | None, main_down: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y [T, D], pre [R, 2F] or empty, rows, slot, offs). The main gradients are only passed through to backward."""
    num_experts, double, _ = gate_up_proj.shape
    table = tiles.moe_tiles(backend_of(x), x.shape[0])
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    with on_device(x):
        room = permute.max_rows(x.shape[0], num_experts, tiles.moe_largest_pad(backend_of(x)))
        rows, slot, offs = permute.permutation(ids, num_experts, table.pad, room)
        grouped, _ = permute.gather(x if table.tma else None, None, y, rows, offs)
        pre = x.new_empty(rows.numel() if save else 0, double)
        act = x.new_empty(rows.numel(), double // 2)
        _up(table, x if grouped is None else grouped, gate_up_proj, pre, act, rows, offs, save)
        _rows(table, table.down, act, down_proj, y, weights, rows, offs, nt=True)
    return y, pre, rows, slot, offs


moe_forward = torch.library.custom_op("zaya::moe_forward", _forward, mutates_args=())


@moe_forward.register_fake
def _(x, gate_up_proj, down_proj, ids, weights, save, main_gate_up, main_down):
    num_experts, double, _ = gate_up_proj.shape
    count = permute.max_rows(x.shape[0], num_experts, tiles.moe_largest_pad(backend_of(x)))
    ints = [x.new_empty(n, dtype=torch.int32) for n in (count, x.shape[0], num_experts + 2)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(count if save else 0, double), *ints


@functools.cache
def _decode_launches(tile: tiles.DecodeTile, padded: int, experts: int, width: int, hidden: int):
    """For `padded` tokens, a power of two: (up kernel, its column blocks, down kernel, its column blocks)."""
    shape = {"E": experts, "E_PAD": triton.next_power_of_2(experts), "VEC": tile.vec, "PDL": tile.pdl}
    shape |= {"BM": 1 if tile.vec else 16, "T_PAD": padded} | tile.launch
    bn, bk = _divisor(tile.bn_up, hidden), _divisor(tile.bk_up, width)
    up, up_blocks = Launch(decode.moe_decode_up_kernel, BN=bn, BK=bk, **shape), hidden // bn
    bn, bk = _divisor(tile.bn_down, width), _divisor(tile.bk_down, hidden)
    return up, up_blocks, Launch(decode.moe_decode_down_kernel, BN=bn, BK=bk, **shape), width // bn


def _decode(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """y [T, D] for the few tokens of MOE_DECODE; no gradient."""
    tile = tiles.moe_decode_tile(backend_of(x), x.shape[0])
    assert tile is not None
    tokens, (num_experts, width, hidden) = x.shape[0], down_proj.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    act = x.new_empty(tokens, hidden)
    slots = max(min(tokens, num_experts), 1)
    up, up_blocks, down, down_blocks = _decode_launches(
        tile, 1 << max(tokens - 1, 0).bit_length(), num_experts, width, hidden
    )
    with on_device(x):
        up((up_blocks, slots), x, gate_up_proj, act, ids, tokens, width, hidden, x.stride(0))
        down((down_blocks, slots), act, down_proj, y, weights, ids, tokens, width, hidden)
    return y


moe_decode = torch.library.custom_op("zaya::moe_decode", _decode, mutates_args=())


@moe_decode.register_fake
def _(x, gate_up_proj, down_proj, ids, weights):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _divisor(block: int, size: int) -> int:
    return min(block, size & -size)


def _gradients(
    dy: Tensor, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, weights: Tensor, pre: Tensor, rows: Tensor,
    slot: Tensor, offs: Tensor, need_x: bool, need_w: bool, main_gate_up: Tensor | None, main_down: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, d gate_up_proj, d down_proj, d weights fp32). What is not needed, or went to a main gradient, is empty."""
    table = tiles.moe_tiles(backend_of(x), x.shape[0])
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0)
    dpre = torch.empty_like(pre)
    act = x.new_empty(rows.numel(), pre.shape[1] // 2)
    with on_device(x):
        zero = dx if need_x else torch.empty_like(dy)
        gdy, gx = permute.gather(dy if table.tma else None, x if table.tma and need_w else None, zero, rows, offs)
        left, right = (gdy, gx) if table.tma else (dy, x)
        parts = _dact(table, left, down_proj, pre, dpre, act, weights, rows, offs)
        dweights = _weight_sums(parts, slot)
        if need_x:
            _rows(table, table.dx, dpre, gate_up_proj, dx, None, rows, offs, nt=False)
        dw1, dw2 = x.new_empty(0), x.new_empty(0)
        if need_w:
            dw1 = _weight_gradient(table, dpre, right, gate_up_proj, main_gate_up, rows, offs, b_tokens=not table.tma)
            dw2 = _weight_gradient(table, left, act, down_proj, main_down, rows, offs, a_tokens=not table.tma)
    return dx, dw1, dw2, dweights


def _weight_gradient(table, a, b, weight, main, rows, offs, a_tokens=False, b_tokens=False):
    """The gradient of a weight, or nothing when it was added into `main`."""
    out = torch.empty_like(weight, memory_format=torch.contiguous_format) if main is None else main
    _dw(table, a, b, out, rows, offs, a_tokens, b_tokens, add=main is not None)
    return out if main is None else weight.new_empty(0)


moe_backward = torch.library.custom_op("zaya::moe_backward", _gradients, mutates_args=("main_gate_up", "main_down"))
_eager_gradients = eager(moe_backward, _gradients)


@moe_backward.register_fake
def _(dy, x, gate_up_proj, down_proj, weights, pre, rows, slot, offs, need_x, need_w, main_gate_up, main_down):
    dw1 = torch.empty_like(gate_up_proj) if need_w and main_gate_up is None else x.new_empty(0)
    dw2 = torch.empty_like(down_proj) if need_w and main_down is None else x.new_empty(0)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0)
    return dx, dw1, dw2, x.new_empty(x.shape[0], dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    x, gate_up_proj, down_proj, _, weights, _, main_gate_up, main_down = inputs
    _, pre, rows, slot, offs = output
    ctx.mark_non_differentiable(pre, rows, slot, offs)
    ctx.set_materialize_grads(False)  # else the buffers that have no gradient get zeros of their size
    ctx.mains = main_gate_up, main_down
    ctx.save_for_backward(x, gate_up_proj, down_proj, weights, pre, rows, slot, offs)


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 8
    x, gate_up_proj, down_proj, weights, *saved = ctx.saved_tensors
    need_x, need_1, need_2, _, need_p = ctx.needs_input_grad[:5]
    dy = dy if dy.stride(1) == 1 and dy.dtype == x.dtype else dy.to(x.dtype).contiguous()
    wanted = need_x, need_1 or need_2
    dx, dw1, dw2, dp = _eager_gradients(dy, x, gate_up_proj, down_proj, weights, *saved, *wanted, *ctx.mains)
    dw1 = dw1 if need_1 and ctx.mains[0] is None else None
    dw2 = dw2 if need_2 and ctx.mains[1] is None else None
    return dx if need_x else None, dw1, dw2, None, dp.to(weights.dtype) if need_p else None, None, None, None


moe_forward.register_autograd(_backward, setup_context=_setup_context)
_eager_forward = eager(moe_forward, _forward, (_setup_context, _backward))
_eager_decode = eager(moe_decode, _decode)


def moe_triton(x, gate_up_proj, down_proj, expert_ids, gate_weights, decode=True):
    """`moe` by kernels: same arguments and result. Check `unsupported` first."""
    weights = [w.to(x.dtype).contiguous() for w in (gate_up_proj, down_proj)]
    x = x if x.stride(1) == 1 else x.contiguous()
    inputs = (x, *weights, expert_ids.contiguous(), gate_weights.contiguous())
    save = torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate_up_proj, down_proj, gate_weights))
    if decode and not save and tiles.moe_decode_tile(backend_of(x), x.shape[0]) is not None:
        return _eager_decode(*inputs)
    mains = [_main_gradient(p) if save else None for p in (gate_up_proj, down_proj)]
    return _eager_forward(*inputs, save, *mains)[0]


def _main_gradient(parameter: Tensor) -> Tensor | None:
    """The fp32 tensor to add this parameter's gradient into, when training has put one on it (see `moe`)."""
    main = getattr(parameter, "main_grad", None)
    if main is None or (main.dtype == torch.float32 and main.shape == parameter.shape and main.is_contiguous()):
        return main
    found = f"{main.dtype} of shape {tuple(main.shape)}"
    raise UserError(f"main_grad must be contiguous float32 of shape {tuple(parameter.shape)}; it is {found}")
