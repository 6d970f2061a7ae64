"""Writing a checkpoint from all ranks: staged beside its final name, and renamed when everything is on disk."""

import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from zaya.files import require_free_space, whole_dir, write_json, write_manifest
from zaya.training.checkpoint.manifest import CONFIG, FOLDER, FORMAT, MODEL, STATE, TOKENIZER, shard_name, step_name
from zaya.training.checkpoint.retention import prune
from zaya.training.parallel.group import Group


class Stateful(Protocol):
    """What a checkpoint asks of the optimizer: tensors of what this rank owns, by global name."""

    def state_tensors(self) -> dict[str, torch.Tensor]: ...


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by native name, tied aliases left out."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return {k: v.detach().contiguous() for k, v in model.state_dict().items() if k not in tied}


def checkpoint_bytes(model: torch.nn.Module) -> int:
    """Upper estimate of a checkpoint's size: weights and two states of the same size in fp32, and small files."""
    return int(3.1 * 4 * sum(v.numel() for v in weights(model).values())) + 2_000_000


def require_room(run: Path, model: torch.nn.Module, checkpoints: int) -> None:
    """Raise UserError when the disk does not hold that many more checkpoints."""
    require_free_space(run, checkpoints * checkpoint_bytes(model), f"{checkpoints} checkpoints")


class Writer:
    """Writes the checkpoints of one run and keeps the newest `keep`."""

    def __init__(self, run: Path, group: Group, keep: int, tokenizer: Path | None, identity: dict[str, Any]):
        """identity: JSON values that say which run this is; a resume compares them."""
        self.run, self.group, self.keep, self.tokenizer, self.identity = Path(run), group, keep, tokenizer, identity

    def save(self, model: torch.nn.Module, optimizer: Stateful, step: int, tokens: int) -> Path:
        """Write the checkpoint of `step` on all ranks; when it returns, it is on disk and older ones are pruned.

        Raises UserError on rank 0 when the disk is too full; nothing half-written stays.
        """
        path = self.run / FOLDER / step_name(step)
        if self.group.rank == 0:
            require_room(self.run, model, 1)
            with whole_dir(path, "checkpoint") as folder:
                self.group.share(str(folder))
                self._write_model(folder, model, step, tokens)
                self._write_rank(folder, optimizer)
                self.group.barrier()
                write_manifest(folder, "checkpoint", self.identity | {"step": step})
            prune(self.run, self.keep)
        else:
            self._write_rank(Path(self.group.share(None)), optimizer)
            self.group.barrier()
        self.group.barrier()
        return path

    def _write_model(self, folder: Path, model: torch.nn.Module, step: int, tokens: int) -> None:
        save_file(weights(model), folder / MODEL, metadata={"format": "pt"})
        config = model.config.to_dict()
        write_json(folder / CONFIG, {k: v for k, v in sorted(config.items()) if k != "transformers_version"})
        state = {"format": FORMAT, "step": step, "tokens": tokens, "ranks": self.group.size} | self.identity
        write_json(folder / STATE, state)
        if self.tokenizer is not None:
            shutil.copytree(self.tokenizer, folder / TOKENIZER)

    def _write_rank(self, folder: Path, optimizer: Stateful) -> None:
        rank, size = self.group.rank, self.group.size
        save_file(optimizer.state_tensors(), folder / shard_name("optimizer", rank, size))
        save_file({str(rank): torch.get_rng_state()}, folder / shard_name("rng", rank, size))
