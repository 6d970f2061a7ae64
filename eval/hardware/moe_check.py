"""Is the MoE block right? Errors against stock in a higher precision, beside stock's own errors in the same one."""

import copy
from typing import Any

import torch
from torch import Tensor

from eval.hardware.moe_block import Layer, build_ours, build_stock, make_layer
from zaya.flops import Shape

SLACK, LEAST = 1.1, {torch.bfloat16: 2e-3, torch.float32: 2e-5}  # allowed: SLACK times stock's error, or LEAST
REGRET = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # how far below the best class a chosen one may score, exactly
SEEDS = 4  # tried until a token is left that all precisions send to one expert: one token alone may be tied


def sizes(device: str) -> tuple[int, ...]:
    """Numbers of tokens to check at: of one for decoding and of one for training at least."""
    return (1, 16, 4096) if device == "cuda" else (1, 16, 96)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact value; NaN where `found` has one."""
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


def _scores(layer: Layer) -> Tensor:
    """What stock's router chooses by, [T, E + 1]: probability plus bias."""
    logits = layer.stock.gate(layer.h, router_states=layer.state)[0]
    return logits.to(max(logits.dtype, torch.float32, key=lambda d: d.itemsize)).softmax(-1) + _biases(layer)


def _biases(layer: Layer) -> Tensor:
    return layer.stock.gate.balancing_biases


def _ids(layer: Layer) -> Tensor:
    """The class that stock's router chooses for each token; the skip class too, which stock writes as weight 0."""
    _, weights, ids, _ = layer.stock.gate(layer.h, router_states=layer.state)
    return torch.where(weights == 0, _biases(layer).numel() - 1, ids).flatten()


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
    for seed in range(SEEDS):
        report = _check(make_layer(shape, tokens, 77 + tokens + seed, device, dtype), tokens, dtype)
        if report["errors"]:
            break
    return report | {"problems": _problems(report, dtype)}


def _check(layer: Layer, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    higher = torch.float64 if dtype == torch.float32 else torch.float32
    exact = Layer(copy.deepcopy(layer.stock).to(higher), *(x.to(higher) for x in (layer.h, layer.state, layer.dy)))
    with torch.no_grad():
        scores = _scores(exact)
        ids = [scores.argmax(-1), _ids(layer), _ours_ids(layer)]
        regret = scores.amax(-1) - scores.gather(1, ids[2].unsqueeze(1)).squeeze(1)
        inference = build_ours(layer)(layer.h, layer.state)
    agree = (ids[0] == ids[1]) & (ids[0] == ids[2])
    dy = layer.dy * agree[None, :, None]
    ours = [outputs(build_ours(layer), layer, dy) for _ in range(2)]
    stock = outputs(build_stock("eager")(layer), layer, dy)
    wanted = outputs(build_stock("eager")(exact), exact, dy.to(higher))
    for found in (*ours, stock, wanted, {"y": inference}):
        found["y"] = found["y"][:, agree]
    errors = {k: (relative_error(ours[0][k], v), relative_error(stock[k], v)) for k, v in wanted.items() if v.any()}
    if "y" in errors:
        errors["y, inference"] = (relative_error(inference[:, agree], wanted["y"]), errors["y"][1])
    same = all(torch.equal(ours[0][k], ours[1][k]) for k in ours[0])
    report = {"tokens": tokens, "same_bits_twice": same, "same_choice": float(agree.double().mean())}
    report["errors"] = {k: {"ours": a, "stock": b} for k, (a, b) in errors.items()}
    return report | {"regret": float(regret.max())}


def _problems(report: dict[str, Any], dtype: torch.dtype) -> list[str]:
    where = f"T={report['tokens']}"
    bad = [
        f"{where}: error of {name} {e['ours']:.2e}, stock's {e['stock']:.2e}"
        for name, e in report["errors"].items()
        if not e["ours"] <= max(SLACK * e["stock"], LEAST[dtype])
    ]
    if not report["same_bits_twice"]:
        bad.append(f"{where}: two runs differ")
    if not report["regret"] <= REGRET[dtype]:
        bad.append(
            f"{where}: a chosen class scores {report['regret']:.2e} below the best, more than rounding explains"
        )
    if not report["errors"]:
        bad.append(f"{where}: no token gets the same expert in every precision, so nothing was compared")
    return bad


def text(report: dict[str, Any]) -> str:
    """One line for the terminal."""
    errors = report["errors"] or {"none compared": {"ours": float("nan"), "stock": float("nan")}}
    worst = max(errors, key=lambda k: errors[k]["ours"])
    e = errors[worst]
    bits = "same bits twice" if report["same_bits_twice"] else "DIFFERENT BITS"
    state = "FAILED" if report["problems"] else "ok"
    return f"check T={report['tokens']}: {state}; worst error {worst} {e['ours']:.2e} (stock {e['stock']:.2e}); {bits}"
