"""`router`: what follows the router's down projection. The mathematics is in reference.py."""

from zaya.kernels import pick_backend
from zaya.kernels.router.reference import Routing, router_reference

__all__ = ["Routing", "router"]


def router(u, prev_state, state_scale, norm_weight, fc1, fc2, out_weight, balancing_biases, eps, backend="auto", keep_logits=False):
    """Choose a class for each token: see `router_reference` for the arguments and `Routing` for what comes back.

    `keep_logits` asks for the logits, which only the reference keeps. Differentiable in everything but
    balancing_biases; the choice itself carries no gradient.
    """
    if not keep_logits and pick_backend(u.device, backend) == "triton":
        raise NotImplementedError
    return router_reference(u, prev_state, state_scale, norm_weight, fc1, fc2, out_weight, balancing_biases, eps)
