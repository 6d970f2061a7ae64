"""Check and time the MoE block of a handful of tokens, for tiles other than the shipped ones, on a GPU.

    python -m tests.gpu.decode_tune [--tokens 1] [--timeline] [NAME=VALUE[,NAME=VALUE ...] ...]

Each argument is a variant: fields of DecodeTile (warps=8), constants and options of the router's vector kernels
(project.BN=2, tail.warps=8), several separated by commas; "shipped" changes nothing. A line per variant: microseconds
of the block, of the router alone, of the experts alone and of the block again, each as `zaya bench kernels` times them
(one CUDA graph over four layers); then what the check found: the choice's regret, the errors of the state, the weight
and y against fp32. --timeline runs two streams at a time and prints a profile of one replay, at the end.
"""

import argparse
import contextlib
import functools
import math
from dataclasses import fields, replace

import torch
import torch.nn.functional as F

from zaya.eval.hardware.moe_block import build_ours, make_layer, ours
from zaya.flops import Shape
from zaya.kernels import tiles
from zaya.kernels.router.reference import router_reference
from zaya.measure import capture, time_call

LAYERS = 4
ROUTER = {"project": ("project_vec", "cuda"), "tail": ("decode_vec", "cuda")}


def _value(text):
    return {"True": True, "False": False}.get(text) if text in ("True", "False") else int(text)


def _changed(tile, key, value):
    if key in tile.blocks:
        return replace(tile, blocks=tile.blocks | {key: _value(value)})
    key = {"warps": "num_warps", "pdl": "launch_pdl"}.get(key, key)
    return replace(tile, options=tile.options | {key: _value(value)})


@contextlib.contextmanager
def variant(text: str, tokens: int):
    """The tile tables with these changes."""
    moe, router = tiles.MOE_DECODE["cuda"], dict(tiles.ROUTER)
    changes = dict(c.split("=") for c in text.split(",") if c != "shipped")
    own = {f.name for f in fields(tiles.DecodeTile)}
    for name, value in changes.items():
        if "." in name:
            kernel, key = name.split(".")
            rows = tiles.ROUTER[ROUTER[kernel]]
            limit, tile = rows[0]
            tiles.ROUTER[ROUTER[kernel]] = ((limit, _changed(tile, key, value)),)
    if mine := {k: _value(v) for k, v in changes.items() if k in own}:
        at = next(i for i, t in enumerate(moe) if tokens <= t.tokens)
        tiles.MOE_DECODE["cuda"] = (*moe[:at], replace(moe[at], **mine), *moe[at + 1 :])
    try:
        yield
    finally:
        tiles.MOE_DECODE["cuda"] = moe
        tiles.ROUTER.update(router)


def poison():
    """Freed blocks full of NaN for the caching allocator to hand out."""
    blocks = [
        torch.full((n,), math.nan, device="cuda") for n in [256] * 8 + [1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22]
    ]
    del blocks


def parts(layer):
    """Calls of the block, of its router and of its experts."""
    block, call = ours(layer), build_ours(layer)
    flat, state = layer.h.flatten(0, 1), layer.state.flatten(0, 1)
    routing = block.gate(flat, state)
    ids, weights = routing.expert_ids, routing.gate_weights
    return (
        lambda: call(layer.h, layer.state),
        lambda: block.gate(flat, state),
        lambda: block.experts(flat, ids, weights),
    )


def exact(layer, skip: bool):
    """(regret of the choice, errors of state, weight and y) of one call of ours against fp32."""
    block = ours(layer)
    flat, prev = layer.h.flatten(0, 1), layer.state.flatten(0, 1)
    if skip:  # the skip class for every token
        biases = block.gate.balancing_biases.clone()
        block.gate.balancing_biases[-1] = 9.0
    runs = []
    for _ in range(2):
        poison()
        y, routing = block(layer.h, prev)
        runs.append((y.clone(), routing.expert_ids.clone(), routing.gate_weights.clone(), routing.state.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), "two runs differ"
    y, ids, weights, state = runs[0]
    gate, mlp = block.gate, block.gate.router_mlp
    wide = lambda m: (m.weight.float(), m.bias.float())
    found = router_reference(
        F.linear(flat.float(), *wide(gate.down_proj)), prev.float(), gate.router_states_scale.float(),
        mlp.norm.weight.float(), wide(mlp.fc1), wide(mlp.fc2), mlp.out_proj.weight.float(), gate.balancing_biases,
        mlp.norm.eps,
    )  # fmt: skip
    p = found.logits.softmax(-1)
    score = p + gate.balancing_biases
    regret = (score.amax(-1) - score.gather(1, ids[:, None])[:, 0]).max().item()
    want = torch.zeros_like(flat, dtype=torch.float32)
    for t, e in enumerate(ids.tolist()):
        if e < block.experts.gate_up_proj.shape[0]:
            a, b = (block.experts.gate_up_proj[e].float() @ flat[t].float()).chunk(2)
            want[t] = weights[t] * (block.experts.down_proj[e].float() @ (F.silu(a) * b))
    off = lambda a, b: ((a.float() - b).norm() / b.norm().clamp_min(1e-30)).item()
    errors = off(state, found.state), off(weights, p.gather(1, ids[:, None])[:, 0]), off(y.flatten(0, 1), want)
    if skip:
        assert (ids == score.shape[1] - 1).all()
        assert not y.any()
        block.gate.balancing_biases.copy_(biases)
    return regret, *errors


def check(layers):
    """The worst of all layers, and that replays of one graph over all of them give the bits of single calls."""
    found = [exact(layer, skip) for layer in layers for skip in (False, True)]
    worst = [max(x) for x in zip(*found, strict=True)]
    assert worst[0] < 0.03, worst
    assert max(worst[1:]) < 1.2e-2, worst
    outs = []
    calls = [functools.partial(lambda c, h, s: outs.append(c(h, s)), build_ours(x), x.h, x.state) for x in layers]
    eager = [c() or outs.pop() for c in calls]
    graph = capture(calls)
    captured = outs[-len(layers) :]
    for _ in range(50):
        for y in captured:
            y.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True)), "a replay differs"
    return worst


def streams(layers):
    """Two streams at a time give the bits of one."""
    calls = [functools.partial(build_ours(x), x.h, x.state) for x in layers[:2]]
    eager = [c() for c in calls]
    side = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    got: list[list] = [[], []]
    for _ in range(200):
        for i, (call, stream) in enumerate(zip(calls, side, strict=True)):
            with torch.cuda.stream(stream):
                got[i].append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(y, e) for ys, e in zip(got, eager, strict=True) for y in ys), "streams differ"


def timeline(layers):
    """Start and end of each kernel of a replay, in microseconds, as the profiler sees them (it slows them down)."""
    graph = capture([parts(x)[0] for x in layers])
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = sorted((e for e in prof.events() if "kernel" in e.name), key=lambda e: e.time_range.start)[-16:]
    first = events[0].time_range.start
    for e in events:
        print(f"  {e.time_range.start - first:8.2f} {e.time_range.end - first:8.2f} {e.name}")


def us(calls, seconds=0.15):
    return time_call(calls, "cuda", graph=True, budget_s=seconds).median_ms * 1e3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("variants", nargs="*", default=["shipped"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--unchecked", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    args = parser.parse_args()
    for tokens in args.tokens:
        torch.manual_seed(0)
        layers = [make_layer(Shape(), tokens, i, "cuda", torch.bfloat16) for i in range(LAYERS)]
        with torch.no_grad():
            for text in args.variants if tokens == args.tokens[-1] else args.variants[:1]:
                with variant(text, tokens):
                    try:
                        row(layers, tokens, text, not args.unchecked)
                    except Exception as e:
                        print(f"T={tokens} FAILED {text}: {type(e).__name__}: {str(e)[:300]}", flush=True)
        if tokens == args.tokens[-1] and args.timeline:  # last: times are longer once the profiler has run
            with torch.no_grad():
                streams(layers)
                timeline(layers)


def row(layers, tokens, text, checked):
    """Print one variant's line."""
    note = " ".join(f"{x:.1e}" for x in check(layers)) if checked else ""
    block, router, experts = ([c[i] for c in map(parts, layers)] for i in range(3))
    times = " ".join(f"{us(calls):6.2f}" for calls in (block, router, experts, block))
    print(f"T={tokens} {times} {note} {text}", flush=True)


if __name__ == "__main__":
    main()
