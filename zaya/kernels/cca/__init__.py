"""`convolve`: the two causal convolutions of compressed convolutional attention. See reference.py."""

from zaya.kernels.cca.reference import convolve, convolve_called

__all__ = ["convolve", "convolve_called"]
