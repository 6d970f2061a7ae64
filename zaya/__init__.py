"""zaya: pretrain a ZAYA1 model, prove it, and release it."""

__version__ = "0.1.0"
