"""`linear_cross_entropy`: the language-model head and its loss without the [T, V] logits. See reference.py."""

from zaya.kernels.linear_cross_entropy.reference import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
