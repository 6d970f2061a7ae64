"""Learning rate by step: a pure function, so that resuming and extending cannot get it wrong."""

from zaya.training.recipe import Schedule


def factor(step: int, steps: int, schedule: Schedule) -> float:
    """Share of the peak rate at `step` (0-based) of `steps`: warm-up, constant, linear decay to the last step."""
    rise = 1.0 if step >= schedule.warmup_steps else (step + 1) / (schedule.warmup_steps + 1)
    decay = schedule.decay_fraction * steps
    left = max(0, steps - 1 - step)
    if decay < 1 or left >= decay:
        return rise
    return rise * (schedule.final_fraction + (1 - schedule.final_fraction) * left / decay)
