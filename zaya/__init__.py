"""zaya: pretrain a ZAYA1 model, prove it, and release it.

Importing this package registers ZAYA with transformers' Auto classes and its experts implementation "zaya". It loads
neither torch nor transformers: both happen when a class is first used, or when the program imports transformers.
"""

import importlib

from zaya._register import register

__version__ = "0.1.0"

_HOME = {
    "ZayaConfig": "zaya.configuration_zaya",
    "ZayaModel": "zaya.modeling_zaya",
    "ZayaForCausalLM": "zaya.modeling_zaya",
    "ZayaCache": "zaya.cache",
    "BalanceCallback": "zaya.balancing",
    "pin_skip_bias": "zaya.balancing",
    "ZayaPreTrainedModel": "zaya.modeling_zaya",
}
__all__ = ["__version__", *_HOME]

register()


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'zaya' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
