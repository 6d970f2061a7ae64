"""One arm's run folder: started, resumed, finished. This is what each rank does."""

import datetime
import logging
import os
import shutil
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from zaya.errors import UserError
from zaya.files import (
    MANIFEST,
    check_target,
    exclusive,
    read_json,
    read_json_lines,
    read_manifest,
    write_json,
    write_manifest,
)
from zaya.results import provenance
from zaya.shards import TokenShards
from zaya.training.callbacks import BalanceCallback, Callback, CheckpointCallback, HeldoutCallback, LogCallback
from zaya.training.callbacks.log import LOG, SPEED
from zaya.training.checkpoint.manifest import FOLDER
from zaya.training.checkpoint.reader import Checkpoint, latest
from zaya.training.checkpoint.retention import prune, sweep
from zaya.training.checkpoint.writer import Writer
from zaya.training.data.loader import Loader
from zaya.training.metrics.flops import count_parameters, train_flops_per_token
from zaya.training.models import build
from zaya.training.parallel.group import Group
from zaya.training.recipe import Recipe
from zaya.training.trainer import Trainer

log = logging.getLogger(__name__)
RUN, PROVENANCE = "run.json", "provenance.json"
RUNTIME_ONLY = {"keep", "checkpoint_every", "threads_per_rank"}  # of `train`: no influence on what is learned


def identity(recipe: Recipe, arm: str, data: Path) -> dict[str, Any]:
    """JSON values that say which run this is. A checkpoint of another identity is never resumed from.

    Raises UserError when `data` holds no token shards, or those of another vocabulary.
    """
    shards = TokenShards(data, "train")
    shards.check_vocabulary(recipe.tokenizer.vocab_size, "tokenizer.vocab_size")
    both = {"model": recipe.model.model_dump(), "baseline": recipe.baseline and recipe.baseline.model_dump()}
    return {
        "arm": arm,
        "seed": recipe.seed,
        "config": both["model" if arm == "zaya" else "baseline"],
        "vocab_size": recipe.tokenizer.vocab_size,
        "train": recipe.train.model_dump(exclude=RUNTIME_ONLY),
        "data": shards.fingerprint,
    }


def start(recipe: Recipe) -> tuple[Accelerator, Group]:
    """Join the other ranks. Raises UserError when their number is not the recipe's."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != recipe.train.ranks:
        raise UserError(
            f"train.ranks is {recipe.train.ranks} and this was launched with {world} processes; "
            f"give train.ranks={world}"
        )
    warnings.filterwarnings(
        "ignore", message=".*broadcast_buffers. is deprecated"
    )  # its successor is not in torch 2.11
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    precision = "bf16" if recipe.train.precision == "bfloat16" else "no"
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=precision, kwargs_handlers=[ddp])
    if accelerator.num_processes != world:
        raise RuntimeError(f"{accelerator.num_processes} processes joined of {world}: each would train alone")
    torch.set_num_threads(recipe.train.threads_per_rank)
    return accelerator, Group(accelerator.process_index, world)


def make_trainer(
    recipe: Recipe, arm: str, data: Path, accelerator: Accelerator, group: Group, out: Path | None = None
) -> Trainer:
    """A trainer with everything that the recipe asks for. Without `out` nothing is written: for measurements."""
    train, heldout = TokenShards(data, "train"), TokenShards(data, "heldout")
    model = build(recipe, arm).to(accelerator.device)
    callbacks: list[Callback] = []
    if hasattr(model, "pop_expert_counts"):
        callbacks.append(BalanceCallback(model, recipe.train.balance))
    if out is not None:
        ids = identity(recipe, arm, data)
        callbacks.append(HeldoutCallback(heldout, recipe.train))
        callbacks.append(LogCallback(out, recipe.train, out.name))
        writer = Writer(out, group, recipe.train.keep, data / "tokenizer", ids)
        callbacks.append(CheckpointCallback(writer, recipe.train))
    loader = Loader(train, recipe.train.sequence_length, recipe.seed)
    return Trainer(recipe.train, model, loader, accelerator, group, callbacks)


def only_one(out: Path) -> AbstractContextManager[None]:
    """Hold a run folder: a second training into it at the same time is a UserError."""
    busy = f"{out}: another training is running there; wait for it or choose another --out"
    return exclusive(out.parent / f".{out.name}.lock", busy)


def check_run_folder(out: Path) -> None:
    """Raise UserError when `out` is a file, or a folder with something in it that no training left there."""
    ours = ((out / RUN).is_file() and (out / LOG).is_file()) or (out / FOLDER).is_dir()
    made = read_manifest(out)
    if not ours or (made is not None and made["stage"] != "train"):
        check_target(out, "train")


def prepare(out: Path, ids: dict[str, Any]) -> bool:
    """Make `out` ready for a run of identity `ids`. Returns whether that run is finished already.

    A folder that another run left is moved aside to `.<name>.previous`, which replaces an earlier one.
    """
    check_run_folder(out)
    sweep(out)
    manifest, newest = read_manifest(out), latest(out)
    if manifest is not None and manifest["inputs"] == ids and newest is not None:
        return True
    if newest is not None and _identity_of(newest, ids) != ids:
        aside = out.with_name(f".{out.name}.previous")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(out, aside)
        log.warning("%s held a run of another recipe or other data; moved to %s, starting anew", out, aside)
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)  # of a run whose checkpoints are gone: it is not finished any more
    return False


def _identity_of(checkpoint: Checkpoint, like: dict[str, Any]) -> dict[str, Any]:
    return {k: checkpoint.state.get(k) for k in like}


def train(recipe: Recipe, arm: str, data: Path, out: Path) -> None:
    """Train one arm into the folder `out`, going on from its newest intact checkpoint. Every rank calls this.

    Raises UserError for data of another vocabulary, too few tokens, a full disk, or ranks
    that do not match the recipe.
    """
    began = datetime.datetime.now(datetime.UTC)
    accelerator, group = start(recipe)
    ids = identity(recipe, arm, data)
    if group.share(prepare(out, ids) if group.rank == 0 else None):
        return
    trainer = make_trainer(recipe, arm, data, accelerator, group, out)
    if group.rank == 0:
        _describe(trainer, recipe, arm, out)
    checkpoint = latest(out, intact=True) if group.rank == 0 else None
    path = group.share(checkpoint and str(checkpoint.path))
    if path is not None:
        trainer.resume(Checkpoint(Path(path)))
        if group.rank == 0 and trainer.step:
            log.warning("%s: going on from step %d of %d", out, trainer.step, recipe.train.steps)
    trainer.fit()
    group.barrier()
    if group.rank == 0:
        sweep(out)
        prune(out, recipe.train.keep)  # a run killed after its last checkpoint had no time to
        write_json(out / PROVENANCE, provenance(began, recipe.seed).model_dump())
        write_manifest(out, "train", ids, timings=(SPEED, PROVENANCE))
    group.barrier()
    accelerator.end_training()


def _describe(trainer: Trainer, recipe: Recipe, arm: str, out: Path) -> None:
    """run.json: what is trained."""
    model = trainer.bare_model
    flops = train_flops_per_token(model, recipe.train.sequence_length)
    about = {
        "arm": arm,
        "model_type": model.config.model_type,
        "parameters": count_parameters(model),
        "train_flop_per_token": flops,
        "steps": recipe.train.steps,
        "tokens": recipe.train.steps * trainer.tokens_per_step,
        "ranks": trainer.group.size,
        "seed": recipe.seed,
    }
    write_json(out / RUN, about)


def summary(out: Path, data: Path) -> dict[str, Any]:
    """The end of a finished run, from its log: step, tokens, loss and held-out loss beside the bigram's."""
    lines = read_json_lines(out / LOG, "training log", ("step", "tokens"))
    if not lines:
        raise UserError(f"{out / LOG}: empty, and this run is finished; remove {out} and train again")
    speeds = read_json_lines(out / SPEED, "training log", ("tokens_per_s",))
    steady = sorted(s["tokens_per_s"] for s in speeds if s["tokens_per_s"] > 0)
    dataset = read_json(data / "dataset.json", "dataset summary")
    last = lines[-1]
    layers = {k: last[k] for k in ("load_entropy", "skip_share") if k in last}
    return {
        "out": str(out),
        "steps": last["step"],
        "tokens": last["tokens"],
        "loss_nats_per_token": last.get("loss"),
        "heldout_loss_nats_per_token": last["heldout_loss"],
        "bigram_heldout_nats_per_token": dataset["bigram_heldout_nats_per_token"],
        "median_tokens_per_s": steady[len(steady) // 2] if steady else None,
        **layers,
        **{k: v for k, v in read_json(out / RUN, "run description").items() if k in ("parameters", "ranks")},
    }
