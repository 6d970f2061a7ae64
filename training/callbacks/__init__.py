"""Features of training: each is a callback, so that the loop does not grow with them."""

from training.callbacks.balance import BalanceCallback
from training.callbacks.base import Callback
from training.callbacks.checkpoint import CheckpointCallback
from training.callbacks.heldout import HeldoutCallback
from training.callbacks.log import LogCallback

__all__ = ["BalanceCallback", "Callback", "CheckpointCallback", "HeldoutCallback", "LogCallback"]
