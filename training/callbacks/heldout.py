"""The loss on held-out text."""

import torch

from zaya.shards import TokenShards
from zaya.training.callbacks.base import Callback
from zaya.training.data.loader import heldout_batch


class HeldoutCallback(Callback):
    """Scores the same held-out sequences every `heldout_every` steps, before the first and after the last."""

    def __init__(self, shards: TokenShards, settings):
        self.every = settings.heldout_every
        self.inputs, self.targets = heldout_batch(shards, settings.sequence_length, settings.heldout_tokens)
        self.batch = max(1, settings.batch_sequences // settings.ranks)
        self.last: float | None = None

    def on_start(self, trainer) -> None:
        if trainer.step == 0:
            trainer.record["heldout_loss"] = self.loss(trainer)

    def on_step(self, trainer) -> None:
        if trainer.due(self.every):
            trainer.record["heldout_loss"] = self.loss(trainer)

    @torch.no_grad()
    def loss(self, trainer) -> float:
        """Mean cross-entropy, nats per token, each rank scoring its part."""
        model, group = trainer.loss_model, trainer.group
        was_training = model.training
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=trainer.device)
        inputs, targets = self.inputs[group.rank :: group.size], self.targets[group.rank :: group.size]
        for x, y in zip(inputs.split(self.batch), targets.split(self.batch), strict=True):
            if len(x):  # more ranks than sequences: this one has none
                total[0] += model(x.to(trainer.device), y.to(trainer.device))
                total[1] += y.numel()
        model.train(was_training)
        group.sum_(total)
        self.last = float(total[0] / total[1])
        return self.last
