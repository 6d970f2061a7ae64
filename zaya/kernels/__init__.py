"""Ops of the model. Each has the mathematics in plain torch (`reference.py`) and, where it pays, a Triton kernel.

The model calls the op; the op picks the backend. On a GPU that is Triton, elsewhere the reference. The environment
variable `ZAYA_KERNELS` (`auto`, `reference`, `triton`), or the config field `kernels`, forces one: the variable wins.
"""

import functools
import logging
import os

import torch

from zaya.errors import UserError

BACKENDS = ("auto", "reference", "triton")
log = logging.getLogger("zaya.kernels")


@functools.cache
def log_once(message: str) -> None:
    """Log `message` at INFO level the first time that it is seen in this process."""
    log.info(message)


def pick_backend(device: torch.device, requested: str = "auto") -> str:
    """The backend for tensors on `device`: "reference" or "triton".

    Raises UserError for a name that is not in BACKENDS.
    """
    name = os.environ.get("ZAYA_KERNELS", "") or requested
    if name not in BACKENDS:
        raise UserError(
            f"kernels: unknown backend {name!r} (ZAYA_KERNELS or the config field `kernels`); "
            f"use one of {', '.join(BACKENDS)}"
        )
    if name != "auto":
        return name
    return "triton" if device.type == "cuda" else "reference"
