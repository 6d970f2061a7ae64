"""The training loop. It reads top to bottom; features are callbacks."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from zaya.errors import CheckFailed
from zaya.training.callbacks.base import Callback
from zaya.training.checkpoint.reader import Checkpoint
from zaya.training.data.loader import Loader
from zaya.training.loss import IGNORE, LossModel
from zaya.training.optim.schedule import factor
from zaya.training.optim.zero1 import Zero1
from zaya.training.parallel.group import Group
from zaya.training.recipe import Train


class Trainer:
    """One arm's training on this rank: `fit` makes the steps that are left.

    `step` optimizer steps have been made on `tokens` tokens; `record` is what the current step has to say. Order of
    data, learning rate and everything else follow from those two numbers, so that a resume only has to restore state.
    The model must be on the accelerator's device already, before callbacks take tensors of it.
    """

    def __init__(
        self,
        settings: Train,
        model: torch.nn.Module,
        loader: Loader,
        accelerator: Accelerator,
        group: Group,
        callbacks: Sequence[Callback] = (),
    ):
        self.settings, self.loader, self.group, self.accelerator = settings, loader, group, accelerator
        self.device = accelerator.device
        self.bare_model = model
        self.optimizer = Zero1(self.bare_model, settings, group)
        self.loss_model = LossModel(self.bare_model)
        # placed again, tensors would be copied (even from "cpu" to "cpu:0"), away from the optimizer's buffer
        self.model = accelerator.prepare(self.loss_model, device_placement=[False])
        self.optimizer.check_views()
        self.callbacks = list(callbacks)
        self.step = self.tokens = 0
        self.record: dict[str, Any] = {}

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes, over all ranks."""
        return self.settings.batch_sequences * self.settings.sequence_length

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the last, happens at this one."""
        return self.step % every == 0 or self.step == self.settings.steps

    def fit(self) -> None:
        """Train to the last step."""
        self.start()
        while self.step < self.settings.steps:
            self.advance()
        self._call("on_end")

    def start(self) -> None:
        """What callbacks do before the first step."""
        self._call("on_start")

    def advance(self) -> None:
        """One step and what callbacks do after it."""
        self.record = self.train_step()
        self._call("on_step")

    def train_step(self) -> dict[str, Any]:
        """One optimizer step on the next batch. Returns loss (nats per token of the whole batch), lr, grad_norm."""
        rate = factor(self.step, self.settings.steps, self.settings.schedule)
        inputs, targets = self._batch()
        valid = self.group.sum_((targets != IGNORE).sum())
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        parts = list(zip(inputs.split(self._micro), targets.split(self._micro), strict=True))
        for i, (x, y) in enumerate(parts):
            with contextlib.nullcontext() if i == len(parts) - 1 else self.accelerator.no_sync(self.model):
                loss = self.model(x, y)
                # DDP averages over ranks; the sum over the batch divided by its valid tokens is wanted
                self.accelerator.backward(loss * (self.group.size / valid))
            total += loss.detach()
        grad_norm = self.optimizer.step(rate)
        self.step += 1
        self.tokens += self.tokens_per_step
        loss_mean = float(self.group.sum_(total) / valid)
        if not (abs(loss_mean) < float("inf") and grad_norm < float("inf")):
            raise CheckFailed(
                f"step {self.step}: loss {loss_mean}, gradient norm {grad_norm}; lower train.muon.learning_rate and "
                "train.adamw.learning_rate"
            )
        return {"loss": loss_mean, "lr": rate * self.settings.muon.learning_rate, "grad_norm": grad_norm}

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.loader.batch(self.tokens, self.settings.batch_sequences, self.group.rank, self.group.size)
        inputs, targets = (t.to(self.device, non_blocking=True) for t in batch)
        return inputs, targets

    @property
    def _micro(self) -> int:
        """Sequences per forward pass of this rank."""
        return self.settings.microbatch_sequences or self.settings.batch_sequences // self.group.size

    def _call(self, hook: str) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """What this rank adds to a checkpoint: the optimizer state that it owns; on rank 0 that of the callbacks."""
        state = self.optimizer.state_tensors()
        if self.group.rank == 0:
            for callback in self.callbacks:
                state |= callback.state_tensors()
        return state

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint: weights, optimizer, callbacks, random state, position."""
        tied = getattr(self.bare_model, "all_tied_weights_keys", {})
        missing, unexpected = self.bare_model.load_state_dict(dict(checkpoint.tensors()), strict=False)
        if unexpected or set(missing) - set(tied):
            raise ValueError(f"{checkpoint.path}: tensors {missing[:3]} missing, {unexpected[:3]} unknown")
        state = dict(checkpoint.optimizer())
        self.optimizer.load_state_tensors(state)
        for callback in self.callbacks:
            callback.load_state_tensors(state)
        rng = checkpoint.rng()
        if len(rng) == self.group.size:
            torch.set_rng_state(rng[self.group.rank])
        self.step, self.tokens = checkpoint.step, checkpoint.tokens
