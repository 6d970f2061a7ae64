"""Is the MoE block right? Errors against stock in a higher precision, beside stock's own errors in the same one."""

import copy
from typing import Any

import torch
from torch import Tensor

from eval.hardware.moe_block import Layer, build_ours, build_stock, make_layer
from zaya.flops import Shape

SLACK, LEAST = 1.1, {torch.bfloat16: 2e-3, torch.float32: 2e-5}  # allowed: SLACK times stock's error, or LEAST


def sizes(device: str) -> tuple[int, ...]:
    """Numbers of tokens to check at: of one for decoding and of one for training at least."""
    return (1, 16, 4096) if device == "cuda" else (1, 16, 96)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact value; NaN where `found` has one."""
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


def _ids(layer: Layer) -> Tensor:
    """The class that stock's router chooses for each token, the skip class too."""
    logits = layer.stock.gate(layer.h, router_states=layer.state)[0].float()
    return (logits.softmax(-1) + layer.stock.gate.balancing_biases).argmax(-1)


def _ours_ids(layer: Layer) -> Tensor:
    from zaya.kernels.router import router_from_hidden

    gate = layer.stock.gate
    mlp, flat = gate.router_mlp, layer.h.flatten(0, 1)
    layers = ((mlp.fc1.weight, mlp.fc1.bias), (mlp.fc2.weight, mlp.fc2.bias), mlp.out_proj.weight)
    rest = (mlp.norm.weight, *layers, gate.balancing_biases, mlp.norm.variance_epsilon)
    weight, bias = gate.down_proj.weight, gate.down_proj.bias
    state = layer.state.flatten(0, 1)
    return router_from_hidden(flat, weight, bias, state, gate.router_states_scale, *rest).expert_ids


def outputs(call: Any, layer: Layer, dy: Tensor) -> dict[str, Tensor]:
    """Output and every gradient of one forward and backward pass, by name."""
    named = dict(layer.stock.named_parameters())
    h, state = (x.detach().requires_grad_() for x in (layer.h, layer.state))
    y = call(h, state)
    found = torch.autograd.grad(y, [h, state, *named.values()], dy)
    return {"y": y.detach()} | dict(zip(["h", "state", *named], found, strict=True))


def check(tokens: int, shape: Shape, device: str) -> dict[str, Any]:
    """Errors of our block and of stock's at one size, whether two runs of ours are the same bits, and `problems`.

    Tokens near a tie may get another expert in another precision. They are left out, and get no gradient.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = make_layer(shape, tokens, 77 + tokens, device, dtype)
    higher = torch.float64 if dtype == torch.float32 else torch.float32
    exact = Layer(copy.deepcopy(layer.stock).to(higher), *(x.to(higher) for x in (layer.h, layer.state, layer.dy)))
    with torch.no_grad():
        ids = [_ids(exact), _ids(layer), _ours_ids(layer)]
        inference = build_ours(layer)(layer.h, layer.state)
    agree = (ids[0] == ids[1]) & (ids[0] == ids[2])
    dy = layer.dy * agree[None, :, None]
    ours = [outputs(build_ours(layer), layer, dy) for _ in range(2)]
    stock = outputs(build_stock("eager")(layer), layer, dy)
    wanted = outputs(build_stock("eager")(exact), exact, dy.to(higher))
    for found in (*ours, stock, wanted, {"y": inference}):
        found["y"] = found["y"][:, agree]
    errors = {k: (relative_error(ours[0][k], v), relative_error(stock[k], v)) for k, v in wanted.items() if v.any()}
    errors["y, inference"] = (relative_error(inference[:, agree], wanted["y"]), errors["y"][1])
    same = all(torch.equal(ours[0][k], ours[1][k]) for k in ours[0])
    report = {"tokens": tokens, "same_bits_twice": same, "same_choice": float(agree.double().mean())}
    report["errors"] = {k: {"ours": a, "stock": b} for k, (a, b) in errors.items()}
    return report | {"problems": _problems(report, LEAST[dtype])}


def _problems(report: dict[str, Any], least: float) -> list[str]:
    where = f"T={report['tokens']}"
    bad = [
        f"{where}: error of {name} {e['ours']:.2e}, stock's {e['stock']:.2e}"
        for name, e in report["errors"].items()
        if not e["ours"] <= max(SLACK * e["stock"], least)
    ]
    if not report["same_bits_twice"]:
        bad.append(f"{where}: two runs differ")
    if report["same_choice"] < 0.9:
        bad.append(f"{where}: only {report['same_choice']:.0%} of the tokens get the expert of the higher precision")
    return bad


def text(report: dict[str, Any]) -> str:
    """One line for the terminal."""
    worst = max(report["errors"], key=lambda k: report["errors"][k]["ours"])
    e = report["errors"][worst]
    bits = "same bits twice" if report["same_bits_twice"] else "DIFFERENT BITS"
    state = "FAILED" if report["problems"] else "ok"
    return f"check T={report['tokens']}: {state}; worst error {worst} {e['ours']:.2e} (stock {e['stock']:.2e}); {bits}"
