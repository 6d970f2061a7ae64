"""Whether a module's weights may be read instead of calling it.

A fused op takes the weights of several modules at once. That is right only while each is what it looks like: adapters,
quantisers, offloading, FSDP, pruning, parametrisations and hooks all put something between a module and its weights,
and each of them works when the module is called.
"""

from torch import nn

# where nn.Module keeps what runs around its forward
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_KINDS: set[type] = {nn.Linear, nn.Conv1d}


def readable(kind: type[nn.Module]) -> type[nn.Module]:
    """Class decorator: `plain` knows instances of exactly this class. Its forward is all that its parameters do."""
    _KINDS.add(kind)
    return kind


def plain(*modules: nn.Module) -> bool:
    """Whether every module is exactly nn.Linear, nn.Conv1d or a `readable` class, with nothing around its forward, and
    its parameters are its own, on a device.

    Where it is False, call the module: what it computes is not what its `weight` and `bias` say.
    """
    return all(map(_plain, modules))


def _plain(module: nn.Module) -> bool:
    if type(module) not in _KINDS or "forward" in module.__dict__:  # accelerate replaces an instance's forward
        return False
    for name in _HOOKS:
        if getattr(module, name):
            return False
    for parameter in module._parameters.values():
        if parameter is not None and (type(parameter) is not nn.Parameter or parameter.is_meta):
            return False
    return True
