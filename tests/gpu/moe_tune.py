"""Check the MoE op on a GPU and time candidate tiles of each product against torch's grouped GEMM.

    python -m tests.gpu.moe_tune OUT.jsonl [--tokens 32768 8192] [--products up down] [--shipped 1 16]

One JSON line per figure: median milliseconds, and TFLOP/s over the routed rows. Winners go into kernels/tiles.py.
"""

import argparse
import cProfile
import functools
import json
import pstats
import time
from dataclasses import replace

import torch
from triton.testing import do_bench

from zaya.kernels import tiles
from zaya.kernels.moe import moe, ops, permute
from zaya.kernels.tiles import DecodeTile, Tile

D = F = 2048
E = 16
WIDE = {"wide": True, "flatten": True}
HALVES = {"split": 2, "flatten": True}
CANDIDATES = {
    "up": [
        *(Tile(128, 128, 64, 8, 3, group=g, **WIDE) for g in (2, 4, 8, 16)),
        Tile(128, 128, 64, 8, 3, group=8, wide=True),
        Tile(128, 128, 64, 8, 3, group=8),
        Tile(64, 128, 64, 8, 4, wide=True),
        Tile(64, 64, 64, 4, 4, wide=True, per_sm=2),
        Tile(64, 64, 128, 4, 4),
    ],
    "down": [
        *(Tile(128, 256, 64, 8, 3, group=g, **HALVES) for g in (4, 8, 16)),
        Tile(128, 256, 64, 8, 3, split=2),
        Tile(128, 128, 64, 4, 3, per_sm=2, flatten=True),
        Tile(64, 128, 64, 4, 4, per_sm=2, flatten=True),
        Tile(64, 256, 64, 4, 4, split=2),
    ],
    "dact": [
        *(Tile(128, 128, 64, 8, 4, group=g, **HALVES) for g in (4, 8, 16)),
        Tile(128, 128, 64, 8, 4, split=2),
        Tile(128, 256, 64, 8, 3, split=4, flatten=True, group=4),
        Tile(64, 128, 64, 4, 4, split=2, per_sm=2),
    ],
    "dw": [
        *(Tile(128, 256, 64, 8, 3, group=g, **HALVES) for g in (2, 4, 8)),
        Tile(128, 256, 64, 8, 3, split=2, group=4),
        Tile(128, 128, 64, 4, 3, split=2, per_sm=2, group=8),
    ],
}
CANDIDATES["dx"] = CANDIDATES["down"]
DECODE = [
    DecodeTile(512, True, 4, 4, 1024, 1024, 4, 2),
    DecodeTile(512, True, 4, 4, 512, 2048, 4, 4, pdl=True),
    DecodeTile(512, True, 8, 8, 512, 1024, 8, 2, pdl=True),
    DecodeTile(512, False, 16, 16, 256, 256, 4, 4, pdl=True),
    DecodeTile(512, False, 32, 64, 128, 128, 4, 4, pdl=True),
    DecodeTile(512, False, 64, 64, 128, 128, 4, 4, pdl=True),
]


def relative(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def reference(x, w1, w2, ids, p, dy):
    """fp32 forward and gradients, expert by expert."""
    x, w1, w2, p = (t.float().requires_grad_() for t in (x, w1, w2, p))
    y = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        i = (ids == e).nonzero().flatten()
        gate, up = (x[i] @ w1[e].T).chunk(2, -1)
        y = y.index_add(0, i, p[i, None] * ((torch.nn.functional.silu(gate) * up) @ w2[e].T))
    return (y, *torch.autograd.grad(y, (x, w1, w2, p), dy.float()))


def make(tokens, weights):
    x = torch.randn(tokens, D, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, E + 1, (tokens,), device="cuda")
    return x, *weights, ids, torch.rand(tokens, device="cuda")


def check(out, tokens, weights):
    inputs = [t.detach().requires_grad_() if t.is_floating_point() else t for t in make(tokens, weights)]
    x, w1, w2, ids, p = inputs
    dy = torch.randn_like(x)
    runs = []
    for _ in range(2):
        y = moe(*inputs, "triton")
        runs.append((y.detach(), *torch.autograd.grad(y, (x, w1, w2, p), dy)))
    same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    y = moe(*inputs, "reference")
    theirs = (y.detach(), *torch.autograd.grad(y, (x, w1, w2, p), dy))
    exact = reference(*(t.detach() for t in inputs), dy)
    names = ("y", "dx", "dw1", "dw2", "dp")
    errors = {n: [relative(a, c), relative(b, c)] for n, a, b, c in zip(names, runs[0], theirs, exact, strict=True)}
    with torch.no_grad():
        errors["y_inference"] = [relative(moe(*inputs, "triton"), exact[0]), errors["y"][1]]
    out(what="check", tokens=tokens, errors_ours_reference=errors, bit_equal=same)


def bench(f):
    return do_bench(f, warmup=10, rep=60, return_mode="median")


def products(out, tokens, weights, wanted, pad):
    """Each product's candidates and the library, on rows grouped with this padding."""
    x, w1, w2, ids, p = make(tokens, weights)
    dy = torch.randn_like(x)
    table = replace(tiles.moe_tiles("cuda", 10**9), pad=pad)
    room = permute.max_rows(tokens, E, pad)
    rows, slot, offs = permute.permutation(ids, E, pad, room)
    n, padded = int((slot >= 0).sum()), int(offs[E])
    y = torch.empty_like(x)
    gx, gdy = permute.gather(x, dy, y, rows, offs)
    pre, act = x.new_empty(rows.numel(), 2 * F), x.new_empty(rows.numel(), F)
    dpre, dw1, dw2 = torch.empty_like(pre), torch.empty_like(w1), torch.empty_like(w2)
    ops._up(table, gx, w1, pre, act, rows, offs, True)
    flops = {"up": 4 * n * D * F, "down": 2 * n * D * F, "dact": 2 * n * D * F, "dx": 4 * n * D * F}
    flops |= {"dw1": 4 * n * D * F, "dw2": 2 * n * D * F}

    def row(name, ms, **more):
        out(
            what=name,
            tokens=tokens,
            pad=pad,
            rows=padded,
            ms=ms,
            tflops=flops[name] / ms / 1e9 if name in flops else None,
            **more,
        )

    row("permutation", bench(lambda: permute.permutation(ids, E, pad, room)))
    row("gather", bench(lambda: permute.gather(x, None, y, rows, offs)))
    row("gather2", bench(lambda: permute.gather(x, dy, y, rows, offs)))
    row("zero_skipped", bench(lambda: permute.gather(None, None, y, rows, offs)))
    run = {
        "up": lambda t: ops._up(t, gx, w1, pre, act, rows, offs, True),
        "up_nosave": lambda t: ops._up(t, gx, w1, pre, act, rows, offs, False),
        "down": lambda t: ops._rows(t, t.down, act, w2, y, p, rows, offs, True),
        "dact": lambda t: ops._dact(t, gdy, w2, pre, dpre, act, p, rows, offs),
        "dx": lambda t: ops._rows(t, t.dx, dpre, w1, y, None, rows, offs, False),
        "dw1": lambda t: ops._dw(t, dpre, gx, dw1, rows, offs),
        "dw2": lambda t: ops._dw(t, gdy, act, dw2, rows, offs),
    }
    flops["up_nosave"] = flops["up"]
    ends = offs[1:-1]
    library = {
        "up": lambda: torch._grouped_mm(gx, w1.transpose(1, 2), offs=ends),
        "down": lambda: torch._grouped_mm(act, w2.transpose(1, 2), offs=ends),
        "dact": lambda: torch._grouped_mm(gdy, w2, offs=ends),
        "dx": lambda: torch._grouped_mm(dpre, w1, offs=ends),
        "dw1": lambda: torch._grouped_mm(dpre.t(), gx, offs=ends),
        "dw2": lambda: torch._grouped_mm(gdy.t(), act, offs=ends),
    }
    for name, f in run.items():
        key = {"dw1": "dw", "dw2": "dw", "up_nosave": "up"}.get(name, name)
        if key not in wanted:
            continue
        if name in library:
            try:
                row(name, bench(library[name]), tile="library")
            except RuntimeError as e:
                out(what=name, tokens=tokens, tile="library", error=str(e)[:200])
        for tile in CANDIDATES[key]:
            if pad % tile.bm and key != "dw":
                continue
            if (pad == 128) != (tile.bm >= 128) and key not in ("dw", "dact"):
                continue
            try:
                t = replace(table, **{key: tile})
                row(name, bench(functools.partial(f, t)), tile=str(tile))
            except Exception as e:
                out(what=name, tokens=tokens, tile=str(tile), error=f"{type(e).__name__} {e}"[:200])


def graph_ms(calls):
    """Milliseconds per call of a CUDA graph that holds `calls` once each."""
    for f in calls[:2]:
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for f in calls:
            f()
    return do_bench(graph.replay, warmup=5, rep=50, return_mode="median") / len(calls)


def decoding(out, tokens, sets):
    inputs = [make(tokens, sets[i % len(sets)]) for i in range(8)]
    if tokens == 1:
        for i, arguments in enumerate(inputs):
            arguments[3].fill_(2 * i)
    exact = reference(*inputs[0], inputs[0][0])[0]
    before = tiles.MOE_DECODE["cuda"]
    for tile in DECODE:
        if tile.vec and tokens > 4:
            continue
        tiles.MOE_DECODE["cuda"] = (tile,)
        try:
            with torch.no_grad():
                error = relative(moe(*inputs[0], "triton"), exact)
                ms = graph_ms([lambda a=a: moe(*a, "triton") for a in inputs])
            out(what="decode", tokens=tokens, tile=str(tile), us=1e3 * ms, error=error)
        except Exception as e:
            out(what="decode", tokens=tokens, tile=str(tile), error=f"{type(e).__name__} {e}"[:200])
    tiles.MOE_DECODE["cuda"] = ()
    with torch.no_grad():
        ms = graph_ms([lambda a=a: moe(*a, "triton") for a in inputs])
    out(what="decode", tokens=tokens, tile="grouped path", us=1e3 * ms)
    tiles.MOE_DECODE["cuda"] = before


def shipped(out, tokens, sets):
    """Microseconds of the op without gradients as shipped, in a graph that goes through four sets of weights."""
    inputs = [make(tokens, sets[i % len(sets)]) for i in range(8)]
    if tokens == 1:
        for i, arguments in enumerate(inputs):
            arguments[3].fill_(2 * i)
    with torch.no_grad():
        ms = graph_ms([lambda a=a: moe(*a, "triton") for a in inputs])
    out(what="shipped", tokens=tokens, us=1e3 * ms)


def whole(out, tokens, weights):
    inputs = [t.detach().requires_grad_() if t.is_floating_point() else t for t in make(tokens, weights)]
    dy = torch.randn_like(inputs[0])
    kept = [inputs[i] for i in (0, 1, 2, 4)]
    with torch.no_grad():
        forward = bench(lambda: moe(*inputs, "triton"))
        graphed = graph_ms([lambda: moe(*inputs, "triton")])
    both = bench(lambda: torch.autograd.grad(moe(*inputs, "triton"), kept, dy))
    out(what="op", tokens=tokens, forward_ms=forward, forward_graph_ms=graphed, forward_backward_ms=both)


def tables(out, tokens, weights):
    """The op with the small and with the large table at one number of tokens."""
    before = tiles.MOE["cuda"]
    for table in before:
        tiles.MOE["cuda"] = (replace(table, tokens=10**9),)
        whole(out, tokens, weights)
    tiles.MOE["cuda"] = before


def host(tokens, weights):
    """Where the host's time goes in a forward pass, and each kernel's share of a training step on the GPU."""
    inputs = [t.detach().requires_grad_() if t.is_floating_point() else t for t in make(tokens, weights)]
    kept, dy = [inputs[i] for i in (0, 1, 2, 4)], torch.randn_like(inputs[0])
    profile = cProfile.Profile()
    with torch.no_grad():
        moe(*inputs, "triton")
        torch.cuda.synchronize()
        profile.enable()
        for _ in range(50):
            moe(*inputs, "triton")
        profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    for _ in range(2):
        torch.autograd.grad(moe(*inputs, "triton"), kept, dy)
    start = time.perf_counter()
    for _ in range(20):
        y = moe(*inputs, "triton")
    middle = time.perf_counter()
    torch.cuda.synchronize()
    again = time.perf_counter()
    torch.autograd.grad(y, kept, dy)
    print("host ms: forward", (middle - start) * 50, "backward", (time.perf_counter() - again) * 1e3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(10):
            torch.autograd.grad(moe(*inputs, "triton"), kept, dy)
        torch.cuda.synchronize()
    for e in sorted(trace.key_averages(), key=lambda e: -e.device_time_total)[:20]:
        print(f"{e.device_time_total / 1e4:9.4f} ms {e.count // 10}x {e.key[:60]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768])
    parser.add_argument("--whole", type=int, nargs="*", default=[32768, 8192, 2048, 512])
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--products", nargs="*", default=list(CANDIDATES))
    parser.add_argument("--shipped", type=int, nargs="*", default=[])
    parser.add_argument("--tables", type=int, nargs="*", default=[])
    parser.add_argument("--host", type=int, nargs="*", default=[])
    parser.add_argument("--check", type=int, nargs="*", default=[7, 133, 4096])
    args = parser.parse_args()
    torch.manual_seed(0)
    with open(args.out, "w") as file:

        def out(**figures):
            print(json.dumps(figures), file=file, flush=True)
            print(
                " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items()),
                flush=True,
            )

        sets = []
        for _ in range(4):
            w1 = torch.randn(E, 2 * F, D, device="cuda", dtype=torch.bfloat16) / 45
            sets.append((w1, torch.randn(E, D, F, device="cuda", dtype=torch.bfloat16) / 45))
        for tokens in args.check:
            check(out, tokens, sets[0])
        for tokens in args.decode:
            decoding(out, tokens, sets)
        for tokens in args.whole:
            whole(out, tokens, sets[0])
        for tokens in args.shipped:
            shipped(out, tokens, sets)
        for tokens in args.tables:
            tables(out, tokens, sets[0])
        for tokens in args.host:
            host(tokens, sets[0])
        for tokens in args.tokens:
            for pad in (128,) if tokens > 2048 else (64,) if tokens < 2048 else (128, 64):
                products(out, tokens, sets[0], args.products, pad)


if __name__ == "__main__":
    main()
