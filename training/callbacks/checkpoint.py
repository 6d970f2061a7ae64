"""Checkpoints during training."""

from zaya.training.callbacks.base import Callback
from zaya.training.checkpoint.writer import Writer, require_room


class CheckpointCallback(Callback):
    """Saves the untrained model, then every `checkpoint_every` steps, and the last step.

    Must come last, after the log: what a checkpoint's step had to say is then on disk before it.
    """

    def __init__(self, writer: Writer, settings):
        self.writer, self.settings = writer, settings

    def on_start(self, trainer) -> None:
        if trainer.step == 0:
            if trainer.group.rank == 0:
                require_room(self.writer.run, trainer.bare_model, self.settings.keep + 2)
            self._save(trainer)

    def on_step(self, trainer) -> None:
        if trainer.due(self.settings.checkpoint_every):
            self._save(trainer)

    def _save(self, trainer) -> None:
        self.writer.save(trainer.bare_model, trainer, trainer.step, trainer.tokens)
