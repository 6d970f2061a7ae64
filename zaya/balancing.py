"""Balancing biases outside of our own trainer: pinned for stock transformers, and moved under its Trainer."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

from zaya.errors import UserError


def pin_skip_bias(model_or_state: Any) -> None:
    """Shift each layer's balancing biases in place so that the last, the skip class's, is -1.

    model_or_state: a model, or a mapping of names to tensors. The choice is argmax(p + bias), which a constant added
    to every class does not change; stock transformers sets the last bias to -1 at every load, which then does nothing.
    """
    state = model_or_state if isinstance(model_or_state, Mapping) else model_or_state.state_dict()
    found = [tensor for name, tensor in state.items() if name.endswith("balancing_biases")]
    if not found:
        raise UserError("no balancing_biases here; give a ZAYA1 model or its state dict")
    for biases in found:
        biases -= biases[-1] + 1.0
        biases[-1] = -1.0  # exactly, whatever the rounding


class BalanceCallback(TrainerCallback, ExportableState):
    """Moves the balancing biases after each optimizer step of `transformers.Trainer` (and so of TRL).

    With f the share of the step's tokens that each class got, over all processes and accumulated batches:

        g = f - 1 / (E + 1);  m, v: moments of g, as in Adam;  bias -= learning_rate * m / (sqrt(v) + eps)

    (arXiv 2511.17127; its rate was never published). Give a fine-tuning run a tenth of the pretraining rate, or leave
    the callback out: then the biases stay as they are.

    The moments travel with Trainer's checkpoints. The biases are buffers, which an adapter does not save: with peft
    the routers have to be in `modules_to_save=["gate"]`, and training without raises UserError.
    """

    def __init__(self, learning_rate: float = 1e-4, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8):
        if learning_rate <= 0:
            raise UserError(
                f"learning_rate is {learning_rate}; it must be above 0 (leave the callback out to stop it)"
            )
        self.settings = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps}
        self.steps = 0
        self.mean: torch.Tensor | None = None
        self.square: torch.Tensor | None = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        zaya = self._model(model)
        zaya.pop_expert_counts()
        saved = [n for n, _ in model.named_modules() if n.endswith("mlp.gate.modules_to_save")]
        if getattr(model, "peft_config", None) and not saved:
            raise UserError(
                "BalanceCallback: an adapter does not save the balancing biases that this moves, so a reload would "
                'choose other experts; give LoraConfig modules_to_save=["gate"], or leave the callback out'
            )
        kept = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and isinstance(kept, dict):  # Trainer restores callbacks only where it is asked to
            self._restore(kept["attributes"])

    def on_step_end(self, args, state, control, model=None, **kwargs):
        zaya = self._model(model)
        counts = zaya.pop_expert_counts()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        self.update([layer.mlp.gate.balancing_biases for layer in zaya.layers], counts)

    @torch.no_grad()
    def update(self, biases: list[torch.Tensor], counts: torch.Tensor) -> None:
        """biases: [E + 1] fp32 per layer, moved in place; counts [L, E + 1] integers of the whole step."""
        counts = counts.to(biases[0].device)
        seen = counts.sum(1, keepdim=True)
        error = torch.where(seen > 0, counts / seen.clamp(min=1) - 1 / counts.shape[1], 0.0).float()
        if self.mean is None or self.square is None:
            self.mean, self.square = torch.zeros_like(error), torch.zeros_like(error)
        s, self.steps = self.settings, self.steps + 1
        self.mean = self.mean.to(error.device).lerp(error, 1 - s["beta1"])
        self.square = self.square.to(error.device).lerp(error.square(), 1 - s["beta2"])
        mean = self.mean / (1 - s["beta1"] ** self.steps)
        root = (self.square / (1 - s["beta2"] ** self.steps)).sqrt()
        for bias, change in zip(biases, s["learning_rate"] * mean / (root + s["eps"]), strict=True):
            bias -= change - change.mean()

    @staticmethod
    def _model(model) -> Any:
        from zaya.modeling_zaya import ZayaModel

        for module in model.modules():
            if isinstance(module, ZayaModel):
                return module
        raise UserError(
            "BalanceCallback: the model is not a ZAYA1 model of this package; import zaya before loading it"
        )

    def state(self) -> dict[str, Any]:
        """For Trainer's checkpoints."""
        moments = {k: None if v is None else v.tolist() for k, v in (("mean", self.mean), ("square", self.square))}
        return {"args": self.settings, "attributes": {"steps": self.steps, "moments": moments}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "BalanceCallback":
        """The callback as `state` describes it."""
        callback = cls(**state["args"])
        callback._restore(state["attributes"])
        return callback

    def _restore(self, attributes: dict[str, Any]) -> None:
        self.steps = attributes["steps"]
        for name, value in attributes["moments"].items():
            setattr(self, name, None if value is None else torch.tensor(value))
