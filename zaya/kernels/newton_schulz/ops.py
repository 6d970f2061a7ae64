"""Newton-Schulz as a `torch.library` operator: three products a step, on a stack that was scaled and padded once."""

import functools
import math
import os
from dataclasses import replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zaya.kernels import tiles
from zaya.kernels.launch import Launch, backend_of, eager, on_device, processors
from zaya.kernels.newton_schulz import triton as kernels
from zaya.kernels.tiles import NewtonSchulzTiles, Tile

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


def unsupported(x: Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernels do not take these matrices, or None when they do."""
    if x.device.type == "cpu" and not INTERPRET:
        return "the tensors are on the CPU"
    if dtype not in (torch.bfloat16, torch.float16) and not INTERPRET:
        return f"dtype {dtype}; they take bfloat16 and float16"
    if _table(x).library:
        return "its speed: torch's products are faster at this size (docs/kernels.md)"
    return None


def _table(x: Tensor) -> NewtonSchulzTiles:
    height, width = sorted(x.shape[-2:])
    return tiles.newton_schulz_tiles(backend_of(x), math.prod(x.shape[:-2]) * height * height)


def _up(size: int, block: int) -> int:
    return -(-size // block) * block


def padded(table: NewtonSchulzTiles, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the working matrices: multiples of what the tiles cannot do without."""
    return _up(height, max(table.gram.bm, table.update.bm, table.update.bk)), _up(width, table.gram.bk)


@functools.cache
def _symmetric(table: NewtonSchulzTiles, tile: Tile, add: bool) -> Launch:
    constants = kernels.symmetric_constants(tile, table.tma, add)
    return Launch(kernels.newton_schulz_symmetric_kernel, **constants, **tile.launch)


@functools.cache
def _update(table: NewtonSchulzTiles, tile: Tile) -> Launch:
    return Launch(kernels.newton_schulz_update_kernel, **kernels.update_constants(tile, table.tma), **tile.launch)


def _grid(table: NewtonSchulzTiles, tile: Tile, count: int, x: Tensor) -> tuple[int]:
    return (min(count, processors(x.device) * tile.per_sm) if table.persistent else count,)


def _operand(table: NewtonSchulzTiles, x: Tensor, rows: int, columns: int):
    return TensorDescriptor.from_tensor(x, [1, rows, columns]) if table.tma else x


@functools.cache
def _square(tile: Tile, size: int, inner: int) -> Tile:
    """The symmetric products' tile for matrices of `size` rows: BN = BM where 2 BM does not divide them."""
    return replace(tile, bn=math.gcd(tile.bn, size), bk=math.gcd(tile.bk, inner))


def tiles_of(tile: Tile, size: int) -> int:
    """Tiles of one matrix that are not wholly below the diagonal."""
    ratio, rows = tile.bn // tile.bm, size // tile.bm
    return sum(min(ratio * (j + 1), rows) for j in range(size // tile.bn))


def _symmetric_product(table, x, add, out, alpha, beta):
    """out = alpha x x^T (+ beta add)."""
    stack, height, inner = x.shape
    tile = _square(table.gram, height, inner)
    each = tiles_of(tile, height)
    _symmetric(table, tile, add is not None)(
        _grid(table, tile, stack * each, x), _operand(table, x, tile.bm, tile.bk),
        _operand(table, x, tile.bn, tile.bk), out if add is None else add, out, height, inner, each, stack * each,
        alpha, beta,
    )  # fmt: skip


def _updated(table, p, x, out, beta):
    """out = p x + beta x."""
    stack, height, width = x.shape
    tile = table.update.fit(width, height)
    count = stack * (height // tile.bm) * (width // tile.bn)
    _update(table, tile)(
        _grid(table, tile, count, x), _operand(table, p, tile.bm, tile.bk), _operand(table, x, tile.bk, tile.bn), x,
        out, height, width, count, beta,
    )  # fmt: skip


def _scaled(x: Tensor, eps: float, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    """x [S, m, n] / max(|x|, eps) in `dtype`, the norms in fp32, padded with zeros to `shape`."""
    x = x.to(dtype)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32).clamp(min=eps)
    if shape == x.shape[1:]:
        return torch.div(x, norms, out=x.new_empty(x.shape))
    out = x.new_zeros(len(x), *shape)
    out[:, : x.shape[1], : x.shape[2]] = x / norms
    return out


def _iterate(x: Tensor, steps: int, a: float, b: float, c: float, eps: float, dtype: torch.dtype) -> Tensor:
    """x [S, m, n] with m <= n -> [S, m, n] in `dtype`."""
    _, height, width = x.shape
    if not x.numel():
        return x.new_empty(x.shape, dtype=dtype)
    with on_device(x):
        table = _table(x)
        now = _scaled(x, eps, dtype, padded(table, height, width))
        after = torch.empty_like(now)
        gram, polynomial = (now.new_empty(len(now), now.shape[1], now.shape[1]) for _ in range(2))
        for _ in range(steps):
            _symmetric_product(table, now, None, gram, 1.0, 0.0)
            _symmetric_product(table, gram, gram, polynomial, c, b)
            _updated(table, polynomial, now, after, a)
            now, after = after, now
    return now if now.shape == x.shape else now[:, :height, :width].contiguous()


newton_schulz_op = torch.library.custom_op("zaya::newton_schulz", _iterate, mutates_args=())


@newton_schulz_op.register_fake
def _(x, steps, a, b, c, eps, dtype):
    return x.new_empty(x.shape, dtype=dtype)


_eager_iterate = eager(newton_schulz_op, _iterate)


@torch.no_grad()
def newton_schulz_triton(x, steps, coefficients, eps, dtype):
    """`newton_schulz` by kernels: same arguments and result. Check `unsupported` first."""
    tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if tall else x
    out = _eager_iterate(wide.reshape(-1, *wide.shape[-2:]), steps, *map(float, coefficients), eps, dtype)
    out = out.view(*x.shape[:-2], *out.shape[1:])
    return out.mT if tall else out
