"""Tile table of the router's kernels, per backend and number of tokens. Widths below 256 shrink the blocks to fit."""

from typing import NamedTuple

DECODE_TOKENS = 64  # up to here the two decode kernels are used,
VECTOR_TOKENS = 4  # and up to here those that take one token at a time


class Tile(NamedTuple):
    """One launch: block sizes (constexpr arguments), launch options, and into how many ranges a sum is split."""

    blocks: dict[str, int]
    options: dict[str, int]
    splits: int = 1


def _cuda(warps: int, stages: int, splits: int = 1, **blocks: int) -> Tile:
    return Tile(blocks, {"num_warps": warps, "num_stages": stages}, splits)


def _hip(warps: int, stages: int, splits: int = 1, **blocks: int) -> Tile:
    return Tile(blocks, {"num_warps": warps, "num_stages": stages, "matrix_instr_nonkdim": 16}, splits)


# (kernel, backend) -> ((largest T, tile), …), the last without a limit
ANY = float("inf")
TABLE: dict[tuple[str, str], tuple[tuple[float, Tile], ...]] = {
    ("fwd", "cuda"): ((8192, _cuda(8, 2, BT=16, BC=64)), (ANY, _cuda(8, 1, BT=128, BC=64))),
    ("fwd", "hip"): ((8192, _hip(4, 1, BT=16, BC=64)), (ANY, _hip(8, 1, BT=64, BC=64))),
    ("bwd_outer", "cuda"): ((ANY, _cuda(8, 2, BT=32, BC=64)),),
    ("bwd_outer", "hip"): ((ANY, _hip(8, 1, BT=64, BC=64)),),
    ("bwd_inner", "cuda"): ((ANY, _cuda(4, 2, BT=32, BC=32)),),
    ("bwd_inner", "hip"): ((ANY, _hip(8, 1, BT=64, BC=32)),),
    ("dw", "cuda"): ((ANY, _cuda(8, 3, splits=26, BM=128, BN=128, BT=64)),),
    ("dw", "hip"): ((ANY, _hip(8, 2, splits=30, BM=128, BN=128, BT=64)),),
    ("add_vectors", "cuda"): ((ANY, _cuda(4, 1, BP=128, BN=8)),),
    ("add_vectors", "hip"): ((ANY, _hip(4, 1, BP=128, BN=8)),),
    ("add_matrices", "cuda"): ((ANY, _cuda(4, 1, BP=32, BN=128)),),
    ("add_matrices", "hip"): ((ANY, _hip(4, 1, BP=32, BN=128)),),
    ("project", "cuda"): (
        (8, _cuda(4, 1, splits=8, BT=16, BN=16, BK=256)),
        (32, _cuda(4, 1, splits=4, BT=16, BN=8, BK=512)),
        (64, _cuda(4, 2, splits=4, BT=16, BN=16, BK=128)),
    ),
    ("project", "hip"): ((64, _hip(4, 2, splits=16, BT=16, BN=16, BK=128)),),
    ("project_vec", "cuda"): ((4, _cuda(4, 1, BN=2, BK=1024)),),
    ("project_vec", "hip"): ((4, _hip(4, 1, BN=2, BK=1024)),),
    ("decode_vec", "cuda"): ((4, _cuda(4, 1, BC=16)),),
    ("decode_vec", "hip"): ((4, _hip(4, 1, BC=16)),),
    ("decode", "cuda"): ((64, _cuda(8, 1, BT=16, BC=64)),),
    ("decode", "hip"): ((64, _hip(8, 1, BT=16, BC=32)),),
}


def router_tile(kernel: str, backend: str, tokens: int, width: int) -> Tile:
    """The tile of `kernel` for `tokens` tokens and router width `width`."""
    tile = next(tile for limit, tile in TABLE[kernel, backend] if tokens <= limit)
    shrink = {k: min(v, width) for k, v in tile.blocks.items() if k in ("BC", "BM", "BN") and width}
    return tile._replace(blocks=tile.blocks | shrink)
