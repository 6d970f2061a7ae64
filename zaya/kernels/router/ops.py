"""The router's kernels as `torch.library` operators, with fake kernels and autograd.

`route` and `route_from_hidden` are the operators; in eager mode they call what those call, without the dispatcher's
detour through Python (`launch.eager`).
"""

import functools
from typing import Any

import torch
from torch import Tensor

from zaya.kernels.launch import Launch, eager, ready
from zaya.kernels.router import decode
from zaya.kernels.router import triton as kernels
from zaya.kernels.tiles import (
    ROUTER_DECODE_TOKENS,
    ROUTER_VECTOR_TOKENS,
    ROUTER_VECTOR_WIDTH,
    LaunchTile,
    router_tile,
)

BACKEND = "hip" if torch.version.hip else "cuda"


def unsupported(x: Tensor, out_weight: Tensor) -> str | None:
    """Why the kernels do not take these tokens and this router, in a few words; None when they do."""
    classes, width = out_weight.shape
    if width not in (16, 32, 64, 128, 256):
        return f"router width {width} is not a power of two from 16 to 256"
    if classes > 64:
        return f"{classes} classes are more than 64"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {x.dtype}"
    if x.dtype == torch.float32 and x.is_cuda:  # compiles for sm_90 with 90 KB of spills in each thread
        return "dtype torch.float32 on a GPU"
    return None


def _padded(classes: int) -> int:
    return max(16, 1 << (classes - 1).bit_length())


@functools.cache
def _launch(kernel: Any, tile: LaunchTile, **constants: Any) -> Launch:
    return Launch(kernel, **constants, **tile.blocks, **tile.options)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _packed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for an argument that the kernel does not read."""
    return other if x is None else x


def _forward(
    u: Tensor,
    prev_state: Tensor | None,
    state_scale: Tensor | None,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    w3: Tensor,
    balance: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(expert_ids [T] int64, gate weights [T] fp32, state [T, R], tokens of each class [C] int32)."""
    outputs = _outputs(u, w3.shape[0])
    _choose(u, prev_state, state_scale, norm_weight, (w1, b1, w2, b2, w3, balance), eps, *outputs)
    return outputs


def _choose(u, prev_state, state_scale, norm_weight, mlp, eps, ids, weights, state, counts):
    """Fills the outputs; counts may be None."""
    (tokens, width), classes = u.shape, mlp[4].shape[0]
    if not tokens:
        return
    u, tile = _rows(u), router_tile("fwd", BACKEND, tokens, width)
    prev = u if prev_state is None else _rows(prev_state)
    norm_weight, state_scale = norm_weight.contiguous(), _packed(state_scale)
    launch = _launch(
        kernels.router_fwd_kernel, tile, R=width, C=classes, C_PAD=_padded(classes),
        HAS_PREV=prev_state is not None, COUNT=counts is not None,
    )  # fmt: skip
    with ready(u, kernels.router_fwd_kernel):
        launch(
            (-(-tokens // tile.blocks["BT"]),), u, prev, _or(state_scale, norm_weight), norm_weight,
            *(w.contiguous() for w in mlp), state, ids, weights, _or(counts, ids), tokens, eps, u.stride(0),
            prev.stride(0),
        )  # fmt: skip


def _outputs(u: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = u.shape[0]
    return (
        u.new_empty(tokens, dtype=torch.int64),
        u.new_empty(tokens, dtype=torch.float32),
        u.new_empty(u.shape),
        u.new_zeros(classes, dtype=torch.int32),
    )


router_op = torch.library.custom_op("zaya::router", _forward, mutates_args=())


@router_op.register_fake
def _(u, prev_state, state_scale, norm_weight, w1, b1, w2, b2, w3, balance, eps):
    return _outputs(u, w3.shape[0])


def _gradients(
    dweights: Tensor,
    dstate: Tensor,
    state: Tensor,
    ids: Tensor,
    prev_state: Tensor | None,
    state_scale: Tensor | None,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    w3: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """du [T, R]; dprev [T, R] or [0]; the gradients of w1, w2, w3 stacked [2R + C, R]; of b1, b2, the norm weight and
    the state scale [4, R], the last without meaning when there is no prev_state."""
    (tokens, width), classes = state.shape, w3.shape[0]
    pad = _padded(classes)
    outer, inner = (router_tile(k, BACKEND, tokens, width) for k in ("bwd_outer", "bwd_inner"))
    assert outer.blocks["BT"] == inner.blocks["BT"], "both kernels run on one grid and share the rows of sums"
    blocks = -(-tokens // outer.blocks["BT"])
    du = torch.empty_like(state)
    dprev = state.new_empty(0) if prev_state is None else torch.empty_like(state, dtype=prev_state.dtype)
    acts = state.new_empty((tokens, 3 * width))
    grads = state.new_empty((tokens, 2 * width + pad))
    sums = state.new_empty((blocks, 4 * width), dtype=torch.float32)
    if not tokens:
        return du, dprev, w1.new_zeros((2 * width + classes, width)), w1.new_zeros((4, width))
    w1, b1, w2, b2, w3, norm_weight, dstate = (x.contiguous() for x in (w1, b1, w2, b2, w3, norm_weight, dstate))
    state_scale = _packed(state_scale)
    prev = state if prev_state is None else _rows(prev_state)
    sizes = {"R": width, "C_PAD": pad}
    outer_launch = _launch(kernels.router_bwd_outer_kernel, outer, C=classes, **sizes)
    inner_launch = _launch(kernels.router_bwd_inner_kernel, inner, HAS_PREV=prev_state is not None, **sizes)
    with ready(state, kernels.router_fwd_kernel):
        outer_launch(
            (blocks,), dweights.contiguous(), state, ids, norm_weight, w1, b1, w2, b2, w3, acts, grads, sums, tokens,
            eps,
        )  # fmt: skip
        inner_launch(
            (blocks,), dstate, state, prev, _or(state_scale, norm_weight), norm_weight, w1, b1, w2, acts, grads, du,
            dprev if prev_state is not None else du, sums, tokens, eps, prev.stride(0),
        )  # fmt: skip
        matrices = _weight_gradients(grads, acts, classes, width, w1.dtype)
        vectors = _add("add_vectors", sums, (4 if prev_state is not None else 3) * width, (4, width), b1.dtype)
    return du, dprev, matrices, vectors


def _weight_gradients(grads: Tensor, acts: Tensor, classes: int, width: int, dtype: torch.dtype) -> Tensor:
    """grads [T, 2R + C_PAD], acts [T, 3R] -> [2R + C, R]: one product per layer, over fixed ranges of tokens."""
    tokens, rows = grads.shape
    tile = router_tile("dw", BACKEND, tokens, width)
    bm, bn, bt = (tile.blocks[x] for x in ("BM", "BN", "BT"))
    splits = min(tile.splits, -(-tokens // bt))
    span = -(-tokens // (splits * bt)) * bt
    splits = -(-tokens // span)
    parts = grads.new_empty((splits, rows, width), dtype=torch.float32)
    grid = (-(-rows // bm) * (width // bn), splits)
    launch = _launch(kernels.router_dw_kernel, tile, R=width, C_PAD=rows - 2 * width)
    launch(grid, grads, acts, parts, tokens, span)
    return _add(
        "add_matrices", parts.view(splits, -1), (2 * width + classes) * width, (2 * width + classes, width), dtype
    )


def _add(kernel: str, parts: Tensor, count: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The first `count` columns of parts [n, …] fp32 added over n, always in one order, as the first of `shape`."""
    out = parts.new_empty(shape, dtype=dtype)
    tile = router_tile(kernel, BACKEND, count, 0)
    grid = (-(-count // tile.blocks["BN"]),)
    _launch(kernels.router_add_kernel, tile)(grid, parts, out, parts.shape[0], count, parts.stride(0))
    return out


router_backward_op = torch.library.custom_op("zaya::router_backward", _gradients, mutates_args=())
_eager_gradients = eager(router_backward_op, _gradients)


@router_backward_op.register_fake
def _(dweights, dstate, state, ids, prev_state, state_scale, norm_weight, w1, b1, w2, b2, w3, eps):
    width, classes = state.shape[1], w3.shape[0]
    dprev = state.new_empty(0) if prev_state is None else torch.empty_like(state, dtype=prev_state.dtype)
    return torch.empty_like(state), dprev, w1.new_empty((2 * width + classes, width)), b1.new_empty((4, width))


def _keep(ctx, inputs, output):
    u, prev_state, state_scale, norm_weight, w1, b1, w2, b2, w3, _, eps = inputs
    ids, _, state, counts = output
    ctx.mark_non_differentiable(ids, counts)
    ctx.save_for_backward(state, ids, prev_state, state_scale, norm_weight, w1, b1, w2, b2, w3)
    ctx.eps = eps


def _backward(ctx, _ids, dweights, dstate, _counts):
    state, ids, prev_state, state_scale, norm_weight, w1, b1, w2, b2, w3 = ctx.saved_tensors
    du, dprev, matrices, vectors = _eager_gradients(
        dweights, dstate, state, ids, prev_state, state_scale, norm_weight, w1, b1, w2, b2, w3, ctx.eps
    )
    width = state.shape[1]
    dw1, dw2, dw3 = matrices[:width], matrices[width : 2 * width], matrices[2 * width :]
    db1, db2, dnorm, dscale = vectors.unbind(0)
    eda = (None, None) if prev_state is None else (dprev, dscale.to(state_scale.dtype))
    rest = (dnorm.to(norm_weight.dtype), dw1, db1, dw2.to(w2.dtype), db2.to(b2.dtype), dw3.to(w3.dtype))
    return du, *eda, *rest, None, None


router_op.register_autograd(_backward, setup_context=_keep)
route = eager(router_op, _forward, (_keep, _backward))


def _decode_outputs(x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = x.shape[0]
    ids, weights = x.new_empty(tokens, dtype=torch.int64), x.new_empty(tokens, dtype=torch.float32)
    return ids, weights, x.new_empty((tokens, width))


def _from_hidden(
    x: Tensor,
    down_weight: Tensor,
    down_bias: Tensor,
    prev_state: Tensor | None,
    state_scale: Tensor | None,
    norm_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    w3: Tensor,
    balance: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Down projection and router, inference only: (expert_ids, gate weights, state).

    The choice between the decode kernels and the library's product is made in here, by the number of tokens at run
    time, so that one compiled graph serves every number.
    """
    down_bias = down_bias.contiguous()  # the library adds a strided one after rounding the product
    if not decode_takes(x, down_weight):
        u = torch.nn.functional.linear(x, down_weight, down_bias)
        outputs = _decode_outputs(u, u.shape[1])
        _choose(u, prev_state, state_scale, norm_weight, (w1, b1, w2, b2, w3, balance), eps, *outputs, None)
        return outputs
    x, prev = _rows(x), None if prev_state is None else _rows(prev_state)
    norm_weight, state_scale = norm_weight.contiguous(), _packed(state_scale)
    mlp = tuple(w.contiguous() for w in (w1, b1, w2, b2, w3, balance))
    outputs = _decode_outputs(x, down_weight.shape[0])
    run = _decode_vectors if x.shape[0] <= ROUTER_VECTOR_TOKENS else _decode_blocks
    with ready(x, kernels.router_fwd_kernel):
        run(x, down_weight.contiguous(), down_bias, prev, state_scale, norm_weight, mlp, eps, outputs)
    return outputs


def _decode_blocks(x, down_weight, down_bias, prev, state_scale, norm_weight, mlp, eps, outputs):
    ids, weights, state = outputs
    (tokens, hidden), width, classes = x.shape, down_weight.shape[0], mlp[4].shape[0]
    first, second = (router_tile(k, BACKEND, tokens, width) for k in ("project", "decode"))
    blocks, slices = -(-tokens // first.blocks["BT"]), width // second.blocks["BC"]
    parts = x.new_empty((first.splits, tokens, width), dtype=torch.float32)
    scratch = x.new_empty((blocks, slices, second.blocks["BT"], width), dtype=torch.float32)
    ticket = x.new_empty(blocks, dtype=torch.int32)
    sizes = {"R": width, "SPLITS": first.splits}
    choice = {"C": classes, "C_PAD": _padded(classes), "HAS_PREV": prev is not None}
    _launch(decode.router_project_kernel, first, **sizes)(
        (width // first.blocks["BN"], first.splits, blocks), x, down_weight, parts, ticket, tokens, hidden, x.stride(0)
    )
    _launch(decode.router_decode_kernel, second, **sizes, **choice)(
        (slices, blocks), parts, down_bias, _or(prev, state), _or(state_scale, norm_weight), norm_weight, *mlp, state,
        ids, weights, scratch, ticket, tokens, eps, _or(prev, state).stride(0),
    )  # fmt: skip


def _decode_vectors(x, down_weight, down_bias, prev, state_scale, norm_weight, mlp, eps, outputs):
    ids, weights, state = outputs
    (tokens, hidden), width, classes = x.shape, down_weight.shape[0], mlp[4].shape[0]
    first, second = (router_tile(k, BACKEND, tokens, width) for k in ("project_vec", "decode_vec"))
    slices = width // second.blocks["BC"]
    u, ticket = torch.empty_like(state), x.new_empty(tokens, dtype=torch.int32)
    scratch = x.new_empty((tokens, slices, width), dtype=torch.float32)
    choice = {"C": classes, "C_PAD": _padded(classes), "HAS_PREV": prev is not None}
    _launch(decode.router_project_vec_kernel, first.fit(hidden), D=hidden, R=width, PDL=x.is_cuda and first.pdl)(
        (width // first.blocks["BN"], tokens), x, down_weight, down_bias, u, ticket, x.stride(0)
    )
    _launch(decode.router_decode_vec_kernel, second, R=width, **choice, PDL=x.is_cuda and second.pdl)(
        (slices, tokens), u, _or(prev, state), _or(state_scale, norm_weight), norm_weight, *mlp, state, ids, weights,
        scratch, ticket, eps, _or(prev, state).stride(0),
    )  # fmt: skip


router_from_hidden_op = torch.library.custom_op("zaya::router_from_hidden", _from_hidden, mutates_args=())
route_from_hidden = eager(router_from_hidden_op, _from_hidden)


@router_from_hidden_op.register_fake
def _(x, down_weight, down_bias, prev_state, state_scale, norm_weight, w1, b1, w2, b2, w3, balance, eps):
    return _decode_outputs(x, down_weight.shape[0])


def decode_takes(x: Tensor, down_weight: Tensor) -> bool:
    """Whether the decode kernels take these tokens: 1 to 64 of them, of a hidden width that their splits divide."""
    tokens, width = x.shape[0], down_weight.shape[0]
    if not 0 < tokens <= ROUTER_DECODE_TOKENS:
        return False
    if tokens <= ROUTER_VECTOR_TOKENS:
        return x.shape[1] % ROUTER_VECTOR_WIDTH == 0
    tile = router_tile("project", BACKEND, tokens, width)
    return x.shape[1] % (tile.splits * tile.blocks["BK"]) == 0
