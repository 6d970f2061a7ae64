"""One server, a comparison with transformers, and the benchmark: what `zaya latency` does, and its result files."""

import datetime
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zaya.errors import UserError
from zaya.eval.latency import bench, parity
from zaya.eval.latency.server import Options, Server, serve_folder
from zaya.files import stage_dir, write_json
from zaya.folder import read_config
from zaya.results import Metric, Result, digest, provenance, save
from zaya.weights import weights_sha256


def measure(
    folder: Path,
    loads: list[bench.Load],
    options: Options,
    compare: int = 8,
    atol: float = parity.ATOL_NATS,
    log: Path | None = None,
) -> tuple[parity.Parity | None, list[dict[str, Any]], dict[str, Any]]:
    """Serve `folder` once; compare `compare` prompts (0: none), then run the loads.

    Returns the comparison, vLLM's reports, and settings that say what was served. The loads are not run when the
    comparison fails: numbers of a server that answers wrongly are worth nothing. Raises UserError for loads that do
    not fit the model, CheckFailed for a server that does not start or requests that fail.
    """
    config = read_config(folder)
    _check(folder, config, loads, options, compare)
    with serve_folder(folder, options, log) as server:
        compared = None
        if compare:
            compared = parity.compare_server(server.url, folder, compare, atol=atol, name=server.model)
        good = compared is None or compared.good
        reports = bench.run(server, folder, loads) if loads and good else []
        return compared, reports, _settings(server)


def _check(folder: Path, config: dict[str, Any], loads: list[bench.Load], options: Options, compare: int) -> None:
    if compare and options.dtype not in ("float32", "float"):
        raise UserError(
            f"--dtype {options.dtype}: the comparison with transformers needs float32; add --no-parity to measure only"
        )
    room = options.max_model_len or config.get("max_position_embeddings") or 1 << 30
    for load in loads:
        if load.input_len + load.output_len > room:
            raise UserError(
                f"{folder}: --input-len {load.input_len} and --output-len {load.output_len} together are more than "
                f"the {room} tokens that the model holds; make them smaller"
            )


def _settings(server: Server) -> dict[str, Any]:
    options = server.options
    return {
        "dtype": options.dtype,
        "eager": options.eager,
        "max_model_len": options.max_model_len,
        "server_arguments": list(options.extra),
        "model_class": server.model_class,
    }


def parity_result(report: parity.Parity, settings: dict[str, Any]) -> dict[str, Any]:
    """Name, metrics and settings of a comparison."""
    metrics = [
        Metric(
            name="max_logprob_difference",
            value=report.max_logprob_difference,
            unit="nat",
            n=report.positions,
            higher_is_better=False,
        ),
        Metric(name="equal_tokens", value=report.equal_tokens, unit="tokens", n=report.tokens, higher_is_better=True),
    ]
    about = {"atol": report.atol, "prompts": report.prompts, "against": report.reference}
    return {"name": "parity", "metrics": metrics, "settings": settings | about}


def build(
    folder: Path,
    name: str,
    began: datetime.datetime,
    compared: parity.Parity | None,
    loads: list[bench.Load],
    reports: list[dict[str, Any]],
    settings: dict[str, Any],
) -> list[Result]:
    """A result for the comparison and one for each load that was run."""
    found = [parity_result(compared, settings)] if compared else []
    for load, report in zip(loads, reports, strict=False):
        about = settings | {k: v for k, v in asdict(load).items() if k != "seed"}
        found.append({"name": "serving", "metrics": bench.metrics(load, report), "settings": about})
    sha, made = weights_sha256(folder), provenance(began, loads[0].seed if loads else None)
    return [Result(kind="latency", subject=name, subject_sha256=sha, provenance=made, **f) for f in found]


def write(out: Path, results: list[Result], compared: parity.Parity | None) -> None:
    """Write the stage folder `out`: the results, and the tokens that were compared."""
    inputs = {"model": results[0].subject_sha256, "settings": [r.settings for r in results]}
    # the largest difference depends on which requests the server happened to batch, so no result is an output here
    with stage_dir(out, "latency", inputs, timings=("latency--*.json",), digest=digest) as stage:
        for result in results:
            save(stage, result)
        if compared:
            write_json(stage / "tokens.json", compared.samples)


def table(results: list[Result]) -> None:
    """The main numbers on standard error, a line per load."""
    for r in results:
        if r.name == "serving":
            m = {x.name: x.value for x in r.metrics}
            tpot = f"TPOT {m['tpot_ms_p50']:.1f} ms (p99 {m['tpot_ms_p99']:.1f}), " if "tpot_ms_p50" in m else ""
            print(
                f"{r.subject}, {r.settings['concurrency']} in flight: TTFT {m['ttft_ms_p50']:.1f} ms "
                f"(p99 {m['ttft_ms_p99']:.1f}), {tpot}{m['output_tokens_per_s']:.1f} output tokens/s, "
                f"{m['requests_per_s']:.2f} requests/s",
                file=sys.stderr,
            )
