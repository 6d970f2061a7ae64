"""Check and time `linear_cross_entropy` and `newton_schulz` on a GPU: one JSON object per line, as it is found.

    python -m tests.gpu.head_muon_tune [--only head muon] [--small] [--tokens 16384] [--seconds 0.4]

`what` names the row. *_check: relative errors of ours and of the reference against fp32 (fp64 with --small), and
whether two runs give the same bits. head, muon: milliseconds of a variant of the tile in `tile`, beside the yardstick
of `times`: for the head three products of its shape, for Newton-Schulz torch's own products; `extra_gb` is the peak of
memory above what was held before. --small: small sizes, in Triton's interpreter where there is no GPU.
"""

import argparse
import json
import os
import time
from dataclasses import replace

import torch

SMALL = not torch.cuda.is_available()
if SMALL:
    os.environ["TRITON_INTERPRET"] = "1"

from zaya.kernels import tiles  # noqa: E402
from zaya.kernels.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from zaya.kernels.newton_schulz import newton_schulz  # noqa: E402
from zaya.kernels.tiles import NewtonSchulzTiles, Tile  # noqa: E402
from zaya.measure import time_call  # noqa: E402

DEVICE = "cpu" if SMALL else "cuda"
ROW = "interpreter" if SMALL else "cuda"
GB = 10**9


def out(**figures):
    """One row."""
    print(json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)


def relative(ours, exact):
    """Relative error in the Frobenius norm."""
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


def attempt(what, tile, run):
    """Print `run()`'s row, or what went wrong: one bad tile must not end the rest."""
    try:
        out(what=what, tile=tile, **run())
    except Exception as e:
        out(what=what, tile=tile, error=" ".join(f"{type(e).__name__} {e}".split())[:300])


def timed(call, seconds):
    """(median milliseconds, p10, peak of memory over the start in GB)."""
    if not SMALL:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        extra = (torch.cuda.max_memory_allocated() - before) / GB
    found = time_call(call, DEVICE, budget_s=seconds, min_repeats=3)
    return {"ms": found.median_ms, "p10": found.p10_ms} | ({} if SMALL else {"extra_gb": extra})


# ------------------------------------------------------------------------------------------------------------ head


def head_inputs(tokens, width, vocabulary):
    hidden = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, width, device=DEVICE) * (3 / width**0.5)
    labels = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    labels[::7] = -100
    return hidden, weight.bfloat16().requires_grad_(), labels


def head_step(inputs, backend="triton", **more):
    hidden, weight, labels = inputs
    loss = linear_cross_entropy(hidden, weight, labels, backend=backend, **more)
    return (loss.detach(), *torch.autograd.grad(loss / len(labels), (hidden, weight)))


def head_exact(inputs, z_loss, dtype):
    """Loss and gradients in `dtype`, the logits whole."""
    hidden, weight, labels = inputs
    h, w = hidden.detach().to(dtype), weight.detach().to(dtype)
    logits = h @ w.T
    lse, live = logits.logsumexp(1), (labels != -100)
    at = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    loss = ((lse - at + z_loss * lse.square()) * live).sum()
    g = logits.sub_(lse[:, None]).exp_().mul_((1 + 2 * z_loss * lse)[:, None])
    g.scatter_add_(1, labels.clamp(min=0)[:, None], -torch.ones_like(g[:, :1]))
    g.mul_(live[:, None] / len(labels))
    return loss, g @ w, g.T @ h


def head_check(tokens, width, vocabulary):
    inputs = head_inputs(tokens, width, vocabulary)
    for z_loss in (0.0, 1e-3):
        exact = head_exact(inputs, z_loss, torch.float64 if SMALL else torch.float32)
        ours, again = (head_step(inputs, z_loss=z_loss) for _ in range(2))
        theirs = head_step(inputs, "reference", z_loss=z_loss)
        errors = [[relative(x, e) for x in (a, b)] for a, b, e in zip(ours, theirs, exact, strict=True)]
        same = all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
        names = dict(zip(("loss", "dhidden", "dweight"), errors, strict=True))
        out(what="head_check", z_loss=z_loss, tokens=tokens, errors_ours_reference=names, bit_equal=same)
    del exact, ours, again, theirs


def head_softmax(tokens, vocabulary, seconds):
    """The kernel alone, on a block of logits: bytes are two reads and one write."""
    from zaya.kernels.linear_cross_entropy import ops

    stride, base = -(-vocabulary // 16) * 16, tiles.HEAD[ROW]
    logits = torch.randn(tokens, stride, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    losses = torch.empty(tokens, device=DEVICE)
    found = {}
    shapes = [(b, w, s, p) for b, w in ((4096, 8), (8192, 16), (16384, 16), (16384, 32)) for s, p in ((1, 0), (1, 1))]
    shapes += [(4096, 8, 3, 0), (8192, 16, 3, 0), (8192, 8, 1, 0), (2048, 4, 1, 0), (8192, 8, 2, 2)]
    for block, warps, stages, per_sm in shapes[:2] if SMALL else shapes:
        tile = replace(base, block=64 if SMALL else block, warps=warps, stages=stages, per_sm=per_sm)

        def run(tile=tile):
            launch = ops._softmax(tile, True)
            grid = min(tokens, ops._processors(logits.device) * tile.per_sm) if tile.per_sm else tokens
            view = logits[:, :vocabulary]
            call = lambda: launch((grid,), view, view, labels, losses, tokens, vocabulary, stride, -100, 0.0)
            row = timed(call, seconds)
            found[tile] = row["ms"]
            return row | {"tb_per_s": 3 * logits.numel() * 2 / row["ms"] / GB}

        attempt("head_softmax", f"BV {block} warps {warps} stages {stages} per_sm {per_sm}", run)
    return min(found, key=found.get) if found else base


def three_products(inputs, chunk, seconds):
    """h W^T, G W and G^T h in bf16, `chunk` tokens at a time, and nothing else."""
    hidden, weight, _ = (t.detach() for t in inputs)
    logits = hidden.new_empty(chunk, weight.shape[0])
    dh, dw = torch.empty_like(hidden), torch.empty_like(weight)

    def run():
        for start in range(0, len(hidden), chunk):
            rows = hidden[start : start + chunk]
            block = logits[: len(rows)]
            torch.mm(rows, weight.t(), out=block)
            torch.mm(block, weight, out=dh[start : start + chunk])
            torch.mm(block.t(), rows, out=dw)

    logits.normal_()
    return timed(run, seconds)


def liger_step(inputs):
    """liger-kernel's fused head with its own settings, and with sums in fp32."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

    hidden, weight, labels = inputs

    def step(accumulate):
        loss = Liger.apply(hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum", None, False, accumulate)
        loss = loss[0] if isinstance(loss, tuple) else loss
        return torch.autograd.grad(loss / len(labels), (hidden, weight))

    return step


def head(args):
    sizes = (40, 32, 200) if args.small else (args.tokens, 2048, 262272)
    tokens, width, vocabulary = sizes
    seconds = args.seconds
    head_check(*((40, 32, 200) if args.small else (2048, 2048, 262272)))
    if not args.small:
        torch.cuda.empty_cache()
    best = head_softmax(min(tokens, 2816), vocabulary, seconds / 8)
    inputs = head_inputs(*sizes)
    yard = three_products(inputs, min(tokens, 4096), seconds)
    flops = 6 * tokens * width * vocabulary
    out(what="head", tile="three products", **yard, tflops=flops / yard["ms"] / GB)

    def with_tile(tile, **more):
        before = tiles.HEAD[ROW]
        tiles.HEAD[ROW] = tile
        try:
            row = timed(lambda: head_step(inputs, **more), seconds)
        finally:
            tiles.HEAD[ROW] = before
        return row | {"times": row["ms"] / yard["ms"]}

    base = tiles.HEAD[ROW]
    tuned = replace(base, block=best.block, warps=best.warps, stages=best.stages, per_sm=best.per_sm)
    attempt("head", "shipped", lambda: with_tile(base))
    limits = (1.1e9, 1.5e9, 1.76e9, 2.2e9)
    for limit in limits[:1] if args.small else limits:
        attempt(
            "head",
            f"tuned softmax, {limit / GB} GB of logits",
            lambda x=limit: with_tile(replace(tuned, logits_bytes=int(x))),
        )
    attempt("head", "weight gradient by the kernel", lambda: with_tile(replace(tuned, library=False)))
    if not args.small:
        attempt("head", "fp32 logits", lambda: with_tile(replace(tuned, wide=True)))
    attempt("head", "reference", lambda: with_tile(tuned, backend="reference"))
    with torch.no_grad():
        attempt(
            "head", "forward only", lambda: timed(lambda: linear_cross_entropy(*inputs, backend="triton"), seconds)
        )
    if not args.small:
        for accumulate in (None, torch.float32):
            attempt(
                "head", f"liger-kernel, sums {accumulate}", lambda a=accumulate: liger_row(inputs, a, yard, seconds)
            )


def liger_row(inputs, accumulate, yard, seconds):
    step = liger_step(inputs)
    row = timed(lambda: step(accumulate), seconds)
    return row | {"times": row["ms"] / yard["ms"]}


# ------------------------------------------------------------------------------------------------------------ muon

HALVES = {"split": 2, "flatten": True}
LARGE = {
    "gram": [
        Tile(128, 256, 64, 8, 3, **HALVES),
        Tile(128, 256, 64, 8, 3, split=2),
        Tile(128, 256, 64, 8, 4, split=2, flatten=True),
        Tile(128, 128, 64, 8, 4, flatten=True),
        Tile(128, 128, 64, 8, 3, flatten=True),
        Tile(128, 128, 64, 4, 3, per_sm=2),
        Tile(128, 128, 64, 4, 3, per_sm=2, flatten=True),
        Tile(128, 128, 128, 8, 3),
    ],
    "update": [
        *(Tile(128, 256, 64, 8, 3, group=g, **HALVES) for g in (4, 8, 16)),
        Tile(128, 256, 64, 8, 3, group=8, split=2),
        Tile(128, 128, 64, 4, 3, group=8, per_sm=2, flatten=True),
        Tile(128, 128, 64, 8, 4, group=8, flatten=True),
    ],
}
FEW = {
    "gram": [
        Tile(64, 64, 64, 4, 4, per_sm=2),
        Tile(64, 64, 128, 4, 3, per_sm=2),
        Tile(64, 64, 64, 4, 6, per_sm=2),
        Tile(64, 128, 64, 4, 4, split=2, per_sm=2),
        Tile(128, 128, 64, 8, 4),
        Tile(64, 64, 128, 4, 4),
    ],
    "update": [
        Tile(64, 128, 64, 4, 4, per_sm=2),
        Tile(64, 128, 128, 4, 2, per_sm=2),
        Tile(128, 128, 64, 8, 4),
        Tile(64, 64, 64, 4, 4, per_sm=2),
        Tile(64, 256, 64, 4, 4),
        Tile(128, 64, 64, 4, 4, per_sm=2),
    ],
}
TINY = {"gram": [Tile(16, 32, 32, 4, 2, split=2)], "update": [Tile(16, 32, 32, 4, 2, split=2)]}


def torch_steps(x):
    """Torch's products on a stack that is scaled already, out of place as in the reference."""
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def muon_check(shape):
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    exact = newton_schulz(x.double(), dtype=torch.float64, backend="reference")
    ours, again = (newton_schulz(x, backend="triton") for _ in range(2))
    theirs = newton_schulz(x, backend="reference")
    errors = [relative(ours, exact), relative(theirs, exact)]
    out(what="muon_check", shape=shape, errors_ours_reference=errors, bit_equal=torch.equal(ours, again))


def graph_or_wall(call, seconds, graph):
    found = time_call(call, DEVICE, graph=graph and not SMALL, budget_s=seconds, min_repeats=3)
    return {"ms": found.median_ms, "p10": found.p10_ms}


def muon_products(shape, candidates, seconds, graph):
    """The best tile of each product, alone; returns the winning pair. Products of torch beside them."""
    from zaya.kernels.newton_schulz import ops

    stack, m, n = shape
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) / n**0.5
    gram = torch.bmm(x, x.mT)
    poly, after = torch.empty_like(gram), torch.empty_like(x)
    library = {
        "gram": lambda: torch.bmm(x, x.mT, out=poly),
        "polynomial": lambda: torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315),
        "update": lambda: torch.baddbmm(x, gram, x, beta=3.4445),
    }
    for name, call in library.items():
        attempt(f"muon_{name}", f"library {shape}", lambda c=call: graph_or_wall(c, seconds, graph))
    best = {}
    for kind, rows in candidates.items():
        for tile in rows:
            table = NewtonSchulzTiles(float("inf"), True, True, tile, tile)
            calls = {
                "gram": lambda t=table: ops._symmetric_product(t, x, None, poly, 1.0, 0.0),
                "polynomial": lambda t=table: ops._symmetric_product(t, gram, gram, poly, 2.0315, -4.775),
                "update": lambda t=table: ops._updated(t, gram, x, after, 3.4445),
            }
            for name in ("gram", "polynomial") if kind == "gram" else ("update",):

                def run(call=calls[name], kind=kind, tile=tile, name=name):
                    row = graph_or_wall(call, seconds, graph)
                    best.setdefault((kind, name), {})[tile] = row["ms"]
                    return row

                attempt(f"muon_{name}", f"{tile} {shape}", run)
    gram, polynomial, update = (best[k] for k in (("gram", "gram"), ("gram", "polynomial"), ("update", "update")))
    both = {tile: gram[tile] + polynomial[tile] for tile in gram.keys() & polynomial.keys()}
    return {"gram": min(both, key=both.get), "update": min(update, key=update.get)}


def muon(args):
    for shape in [(2, 20, 37), (33, 18)] if args.small else [(3, 1000, 1528), (2048, 1024), (4, 2048, 2048)]:
        muon_check(shape)
    works = [((48, 2048, 2048), LARGE, False), ((2048, 1024), FEW, True)]
    for shape, candidates, graph in [((2, 32, 64), TINY, False)] if args.small else works:
        flat = (1, *sorted(shape)) if len(shape) == 2 else shape
        x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        wide = torch.randn(flat, device=DEVICE, dtype=torch.bfloat16) / flat[-1] ** 0.5
        yard = graph_or_wall(lambda w=wide: torch_steps(w), args.seconds, graph)
        out(what="muon", tile="torch's products alone", shape=shape, **yard)

        def whole(backend, x=x, graph=graph, yard=yard):
            row = graph_or_wall(lambda: newton_schulz(x, backend=backend), args.seconds, graph)
            return row | {"times": row["ms"] / yard["ms"]}

        attempt("muon", f"reference {shape}", lambda w=whole: w("reference"))
        attempt("muon", f"shipped {shape}", lambda w=whole: w("triton"))
        best = muon_products(flat, candidates, args.seconds / 8, graph)
        before = tiles.NEWTON_SCHULZ[ROW]
        tiles.NEWTON_SCHULZ[ROW] = (NewtonSchulzTiles(float("inf"), True, True, **best),)
        attempt("muon", f"best tiles {best} {shape}", lambda w=whole: w("triton"))
        tiles.NEWTON_SCHULZ[ROW] = before


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=["head", "muon"], choices=["head", "muon"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=0.4)
    args = parser.parse_args()
    torch.manual_seed(0)
    started = time.time()
    for name in args.only:
        {"head": head, "muon": muon}[name](args)
        out(what="seconds", of=name, total=time.time() - started)


if __name__ == "__main__":
    main()
