"""The plain loop that training is measured against: stock's class, torch's optimizers, one process.

torch.optim.Muon takes 2-D matrices only, so stock's expert stacks go to AdamW, as a user without this package would
have it.
"""

import torch

from zaya.shards import TokenShards
from zaya.training.recipe import Recipe


class Rival:
    """A training loop over `transformers.models.zaya` at the shape of a recipe, on one process."""

    def __init__(self, recipe: Recipe, shards: TokenShards):
        from transformers.models.zaya.configuration_zaya import ZayaConfig
        from transformers.models.zaya.modeling_zaya import ZayaForCausalLM

        from zaya.training.models import zaya_fields

        self.settings = recipe.train
        self.tokens = torch.from_numpy(shards.read(0, min(len(shards), 1 << 22)))
        torch.manual_seed(recipe.seed)
        self.model = ZayaForCausalLM(ZayaConfig(**zaya_fields(recipe))).train()
        for name, p in self.model.named_parameters():
            if name.endswith("temp"):
                p.data.fill_(1.0)  # stock starts at 0, where attention is uniform
        is_matrix = lambda n, p: p.ndim == 2 and "embed" not in n
        named = list(self.model.named_parameters())
        muon, adamw = recipe.train.muon, recipe.train.adamw
        self.optimizers = [
            torch.optim.Muon(
                [p for n, p in named if is_matrix(n, p)],
                lr=muon.learning_rate,
                weight_decay=muon.weight_decay,
                momentum=muon.momentum,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                [p for n, p in named if not is_matrix(n, p)], lr=adamw.learning_rate, betas=(adamw.beta1, adamw.beta2)
            ),
        ]

    def train_step(self) -> None:
        """One step on a random batch of the recipe's size."""
        length, count = self.settings.sequence_length, self.settings.batch_sequences
        starts = torch.randint(0, len(self.tokens) - length - 1, (count,))
        x = torch.stack([self.tokens[i : i + length] for i in starts])
        self.model(x, labels=x).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
