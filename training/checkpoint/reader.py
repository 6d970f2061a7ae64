"""Reading checkpoints, of which export needs nothing but this module."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from zaya.errors import UserError
from zaya.files import manifest_digest, read_object
from zaya.training.checkpoint.manifest import CONFIG, FORMAT, MODEL, STATE, TOKENIZER, is_intact, is_whole, steps

FOR_EXPORT = (MODEL, CONFIG, STATE, f"{TOKENIZER}/*")
log = logging.getLogger(__name__)


class Checkpoint:
    """One whole checkpoint folder. Tensors are read when they are asked for."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.state: dict[str, Any] = read_object(self.path / STATE, "checkpoint state")
        if self.state.get("format") != FORMAT:
            raise UserError(f"{self.path}: checkpoint format {self.state.get('format')}, this version reads {FORMAT}")
        self.config: dict[str, Any] = read_object(self.path / CONFIG, "model config")
        self.arm: str = self.state["arm"]
        self.step: int = self.state["step"]
        self.tokens: int = self.state["tokens"]

    @property
    def tokenizer(self) -> Path | None:
        """Folder of the tokenizer, or None when the checkpoint holds none."""
        folder = self.path / TOKENIZER
        return folder if folder.is_dir() else None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(native name, tensor) of the weights and persistent buffers, sorted by name, on the CPU, fp32 as stored."""
        return _tensors([self.path / MODEL])

    def optimizer(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(`<parameter>/<state>`, tensor) of the optimizers of all ranks that wrote."""
        return _tensors(sorted(self.path.glob("optimizer-*.safetensors")))

    def rng(self) -> dict[int, torch.Tensor]:
        """Random state by the rank that wrote it, uint8."""
        return {int(name): value for name, value in _tensors(sorted(self.path.glob("rng-*.safetensors")))}

    def weight_bytes(self) -> int:
        """Bytes of the weights on disk."""
        return (self.path / MODEL).stat().st_size

    def digest(self) -> str:
        """Hex digest of everything in the checkpoint."""
        return manifest_digest(self.path)


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as f:
            for name in sorted(f.keys()):
                yield name, f.get_tensor(name)


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint folder, or the newest whole one of a run folder.

    Raises UserError when there is none, when the folder was not written whole, and when what an export reads of it
    (all but the optimizer's and the random states) has changed since.
    """
    path = Path(path)
    found = steps(path)
    chosen = path if is_whole(path) and (path / STATE).is_file() else found[max(found)] if found else None
    if chosen is not None:
        if not is_intact(chosen, FOR_EXPORT):
            raise UserError(f"{chosen}: damaged, its files are not what was written; use another step of the run")
        return Checkpoint(chosen)
    if (path / STATE).exists() or (path / MODEL).exists():
        raise UserError(f"{path}: this checkpoint is not whole; use another step of the run")
    raise UserError(f"{path}: no checkpoint here; name a step folder, or the run folder that holds `checkpoints`")


def latest(run: Path, intact: bool = False) -> Checkpoint | None:
    """The newest whole checkpoint of a run folder, or None.

    intact: read every file and pass over, with a line in the log, a checkpoint whose content is not what it was.
    """
    for step, path in reversed(steps(run).items()):
        if not intact or is_intact(path):
            return Checkpoint(path)
        log.warning("%s is damaged; falling back from step %d to the one before", path, step)
    return None
