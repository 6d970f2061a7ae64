"""Features of training: each is a callback, so that the loop does not grow with them."""

from zaya.training.callbacks.balance import BalanceCallback
from zaya.training.callbacks.base import Callback
from zaya.training.callbacks.checkpoint import CheckpointCallback
from zaya.training.callbacks.heldout import HeldoutCallback
from zaya.training.callbacks.log import LogCallback

__all__ = ["BalanceCallback", "Callback", "CheckpointCallback", "HeldoutCallback", "LogCallback"]
