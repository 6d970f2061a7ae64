"""The ops of a layer, a training step and a decode step on a GPU: one JSON object per line, as it is found.

    python -m tests.gpu.step_gpu [--small]

`*_check`: relative errors of the kernels and of the reference in bf16, both against fp64. `cca`, `residual_norm`:
milliseconds by the kernels and by the reference in plain torch. `train`: 8 layers, 4 x 4,096 tokens, forward and
backward. `decode`: 40 layers, static cache, one CUDA graph. `--small` runs all of it at small sizes to try the script.
"""

import argparse
import gc
import json

import torch

import zaya
from zaya.kernels.cca import cca
from zaya.kernels.cca.reference import cca_reference
from zaya.kernels.residual_norm import residual_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def out(**figures):
    """One row."""
    print(json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)


def relative(ours, exact):
    return ((ours.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)).item()


def milliseconds(call, repeats=20):
    """Median of `repeats` calls, by events."""
    if DEVICE == "cpu":
        call()
        return 0.0
    times = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end)] if i >= 3 else []
    return sorted(times)[len(times) // 2]


def cca_problem(tokens, dtype, documents):
    """Arguments of `cca` at the model's shape, and its leaves."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    new = lambda *n, s=1.0: (torch.randn(n, device=DEVICE, generator=generator) * s).to(dtype).requires_grad_()
    qkv, depthwise = new(1, tokens, 1536), (new(1280, 1, 2), new(1280, s=0.1))
    grouped, temp = (new(1280, 128, 2, s=0.06), new(1280, s=0.1)), new(2)
    angles = torch.rand(1, tokens, 32, device=DEVICE, generator=generator) * 6
    depth = torch.arange(tokens, device=DEVICE)[None] % 777 if documents else None
    leaves = [qkv, *depthwise, *grouped, temp]
    return (qkv, depthwise, grouped, temp, (angles.cos(), angles.sin()), None, None, depth), leaves


def cast(x, dtype):
    if isinstance(x, tuple):
        return tuple(cast(y, dtype) for y in x)
    if x is None or not x.dtype.is_floating_point:
        return x
    return x.detach().to(dtype).requires_grad_(x.requires_grad)


def check_cca(tokens, documents):
    arguments, leaves = cca_problem(tokens, torch.bfloat16, documents)
    exact = tuple(cast(x, torch.float64) for x in arguments)
    wide = [exact[0], *exact[1], *exact[2], exact[3]]
    want = cca_reference(*exact)
    given = [torch.randn_like(x) for x in want]
    want = [*want, *torch.autograd.grad(want, wide, given)]
    names = ("query", "key", "value", "qkv", "w0", "b0", "w1", "b1", "temp")
    for backend in ("auto", "reference"):
        got = cca(*arguments, backend=backend)
        got = [*got, *torch.autograd.grad(got, leaves, [g.bfloat16() for g in given])]
        errors = {n: relative(a, b) for n, a, b in zip(names, got, want, strict=True)}
        out(what="cca_check", tokens=tokens, documents=documents, backend=backend, **errors)


def time_cca(tokens):
    arguments, leaves = cca_problem(tokens, torch.bfloat16, False)
    for backend in ("auto", "reference"):
        with torch.no_grad():
            forward = milliseconds(lambda: cca(*arguments, backend=backend))  # noqa: B023
        given = [torch.randn_like(x) for x in cca(*arguments, backend=backend)]
        both = lambda: torch.autograd.grad(cca(*arguments, backend=backend), leaves, given)  # noqa: B023
        out(what="cca", tokens=tokens, backend=backend, forward_ms=forward, both_ms=milliseconds(both))


def residual_problem(tokens):
    new = lambda *n: torch.randn(n, device=DEVICE)
    residual, branch = new(tokens, 2048).requires_grad_(), new(tokens, 2048).bfloat16().requires_grad_()
    scaling = [(1 + 0.1 * new(2048)).bfloat16().requires_grad_() for _ in range(4)]
    return residual, branch, scaling, (new(2048).bfloat16().requires_grad_(), 1e-5)


def residual_rows(tokens):
    residual, branch, scaling, norm = problem = residual_problem(tokens)
    leaves = [residual, branch, *scaling, norm[0]]
    given = [torch.randn_like(residual), torch.randn_like(branch)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = residual_norm(exact[0], exact[1], exact[2:6], (exact[6], 1e-5), "reference")
    want = [*want, *torch.autograd.grad(want, exact, [g.double() for g in given])]
    for backend in ("auto", "reference"):
        got = residual_norm(*problem, backend)
        got = [*got, *torch.autograd.grad(got, leaves, given)]
        errors = [relative(a, b) for a, b in zip(got, want, strict=True)]
        with torch.no_grad():
            forward = milliseconds(lambda: residual_norm(*problem, backend))  # noqa: B023
        both = milliseconds(lambda: torch.autograd.grad(residual_norm(*problem, backend), leaves, given))  # noqa: B023
        times = {"forward_ms": forward, "both_ms": both, "copy_floor_ms": tokens * 24576 / 4.27e9}
        out(what="residual_norm", tokens=tokens, backend=backend, **times, errors=[round(e, 6) for e in errors])


def config(layers, small, **kwargs):
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "vocab_size": 1000} if small else {}
    return zaya.ZayaConfig(num_hidden_layers=layers, **sizes, **kwargs)


def train_rows(batch, length, small):
    """Loss, tokens per second and peak memory of a step without an optimizer, by the kernels and by plain torch."""
    for kernels in ("auto", "reference"):
        train_row(batch, length, small, kernels)
        gc.collect()
        torch.cuda.empty_cache()


def train_row(batch, length, small, kernels):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = zaya.ZayaForCausalLM(config(2 if small else 8, small, kernels=kernels)).bfloat16().train()
    ids = torch.randint(3, 900, (batch, length), device=DEVICE)

    def step():
        loss = model(ids, labels=ids, skip_logits=True).loss
        loss.backward()
        model.zero_grad()
        return loss.item()

    first = step()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(step, 5)
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0
    speed = batch * length / ms * 1e3 if ms else 0.0
    out(what="train", kernels=kernels, loss=first, ms=ms, tokens_per_s=speed, peak_gb=peak)
    if DEVICE == "cuda" and kernels == "auto":
        profile(step)


def profile(step):
    """The ten kernels that take longest, in milliseconds of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
    rows = sorted(found.key_averages(), key=lambda r: -r.self_device_time_total)[:24]
    for r in rows:
        out(what="kernel", ms=r.self_device_time_total / 1e3, count=r.count, name=r.key[:90])


@torch.no_grad()
def decode_rows(batch, small):
    """Milliseconds a token, captured; and whether the graph's tokens are those of the eager loop."""
    from transformers import StaticCache

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = zaya.ZayaForCausalLM(config(2 if small else 40, small)).bfloat16().eval()
    ids = torch.randint(3, 900, (batch, 32), device=DEVICE)
    cache = StaticCache(model.config, max_cache_len=512)
    model(ids, cache=cache)
    token, place = ids[:, :1].clone(), torch.full((batch, 1), 32, device=DEVICE)
    call = lambda: model(token, position_ids=place, cache=cache).logits
    eager = milliseconds(call, 5)
    if DEVICE == "cpu":
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    out(what="decode", batch=batch, eager_ms=eager, graph_ms=milliseconds(graph.replay, 30))
    profile(graph.replay)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small or DEVICE == "cpu"
    for tokens in (100,) if small else (4096,):
        for documents in (False, True):
            check_cca(tokens, documents)
    for tokens in (100,) if small else (32768, 4096):
        time_cca(tokens)
    residual_rows(100 if small else 32768)
    train_rows(*((2, 64) if small else (4, 4096)), small)
    for batch in (1, 16):
        decode_rows(batch, small)


if __name__ == "__main__":
    main()
