"""A recipe that trains in a second, and its data."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

os.environ["HF_HUB_OFFLINE"] = "1"

RECIPE = {
    "name": "tiny",
    "corpus": {"sources": ["text/*.txt"], "heldout_fraction": 0.2},
    "tokenizer": {"vocab_size": 320},
    "model": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 3,
        "router_hidden_size": 16,
        "max_position_embeddings": 64,
    },
    "baseline": {
        "hidden_size": 32,
        "intermediate_size": 57,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "train": {
        "steps": 12,
        "sequence_length": 16,
        "batch_sequences": 4,
        "ranks": 2,
        "schedule": {"warmup_steps": 2},
        "balance": {"learning_rate": 0.01, "initial_skip_bias": 0.0},
        "checkpoint_every": 4,
        "log_every": 2,
        "heldout_every": 6,
        "heldout_tokens": 64,
    },
    "bench": {"seconds": 0.2},
}


def write_text_files(folder: Path, files: int = 10, words: int = 400) -> None:
    """Pseudo-random words with a little structure, the same each time."""
    draw = random.Random(7)
    lexicon = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(60)]
    folder.mkdir(parents=True)
    for i in range(files):
        text = " ".join(lexicon[min(59, int(draw.expovariate(0.08)))] for _ in range(words))
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")


def write_recipe(folder: Path, **changes) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE | changes), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The recipe's path; its text lies beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    write_text_files(folder / "text")
    return write_recipe(folder)


@pytest.fixture(scope="session")
def tiny_data(tiny) -> Path:
    """The recipe's data folder."""
    from zaya.training.data.tokenize import tokenize
    from zaya.training.recipe import load_recipe

    out = tiny.parent / "data"
    tokenize(load_recipe(tiny), out)
    return out


def start(*argv: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    """`zaya` in a process group of its own, its output in pipes."""
    command = [sys.executable, "-P", "-m", "zaya.cli", *map(str, argv)]
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float = 180) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; the whole group is gone afterwards."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        kill_group(process)
    return process.returncode, out, err


def kill_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
