"""Commands of this folder: `zaya serve`, `zaya latency`."""

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Argument(help="Hugging Face folder, as `zaya export` writes it.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or auto (as saved).")]
Compile = Annotated[bool, typer.Option("--compile", help="Let vLLM compile: a slower start, faster answers.")]
MaxLen = Annotated[int | None, typer.Option(min=1, help="Longest request, tokens; default what the model holds.")]
Log = Annotated[Path | None, typer.Option(help="File for the server's log; default none is kept when all goes well.")]
Extra = Annotated[list[str] | None, typer.Argument(help="After --: more arguments for vLLM's server.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def serve(
    model: Model,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8000,
    dtype: Dtype = "auto",
    compile_: Compile = False,
    max_model_len: MaxLen = None,
    log: Log = None,
    vllm_args: Extra = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model with vLLM and our plugin, until Ctrl-C. Refuses to serve through any other class than ours."""
    from zaya.eval.latency.server import Options, serve_folder

    options = Options(port, dtype, not compile_, max_model_len, tuple(vllm_args or ()))
    with serve_folder(model, options, log) as server:
        about = {"url": f"{server.url}/v1", "model": server.model, "class": server.model_class}
        if as_json:
            print(json.dumps(about | {"start_s": round(server.start_s, 1), "log": str(server.log)}), flush=True)
        print(f"{about['url']} serves model {about['model']} as {about['class']}; Ctrl-C ends it", file=sys.stderr)
        _follow(server)


def _follow(server) -> None:
    """Copy what the server logs from now on to standard error, until it ends (CheckFailed) or Ctrl-C."""
    from zaya.interrupts import Terminated

    try:
        with open(server.log, encoding="utf-8", errors="replace") as f:
            f.seek(0, 2)
            while True:
                server.check_alive()
                for line in f:
                    print(line, end="", file=sys.stderr, flush=True)
                time.sleep(0.3)
    except Terminated:
        raise
    except KeyboardInterrupt:
        print("stopping", file=sys.stderr, flush=True)


def latency(
    model: Model,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Requests in flight; repeatable. Default 1, 4.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests per measurement.")] = 32,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens generated per request.")] = 32,
    out: Annotated[Path | None, typer.Option(help="Folder for the result files; none: print only.")] = None,
    name: Annotated[str | None, typer.Option(help="Name in the results; default the folder's.")] = None,
    parity: Annotated[bool, typer.Option(help="Compare with transformers first; needs float32.")] = True,
    parity_only: Annotated[bool, typer.Option("--parity-only", help="Compare, and measure nothing.")] = False,
    parity_prompts: Annotated[int, typer.Option(min=1, help="Prompts to compare, 32 tokens generated for each.")] = 8,
    atol: Annotated[float, typer.Option(min=0, help="Largest allowed difference of log-probabilities, nats.")] = 1e-4,
    seed: Annotated[int, typer.Option(help="Seed of the benchmark's prompts.")] = 0,
    dtype: Dtype = "float32",
    compile_: Compile = False,
    max_model_len: MaxLen = None,
    log: Log = None,
    vllm_args: Extra = None,
    as_json: AsJson = False,
) -> None:
    """Start a vLLM server, compare its answers with transformers', measure TTFT, TPOT, ITL (ms) and throughput.

    Exit code 1 when the answers differ, a request fails, or another class than ours answers.
    """
    from zaya.errors import UserError
    from zaya.eval.latency import bench, run
    from zaya.eval.latency.parity import require
    from zaya.eval.latency.server import Options
    from zaya.files import check_target

    began = datetime.datetime.now(datetime.UTC)
    levels = concurrency or [1, 4]
    if min(levels) < 1 or len(set(levels)) != len(levels):
        raise UserError(f"--concurrency {levels}: use different numbers of at least 1")
    if parity_only and not parity:
        raise UserError("--parity-only and --no-parity leave nothing to do; drop one of them")
    if out is not None:
        check_target(out, "latency")
    loads = [] if parity_only else [bench.Load(c, num_prompts, input_len, output_len, seed) for c in levels]
    options = Options(None, dtype, not compile_, max_model_len, tuple(vllm_args or ()))
    compared, reports, settings = run.measure(model, loads, options, parity_prompts if parity else 0, atol, log)
    results = run.build(model, name or model.resolve().name, began, compared, loads, reports, settings)
    if out is not None:
        run.write(out, results, compared)
    if compared:
        require(compared, model)
    if as_json:
        print(json.dumps({"results": [r.model_dump() for r in results]}))
    run.table(results)
