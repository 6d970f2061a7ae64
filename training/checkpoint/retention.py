"""Which checkpoints stay. Called only after a newer one is safely on disk."""

import os
import shutil
from pathlib import Path

from zaya.training.checkpoint.manifest import FOLDER, steps


def prune(run: Path, keep: int) -> list[int]:
    """Delete all but the untrained model's and the `keep` newest whole checkpoints. Returns the steps deleted.

    Each is renamed to a hidden name first, so that being killed here leaves nothing that looks like a checkpoint.
    """
    found = steps(run)
    doomed = [s for s in list(found)[:-keep] if s != 0]
    for step in doomed:
        hidden = found[step].with_name(f".{found[step].name}.tmp-old")
        os.rename(found[step], hidden)
        shutil.rmtree(hidden)
    return doomed


def sweep(run: Path) -> None:
    """Remove what a killed run left half-written or half-deleted."""
    for leftover in (Path(run) / FOLDER).glob(".step-*.tmp-*"):
        shutil.rmtree(leftover)
