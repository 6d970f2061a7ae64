"""Tell transformers about ZAYA without importing it.

Two modules of transformers are met as they are imported, now or later: the Auto configuration mapping, which gets an
entry that loads our classes when "zaya" is first looked up, and the experts interface.
"""

import sys
from types import ModuleType

_AUTO = "transformers.models.auto.configuration_auto"
_EXPERTS = "transformers.integrations.moe"


class _Entries(dict):
    """Auto's table of registered configs; the first look-up of "zaya" registers config and models."""

    def __contains__(self, key) -> bool:
        if key == "zaya" and not super().__contains__(key):
            _register_classes()
        return super().__contains__(key)


def _register_classes() -> None:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from zaya.configuration_zaya import ZayaConfig
    from zaya.modeling_zaya import ZayaForCausalLM, ZayaModel

    AutoConfig.register("zaya", ZayaConfig, exist_ok=True)
    AutoModel.register(ZayaConfig, ZayaModel, exist_ok=True)
    AutoModelForCausalLM.register(ZayaConfig, ZayaForCausalLM, exist_ok=True)


def _prepare_auto(module: ModuleType) -> None:
    mapping = module.CONFIG_MAPPING  # type: ignore[attr-defined]
    if not isinstance(mapping._extra_content, _Entries):
        mapping._extra_content = _Entries(mapping._extra_content)


def _prepare_experts(module: ModuleType) -> None:
    def zaya(*args, **kwargs):
        from zaya.kernels.experts import experts_forward

        return experts_forward(*args, **kwargs)

    module.ALL_EXPERTS_FUNCTIONS.register("zaya", zaya)  # type: ignore[attr-defined]


_HOOKS = {_AUTO: _prepare_auto, _EXPERTS: _prepare_experts}


class _Loader:
    """Runs a module as its own loader does, then its hook. (Importing importlib.abc for it is slow.)"""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _HOOKS[module.__name__](module)


class _Finder:
    """Finds the two modules through the other finders, and wraps their loader."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in _HOOKS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


def register() -> None:
    """Register now with what is loaded, and with the rest as it is imported. Safe to call again."""
    for name, hook in _HOOKS.items():
        if name in sys.modules:
            hook(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
