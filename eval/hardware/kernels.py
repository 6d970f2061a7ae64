"""`zaya bench kernels`: is the MoE block right, and how far is it from the least time that this machine allows?"""

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from zaya.errors import CheckFailed, UserError
from zaya.eval.hardware import moe_check
from zaya.eval.hardware.moe_block import IMPLEMENTATIONS, SMALL, Implementation, Layer, make_layer
from zaya.files import check_file, write_json
from zaya.flops import Hardware, Shape, block_floor_s, block_work
from zaya.measure import time_call

GRAPH_TOKENS = 512  # up to here, launches from Python would be most of the time: only CUDA graphs are timed,
REPLAYED_TOKENS = 8192  # and up to here both ways
FORWARD, REPLAYED, BOTH = "forward", "forward replayed", "forward+backward"
LAYERS = 4  # for few tokens: layers that take turns, so that weights come from memory as they do in a model
GPU_TOKENS, CPU_TOKENS = (32768, 8192, 512, 64, 16, 1), (256, 16, 1)


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def ceilings(device: str, seconds: float) -> Hardware:
    """What this machine reaches: a large matrix product in FLOP/s, a copy within memory in B/s, read plus written."""
    n, size, dtype = (8192, 2**31, torch.bfloat16) if device == "cuda" else (512, 2**24, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product = time_call(lambda: a @ b, device, budget_s=seconds)
    source = torch.randint(0, 127, (size,), device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    copied = time_call(lambda: target.copy_(source), device, budget_s=seconds)
    return Hardware(2 * n**3 / product.median_ms * 1e3, 2 * size / copied.median_ms * 1e3)


def _forward(call: Any, layer: Layer):
    def run():
        with torch.no_grad():
            return call(layer.h, layer.state)

    return run


def _forward_backward(call: Any, layer: Layer):
    parameters = list(layer.stock.parameters())
    h = layer.h.detach().requires_grad_()

    def run():
        call(h, layer.state).backward(layer.dy)
        for p in (h, *parameters):
            p.grad = None

    return run


def time_block(
    item: Implementation, layers: list[Layer], direction: str, device: str, seconds: float
) -> dict[str, Any]:
    """Times of one implementation: `median_ms` and how it was taken, or `gap` with the reason why there is none."""
    tokens = layers[0].h.shape[1]
    if item.version() is None:
        return {"gap": f"{item.package} is not installed"}
    if tokens > item.largest:
        return {"gap": item.reason}
    graph, note = direction == REPLAYED and item.graph, {}
    if direction == REPLAYED and not item.graph:
        note = {"no_graph": "waits for the device on the host"}
    try:
        make = _forward_backward if direction == BOTH else _forward
        calls = [make(item.build(layer), layer) for layer in layers]
        try:
            timing = time_call(calls, device, graph, seconds)
        except RuntimeError as e:
            if not graph:
                raise
            note = {"no_graph": _line(e)}
            timing = time_call(calls, device, False, seconds)
    except Exception as e:  # a rival that fails is a gap in the table, not the end of the run
        if item.name == "zaya":
            raise
        return {"gap": _line(e)}
    return timing.as_dict() | note


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def measure(
    tokens: tuple[int, ...], shape: Shape, roof: Hardware, device: str, seconds: float
) -> list[dict[str, Any]]:
    """A row per implementation, number of tokens and direction. Ours comes first: a rival's failed capture can leave
    the process without CUDA graphs."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers = {t: [make_layer(shape, t, i, device, dtype) for i in range(_layers(t))] for t in tokens}
    rows = []
    for item in IMPLEMENTATIONS:
        for t, direction in _works(tokens, device):
            if direction == BOTH and item.name.startswith("grouped_mm"):
                continue
            found = time_block(item, layers[t], direction, device, seconds)
            rows.append(_row(item, t, direction, shape, roof, found))
            say(_row_text(rows[-1]))
    return rows


def _layers(tokens: int) -> int:
    return LAYERS if tokens <= GRAPH_TOKENS else 1


def _works(tokens: tuple[int, ...], device: str) -> list[tuple[int, str]]:
    """(tokens, direction). A backward pass of few tokens is nobody's work on a GPU."""

    def directions(t: int) -> tuple[str, ...]:
        if device == "cpu":
            return FORWARD, BOTH
        if t <= GRAPH_TOKENS:
            return (REPLAYED,)
        return (FORWARD, REPLAYED, BOTH) if t <= REPLAYED_TOKENS else (FORWARD, BOTH)

    return [(t, d) for t in tokens for d in directions(t)]


def _row(
    item: Implementation, tokens: int, direction: str, shape: Shape, roof: Hardware, found: dict
) -> dict[str, Any]:
    floor_ms = block_floor_s(tokens, roof, shape, direction == BOTH) * 1e3
    row = {"name": item.name, "version": item.version(), "tokens": tokens}
    row |= {"direction": direction, "floor_ms": floor_ms, **found}
    if "median_ms" in row:
        row["times_floor"] = row["median_ms"] / floor_ms
        row["tflop_per_s"] = block_work(tokens, shape, direction == BOTH).flops / row["median_ms"] / 1e9
    return row


def _row_text(row: dict[str, Any]) -> str:
    head = f"T={row['tokens']:<6} {row['direction']:<17} {row['name']:<27}"
    if "gap" in row:
        return f"{head} not run: {row['gap']}"
    how = row["method"] + (f" (no graph: {row['no_graph']})" if "no_graph" in row else "")
    rate = f"{row['times_floor']:7.2f} x floor {row['tflop_per_s']:8.1f} TFLOP/s"
    return f"{head} {row['median_ms']:10.4f} ms {rate}  {how}"


def table(report: dict[str, Any]) -> str:
    """The report as Markdown: one row per implementation, one column per work."""
    works = list(dict.fromkeys((r["tokens"], r["direction"]) for r in report["rows"]))
    cells = {(r["name"], r["tokens"], r["direction"]): r for r in report["rows"]}
    floors = {(r["tokens"], r["direction"]): r["floor_ms"] for r in report["rows"]}
    out = [
        "| ms (times floor) | " + " | ".join(f"T = {t:,} {d}" for t, d in works) + " |",
        "|---|" + "---:|" * len(works),
    ]
    out.append("| floor | " + " | ".join(f"{floors[w]:.4g}" for w in works) + " |")
    gaps = []
    for name in dict.fromkeys(r["name"] for r in report["rows"]):
        found = [cells.get((name, *w), {}) for w in works]
        version = next((r["version"] for r in found if r.get("version")), None)
        shown = [f"{r['median_ms']:.4g} ({r['times_floor']:.2f})" if "median_ms" in r else "–" for r in found]
        out.append(f"| {name} {version or ''} | " + " | ".join(shown) + " |")
        gaps += [f"- {name}, T = {r['tokens']:,} {r['direction']}: {r['gap']}" for r in found if "gap" in r]
        gaps += [
            f"- {name}, T = {r['tokens']:,}: launched, not replayed: {r['no_graph']}" for r in found if "no_graph" in r
        ]
    roof = report["ceilings"]
    out += ["", f"Ceilings in the same run: {roof['tflop_per_s']:.4g} TFLOP/s, {roof['copy_tb_per_s']:.3g} TB/s."]
    return "\n".join(out + ([""] + gaps if gaps else []))


def _tokens(text: str | None, device: str) -> tuple[int, ...]:
    if text is None:
        return GPU_TOKENS if device == "cuda" else CPU_TOKENS
    try:
        numbers = tuple(int(x) for x in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UserError(f"--tokens {text}: not a list of positive numbers; write, say, --tokens 32768,512,1")
    return numbers


def run(tokens: tuple[int, ...], device: str, seconds: float, check_only: bool = False) -> dict[str, Any]:
    """Check, then time: the report. `failed` in it lists what the check found wrong."""
    from zaya.results import provenance

    started, shape = datetime.datetime.now(datetime.UTC), Shape() if device == "cuda" else SMALL
    checks = [moe_check.check(t, shape, device) for t in moe_check.sizes(device)]
    for c in checks:
        say(moe_check.text(c))
    report: dict[str, Any] = {"checks": checks, "failed": [p for c in checks for p in c["problems"]], "rows": []}
    if not check_only:
        roof = ceilings(device, seconds)
        report["ceilings"] = {"tflop_per_s": roof.flops / 1e12, "copy_tb_per_s": roof.bandwidth / 1e12}
        report["rows"] = measure(tokens, shape, roof, device, seconds)
    settings = {k: v for k, v in os.environ.items() if k.startswith(("ZAYA_KERNELS", "LIGER_", "TRITON_"))}
    return report | {"shape": vars(shape), "environment": settings, "provenance": provenance(started).model_dump()}


def kernels(
    tokens: Annotated[str | None, typer.Option(help="Numbers of tokens, separated by commas.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Time spent on each measurement, in seconds.")] = 0.3,
    check_only: Annotated[bool, typer.Option(help="Only check that the kernels are right.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Check and time the MoE block, router included, beside stock transformers, torch and liger-kernel.

    On a GPU at ZAYA1-8B's sizes in bf16; on a CPU at small sizes, the reference. The floor is the experts' products at
    the rates measured in the same run. Exit code 1 when an error is above stock's or two runs differ in a bit.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = _tokens(tokens, device)
    if out is not None:
        check_file(out)
    report = run(sizes, device, seconds, check_only)
    if out is not None:
        write_json(out, report)
    if as_json:
        print(json.dumps(report))
    elif report["rows"]:
        print(table(report))
    if report["failed"]:
        raise CheckFailed("; ".join(report["failed"]))
