"""Balancing the experts without an auxiliary loss: the router's biases follow the load.

After each optimizer step, for every layer, with f the share of the whole batch's tokens that went to each class:

    g = f - target,   m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    d = lr m^ / (sqrt(v^) + eps)   (m^, v^ corrected for their start),   bias <- bias - (d - mean(d))

The pseudo-gradient and the AdamW-like update are those of the ZAYA1 report (arXiv 2511.17127); its rate was never
published. The choice is an argmax, to which a constant is nothing: taking the mean out of the update keeps the biases'
sum where it started. Counts are integers of the whole step's batch; biases and state are fp32 under any precision.
"""

import torch

from zaya.training.recipe import Balance


class BiasBalancer:
    """Updates the balancing biases of all layers; its state is `mean` and `square`, [L, E + 1], and `step`."""

    def __init__(self, biases: list[torch.Tensor], settings: Balance):
        """biases: one fp32 buffer [E + 1] per layer, the skip class last; they are updated in place."""
        for bias in biases:
            if bias.dtype != torch.float32:
                raise ValueError(f"balancing biases are {bias.dtype}; they must stay float32")
        self.biases, self.settings = biases, settings
        self.mean = torch.zeros(len(biases), len(biases[0]))
        self.square = torch.zeros_like(self.mean)
        self.steps = 0
        experts = len(biases[0]) - 1
        skip = 1 / (experts + 1) if settings.skip_target is None else settings.skip_target
        self.target = torch.tensor([(1 - skip) / experts] * experts + [skip])

    @torch.no_grad()
    def update(self, counts: torch.Tensor) -> None:
        """counts: integers [L, E + 1], tokens per class in the whole batch of the optimizer step just made.

        A layer that saw no tokens keeps its biases.
        """
        if counts.is_floating_point():
            raise ValueError("expert counts must be integers: sums of rounded counts flip the sign of the update")
        s = self.settings
        totals = counts.sum(1, keepdim=True)
        error = counts.cpu().double() / totals.clamp(min=1).cpu()
        error = torch.where(totals.cpu() > 0, error - self.target, 0).float()
        self.steps += 1
        self.mean.lerp_(error, 1 - s.beta1)
        self.square.lerp_(error.square(), 1 - s.beta2)
        mean = self.mean / (1 - s.beta1**self.steps)
        root = (self.square / (1 - s.beta2**self.steps)).sqrt()
        delta = s.learning_rate * mean / (root + s.eps)
        delta -= delta.mean(1, keepdim=True)
        for bias, change, total in zip(self.biases, delta, totals, strict=True):
            if total > 0:
                bias.sub_(change.to(bias.device))

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """State by global name, for a checkpoint."""
        steps = torch.tensor(self.steps, dtype=torch.int64)
        return {"balance/mean": self.mean, "balance/square": self.square, "balance/steps": steps}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what `state_tensors` gave."""
        self.mean.copy_(tensors["balance/mean"])
        self.square.copy_(tensors["balance/square"])
        self.steps = int(tensors["balance/steps"])
