"""vLLM's own serving benchmark against a running server, at several numbers of requests in flight."""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zaya.children import ending
from zaya.errors import CheckFailed
from zaya.eval.latency.server import Server, environment, reason
from zaya.results import Metric

CHILD = Path(__file__).with_name("_bench_child.py")
TIMES = ("ttft", "tpot", "itl", "e2el")
QUANTILES = ("p50", "p90", "p99")
TIMEOUT_S = 3600


@dataclass(frozen=True)
class Load:
    """One measurement: `num_prompts` requests of `input_len` random tokens, `output_len` tokens each, `concurrency` of
    them in flight at a time. Random tokens are tokenized again, so inputs differ from `input_len` by a few tokens."""

    concurrency: int
    num_prompts: int
    input_len: int
    output_len: int
    seed: int = 0


def arguments(server: Server, folder: Path, load: Load, out: Path) -> list[str]:
    """Arguments of vLLM's benchmark. Two unmeasured requests per slot come first."""
    host, port = server.url.removeprefix("http://").split(":")
    argv = ["--backend", "vllm", "--endpoint", "/v1/completions", "--host", host, "--port", port]
    argv += ["--model", server.model, "--tokenizer", str(folder), "--dataset-name", "random"]
    argv += ["--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)]
    argv += ["--num-prompts", str(load.num_prompts), "--max-concurrency", str(load.concurrency)]
    argv += ["--num-warmups", str(min(2 * load.concurrency, load.num_prompts)), "--ignore-eos"]
    argv += ["--temperature", "0", "--seed", str(load.seed), "--ready-check-timeout-sec", "0"]
    argv += ["--percentile-metrics", ",".join(TIMES), "--metric-percentiles", "50,90,99"]
    argv += ["--save-result", "--result-dir", str(out.parent), "--result-filename", out.name]
    return argv if sys.stderr.isatty() else [*argv, "--disable-tqdm"]


def run(server: Server, folder: Path, loads: list[Load]) -> list[dict[str, Any]]:
    """vLLM's report for each load. Raises CheckFailed when the benchmark fails, or any request of it."""
    with tempfile.TemporaryDirectory(prefix="zaya-bench-") as scratch:
        files = [Path(scratch) / f"{i}.json" for i in range(len(loads))]
        runs = [arguments(server, folder, load, f) for load, f in zip(loads, files, strict=True)]
        plan, log = Path(scratch) / "runs.json", Path(scratch) / "log.txt"
        plan.write_text(json.dumps(runs))
        levels = ", ".join(str(x.concurrency) for x in loads)
        print(f"measuring with {levels} requests in flight", file=sys.stderr, flush=True)
        code = _child([sys.executable, "-P", str(CHILD), str(plan)], log, files)
        server.check_alive()
        if code != 0:
            raise CheckFailed(f"vLLM's benchmark ended with exit code {code}: {reason(log)}")
        reports = [json.loads(f.read_text()) for f in files]
    for load, report in zip(loads, reports, strict=True):
        _check(load, report)
    return reports


def _child(argv: list[str], log: Path, files: list[Path]) -> int:
    """Run the benchmark, saying as each load is done. It never outlives this call."""
    began, done = time.monotonic(), 0
    with open(log, "w", encoding="utf-8") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=environment())
    with ending([process]):
        while process.poll() is None:
            if time.monotonic() - began > TIMEOUT_S:
                raise CheckFailed(f"vLLM's benchmark did not end within {TIMEOUT_S} s: {reason(log)}")
            finished = sum(f.exists() for f in files)
            if finished > done:
                done = finished
                print(f"load {done} of {len(files)} done, {time.monotonic() - began:.0f} s", file=sys.stderr)
            time.sleep(0.2)
    return process.returncode


def _check(load: Load, report: dict[str, Any]) -> None:
    failed = load.num_prompts - report["completed"]
    if failed or report.get("failed"):
        raise CheckFailed(
            f"{max(failed, report.get('failed') or 0)} of {load.num_prompts} requests failed with {load.concurrency} "
            "in flight; the server's log says why"
        )
    expected = load.num_prompts * load.output_len
    if report["total_output_tokens"] != expected:
        raise CheckFailed(f"the server made {report['total_output_tokens']} tokens where {expected} were asked for")


def metrics(load: Load, report: dict[str, Any]) -> list[Metric]:
    """The numbers of one report, with units."""
    n = load.num_prompts
    found = []
    for what in TIMES:
        if load.output_len < 2 and what in ("tpot", "itl"):
            continue  # there is no token after the first
        for quantile in ("mean", *QUANTILES):
            value = report[f"{quantile}_{what}_ms"]
            found.append(Metric(name=f"{what}_ms_{quantile}", value=value, unit="ms", n=n, higher_is_better=False))
    rates = {
        "output_tokens_per_s": (report["output_throughput"], "tokens/s"),
        "total_tokens_per_s": (report["total_token_throughput"], "tokens/s"),
        "requests_per_s": (report["request_throughput"], "requests/s"),
    }
    found += [Metric(name=k, value=v, unit=u, n=n, higher_is_better=True) for k, (v, u) in rates.items()]
    failed = report.get("failed") or 0
    found.append(Metric(name="failed_requests", value=failed, unit="requests", n=n, higher_is_better=False))
    found.append(Metric(name="input_tokens", value=report["total_input_tokens"], unit="tokens", n=n))
    return found
