"""The update of the balancing biases, and the load that it acts on."""

import torch

from zaya.training.callbacks.base import Callback
from zaya.training.metrics.load import load_metrics
from zaya.training.optim.balance import BiasBalancer


class BalanceCallback(Callback):
    """After each step, adds up the expert counts over ranks, updates the biases, and puts the load on record."""

    def __init__(self, model: torch.nn.Module, settings):
        self.model = model
        names = sorted(
            (n for n, _ in model.named_buffers() if n.endswith("balancing_biases")), key=lambda n: int(n.split(".")[2])
        )
        self.balancer = BiasBalancer([model.get_buffer(n) for n in names], settings)

    def on_start(self, trainer) -> None:
        self.model.pop_expert_counts()  # whatever ran before is not of the first step

    def on_step(self, trainer) -> None:
        counts = trainer.group.sum_(self.model.pop_expert_counts())
        self.balancer.update(counts)
        if trainer.due(trainer.settings.log_every):
            trainer.record |= load_metrics(counts.cpu())

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return self.balancer.state_tensors()

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.balancer.load_state_tensors(tensors)
