"""Ours against stock transformers' class, with routing that uses every class."""

import pytest
import torch
import torch.nn.functional as F

import zaya
from tests import parity
from tests.zaya.support import make, mixed_config, tokens, twin, used

TOLERANCE = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(scope="module")
def pair():
    ours = make()
    return ours, twin(ours)


def masks(batch, length):
    full = torch.ones(batch, length, dtype=torch.long)
    left, right, middle, mixed = full.clone(), full.clone(), full.clone(), full.clone()
    left[0, :5], right[1, -6:], middle[2, 4:9] = 0, 0, 0
    mixed[0, :3], mixed[1, -2:], mixed[2, 6:7] = 0, 0, 0
    return {"none": None, "full": full, "left": left, "right": right, "middle": middle, "mixed": mixed}


def test_every_class_is_used(pair):
    assert bool((used(pair[0], tokens(pair[0], 4, 96)) > 0).all())


@pytest.mark.parametrize("padding", ["none", "full", "left", "right", "middle", "mixed"])
@torch.no_grad()
def test_logits_loss_and_records_equal_stock(pair, padding):
    ids = tokens(pair[0], 3, 20)
    mask = masks(3, 20)[padding]
    options = {"output_hidden_states": True, "output_router_logits": True, "use_cache": False}
    a, b = (m(ids, attention_mask=mask, labels=ids, **options) for m in pair)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    torch.testing.assert_close(a.logits[real], b.logits[real], **TOLERANCE)
    assert len(a.hidden_states) == len(b.hidden_states)
    for x, y in zip(a.hidden_states, b.hidden_states, strict=True):
        torch.testing.assert_close(x[real], y[real], atol=1e-5, rtol=1e-5)
    for x, y in zip(a.router_logits, b.router_logits, strict=True):
        torch.testing.assert_close(x[real.flatten()], y[real.flatten()], atol=1e-5, rtol=1e-5)
    if padding == "none":
        torch.testing.assert_close(a.loss, b.loss, **TOLERANCE)


@torch.no_grad()
def test_eager_attention_gives_the_weights(pair):
    ids = tokens(pair[0], 2, 12)
    for model in pair:
        model.set_attn_implementation("eager")
    a, b = (m(ids, output_attentions=True, use_cache=False) for m in pair)
    for model in pair:
        model.set_attn_implementation("sdpa")
    assert len(a.attentions) == 3
    for x, y in zip(a.attentions, b.attentions, strict=True):
        torch.testing.assert_close(x, y, **TOLERANCE)
    torch.testing.assert_close(a.logits, pair[0](ids).logits, **TOLERANCE)


@torch.no_grad()
def test_arguments(pair):
    ours, stock = pair
    ids = tokens(ours, 2, 12)
    full = ours(ids).logits
    embeds = ours.get_input_embeddings()(ids)
    torch.testing.assert_close(ours(inputs_embeds=embeds).logits, full)
    torch.testing.assert_close(ours(ids, logits_to_keep=3).logits, full[:, -3:])
    torch.testing.assert_close(ours(ids, logits_to_keep=torch.tensor([0, 5])).logits, full[:, [0, 5]])
    a, b = (m(ids, labels=ids, num_items_in_batch=7).loss for m in pair)
    torch.testing.assert_close(a, b)
    assert isinstance(ours(ids, return_dict=False), tuple)
    torch.testing.assert_close(stock(ids).logits, full, **TOLERANCE)


@torch.no_grad()
def test_positions_are_the_rotary_angles(pair):
    ids = tokens(pair[0], 2, 12)
    positions = torch.arange(12)[None].repeat(2, 1) * 3 + 5
    options = {"position_ids": positions, "attention_mask": torch.ones_like(ids), "use_cache": False}
    torch.testing.assert_close(*(m(ids, **options).logits for m in pair), **TOLERANCE)


def test_gradients_equal_stock(pair):
    ids = tokens(pair[0], 4, 48)
    ours, stock = (parity.gradients(m, ids) for m in pair)
    assert ours.keys() == stock.keys()
    assert max(parity.gradient_errors(ours, stock).values()) < 1e-4


@torch.no_grad()
def test_loss_without_logits(pair):
    ids = tokens(pair[0], 2, 24)
    labels = ids.clone()
    labels[0, :7] = -100
    for items in (None, 5):
        want = pair[1](ids, labels=labels, num_items_in_batch=items).loss
        got = pair[0](ids, labels=labels, num_items_in_batch=items, skip_logits=True)
        assert got.logits is None
        torch.testing.assert_close(got.loss, want)


@torch.no_grad()
def test_low_precision_keeps_the_residual_and_the_biases_in_fp32():
    model = make().bfloat16()
    assert all(b.dtype == torch.float32 for n, b in model.named_buffers() if n.endswith("balancing_biases"))
    before = make().state_dict()["model.layers.1.mlp.gate.balancing_biases"]
    assert torch.equal(model.state_dict()["model.layers.1.mlp.gate.balancing_biases"], before)
    out = model(tokens(model, 2, 8), output_hidden_states=True)
    assert out.logits.dtype == torch.bfloat16
    assert all(h.dtype == torch.float32 for h in out.hidden_states[:-1])


@pytest.mark.parametrize("semantics", ["zero", "input"])
@torch.no_grad()
def test_skip_semantics_against_the_formula(semantics):
    """The block written out token by token, from the definitions of both layouts."""
    model = make(mixed_config(skip_semantics=semantics))
    block = model.model.layers[1].mlp
    gate, mlp = block.gate, block.gate.router_mlp
    generator = torch.Generator().manual_seed(0)
    h, before = torch.randn(40, 32, generator=generator), torch.randn(40, 16, generator=generator)
    u = h @ gate.down_proj.weight.T + gate.down_proj.bias + before * gate.router_states_scale
    n = u / (u.square().mean(1, keepdim=True) + 1e-5).sqrt() * mlp.norm.weight
    z = F.gelu(F.gelu(n @ mlp.fc1.weight.T + mlp.fc1.bias) @ mlp.fc2.weight.T + mlp.fc2.bias) @ mlp.out_proj.weight.T
    p = z.softmax(1)
    scores = p + gate.balancing_biases
    gate.balancing_biases[4] += (scores[:, :4].amax(1) - scores[:, 4]).quantile(0.25)  # a quarter skips
    chosen = (p + gate.balancing_biases).argmax(1)
    assert 5 <= (chosen == 4).sum() <= 15
    assert chosen.unique().numel() >= 4
    y, routing = block(h[None], before)
    for t, e in enumerate(chosen.tolist()):
        if e == 4:
            want = p[t, 4] * h[t] if semantics == "input" else torch.zeros(32)
        else:
            g, up = (block.experts.gate_up_proj[e] @ h[t]).chunk(2)
            want = p[t, e] * (block.experts.down_proj[e] @ (F.silu(g) * up))
        torch.testing.assert_close(y[0, t], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(routing.state, u, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", list(parity.CONFIGS)[:2])
def test_parity_rows_pass(name):
    assert parity.passes(parity.fp32_row(name, decode_steps=40))


def test_attention_bias_and_three_tap_convolutions_equal_stock():
    model = make(zaya.ZayaConfig.tiny(attention_bias=True, cca_time0=3, cca_time1=2, lm_head_bias=True))
    ids = tokens(model, 2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, twin(model)(ids).logits, **TOLERANCE)


def test_every_op_heeds_the_kernels_of_the_config_whenever_it_is_set(monkeypatch):
    import importlib

    asked = {}
    ops = ("cca", "linear_cross_entropy", "moe", "residual_norm", "router")
    for op in ops:
        record = lambda device, requested="auto", op=op: asked.setdefault(op, set()).add(requested) or "reference"
        monkeypatch.setattr(importlib.import_module(f"zaya.kernels.{op}"), "pick_backend", record)
    model = make().train()
    for name in ("reference", "triton"):
        asked.clear()
        model.config.kernels = name
        ids = torch.arange(3, 13)[None]
        model(ids, labels=ids, skip_logits=True)
        assert asked == {op: {name} for op in ops}
