"""Tile table of the router's kernels, per backend and number of tokens. Widths below 256 shrink the blocks to fit."""

from typing import NamedTuple

DECODE_TOKENS = 64  # up to here the two decode kernels are used


class Tile(NamedTuple):
    """One launch: block sizes (constexpr arguments), launch options, and into how many ranges a sum is split."""

    blocks: dict[str, int]
    options: dict[str, int]
    splits: int = 1


def _cuda(warps: int, stages: int, splits: int = 1, **blocks: int) -> Tile:
    return Tile(blocks, {"num_warps": warps, "num_stages": stages}, splits)


def _pdl(warps: int, stages: int, splits: int = 1, **blocks: int) -> Tile:
    """A kernel that starts before its predecessor has ended, and waits for it inside."""
    return Tile(blocks, {"num_warps": warps, "num_stages": stages, "launch_pdl": True}, splits)


def _hip(warps: int, stages: int, splits: int = 1, **blocks: int) -> Tile:
    return Tile(blocks, {"num_warps": warps, "num_stages": stages, "matrix_instr_nonkdim": 16}, splits)


# (kernel, backend) -> ((largest T, tile), …), the last without a limit
TABLE: dict[tuple[str, str], tuple[tuple[float, Tile], ...]] = {
    ("fwd", "cuda"): ((512, _cuda(8, 2, BT=16, BC=64)), (float("inf"), _cuda(8, 1, BT=64, BC=64))),
    ("fwd", "hip"): ((512, _hip(4, 1, BT=16, BC=64)), (float("inf"), _hip(8, 1, BT=64, BC=64))),
    ("bwd_outer", "cuda"): ((float("inf"), _cuda(8, 2, BT=32, BC=64)),),
    ("bwd_outer", "hip"): ((float("inf"), _hip(8, 1, BT=64, BC=64)),),
    ("bwd_inner", "cuda"): ((float("inf"), _cuda(8, 2, BT=32, BC=64)),),
    ("bwd_inner", "hip"): ((float("inf"), _hip(8, 1, BT=64, BC=32)),),
    ("dw", "cuda"): ((float("inf"), _cuda(8, 3, splits=26, BM=128, BN=128, BT=64)),),
    ("dw", "hip"): ((float("inf"), _hip(8, 2, splits=30, BM=128, BN=128, BT=64)),),
    ("add_vectors", "cuda"): ((float("inf"), _cuda(4, 1, BP=128, BN=8)),),
    ("add_vectors", "hip"): ((float("inf"), _hip(4, 1, BP=128, BN=8)),),
    ("add_matrices", "cuda"): ((float("inf"), _cuda(4, 1, BP=32, BN=128)),),
    ("add_matrices", "hip"): ((float("inf"), _hip(4, 1, BP=32, BN=128)),),
    ("project", "cuda"): ((float("inf"), _cuda(4, 2, splits=8, BT=16, BN=16, BK=128)),),
    ("project", "hip"): ((float("inf"), _hip(4, 2, splits=16, BT=16, BN=16, BK=128)),),
    ("decode", "cuda"): ((float("inf"), _pdl(8, 1, BT=16, BC=32)),),
    ("decode", "hip"): ((float("inf"), _hip(8, 1, BT=16, BC=32)),),
}


def router_tile(kernel: str, backend: str, tokens: int, width: int) -> Tile:
    """The tile of `kernel` for `tokens` tokens and router width `width`."""
    tile = next(tile for limit, tile in TABLE[kernel, backend] if tokens <= limit)
    shrink = {k: min(v, width) for k, v in tile.blocks.items() if k in ("BC", "BM", "BN") and width}
    return tile._replace(blocks=tile.blocks | shrink)
