"""`zaya bench loop`: training throughput of ours beside the plain loop, in turns, on the same machine and shape.

Both are started and warmed up first and then take turns, one waiting for its pipe while the other computes, so that
what else the machine does meets both. Ours is the whole training step with all its ranks; logging, held-out losses and
checkpoints are in neither.
"""

import contextlib
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya.errors import CheckFailed
from zaya.files import check_target, stage_dir
from zaya.training import launch
from zaya.training.progress import bar
from zaya.training.recipe import Recipe

TURNS = 2
WARMUP_STEPS = 3


def bench(recipe: Recipe, data: Path, out: Path) -> dict[str, Any]:
    """Measure, and write the result into the folder `out`. Returns tokens/s of both and their ratio.

    Raises CheckFailed when one of the two ends before it has answered.
    """
    from zaya.shards import TokenShards

    began = datetime.datetime.now(datetime.UTC)
    check_target(out, "bench")
    TokenShards(data, "train").check_vocabulary(recipe.tokenizer.vocab_size, "tokenizer.vocab_size")
    turns = _measure(recipe, data)
    speeds = {who: [t["tokens"] / t["seconds"] for t in done] for who, done in turns.items()}
    whole = {who: sum(t["tokens"] for t in d) / sum(t["seconds"] for t in d) for who, d in turns.items()}
    ratio = whole["ours"] / whole["rival"]
    per_cpu = {who: sum(t["tokens"] for t in d) / sum(t["cpu_seconds"] for t in d) for who, d in turns.items()}
    cpu_ratio = per_cpu["ours"] / per_cpu["rival"]
    _write(recipe, out, began, speeds, whole, ratio, cpu_ratio)
    return {
        "out": str(out),
        "ours_tokens_per_s": whole["ours"],
        "rival_tokens_per_s": whole["rival"],
        "ratio": ratio,
        "ratio_per_cpu_second": cpu_ratio,
        "turns": speeds,
    }


def _measure(recipe: Recipe, data: Path) -> dict[str, list[dict[str, float]]]:
    """Tokens and seconds of every turn of both."""
    ranks, threads = recipe.train.ranks, recipe.train.threads_per_rank
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = lambda who: [sys.executable, "-P", "-m", "zaya.training.bench", who, str(data), recipe.model_dump_json()]
    turns: dict[str, list[dict[str, float]]] = {"ours": [], "rival": []}
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(launch.started(command("ours"), ranks, threads, **pipes))[0]
        rival = stack.enter_context(launch.started(command("rival"), 1, ranks * threads, **pipes))[0]
        for child in (ours, rival):
            _answer(child)
        shown = bar(2 * TURNS, "training throughput", "turn")
        for _ in range(TURNS):
            for who, child in (("ours", ours), ("rival", rival)):
                turns[who].append(json.loads(_ask(child, str(recipe.bench.seconds))))
                shown.update()
        shown.close()
    return turns


def _ask(child: subprocess.Popen, line: str) -> str:
    """Send a line, wait for the answer."""
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(line + "\n")
        child.stdin.flush()
    return _answer(child)


def _answer(child: subprocess.Popen) -> str:
    answer = child.stdout.readline()
    if not answer:
        raise CheckFailed(f"bench loop: a worker ended with code {child.wait()}; what it printed above says why")
    return answer


def _write(recipe: Recipe, out: Path, began, speeds, whole, ratio: float, cpu_ratio: float) -> None:
    from zaya.results import Metric, Result, provenance, save

    metrics = [
        Metric(name="ours_tokens_per_s", value=whole["ours"], unit="tokens/s", n=TURNS, higher_is_better=True),
        Metric(name="rival_tokens_per_s", value=whole["rival"], unit="tokens/s", n=TURNS, higher_is_better=True),
        Metric(name="ratio", value=ratio, unit="ratio", n=TURNS, higher_is_better=True),
        Metric(name="ratio_per_cpu_second", value=cpu_ratio, unit="ratio", n=TURNS, higher_is_better=True),
    ]
    settings = {
        "rival": "a plain loop over transformers' class with torch.optim.Muon and AdamW, one process",
        "ranks": recipe.train.ranks,
        "threads": recipe.train.ranks * recipe.train.threads_per_rank,
        "sequence_length": recipe.train.sequence_length,
        "batch_sequences": recipe.train.batch_sequences,
        "seconds_per_turn": recipe.bench.seconds,
        "model": recipe.model.model_dump(exclude_none=True),
    }
    result = Result(
        kind="hardware",
        name="train-loop",
        subject="zaya",
        metrics=metrics,
        settings=settings,
        series={f"{who}_tokens_per_s": values for who, values in speeds.items()},
        provenance=provenance(began, recipe.seed),
    )
    with stage_dir(out, "bench", {"settings": settings}, timings=("*.json",)) as folder:
        save(folder, result)


def worker(who: str, data: Path, recipe: Recipe) -> None:
    """A process of one contestant: warms up, says so, then answers turns of so many seconds with tokens and seconds.

    Lines come on standard input of the first rank, answers leave on its standard output.
    """
    launch.die_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    first = os.environ["RANK"] == "0"
    step, share, add = (_ours if who == "ours" else _rival)(recipe, data)
    for _ in range(WARMUP_STEPS):
        step()
    answer: Any = "ready"
    while True:
        if first:
            os.write(answers, (json.dumps(answer) + "\n").encode())
        turn = share(sys.stdin.readline() if first else None)
        if not turn:
            return
        steps, began, computed = 0, time.perf_counter(), time.process_time()
        while share(time.perf_counter() - began < float(turn)):
            step()
            steps += 1
        tokens = steps * recipe.train.batch_sequences * recipe.train.sequence_length
        seconds, computed = time.perf_counter() - began, add(time.process_time() - computed)
        answer = {"tokens": tokens, "seconds": seconds, "cpu_seconds": computed}


def _ours(recipe: Recipe, data: Path) -> tuple[Callable[[], Any], Callable[[Any], Any], Callable[[float], float]]:
    """Our step, how rank 0 tells the others a value, and the sum of a value over the ranks."""
    import torch

    from zaya.training.run import make_trainer, start

    accelerator, group = start(recipe)
    trainer = make_trainer(recipe, "zaya", data, accelerator, group)
    trainer.start()
    return trainer.advance, group.share, lambda value: float(group.sum_(torch.tensor(value, dtype=torch.float64)))


def _rival(recipe: Recipe, data: Path) -> tuple[Callable[[], Any], Callable[[Any], Any], Callable[[float], float]]:
    """The plain loop's step, on one process."""
    import torch

    from zaya.shards import TokenShards
    from zaya.training.rival import Rival

    torch.set_num_threads(recipe.train.ranks * recipe.train.threads_per_rank)
    return Rival(recipe, TokenShards(data, "train")).train_step, lambda value: value, lambda value: value


if __name__ == "__main__":
    worker(sys.argv[1], Path(sys.argv[2]), Recipe.model_validate_json(sys.argv[3]))
