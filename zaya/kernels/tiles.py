"""Every tile that the kernels ship, per backend and number of tokens. Chosen from compiled resources and measurements
(docs/kernels.md), never by tuning at run time. "cuda" is sm_90, "hip" is gfx942, "interpreter" is Triton's on the CPU.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# ------------------------------------------------------------------------------------------------------------- moe


@dataclass(frozen=True, eq=False)
class Tile:
    """One product's tile: BM rows x BN columns, reduced BK at a time.

    `group` row tiles are walked before the next column tile. `split` is how many column parts of the accumulator pass
    through the end of the kernel one after the other; `flatten` lets the loads of the next tile start during it.
    `wide` reads the gate and up weights of `up` as one operand. `per_sm` programs of a persistent schedule share a
    multiprocessor. `options` are the backend's own launch options.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 16
    split: int = 1
    flatten: bool = False
    wide: bool = False
    per_sm: int = 1
    options: Mapping[str, int] = field(default_factory=dict)

    def fit(self, n: int, k: int) -> "Tile":
        """The same tile with BN and BK lowered to divide a width of n and a reduction of k (multiples of 16)."""
        return _fit(self, n, k)

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages, **self.options}


@functools.cache  # launches are cached by the tile's identity
def _fit(tile: Tile, n: int, k: int) -> Tile:
    bn, bk = math.gcd(tile.bn, n), math.gcd(tile.bk, k)
    if (bn, bk) == (tile.bn, tile.bk):
        return tile
    return replace(tile, bn=bn, bk=bk, split=tile.split if bn == tile.bn else 1)


@dataclass(frozen=True, eq=False)
class MoeTiles:
    """How `moe` runs for up to `tokens` tokens.

    Experts' rows start at multiples of `pad`, which every `bm` divides. With `tma`, operands are grouped copies read
    through tensor descriptors, else token rows are gathered by pointers. `persistent`: one program per multiprocessor.
    """

    tokens: float
    pad: int
    tma: bool
    persistent: bool
    up: Tile
    down: Tile
    dact: Tile
    dx: Tile
    dw: Tile


@dataclass(frozen=True)
class DecodeTile:
    """The decode kernels for up to `tokens` tokens.

    `vec` is vector arithmetic, one token at a time. With `pdl` a kernel starts before the one before it has ended.
    """

    tokens: int
    vec: bool
    bn_up: int
    bn_down: int
    bk_up: int
    bk_down: int
    warps: int
    stages: int
    pdl: bool = False

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages} | ({"launch_pdl": True} if self.pdl else {})


_AMD = {"matrix_instr_nonkdim": 16, "waves_per_eu": 2}
_HIP_SMALL = Tile(64, 64, 64, 4, 2, options=_AMD)
_TINY = Tile(16, 32, 32, 4, 2, group=2, split=2)

MOE: dict[str, tuple[MoeTiles, ...]] = {
    "cuda": (
        MoeTiles(
            2048, 64, True, True,
            up=Tile(64, 128, 64, 8, 4, wide=True),
            down=Tile(64, 128, 64, 4, 4, flatten=True, per_sm=2),
            dact=Tile(64, 128, 64, 4, 4, split=2, per_sm=2),
            dx=Tile(64, 256, 64, 4, 4, split=2),
            dw=Tile(128, 128, 64, 4, 3, group=8, split=2, per_sm=2),
        ),
        MoeTiles(
            math.inf, 128, True, True,
            up=Tile(128, 128, 64, 8, 3, group=4, flatten=True, wide=True),
            down=Tile(128, 256, 64, 8, 3, group=8, split=2, flatten=True),
            dact=Tile(128, 128, 64, 8, 4, group=4, split=2, flatten=True),
            dx=Tile(128, 256, 64, 8, 3, group=4, split=2, flatten=True),
            dw=Tile(128, 256, 64, 8, 3, group=4, split=2, flatten=True),
        ),
    ),
    "hip": (
        MoeTiles(
            4096, 64, False, False, up=_HIP_SMALL, down=_HIP_SMALL, dact=_HIP_SMALL, dx=_HIP_SMALL,
            dw=Tile(128, 128, 64, 8, 2, options=_AMD),
        ),
        MoeTiles(
            16384,
            128,
            False,
            False,
            up=Tile(128, 128, 64, 8, 2, options=_AMD),
            down=Tile(128, 128, 64, 8, 2, options=_AMD),
            dact=Tile(128, 128, 64, 8, 2, split=2, options=_AMD),
            dx=Tile(128, 128, 64, 8, 2, options=_AMD),
            dw=Tile(256, 128, 64, 8, 2, options=_AMD),
        ),
        MoeTiles(
            math.inf, 256, False, False,
            up=Tile(128, 128, 64, 8, 2, options=_AMD),
            down=Tile(256, 128, 64, 8, 2, options=_AMD),
            dact=Tile(128, 128, 64, 8, 2, split=2, options=_AMD),
            dx=Tile(256, 128, 64, 8, 2, options=_AMD),
            dw=Tile(256, 128, 64, 8, 2, options=_AMD),
        ),
    ),
    "interpreter": (
        MoeTiles(math.inf, 32, True, True, up=_TINY, down=_TINY, dact=replace(_TINY, split=4), dx=_TINY, dw=_TINY),
    ),
}  # fmt: skip

MOE_DECODE: dict[str, tuple[DecodeTile, ...]] = {
    "cuda": (
        DecodeTile(2, True, 4, 2, 512, 2048, 4, 4, pdl=True),
        DecodeTile(128, False, 32, 64, 128, 128, 4, 4, pdl=True),
    ),
    "hip": (DecodeTile(2, True, 8, 8, 512, 512, 4, 2), DecodeTile(64, False, 16, 16, 128, 128, 4, 2)),
    "interpreter": (DecodeTile(4, True, 16, 16, 32, 32, 4, 2), DecodeTile(64, False, 16, 16, 32, 32, 4, 2)),
}


def moe_tiles(backend: str, tokens: int) -> MoeTiles:
    """The row of MOE for this many tokens."""
    return next(t for t in MOE[backend] if tokens <= t.tokens)


def moe_largest_pad(backend: str) -> int:
    """The largest `pad` of the backend: buffers sized for it have room whatever row of MOE is used."""
    return max(t.pad for t in MOE[backend])


def moe_decode_tile(backend: str, tokens: int) -> DecodeTile | None:
    """The row of MOE_DECODE for this many tokens; None when there are too many for the decode kernels."""
    return next((t for t in MOE_DECODE[backend] if tokens <= t.tokens), None)


# ---------------------------------------------------------------------------------------------------------- router

ROUTER_DECODE_TOKENS = 64  # up to here the two decode kernels are used,
ROUTER_VECTOR_TOKENS = 4  # and up to here those that take one token at a time,
ROUTER_VECTOR_WIDTH = 1024  # of a hidden width that is a multiple of this


@dataclass(frozen=True, eq=False)
class LaunchTile:
    """One launch: block sizes (constexpr arguments), launch options, and into how many ranges a sum is split."""

    blocks: dict[str, int]
    options: dict[str, int]
    splits: int = 1

    @property
    def pdl(self) -> bool:
        """Whether it starts before the kernel before it has ended (CUDA's programmatic dependent launch)."""
        return bool(self.options.get("launch_pdl"))

    def fit(self, width: int) -> "LaunchTile":
        """The same tile with BK lowered to divide a reduction of `width`."""
        return _fit_router(self, width)


@functools.cache
def _fit_router(tile: LaunchTile, width: int) -> LaunchTile:
    return replace(tile, blocks=tile.blocks | {"BK": min(tile.blocks["BK"], width & -width)})


def _cuda(warps: int, stages: int, splits: int = 1, **blocks: int) -> LaunchTile:
    return LaunchTile(blocks, {"num_warps": warps, "num_stages": stages}, splits)


def _pdl(tile: LaunchTile) -> LaunchTile:
    return replace(tile, options=tile.options | {"launch_pdl": True})


def _hip(warps: int, stages: int, splits: int = 1, **blocks: int) -> LaunchTile:
    return LaunchTile(blocks, {"num_warps": warps, "num_stages": stages, "matrix_instr_nonkdim": 16}, splits)


# (kernel, backend) -> ((largest T, tile), …), the last without a limit
ROUTER: dict[tuple[str, str], tuple[tuple[float, LaunchTile], ...]] = {
    ("fwd", "cuda"): (
        (2048, _cuda(8, 2, BT=16, BC=64)),
        (8192, _cuda(8, 2, BT=32, BC=64)),
        (math.inf, _cuda(8, 1, BT=128, BC=64)),
    ),
    ("fwd", "hip"): ((8192, _hip(4, 1, BT=16, BC=64)), (math.inf, _hip(8, 1, BT=64, BC=64))),
    ("bwd_outer", "cuda"): ((math.inf, _cuda(8, 2, BT=32, BC=64)),),
    ("bwd_outer", "hip"): ((math.inf, _hip(8, 1, BT=64, BC=64)),),
    ("bwd_inner", "cuda"): ((math.inf, _cuda(4, 2, BT=32, BC=32)),),
    ("bwd_inner", "hip"): ((math.inf, _hip(8, 1, BT=64, BC=32)),),
    ("dw", "cuda"): ((math.inf, _cuda(8, 3, splits=26, BM=128, BN=128, BT=64)),),
    ("dw", "hip"): ((math.inf, _hip(8, 2, splits=30, BM=128, BN=128, BT=64)),),
    ("add_vectors", "cuda"): ((math.inf, _cuda(4, 1, BP=128, BN=8)),),
    ("add_vectors", "hip"): ((math.inf, _hip(4, 1, BP=128, BN=8)),),
    ("add_matrices", "cuda"): ((math.inf, _cuda(4, 1, BP=32, BN=128)),),
    ("add_matrices", "hip"): ((math.inf, _hip(4, 1, BP=32, BN=128)),),
    ("project", "cuda"): (
        (8, _cuda(4, 1, splits=8, BT=16, BN=16, BK=256)),
        (32, _cuda(4, 1, splits=4, BT=16, BN=8, BK=512)),
        (64, _cuda(4, 2, splits=4, BT=16, BN=16, BK=128)),
    ),
    ("project", "hip"): ((64, _hip(4, 2, splits=16, BT=16, BN=16, BK=128)),),
    ("project_vec", "cuda"): ((4, _pdl(_cuda(4, 1, BN=2, BK=2048))),),
    ("project_vec", "hip"): ((4, _hip(4, 1, BN=2, BK=1024)),),
    ("decode_vec", "cuda"): ((4, _pdl(_cuda(4, 1, BC=32))),),
    ("decode_vec", "hip"): ((4, _hip(4, 1, BC=16)),),
    ("decode", "cuda"): ((64, _cuda(8, 1, BT=16, BC=64)),),
    ("decode", "hip"): ((64, _hip(8, 1, BT=16, BC=32)),),
}


def router_tile(kernel: str, backend: str, tokens: int, width: int) -> LaunchTile:
    """The tile of `kernel` for `tokens` tokens and router width `width`."""
    return _narrowed(tile_for(ROUTER[kernel, backend], tokens), width)


@functools.cache
def _narrowed(tile: LaunchTile, width: int) -> LaunchTile:
    shrink = {k: min(v, width) for k, v in tile.blocks.items() if k in ("BC", "BM", "BN") and width}
    return replace(tile, blocks=tile.blocks | shrink)


def tile_for(rows: tuple[tuple[float, LaunchTile], ...], tokens: int) -> LaunchTile:
    """The first of (largest T, tile), … that takes `tokens`."""
    return next(tile for limit, tile in rows if tokens <= limit)


# --------------------------------------------------------------------------------------------------- residual_norm

# `splits` is how many programs of the backward kernel share a multiprocessor
RESIDUAL_NORM: dict[tuple[str, str], tuple[tuple[float, LaunchTile], ...]] = {
    ("fwd", "cuda"): ((math.inf, _cuda(8, 1, BT=1)),),
    ("fwd", "hip"): ((math.inf, LaunchTile({"BT": 1}, {"num_warps": 4, "num_stages": 1})),),
    ("bwd", "cuda"): ((math.inf, _cuda(8, 1, splits=4, BT=1)),),
    ("bwd", "hip"): ((math.inf, LaunchTile({"BT": 1}, {"num_warps": 4, "num_stages": 1}, splits=4)),),
}


# ------------------------------------------------------------------------------------------------------------- cca

CCA_VECTOR_TOKENS = 32  # up to here a decode step takes one token at a time

CCA: dict[tuple[str, str], tuple[tuple[float, LaunchTile], ...]] = {
    ("fwd", "cuda"): ((math.inf, _cuda(8, 2, BT=64)),),
    ("fwd", "hip"): ((math.inf, _hip(8, 1, BT=32)),),
    ("step", "cuda"): ((math.inf, _cuda(8, 1, BT=16)),),
    ("step", "hip"): ((math.inf, _hip(4, 2, BT=16)),),
    ("vector", "cuda"): ((CCA_VECTOR_TOKENS, _cuda(8, 1)),),
    ("vector", "hip"): ((CCA_VECTOR_TOKENS, LaunchTile({}, {"num_warps": 8, "num_stages": 1})),),
    ("bwd_dy", "cuda"): ((math.inf, _cuda(8, 1, BT=64)),),
    ("bwd_dy", "hip"): ((math.inf, _hip(8, 1, BT=32)),),
    ("bwd_dx", "cuda"): ((math.inf, _cuda(8, 2, BT=64)),),
    ("bwd_dx", "hip"): ((math.inf, _hip(8, 2, BT=32)),),
    ("bwd_dw", "cuda"): ((math.inf, _cuda(8, 2, splits=20, BT=64)),),
    ("bwd_dw", "hip"): ((math.inf, _hip(8, 2, splits=30, BT=32)),),
}


# ------------------------------------------------------------------------------------------------------------ head


@dataclass(frozen=True, eq=False)
class HeadTile:
    """`linear_cross_entropy`: blocks of tokens whose logits fill at most `logits_bytes`, in fp32 if `wide`.

    The softmax kernel takes `block` logits of a row at a time, `stages` of them in flight, with `per_sm` programs to a
    multiprocessor that take one row after the other, or a program per row if 0. The weight's gradient is added up by
    the library if `library` (and if it can), else by the kernel with `dw`, through tensor descriptors if `tma`.
    """

    logits_bytes: int
    block: int
    warps: int
    stages: int
    per_sm: int
    library: bool
    tma: bool
    dw: Tile
    wide: bool = False


HEAD: dict[str, HeadTile] = {
    "cuda": HeadTile(
        1_500_000_000, 8192, 16, 1, 0, True, True, Tile(128, 256, 64, 8, 3, group=8, split=2, flatten=True)
    ),
    "hip": HeadTile(1_500_000_000, 8192, 16, 1, 0, False, False, Tile(256, 128, 64, 8, 2, options=_AMD)),
    "interpreter": HeadTile(2**16, 64, 4, 1, 2, False, True, Tile(16, 32, 16, 4, 2, group=2, split=2)),
}

# --------------------------------------------------------------------------------------------------- newton_schulz


@dataclass(frozen=True, eq=False)
class NewtonSchulzTiles:
    """`newton_schulz` on matrices [m, n], m <= n, of at most `elements` elements of X X^T in the whole stack.

    `gram` is the tile of the two symmetric products, whose BN is BM or 2 BM; `update` of the third. With `tma`,
    operands are read through tensor descriptors; `persistent`: one program per multiprocessor. `library`: torch's
    products are faster at this size and run instead.
    """

    elements: float
    tma: bool
    persistent: bool
    gram: Tile
    update: Tile
    library: bool = False


NEWTON_SCHULZ: dict[str, tuple[NewtonSchulzTiles, ...]] = {
    "cuda": (
        NewtonSchulzTiles(
            2**22, True, True, gram=Tile(64, 64, 64, 4, 4, per_sm=2), update=Tile(64, 128, 64, 4, 4, per_sm=2)
        ),
        NewtonSchulzTiles(
            math.inf, True, True,
            gram=Tile(128, 256, 64, 8, 3, split=2, flatten=True),
            update=Tile(128, 256, 64, 8, 3, group=8, split=2, flatten=True),
        ),
    ),
    "hip": (
        NewtonSchulzTiles(2**22, False, False, gram=_HIP_SMALL, update=_HIP_SMALL),
        NewtonSchulzTiles(
            math.inf, False, False,
            gram=Tile(128, 128, 64, 8, 2, options=_AMD), update=Tile(256, 128, 64, 8, 2, options=_AMD),
        ),
    ),
    "interpreter": (
        NewtonSchulzTiles(
            math.inf, True, True, gram=Tile(16, 32, 32, 4, 2, split=2), update=Tile(16, 32, 32, 4, 2, group=2, split=2)
        ),
    ),
}  # fmt: skip


def newton_schulz_tiles(backend: str, elements: int) -> NewtonSchulzTiles:
    """The row of NEWTON_SCHULZ for this many elements of X X^T."""
    return next(t for t in NEWTON_SCHULZ[backend] if elements <= t.elements)
