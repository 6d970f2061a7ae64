import pytest
import torch
import torch.nn.functional as F

import zaya
from tests.parity import gradients
from tests.zaya.support import make, tokens
from zaya.kernels.linear_cross_entropy import linear_cross_entropy


def loss_and_gradients(model, ids, **kwargs):
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False, **kwargs).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients_and_counts(reentrant):
    model = make().train()
    ids = tokens(model, 2, 24)
    want = loss_and_gradients(model, ids)
    counts = model.pop_expert_counts()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    got = loss_and_gradients(model, ids)
    hook.remove()
    assert len(calls) == 2  # it was recomputed
    assert torch.equal(got[0], want[0])
    for name, gradient in want[1].items():
        assert torch.equal(got[1][name], gradient), name
    assert torch.equal(model.pop_expert_counts(), counts)


def test_expert_counts():
    model = make().train()
    ids, mask = tokens(model, 3, 20), torch.ones(3, 20, dtype=torch.long)
    mask[0, :5], mask[2, 11:] = 0, 0
    out = model(ids, attention_mask=mask, output_router_logits=True)
    biases = [layer.mlp.gate.balancing_biases for layer in model.model.layers]
    real = mask.flatten().bool()
    chosen = [(z.softmax(-1) + b).argmax(-1)[real] for z, b in zip(out.router_logits, biases, strict=True)]
    want = torch.stack([torch.bincount(c, minlength=5) for c in chosen])
    model(ids, attention_mask=mask)  # a second microbatch adds up
    counts = model.pop_expert_counts()
    assert counts.dtype == torch.int64
    assert torch.equal(counts, 2 * want)
    assert not model.pop_expert_counts().any()
    with torch.no_grad():
        model(ids)
    model.eval()(ids)
    assert not model.pop_expert_counts().any()


def test_compile_without_graph_breaks():
    model = make().train()
    ids = tokens(model, 2, 24)
    want = loss_and_gradients(model, ids, skip_logits=True)
    counts = model.pop_expert_counts()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        got = loss_and_gradients(compiled, ids, skip_logits=True)
        torch.testing.assert_close(got[0], want[0])
        for name, gradient in want[1].items():
            torch.testing.assert_close(got[1]["_orig_mod." + name], gradient, atol=1e-6, rtol=1e-5)
    assert torch.equal(model.pop_expert_counts(), 2 * counts)


@torch.no_grad()
def test_compiled_decoding_with_a_static_cache():
    from transformers import StaticCache

    model = make()
    ids = tokens(model, 2, 14)
    want = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=20)
    model(ids[:, :10], past_key_values=cache)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    graphs = []
    for i in range(10, 14):
        got = step(ids[:, i : i + 1], past_key_values=cache).logits
        torch.testing.assert_close(got, want[:, i : i + 1], atol=1e-5, rtol=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[-1], graphs  # it settles: no new graph per position


def test_initial_weights_are_for_training():
    torch.manual_seed(0)
    model = zaya.ZayaForCausalLM(zaya.ZayaConfig.tiny())
    for name, p in model.named_parameters():
        if name.endswith(("temp", "scale", "norm.weight", "layernorm.weight")):
            assert bool((p == 1).all()), name
        elif p.ndim > 1 and "conv" not in name:
            assert 0.8 < p.std() / 0.02 < 1.25, name
    for layer in model.model.layers:
        assert layer.mlp.gate.balancing_biases.tolist() == [0, 0, 0, 0, -1]
    ids = tokens(model, 4, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        losses.append(loss_and_gradients(model, ids)[0])
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5


def test_lora_reaches_attention_and_experts():
    peft = pytest.importorskip("peft")
    model = make().train()
    attention = ["q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "o_proj"]
    config = peft.LoraConfig(
        target_modules=attention, target_parameters=["experts.gate_up_proj", "experts.down_proj"], r=2
    )
    tuned = peft.get_peft_model(model, config)
    ids = tokens(model, 2, 16)
    tuned(input_ids=ids, labels=ids).loss.backward()
    trained = {n: p for n, p in tuned.named_parameters() if p.requires_grad}
    assert len(trained) == 3 * 2 * (5 + 2)
    for name, p in trained.items():
        assert p.grad is not None, name
        assert bool(p.grad.any()) == ("lora_B" in name), name  # B starts at zero, so A has no gradient yet


def test_linear_cross_entropy_against_autograd():
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(50, 8), torch.randn(30, 8), torch.randn(30)
    labels = torch.randint(0, 30, (50,))
    labels[::4] = -100
    got = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    want = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    import zaya.kernels.linear_cross_entropy.reference as reference

    limit, reference._ELEMENTS_CPU = reference._ELEMENTS_CPU, 30 * 7  # blocks of 7 tokens
    try:
        loss = linear_cross_entropy(got[0], got[1], labels, got[2]) / 3
    finally:
        reference._ELEMENTS_CPU = limit
    expected = F.cross_entropy(want[0] @ want[1].T + want[2], labels, reduction="sum") / 3
    torch.testing.assert_close(loss, expected)
    for x, y in zip(torch.autograd.grad(loss, got), torch.autograd.grad(expected, want), strict=True):
        torch.testing.assert_close(x, y)


def test_grouped_linear_gradients_against_autograd():
    from zaya.kernels.moe.reference import moe_reference

    torch.manual_seed(0)
    x, up, down = torch.randn(20, 6), torch.randn(3, 10, 6), torch.randn(3, 6, 5)
    ids, weights = torch.tensor([0, 3, 2, 2, 0] * 4), torch.rand(20)  # expert 1 gets nothing, 3 is skip
    ours = [t.clone().requires_grad_() for t in (x, up, down, weights)]
    plain = [t.clone().requires_grad_() for t in (x, up, down, weights)]
    y = moe_reference(ours[0], ours[1], ours[2], ids, ours[3])
    rows = []
    for t, e in enumerate(ids.tolist()):
        gate, value = (plain[1][min(e, 2)] @ plain[0][t]).chunk(2)
        rows.append(plain[3][t] * (e < 3) * (plain[2][min(e, 2)] @ (F.silu(gate) * value)))
    torch.testing.assert_close(y, torch.stack(rows))
    cotangent = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad(y, ours, cotangent), torch.autograd.grad(torch.stack(rows), plain, cotangent), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_gradients_reach_every_parameter():
    model = make().train()
    got = gradients(model, tokens(model, 4, 48))
    assert got.keys() == {n for n, _ in model.named_parameters()}
    assert all(bool(g.any()) for g in got.values())
