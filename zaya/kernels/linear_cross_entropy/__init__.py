"""`linear_cross_entropy`: the language-model head and its loss without the [T, V] logits. The mathematics is in
reference.py, the kernels in triton.py, the products and launches in ops.py."""

from zaya.kernels import log_once, pick_backend
from zaya.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(hidden, weight, labels, bias=None, ignore_index=-100, z_loss=0.0, backend="auto"):
    """hidden [T, D], weight [V, D], labels [T], bias [V] or None -> the summed loss in nats, fp32 scalar.

    `z_loss` times the squared logarithm of each softmax's sum is added to the loss of each label that counts; labels
    equal to `ignore_index` do not. A mean is the caller's division, by `num_items_in_batch` say. Differentiable once
    in hidden, weight and bias. The products run in hidden's dtype (under autocast in that of autocast), the softmax
    and the sums over tokens in fp32.

    Gradient accumulation: when the weight has an attribute `main_grad` (contiguous float32 of its shape), the kernels'
    backward adds its gradient there instead of returning it; the reference leaves it in `.grad` (see `moe`).
    """
    if pick_backend(hidden.device, backend) == "triton":
        from zaya.kernels.linear_cross_entropy import ops

        reason = ops.unsupported(hidden, weight)
        if reason is None:
            return ops.linear_cross_entropy_triton(hidden, weight, labels, bias, ignore_index, z_loss)
        log_once(f"linear_cross_entropy: the reference instead of the kernels, because of {reason}")
    return linear_cross_entropy_reference(hidden, weight, labels, bias, ignore_index, z_loss)
