"""Floating-point operations and bytes of the model's ops, and the least time that they can take.

Bytes count every input read once and every output written once. A floor is the larger of operations over the peak rate
and bytes over the bandwidth: no version runs faster. bf16 throughout, fp32 where the op keeps it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Peak bf16 matrix rate in FLOP/s and memory bandwidth in B/s."""

    flops: float
    bandwidth: float


HARDWARE = {
    "MI300X": Hardware(1307e12, 5.3e12),  # data sheet
    "MI300X practical": Hardware(708e12, 4.3e12),  # AMD's own best measured GEMM; the bandwidth is assumed (81 %)
    "H200": Hardware(989e12, 4.8e12),  # data sheet
    "H200 measured": Hardware(781e12, 4.27e12),  # bf16 8192^3 product, device copy
}


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer. Defaults are ZAYA1-8B's."""

    hidden: int = 2048
    ffn: int = 2048
    experts: int = 16
    router: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128


@dataclass(frozen=True)
class Work:
    """Operations (FLOP) and bytes of one op."""

    flops: float
    bytes: float

    def floor_s(self, hardware: Hardware) -> float:
        """The least time in seconds."""
        return max(self.flops / hardware.flops, self.bytes / hardware.bandwidth)

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def experts_hit(tokens: float, experts: int) -> float:
    """Expected number of experts that get a token when routing is uniform."""
    return experts * (1 - (1 - 1 / experts) ** tokens)


def _product(rows: float, inner: float, columns: float, weights: float = 1.0, saved: float = 0.0) -> Work:
    """[rows, inner] x [inner, columns] with `weights` different matrices; `saved` more bf16 values written per row."""
    values = rows * (inner + columns + saved) + weights * inner * columns
    return Work(2 * rows * inner * columns, 2 * values)


def _router_work(tokens: float, shape: Shape) -> dict[str, Work]:
    width, classes = shape.router, shape.experts + 1
    square, head = 2 * tokens * width * width, 2 * tokens * width * classes
    row, matrices = 2 * tokens * width, 4 * width * width + 2 * width * classes  # bytes of [T, R]; of all weights
    choice = 12 * tokens  # int64 class and fp32 weight
    return {
        "router.down_proj": _product(tokens, shape.hidden, width),
        "router.tail": Work(2 * square + head, 3 * row + matrices + choice),
        "router.backward_outer": Work(2 * square + 2 * head, 5 * row + matrices + choice + 64 * tokens),
        "router.backward_inner": Work(3 * square, 8 * row + 4 * width * width),
        "router.weight_gradients": Work(2 * square + head, 5 * row + 64 * tokens + matrices),
    }


def _layer_work(tokens: float, shape: Shape) -> dict[str, Work]:
    """CCA past its projections, and residual scaling with norm beside the fp32 stream."""
    size, heads = shape.head_dim, shape.heads + shape.kv_heads
    row = 2 * tokens * (heads + shape.kv_heads) * size  # bytes of q, k and v
    stream = tokens * shape.hidden
    return {
        "cca": Work(2 * tokens * heads * 2 * size * size, 2 * row + 2 * heads * size * (2 * size + 4)),
        "residual_norm": Work(12 * stream, 12 * stream),
        "residual_norm.backward": Work(30 * stream, 22 * stream),
    }


def _moe_work(tokens: float, shape: Shape) -> dict[str, Work]:
    d, f, hit = shape.hidden, shape.ffn, experts_hit(tokens, shape.experts)
    up, up_saved = (Work(4 * tokens * d * f, 2 * (tokens * (d + f + s) + hit * 2 * f * d)) for s in (0, 2 * f))
    return {
        "moe.permute": Work(0, 12 * tokens),
        "moe.up": up,
        "moe.up_saved": up_saved,
        "moe.down": _product(tokens, f, d, hit),
        "moe.d_act": _product(tokens, d, f, hit, saved=4 * f),
        "moe.dx": _product(tokens, 2 * f, d, hit),
        "moe.dw1": Work(4 * tokens * d * f, 2 * (tokens * (2 * f + d) + shape.experts * 2 * f * d)),
        "moe.dw2": Work(2 * tokens * d * f, 2 * (tokens * (f + d) + shape.experts * f * d)),
    }


def op_work(tokens: float, shape: Shape | None = None) -> dict[str, Work]:
    """Work of each kernel of a layer on `tokens` tokens, all of them routed (none skipped)."""
    shape = shape or Shape()
    return _router_work(tokens, shape) | _moe_work(tokens, shape) | _layer_work(tokens, shape)


def block_work(tokens: float, shape: Shape | None = None, backward: bool = False) -> Work:
    """The yardstick of the MoE block: its expert products alone, each expert hit read once.

    The router's own work (about 5 % at T = 32,768) is not in it, but is in the times that are held against it.
    """
    shape = shape or Shape()
    names = ["up", "down"] + (["d_act", "dx", "dw1", "dw2"] if backward else [])
    work = op_work(tokens, shape)
    total = Work(0, 0)
    for name in names:
        total += work[f"moe.{name}"]
    return total


def block_floor_s(tokens: float, hardware: Hardware, shape: Shape | None = None, backward: bool = False) -> float:
    """The least time of the MoE block in seconds, forward or forward and backward."""
    return block_work(tokens, shape, backward).floor_s(hardware)
