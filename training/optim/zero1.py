"""Optimizer state and work divided over the ranks by whole parameters (ZeRO stage 1).

Each rank updates the parameters that it owns, with whole-matrix Newton-Schulz, and all ranks then gather the result.
Ownership follows the estimated cost of the update. At one rank it owns everything and nothing is gathered; the update
of a parameter does not depend on who makes it.
"""

import torch

from zaya.training.optim.groups import Rule, classify
from zaya.training.optim.muon import Muon
from zaya.training.parallel.group import Group
from zaya.training.recipe import Train


def update_cost(p: torch.Tensor, rule: Rule, ns_steps: int) -> float:
    """Estimated cost of one update, floating-point operations."""
    elementwise = 100.0 * p.numel()  # bound by memory, not arithmetic: an operation counted here is a hundred there
    if rule.algorithm != "muon":
        return elementwise
    m, n = sorted((p.shape[-2] // rule.blocks, p.shape[-1]))
    matrices = p.numel() // (m * n)
    return elementwise + matrices * ns_steps * 2.0 * (2 * m * m * n + m**3)


def assign(costs: list[float], ranks: int) -> list[int]:
    """Owner of each item: the costliest first, each to the rank with the least so far."""
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


class Zero1:
    """Muon and AdamW over a model's parameters, divided over the ranks of `group`.

    Parameters are moved into one flat buffer in which every rank's share is contiguous, so that gathering needs no
    packing: make it after the model is on its device and before it is wrapped. Raises ValueError for a parameter that
    no rule of `groups` names, and for one that is not fp32.
    """

    def __init__(self, model: torch.nn.Module, settings: Train, group: Group):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        rules = classify(named)
        for name, p in named:
            if p.dtype != torch.float32:
                raise ValueError(f"parameter {name} is {p.dtype}; training keeps its weights in float32")
        self.settings, self.group = settings, group
        owners = assign([update_cost(p, rules[n], settings.muon.ns_steps) for n, p in named], group.size)
        self.flat = self._flatten([p for _, p in named], owners)
        self.owned = {n: p for (n, p), owner in zip(named, owners, strict=True) if owner == group.rank}
        self.parameters = [p for _, p in named]
        self.optimizers = self._optimizers({n: rules[n] for n in self.owned})

    def _flatten(self, parameters: list[torch.nn.Parameter], owners: list[int]) -> torch.Tensor:
        """One buffer [ranks, n] that holds every parameter, each in its owner's row; parameters become views of it."""
        shares = [[p for p, o in zip(parameters, owners, strict=True) if o == r] for r in range(self.group.size)]
        length = max(sum(p.numel() for p in share) for share in shares)
        flat = torch.zeros(self.group.size, length, device=parameters[0].device)
        for row, share in zip(flat, shares, strict=True):
            start = 0
            for p in share:
                view = row[start : start + p.numel()].view_as(p)
                view.copy_(p.detach())
                p.data = view
                start += p.numel()
        return flat

    def check_views(self) -> None:
        """Raise RuntimeError when something has moved a parameter out of the flat buffer since it was made."""
        home = self.flat.untyped_storage().data_ptr()
        if any(p.untyped_storage().data_ptr() != home for p in self.parameters):
            raise RuntimeError("parameters were moved after the optimizer was made; place the model first")

    def _optimizers(self, rules: dict[str, Rule]) -> list[torch.optim.Optimizer]:
        m, a = self.settings.muon, self.settings.adamw
        made: list[torch.optim.Optimizer] = []
        groups = [
            {
                "params": [self.owned[n] for n, r in rules.items() if r.algorithm == "muon" and r.blocks == b],
                "blocks": b,
            }
            for b in sorted({r.blocks for r in rules.values() if r.algorithm == "muon"})
        ]
        if groups:
            made.append(
                Muon(groups, m.learning_rate, m.momentum, m.weight_decay, m.ns_steps, getattr(torch, m.ns_dtype))
            )
        groups = [
            {"params": params, "weight_decay": a.weight_decay if decay else 0.0}
            for decay in (True, False)
            if (params := [self.owned[n] for n, r in rules.items() if r.algorithm == "adamw" and r.decay == decay])
        ]
        if groups:
            made.append(torch.optim.AdamW(groups, lr=a.learning_rate, betas=(a.beta1, a.beta2), eps=a.eps, fused=True))
        return made

    def step(self, rate: float) -> float:
        """Clip, update what this rank owns at `rate` times the peak rates, gather. Returns the gradient's norm.

        Gradients must be those of the whole batch on every rank. They are cleared.
        """
        grads = [p.grad for p in self.owned.values() if p.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self.flat.device)
        if grads:
            square += torch.stack(torch._foreach_norm(grads)).double().square().sum()
        norm = float(self.group.sum_(square).sqrt())
        if norm > self.settings.clip_norm:
            torch._foreach_mul_(grads, self.settings.clip_norm / (norm + 1e-6))
        for optimizer, peak in self._peaks():
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()
        if self.group.size > 1:
            self.group.gather_into(self.flat, self.flat[self.group.rank].clone())
        for p in self.parameters:
            p.grad = None
        return norm

    def _peaks(self):
        for optimizer in self.optimizers:
            section = self.settings.muon if isinstance(optimizer, Muon) else self.settings.adamw
            yield optimizer, section.learning_rate

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """State of what this rank owns, whole tensors by `<parameter>/<state>`."""
        names = {p: n for n, p in self.owned.items()}
        return {
            f"{names[p]}/{key}": value
            for optimizer in self.optimizers
            for p, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what this rank owns from the state of all ranks, of whatever number they were."""
        by_parameter: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition("/")
            by_parameter.setdefault(parameter, {})[key] = value
        names = {p: n for n, p in self.owned.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    state = by_parameter.get(names[p], {})
                    optimizer.state[p] = {
                        k: v.clone() if k == "step" else v.to(p.device).clone() for k, v in state.items()
                    }
