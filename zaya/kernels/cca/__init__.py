"""`cca`: compressed convolutional attention between its projections and the attention. See reference.py."""

from zaya.kernels import log_once, pick_backend
from zaya.kernels.cca.reference import assemble, cca_reference, convolve_called, normalise, with_past

__all__ = ["assemble", "cca", "cca_step", "convolve_called", "normalise", "with_past"]


def cca(qkv, depthwise, grouped, temp, rope, first=None, state=None, depth=None, backend="auto"):
    """Queries, keys and values ready for attention: see `cca_reference` for shapes and what comes back.

    Differentiable in everything but `rope`; the gradient of `state` is what context parallelism sends back to the rank
    before. Raises UserError when "triton" is forced where there is no GPU.
    """
    if pick_backend(qkv.device, backend) == "triton":
        from zaya.kernels.cca import ops

        reason = ops.unsupported(qkv, depthwise, grouped, rope[0])
        if reason is None:
            conv, delayed = (None, None) if state is None else (state[0], state[1].squeeze(1))
            return ops.apply(qkv, *depthwise, *grouped, temp, *rope, first, conv, delayed, depth)
        log_once(f"cca: reference instead of the Triton kernels: {reason}")
    return cca_reference(qkv, depthwise, grouped, temp, rope, first, state, depth)


def cca_step(qkv, depthwise, grouped, temp, rope, conv_state, delayed_state, slots=None, backend="auto"):
    """One token of each sequence by the kernels, which read its state and replace it in place; no gradient.

    qkv [B, 1, N]; conv_state [slots, 2, C] and delayed_state [slots, G d / 2], of any strides; slots [B] int64 or None
    for 0 … B - 1. Returns what `cca` returns, or None, with nothing touched, where the kernels do not apply.
    """
    if pick_backend(qkv.device, backend) != "triton":
        return None
    from zaya.kernels.cca import ops

    if ops.unsupported(qkv, depthwise, grouped, rope[0]) is not None or conv_state.dtype != qkv.dtype:
        return None
    return ops.step(qkv, *depthwise, *grouped, temp, *rope, conv_state, delayed_state, slots)
