"""Commands of this folder: `zaya data tokenize`, `zaya train`, `zaya bench loop`."""

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zaya.errors import UserError
from zaya.training.recipe import Recipe, load_recipe

RecipePath = Annotated[Path, typer.Argument(help="Recipe, a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to change, as train.steps=100.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
DataDir = Annotated[Path | None, typer.Option(help="Data folder that `zaya data tokenize` made; default OUT/data.")]


def tokenize(
    recipe: RecipePath,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default OUT/data of the recipe's `out`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Collect the recipe's text, train its tokenizer, write token shards, and count n-gram baselines."""
    _log_to_stderr()
    loaded = load_recipe(recipe, overrides or ())
    from zaya.training.data.tokenize import tokenize as run

    folder = out or loaded.out_dir / "data"
    result = run(loaded, folder)
    if as_json:
        print(json.dumps(result | {"out": str(folder)}))
    print(
        f"{folder}: {result['train_tokens'] / 1e6:.2f} M training tokens, {result['heldout_tokens'] / 1e6:.2f} M held "
        f"out; unigram {result['unigram_heldout_nats_per_token']:.3f}, bigram "
        f"{result['bigram_heldout_nats_per_token']:.3f} nats per token",
        file=sys.stderr,
    )


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    arm: Annotated[Literal["zaya", "baseline"], typer.Option(help="Which of the recipe's models.")] = "zaya",
    data: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default OUT/train/<zaya or the baseline's>.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the recipe, print it resolved, and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Pretrain one model of the recipe. Run again, it goes on from the newest whole checkpoint.

    Starts train.ranks processes itself; under torchrun or accelerate launch this command is one of them.
    """
    loaded = load_recipe(recipe, overrides or ())
    if check:
        resolved = loaded.model_dump(mode="json") | {"out": str(loaded.out_dir)}
        print(json.dumps(resolved) if as_json else json.dumps(resolved, indent=1))
        return
    if arm == "baseline" and loaded.baseline is None:
        raise UserError(f"{recipe}: --arm baseline, and the recipe has no `baseline`; add one")
    name = "zaya" if arm == "zaya" or loaded.baseline is None else loaded.baseline.architecture
    result = _train(loaded, arm, data or loaded.out_dir / "data", out or loaded.out_dir / "train" / name)
    if result is None:
        return
    if as_json:
        print(json.dumps(result))
    print(
        f"{result['out']}: {result['steps']} steps, {result['tokens'] / 1e6:.2f} M tokens; held-out loss "
        f"{result['heldout_loss_nats_per_token']:.3f} nats per token (bigram "
        f"{result['bigram_heldout_nats_per_token']:.3f}), {result['median_tokens_per_s']:.0f} tokens/s",
        file=sys.stderr,
    )


def _train(loaded: Recipe, arm: str, data: Path, out: Path) -> dict[str, Any] | None:
    """Train as the parent of the ranks, or as one of them. None on ranks that have nothing to say."""
    from zaya.training import launch

    _log_to_stderr()
    launch.die_with_parent()
    if launch.is_rank():
        from zaya.training.run import only_one, train

        first, ours = os.environ["RANK"] == "0", launch.is_child()
        with only_one(out) if first and not ours else contextlib.nullcontext():
            train(loaded, arm, data, out)
        if not first or ours:
            return None
    else:
        from zaya.files import read_object
        from zaya.training.run import check_run_folder, identity, only_one, prepare, train

        ids = identity(loaded, arm, data)
        read_object(data / "dataset.json", "dataset summary (`zaya data tokenize` writes it)")
        check_run_folder(out)
        with only_one(out):
            if prepare(out, ids):
                logging.getLogger(__name__).warning("%s: finished already, nothing to do", out)
            elif loaded.train.ranks > 1:
                launch.launch(sys.argv[1:], loaded.train.ranks, loaded.train.threads_per_rank)
            else:
                train(loaded, arm, data, out)
    from zaya.training.run import summary

    return summary(out, data)


def bench_loop(
    recipe: RecipePath,
    overrides: Overrides = None,
    data: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result; default OUT/bench.")] = None,
    as_json: AsJson = False,
) -> None:
    """Training throughput of ours beside a plain loop over stock's class, in turns, at the recipe's shape."""
    _log_to_stderr()
    loaded = load_recipe(recipe, overrides or ())
    from zaya.training.bench import bench

    result = bench(loaded, data or loaded.out_dir / "data", out or loaded.out_dir / "bench")
    if as_json:
        print(json.dumps(result))
    print(
        f"{result['ours_tokens_per_s']:.0f} tokens/s, the plain loop {result['rival_tokens_per_s']:.0f}: "
        f"{result['ratio']:.2f} times as many",
        file=sys.stderr,
    )


def _log_to_stderr() -> None:
    """Our own lines on standard error, without the libraries' chatter."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("zaya.training").setLevel(logging.INFO)
