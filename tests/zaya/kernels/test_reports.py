"""Faults that users of other MoE kernels reported, kept away here. docs/kernels.md lists every report and its test."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import zaya
import zaya.kernels
from tests.zaya.kernels.test_moe import POINTERS, assert_close, gradients, kernels, make, relative, written_out
from tests.zaya.kernels.test_router import arguments, stock_router
from zaya.kernels import tiles
from zaya.kernels.router import router, router_from_hidden
from zaya.modeling_zaya import ZayaMoE

pytestmark = pytest.mark.usefixtures("interpreter")


def spread(module: torch.nn.Module):
    """Random weights of order one over the width, so that every class is chosen."""
    for name, p in module.named_parameters():
        torch.nn.init.normal_(p, std=0.5 if p.ndim == 1 else 2 / p.shape[-1] ** 0.5)
        if name.endswith(("norm.weight", "scale")):
            p.data.add_(1.0)
    module.gate.balancing_biases.zero_()[-1] = 0.5
    return module


def block(layer: int = 1, dtype=torch.float32, **sizes) -> ZayaMoE:
    """Router and experts of the model, through the kernels."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "router_hidden_size": 16, "moe_intermediate_size": 32, "num_experts": 4} | sizes
    config = zaya.ZayaConfig.tiny(kernels="triton", **sizes)
    return spread(ZayaMoE(config, layer)).to(dtype)


# ------------------------------------------------------------------------------------------ rows that nobody reads


def block_gradients(module, h, state, dy):
    leaves = [h.detach().requires_grad_(), state.detach().requires_grad_()]
    y, routing = module(leaves[0], leaves[1])
    found = torch.autograd.grad(y, [*leaves, *module.parameters()], dy)
    names = ["h", "state", *(n for n, _ in module.named_parameters())]
    return y.detach(), routing, dict(zip(names, found, strict=True))


@pytest.mark.usefixtures("poisoned")
def test_skipped_tokens_move_no_weight_of_the_block():
    """transformers#48205, #48687, #48689, pytorch#154557, #193633: masked slots leaked into the router's gradient, and
    0 x NaN made the second step explode. What comes back for a skipped token, NaN too, reaches nothing."""
    module, h, state, dy = block(), torch.randn(1, 40, 32), torch.randn(40, 16), torch.randn(1, 40, 32)
    _, routing, _ = block_gradients(module, h, state, dy)
    skipped = routing.expert_ids == 4
    assert 2 < skipped.sum() < 38
    broken = dy.masked_fill(skipped[None, :, None], math.nan)
    for _ in range(2):  # the second step finds the memory of the first
        y, _, found = block_gradients(module, h, state, broken)
        assert not y[0, skipped].any()
        assert not found["h"][0, skipped].any()
        assert not found["state"][skipped].any()
    _, _, alone = block_gradients(module, h[:, ~skipped], state[~skipped], dy[:, ~skipped])
    for name, gradient in alone.items():
        rows = found[name][0, ~skipped] if name == "h" else found[name][~skipped] if name == "state" else found[name]
        assert relative(rows, gradient) < 1e-5, name


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("grad", [True, False])
def test_a_block_whose_tokens_are_all_skipped(grad):
    """pytorch#192497: a call without a routed token failed. Zeros forward and backward, training and decoding."""
    module, h, state = block().train(grad), torch.randn(1, 9, 32), torch.randn(9, 16)
    module.gate.balancing_biases[-1] = 9.0
    if not grad:
        with torch.no_grad():
            y, routing = module(h, state)
        assert not y.any()
        assert routing.expert_ids.tolist() == [4] * 9
        return
    y, _, found = block_gradients(module, h, state, torch.randn(1, 9, 32))
    assert not y.any()
    for name, gradient in found.items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


def test_a_model_whose_tokens_are_all_skipped_trains():
    """pytorch#192497, MSLK#158, pytorch#172439: the whole model, with every expert of every layer idle."""
    model = zaya.ZayaForCausalLM(zaya.ZayaConfig.tiny(kernels="triton")).train()
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = 9.0
    ids = torch.randint(3, model.config.vocab_size, (1, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all(), name
        assert not (".experts." in name and p.grad.any()), name
    assert (model.pop_expert_counts()[:, :-1] == 0).all()


# ------------------------------------------------------------------------------------------------- the same choices


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("tokens", "hidden", "dtype"), [(40, 32, torch.float32), (60, 2048, torch.bfloat16)])
def test_recomputation_repeats_the_choices(reentrant, tokens, hidden, dtype, monkeypatch):
    """Liger#1255: under checkpointing the recomputed routing differed from that of the forward pass. Reentrant
    checkpointing runs the forward pass without gradients, where the decode kernels, which round otherwise, wait."""
    module = block(hidden_size=hidden, moe_intermediate_size=16, dtype=dtype).train()
    module.experts.forward = lambda h, ids, weights: h * weights.unsqueeze(1).to(h.dtype)  # the choice is at stake
    seen, run = [], module.gate.forward
    monkeypatch.setattr(module.gate, "forward", lambda *a: seen.append(run(*a)) or seen[-1])
    h, state = torch.randn(1, tokens, hidden).to(dtype), torch.randn(tokens, 16).to(dtype)
    leaf = h.clone().requires_grad_()
    y, _ = checkpoint(module, leaf, state, use_reentrant=reentrant)
    y.float().square().sum().backward()
    first, again = seen
    assert torch.equal(first.expert_ids, again.expert_ids)
    assert torch.equal(first.gate_weights, again.gate_weights)
    assert torch.equal(first.state, again.state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_bits_of_training_without_it(reentrant):
    """Liger#1255: the whole block, experts included."""
    module, h, state = block().train(), torch.randn(1, 40, 32), torch.randn(40, 16)
    results = []
    for again in (False, True):
        leaf = h.clone().requires_grad_()
        module.zero_grad()
        y = checkpoint(module, leaf, state, use_reentrant=reentrant)[0] if again else module(leaf, state)[0]
        y.backward(torch.ones_like(y))
        results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("tokens", [3, 20])
def test_equal_scores_give_the_lowest_class(tokens):
    """Liger#1255: ties fell differently from pass to pass. Classes 2 and 4 have one row of weights, and the best."""
    module = block(hidden_size=2048)
    rows = module.gate.router_mlp.out_proj.weight.data
    rows[4] = rows[2]
    module.gate.balancing_biases[[2, 4]] = 9.0
    h, state = torch.randn(tokens, 2048), torch.randn(tokens, 16)
    with torch.no_grad():
        for mode in (True, False):  # the kernels of training, and of decoding
            assert module.train(mode).gate(h, state).expert_ids.tolist() == [2] * tokens


# ---------------------------------------------------------------------------------------------------------- layouts


def moved(t: torch.Tensor) -> torch.Tensor:
    """The same values with the last two dimensions swapped in memory, or every other element of a longer vector."""
    if t.ndim == 1:
        return torch.stack([t, torch.full_like(t, 7)], 1)[:, 0]
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("way", ["descriptors", "pointers"])
def test_experts_of_any_layout(way, monkeypatch):
    """Liger#1377, scattermoe#23: strided weights were refused or misread. Every argument, and dy."""
    if way == "pointers":
        monkeypatch.setitem(tiles.MOE, "interpreter", (POINTERS,))
    inputs = [*make(9), torch.randn(9, 48)]
    exact = gradients(written_out, inputs[:5], inputs[5])
    strided = [moved(t) for t in inputs]
    assert not any(t.is_contiguous() for t in strided)
    assert_close(gradients(kernels, strided[:5], strided[5]), exact, 2e-6)
    with torch.no_grad():
        assert relative(kernels(*strided[:5]), exact[0]) < 2e-6


def test_router_of_any_layout():
    """Liger#1377, scattermoe#23: likewise for the router, trained and decoding."""
    module = stock_router(1, width=64, hidden=2048)
    scale, norm, fc1, fc2, out, biases, eps = arguments(module)
    weight, bias = (p.detach() for p in (module.down_proj.weight, module.down_proj.bias))
    plain = [torch.randn(9, 64), torch.randn(9, 64), scale, norm, *fc1, *fc2, out, biases, bias]
    strided = [moved(t.detach()) for t in plain]
    assert not any(t.is_contiguous() for t in strided)

    def run(tensors, move):
        u, prev, scale, norm, *rest = (t.detach().requires_grad_() for t in tensors)
        w1, b1, w2, b2, out, biases, _ = rest
        got = router(u, prev, scale, norm, (w1, b1), (w2, b2), out, biases.detach(), eps, backend="triton")
        dweights = move(torch.linspace(-1, 1, 9))
        dstate = move(torch.linspace(-1, 1, 9 * 64).view(9, 64))
        leaves = [u, prev, scale, norm, w1, b1, w2, b2, out]
        found = torch.autograd.grad([got.gate_weights, got.state], leaves, [dweights, dstate])
        return got.expert_ids, got.gate_weights, got.state, *found

    def decode(tensors, x):
        _, prev, scale, norm, w1, b1, w2, b2, out, biases, bias = (t.detach() for t in tensors)
        rest = (prev[: len(x)], scale, norm, (w1, b1), (w2, b2), out, biases, eps)
        with torch.no_grad():
            return router_from_hidden(x, weight, bias, *rest, backend="triton")[:3]

    assert all(torch.equal(a, b) for a, b in zip(run(strided, moved), run(plain, torch.clone), strict=True))
    for x in (torch.randn(2, 2048), torch.randn(9, 2048)):
        assert all(torch.equal(a, b) for a, b in zip(decode(strided, moved(x)), decode(plain, x), strict=True))
