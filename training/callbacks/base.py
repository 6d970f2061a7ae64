"""The hooks that training calls."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zaya.training.trainer import Trainer


class Callback:
    """Does nothing at every hook. Hooks run in the order in which the trainer was given its callbacks, on all ranks.

    `trainer.record` holds what the step has to say; a callback adds to it and LogCallback writes it.
    """

    def on_start(self, trainer: "Trainer") -> None:
        """Before the first step of this process, after a resume: `trainer.step` steps have been made."""

    def on_step(self, trainer: "Trainer") -> None:
        """After an optimizer step: `trainer.step` counts it already."""

    def on_end(self, trainer: "Trainer") -> None:
        """After the last step."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """State to keep in checkpoints, by global name. Asked on rank 0, equal on all ranks."""
        return {}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore from what a checkpoint holds, that of other parts included."""
