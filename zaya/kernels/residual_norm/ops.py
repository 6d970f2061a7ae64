"""`residual_norm` as `torch.library` operators, with fake kernels and autograd."""

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from zaya.kernels.launch import Launch, eager, processors, ready
from zaya.kernels.residual_norm import triton as kernels
from zaya.kernels.tiles import RESIDUAL_NORM, LaunchTile, tile_for

BACKEND = "hip" if torch.version.hip else "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def unsupported(residual: Tensor, branch: Tensor | None, norm: tuple[Tensor, float] | None) -> str | None:
    """Why the kernels do not take these tensors, in a few words; None when they do."""
    if residual.shape[-1] > 16384:
        return f"width {residual.shape[-1]} is over 16,384"
    wide = torch.float32 if branch is None else torch.promote_types(branch.dtype, residual.dtype)
    if branch is not None and wide != residual.dtype:
        return f"a residual stream of {residual.dtype} beside a branch of {branch.dtype}"
    if residual.dtype not in DTYPES or (norm is not None and norm[0].dtype not in DTYPES):
        return f"dtype {residual.dtype}"
    return None


@functools.cache
def _launch(kernel: Any, tile: LaunchTile, width: int, **constants: Any) -> Launch:
    return Launch(kernel, D=width, BD=triton.next_power_of_2(width), **constants, **tile.blocks, **tile.options)


def _rows(x: Tensor) -> Tensor:
    """x [..., D] as [T, D] with D contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _outputs(residual: Tensor, branch: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    joined = residual.new_empty(0 if branch is None else residual.shape)
    if weight is None:
        return joined, residual.new_empty(0)
    return joined, residual.new_empty(residual.shape, dtype=weight.dtype)


def _vectors(like: Tensor, *vectors: Tensor | None) -> list[Tensor]:
    """Contiguous vectors; in the place of one that the kernel does not read, some pointer."""
    return [like if v is None else v.contiguous() for v in vectors]


def _forward(
    residual: Tensor, branch: Tensor | None, s: Tensor | None, b: Tensor | None, residual_s: Tensor | None,
    residual_b: Tensor | None, weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(r' or empty when there is no branch, y or empty when there is no weight)."""
    joined, y = _outputs(residual, branch, weight)
    rows = _rows(residual)
    tokens, width = rows.shape
    if not tokens:
        return joined, y
    other = rows if branch is None else _rows(branch)
    tile = tile_for(RESIDUAL_NORM["fwd", BACKEND], tokens)
    launch = _launch(kernels.residual_norm_fwd_kernel, tile, width, BRANCH=branch is not None, NORM=weight is not None)
    with ready(residual, kernels.residual_norm_fwd_kernel):
        launch(
            (-(-tokens // tile.blocks["BT"]),), rows, other, *_vectors(rows, s, b, residual_s, residual_b, weight),
            joined, y, tokens, eps, rows.stride(0), other.stride(0),
        )  # fmt: skip
    return joined, y


forward_op = torch.library.custom_op("zaya::residual_norm", _forward, mutates_args=())


@forward_op.register_fake
def _(residual, branch, s, b, residual_s, residual_b, weight, eps):
    return _outputs(residual, branch, weight)


def _gradients(
    djoined: Tensor | None, dy: Tensor | None, residual: Tensor, branch: Tensor | None, s: Tensor | None,
    b: Tensor | None, residual_s: Tensor | None, residual_b: Tensor | None, weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dresidual; dbranch or empty; [4, D] fp32, the sums that `residual_norm_bwd_kernel` names."""
    rows = _rows(residual)
    tokens, width = rows.shape
    dresidual = residual.new_empty(residual.shape)
    dbranch = residual.new_empty(0) if branch is None else branch.new_empty(branch.shape)
    if not tokens:
        return dresidual, dbranch, residual.new_zeros((4, width), dtype=torch.float32)
    other = rows if branch is None else _rows(branch)
    tile = tile_for(RESIDUAL_NORM["bwd", BACKEND], tokens)
    step = tile.blocks["BT"]
    programs = min(processors(residual.device) * tile.splits, -(-tokens // step))
    span = -(-tokens // (programs * step)) * step
    programs = -(-tokens // span)
    sums = residual.new_empty((programs, 4, width), dtype=torch.float32)
    launch = _launch(
        kernels.residual_norm_bwd_kernel, tile, width, BRANCH=branch is not None, NORM=weight is not None,
        JOINED=djoined is not None,
    )  # fmt: skip
    with ready(residual, kernels.residual_norm_fwd_kernel):
        launch(
            (programs,), *_vectors(rows, djoined, dy), rows, other,
            *_vectors(rows, s, b, residual_s, residual_b, weight), dresidual, dbranch, sums, tokens, span, eps,
            rows.stride(0), other.stride(0),
        )  # fmt: skip
        return dresidual, dbranch, sums.sum(0)


backward_op = torch.library.custom_op("zaya::residual_norm_backward", _gradients, mutates_args=())
_eager_gradients = eager(backward_op, _gradients)


@backward_op.register_fake
def _(djoined, dy, residual, branch, s, b, residual_s, residual_b, weight, eps):
    dbranch = residual.new_empty(0) if branch is None else branch.new_empty(branch.shape)
    return (
        residual.new_empty(residual.shape),
        dbranch,
        residual.new_empty((4, residual.shape[-1]), dtype=torch.float32),
    )


def _keep(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:-1])
    ctx.eps = inputs[-1]


def _backward(ctx, djoined, dy):
    residual, branch, s, b, residual_s, residual_b, weight = ctx.saved_tensors
    if branch is None:
        djoined = None  # the empty stand-in for r'
    used = weight if dy is not None else None
    dy = dy if weight is not None else None  # likewise for y
    dresidual, dbranch, sums = _eager_gradients(djoined, dy, *ctx.saved_tensors[:-1], used, ctx.eps)
    joins: tuple = (None,) * 5
    if branch is not None:
        moved, scaled, residual_scaled = sums[0], sums[1].to(s.dtype), sums[2].to(residual_s.dtype)
        shifts = (moved * s).to(b.dtype), (moved * residual_s).to(residual_b.dtype)
        joins = (dbranch, scaled, shifts[0], residual_scaled, shifts[1])
    return dresidual, *joins, None if used is None else sums[3].to(weight.dtype), None


forward_op.register_autograd(_backward, setup_context=_keep)
_join = eager(forward_op, _forward, (_keep, _backward))


def apply(residual, branch, scaling, norm):
    """What `residual_norm_reference` returns, by the kernels."""
    weight, eps = (None, 0.0) if norm is None else norm
    joined, y = _join(residual, branch, *((None,) * 4 if branch is None else scaling), weight, eps)
    return residual if branch is None else joined, None if norm is None else y
