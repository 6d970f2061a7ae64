"""Commands of this folder: `zaya board build`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def build(
    results: Annotated[list[Path], typer.Argument(help="Release folder, then folders of other models' results.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default board/ in the first one.")] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "ZAYA",
    bigram_margin: Annotated[
        float, typer.Option(min=0, help="Nats per token by which the held-out loss must be below the bigram model's.")
    ] = 0.7,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Results to one static page that opens from disk: verdict, scores, training, serving, sources."""
    from zaya.files import sha256_json, stage_dir, write_text
    from zaya.leaderboards.checks import run_checks, verdict
    from zaya.leaderboards.collect import collect
    from zaya.leaderboards.page import render

    release = collect(results)
    page = render(release, title, bigram_margin)
    target = out or results[0] / "board"
    inputs = {"title": title, "bigram_margin": bigram_margin, "page": sha256_json(page)}
    with stage_dir(target, "board", inputs, timings=("index.html",)) as folder:
        write_text(folder / "index.html", page)
    checks = run_checks(release, bigram_margin)
    words = verdict(checks)[1]
    if as_json:
        states = {c.title: c.state for c in checks}
        print(json.dumps({"page": str(target / "index.html"), "verdict": words, "checks": states}))
    print(f"{words}. {target / 'index.html'}", file=sys.stderr)
