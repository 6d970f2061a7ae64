"""Is the MoE block right? Errors against stock in a higher precision, beside stock's own errors in the same one."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from zaya.eval.hardware.moe_block import Layer, build_ours, build_stock, make_layer, ours
from zaya.flops import Shape

SLACK, LEAST = 1.1, {torch.bfloat16: 2e-3, torch.float32: 2e-5}  # allowed: SLACK times stock's error, or LEAST
REGRET = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # how far below the best class a chosen one may score, exactly
LEAST_TOKENS = 32  # compared at every size


def sizes(device: str) -> tuple[int, ...]:
    """Numbers of tokens to check at: of one for decoding and of one for training at least."""
    return (1, 16, 4096) if device == "cuda" else (1, 16, 96)


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
    """The class that our block chooses for each token: with gradients or without, as the caller has it."""
    return ours(layer)(layer.h, layer.state.flatten(0, 1))[1].expert_ids


def outputs(call: Any, layer: Layer, dy: Tensor) -> dict[str, Tensor]:
    """Output and every gradient of one forward and backward pass, by name."""
    named = dict(layer.stock.named_parameters())
    h, state = (x.detach().requires_grad_() for x in (layer.h, layer.state))
    y = call(h, state)
    found = torch.autograd.grad(y, [h, state, *named.values()], dy)
    return {"y": y.detach()} | dict(zip(["h", "state", *named], found, strict=True))


def check(tokens: int, shape: Shape, device: str) -> dict[str, Any]:
    """Errors of our block and of stock's at one size, whether two runs of ours are the same bits, and `problems`.

    A call of few tokens is repeated on other tokens until LEAST_TOKENS were compared: what one token's weight loses to
    rounding is chance. Tokens near a tie may get another expert in another precision: left out, they get no gradient.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    calls = max(1, LEAST_TOKENS // tokens)
    whole = make_layer(shape, tokens * calls, 77 + tokens, device, dtype)
    exact = copy.deepcopy(whole.stock).to(torch.float64 if dtype == torch.float32 else torch.float32)
    parts = zip(*(x.split(tokens, 1) for x in (whole.h, whole.state, whole.dy)), strict=True)
    report = _pooled([_compare(Layer(whole.stock, *(x.contiguous() for x in part)), exact) for part in parts], tokens)
    return report | {"problems": _problems(report, dtype)}


def _compare(layer: Layer, exact_stock: nn.Module) -> dict[str, Any]:
    """One call: per value, the squared norms of our error, of stock's, and of the exact value."""
    higher = next(exact_stock.parameters()).dtype
    exact = Layer(exact_stock, *(x.to(higher) for x in (layer.h, layer.state, layer.dy)))
    chosen = [_ours_ids(layer)]
    with torch.no_grad():
        scores = _scores(exact)
        chosen.append(_ours_ids(layer))
        regret = scores.amax(-1) - torch.stack([scores.gather(1, i.unsqueeze(1)).squeeze(1) for i in chosen])
        inference = build_ours(layer)(layer.h, layer.state)
        agree = (torch.stack([_ids(layer), *chosen]) == scores.argmax(-1)).all(0)
    dy = layer.dy * agree[None, :, None]
    first, second = (outputs(build_ours(layer), layer, dy) for _ in range(2))
    stock = outputs(build_stock("eager")(layer), layer, dy)
    wanted = outputs(build_stock("eager")(exact), exact, dy.to(higher))
    for found in (first, second, stock, wanted):
        found["y"] = found["y"][:, agree]
    squares = {k: (_square(first[k], v), _square(stock[k], v), _square(v)) for k, v in wanted.items()}
    squares["y, inference"] = (_square(inference[:, agree], wanted["y"]), *squares["y"][1:])
    same = all(torch.equal(first[k], second[k]) for k in first)
    return {"same": same, "agree": float(agree.double().mean()), "regret": float(regret.max()), "squares": squares}


def _square(found: Tensor, exact: Tensor | float = 0.0) -> float:
    """Squared norm of the difference; NaN where `found` has one."""
    return float((found.double() - exact).square().sum())


def _pooled(calls: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """One report of several calls: relative errors over all of them."""
    errors = {}
    for name in calls[0]["squares"]:
        mine, stock, exact = (sum(c["squares"][name][i] for c in calls) for i in range(3))
        if exact or mine:
            errors[name] = {
                k: math.sqrt(v / exact) if exact else math.inf for k, v in (("ours", mine), ("stock", stock))
            }
    return {
        "tokens": tokens,
        "calls": len(calls),
        "same_bits_twice": all(c["same"] for c in calls),
        "same_choice": sum(c["agree"] for c in calls) / len(calls),
        "regret": max(c["regret"] for c in calls),
        "errors": errors,
    }


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
