"""`router`: what follows the router's down projection. The mathematics is in reference.py."""

import torch
import torch.nn.functional as F

from zaya.kernels import log_once, pick_backend
from zaya.kernels.router.reference import Routing, choose, count_classes, router_reference

__all__ = ["Routing", "choose", "count_classes", "router", "router_from_hidden"]


def router(
    u,
    prev_state,
    state_scale,
    norm_weight,
    fc1,
    fc2,
    out_weight,
    balancing_biases,
    eps,
    backend="auto",
    keep_logits=False,
):
    """Choose a class for each token: see `router_reference` for the arguments and `Routing` for what comes back.

    `keep_logits` asks for the logits, which only the reference keeps. Differentiable in everything but
    balancing_biases; the choice itself carries no gradient. Raises UserError when "triton" is forced where there is
    no GPU.
    """
    arguments = (u, prev_state, state_scale, norm_weight, fc1, fc2, out_weight, balancing_biases, eps)
    if pick_backend(u.device, backend) == "triton" and not keep_logits:
        from zaya.kernels.router import ops

        reason = ops.unsupported(u, out_weight)
        if reason is None:
            ids, weights, state, counts = ops.route(
                u, prev_state, state_scale, norm_weight, *fc1, *fc2, out_weight, balancing_biases, eps
            )
            return Routing(ids, weights, state, None, counts)
        log_once(f"router: reference instead of the Triton kernel: {reason}")
    return router_reference(*arguments)


def router_from_hidden(x, down_weight, down_bias, prev_state, *parameters, backend="auto"):
    """The down projection and the router: x [T, D], down_weight [R, D], down_bias [R], then as `router` from
    state_scale on.

    The same as `router(F.linear(x, down_weight, down_bias), …)`. On a GPU without gradients it is one operator, which
    for 1 to 64 tokens runs two kernels that spread all of it over the chip; `Routing.counts` is None then.
    """
    if pick_backend(x.device, backend) == "triton" and not torch.is_grad_enabled():
        from zaya.kernels.router import ops

        scale, norm_weight, fc1, fc2, out_weight, biases, eps = parameters
        if ops.unsupported(x, out_weight) is None:
            weights = (*fc1, *fc2, out_weight, biases, eps)
            found = ops.route_from_hidden(x, down_weight, down_bias, prev_state, scale, norm_weight, *weights)
            return Routing(*found, None)
    return router(F.linear(x, down_weight, down_bias), prev_state, *parameters, backend=backend)
