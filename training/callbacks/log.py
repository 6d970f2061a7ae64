"""The run's own log: log.jsonl, the same from run to run, and speed.jsonl, which holds times."""

import json
import os
import time
from pathlib import Path
from typing import Any

from zaya.files import write_text
from zaya.training.callbacks.base import Callback
from zaya.training.progress import bar

LOG, SPEED = "log.jsonl", "speed.jsonl"


def truncate(path: Path, step: int) -> None:
    """Drop the lines after `step`, which a killed run wrote after its last checkpoint, and a torn last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            break
    write_text(path, "".join(kept))


class LogCallback(Callback):
    """Writes `trainer.record` every `log_every` steps and whenever a held-out loss is on it; shows progress."""

    def __init__(self, run: Path, settings, name: str):
        self.run, self.settings, self.name = Path(run), settings, name
        self.began = self.marked = 0.0
        self.marked_tokens = 0
        self.bar: Any = None

    def on_start(self, trainer) -> None:
        if trainer.group.rank != 0:
            return
        self.began = self.marked = time.monotonic()
        self.marked_tokens = trainer.tokens
        for name in (LOG, SPEED):
            truncate(self.run / name, trainer.step or -1)  # step 0 is written anew
        self.bar = bar(self.settings.steps, f"training {self.name}", "step", trainer.step)
        if trainer.step == 0:
            self._write(trainer)

    def on_step(self, trainer) -> None:
        if trainer.group.rank != 0:
            return
        note = f"loss {trainer.record['loss']:.3f}"
        if "heldout_loss" in trainer.record:
            note += f", held-out {trainer.record['heldout_loss']:.3f}"
        self.bar.set_postfix_str(note, refresh=False)
        self.bar.update()
        if trainer.due(self.settings.log_every) or "heldout_loss" in trainer.record:
            self._write(trainer)

    def on_end(self, trainer) -> None:
        if self.bar is not None:
            self.bar.close()

    def _write(self, trainer) -> None:
        self._append(LOG, {"step": trainer.step, "tokens": trainer.tokens} | trainer.record)
        now = time.monotonic()
        speed = (trainer.tokens - self.marked_tokens) / max(now - self.marked, 1e-9)
        times = {"step": trainer.step, "tokens_per_s": speed, "since_start_s": now - self.began}
        self._append(SPEED, times)
        self.marked, self.marked_tokens = now, trainer.tokens

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with open(self.run / name, "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")
            f.flush()
            os.fsync(f.fileno())
