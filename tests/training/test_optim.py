import math

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from transformers.models.zaya.modeling_zaya import ZayaForCausalLM as StockZaya

from zaya.errors import UserError
from zaya.kernels.newton_schulz import newton_schulz
from zaya.training.metrics.flops import check_same_active, count_parameters, train_flops_per_token
from zaya.training.metrics.load import load_metrics
from zaya.training.models import baseline_model, zaya_model
from zaya.training.optim.balance import BiasBalancer
from zaya.training.optim.groups import RULES, classify, rule_for
from zaya.training.optim.muon import Muon
from zaya.training.optim.schedule import factor
from zaya.training.optim.zero1 import Zero1, assign
from zaya.training.parallel.group import Group
from zaya.training.recipe import Balance, Schedule, load_recipe

SHAPES = [(8, 8), (24, 16), (16, 40), (1, 12), (33, 7)]


def torch_muon(params, **kwargs):
    return torch.optim.Muon(params, adjust_lr_fn="match_rms_adamw", **kwargs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon_is_torchs_muon_on_matrices(shape):
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.zeros(shape)) for _ in range(2))
    start = torch.randn(shape)
    ours.data.copy_(start), theirs.data.copy_(start)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    a, b = Muon([ours], **settings), torch_muon([theirs], **settings)
    for _ in range(4):
        gradient = torch.randn(shape)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        a.step(), b.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.01 * moved  # both go through bfloat16, in another order of products


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_in_float32_is_the_polynomial_of_singular_values(shape):
    """The iteration acts on singular values alone: the oracle is an SVD and the scalar polynomial in float64."""
    torch.manual_seed(1)
    x = torch.randn(3, *sorted(shape))
    ours = newton_schulz(x, steps=5, dtype=torch.float32)
    u, s, v = torch.linalg.svd(x.double() / x.double().norm(dim=(-2, -1), keepdim=True), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(ours.double(), u @ torch.diag_embed(s) @ v, atol=2e-4, rtol=0)


def test_a_stack_of_fused_matrices_is_updated_as_its_logical_matrices():
    torch.manual_seed(2)
    stack = nn.Parameter(torch.randn(3, 2 * 12, 20))
    parts = [[nn.Parameter(stack[e, b * 12 : b * 12 + 12].detach().clone()) for b in range(2)] for e in range(3)]
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.05}
    ours = Muon([{"params": [stack], "blocks": 2}], **settings)
    theirs = torch_muon([p for pair in parts for p in pair], **settings)
    before = stack.detach().clone()
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for e, pair in enumerate(parts):
            for b, p in enumerate(pair):
                p.grad = stack.grad[e, b * 12 : b * 12 + 12].clone()
        ours.step(), theirs.step()
    expected = torch.stack([torch.cat([p.detach() for p in pair]) for pair in parts])
    assert (stack - expected).norm() < 0.01 * (expected - before).norm()
    # orthogonalising gate and up together would be another update altogether
    fused = nn.Parameter(before.clone())
    fused.grad = stack.grad.clone()
    Muon([{"params": [fused], "blocks": 1}], **settings).step()
    assert (fused - stack).norm() > 0.1 * (expected - before).norm()


def test_chunks_do_not_change_the_result(monkeypatch):
    torch.manual_seed(3)
    results = []
    start, gradient = torch.randn(5, 16, 24), torch.randn(5, 16, 24)
    for size in (1, 1 << 30):
        monkeypatch.setattr("zaya.training.optim.muon.CHUNK_BYTES", size)
        p = nn.Parameter(start.clone())
        p.grad = gradient
        Muon([p], lr=0.1, momentum=0.9, weight_decay=0.0, ns_dtype=torch.float32).step()
        results.append(p.detach())
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)


def test_every_parameter_of_both_architectures_has_exactly_one_rule(tiny):
    recipe = load_recipe(tiny)
    for model in (zaya_model(recipe), baseline_model(recipe), StockZaya(zaya_model(recipe).config)):
        rules = classify(list(model.named_parameters()))
        for name, p in model.named_parameters():
            matrix = p.ndim >= 2 and "embed_tokens" not in name and "conv" not in name
            assert (rules[name].algorithm == "muon") == matrix, name
    assert rule_for("model.layers.3.mlp.experts.gate_up_proj").blocks == 2
    used = {id(rule_for(n)) for m in (zaya_model(recipe), baseline_model(recipe)) for n, _ in m.named_parameters()}
    assert used == {id(rule) for rule in RULES}


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(ValueError, match="model.layers.0.mlp.new_thing.weight is named by 0 rules"):
        classify([("model.layers.0.mlp.new_thing.weight", nn.Parameter(torch.zeros(2, 2)))])
    with pytest.raises(ValueError, match="cannot be 2 stacked"):
        classify([("model.layers.0.mlp.experts.gate_up_proj", nn.Parameter(torch.zeros(2, 3, 2)))])


def test_the_schedule_rises_stays_and_falls_to_its_end():
    schedule = Schedule(warmup_steps=10, decay_fraction=0.5, final_fraction=0.1)
    rates = [factor(s, 100, schedule) for s in range(100)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:50] == [1.0] * 40
    assert rates[-1] == pytest.approx(0.1)
    assert rates[74] == pytest.approx(0.1 + 0.9 * 25 / 50)
    assert all(a >= b for a, b in zip(rates[50:], rates[51:], strict=False))
    assert [factor(s, 7, Schedule(warmup_steps=0, decay_fraction=0)) for s in range(9)] == [1.0] * 9


def test_balancing_is_adamw_on_the_load_error_with_the_mean_taken_out():
    """The oracle is torch.optim.AdamW on g = f - target, each step's mean change added back afterwards."""
    torch.manual_seed(4)
    settings = Balance(learning_rate=0.01, beta1=0.9, beta2=0.99, skip_target=0.1)
    ours = [torch.tensor([0.0, 0.0, 0.0, -1.0]) for _ in range(2)]
    balancer = BiasBalancer(ours, settings)
    theirs = [nn.Parameter(b.clone()) for b in ours]
    adam = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    target = torch.tensor([0.3, 0.3, 0.3, 0.1])
    for _ in range(20):
        counts = torch.randint(0, 50, (2, 4))
        balancer.update(counts)
        for p, c in zip(theirs, counts, strict=True):
            p.grad = c / c.sum() - target
        before = [p.detach().clone() for p in theirs]
        adam.step()
        for p, old in zip(theirs, before, strict=True):
            p.data -= (p.data - old).mean()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), atol=1e-6, rtol=0)
        assert a.sum() == pytest.approx(-1.0, abs=1e-5)


def test_balancing_lowers_the_bias_of_what_is_overloaded_layer_by_layer():
    biases = [torch.zeros(3), torch.zeros(3)]
    balancer = BiasBalancer(biases, Balance(learning_rate=0.1))
    balancer.update(torch.tensor([[90, 5, 5], [0, 0, 0]]))
    assert biases[0][0] < 0 < biases[0][1]
    assert torch.equal(biases[1], torch.zeros(3))  # a layer without tokens is left alone
    with pytest.raises(ValueError, match="integers"):
        balancer.update(torch.ones(2, 3))
    with pytest.raises(ValueError, match="float32"):
        BiasBalancer([torch.zeros(3, dtype=torch.bfloat16)], Balance())


def test_balancing_state_comes_back():
    settings = Balance(learning_rate=0.1)
    a, b = BiasBalancer([torch.zeros(3)], settings), BiasBalancer([torch.zeros(3)], settings)
    a.update(torch.tensor([[9, 1, 0]]))
    b.load_state_tensors(a.state_tensors())
    b.biases[0].copy_(a.biases[0])
    for balancer in (a, b):
        balancer.update(torch.tensor([[1, 2, 3]]))
    assert torch.equal(a.biases[0], b.biases[0])


def test_load_metrics_of_known_loads():
    metrics = load_metrics(torch.tensor([[25, 25, 25, 25, 0], [80, 0, 0, 0, 20], [50, 50, 0, 0, 100]]))
    assert metrics["load_entropy"] == pytest.approx([1.0, 0.0, 0.5])
    assert metrics["skip_share"] == pytest.approx([0.0, 0.2, 0.5])
    assert metrics["load_max"] == pytest.approx([1.0, 4.0, 2.0])
    assert metrics["load_min"] == pytest.approx([1.0, 0.0, 0.0])


def test_active_parameters_are_those_of_the_formula(tiny):
    recipe = load_recipe(tiny)
    ours, counts = zaya_model(recipe), count_parameters(zaya_model(recipe))
    d, f, r, e, layers = 32, 24, 16, 3, 2
    attention = d * 32 + d * 16 + d * 16 + 32 * d + 48 * 2 + 48 + 48 * 16 * 2 + 48 + 1
    router = d * r + r + 2 * (r * r + r) + (e + 1) * r + r
    norms = 2 * d + 8 * d
    active = layers * (attention + router + 3 * d * f + norms) + (layers - 1) * r + 3 * d
    assert counts == {"total": active + layers * (e - 1) * 3 * d * f + 320 * d, "embedding": 320 * d, "active": active}
    assert train_flops_per_token(ours, 16) == 6 * (active + 320 * d) + 6 * layers * 2 * 16 * 16
    baseline = baseline_model(recipe)
    assert isinstance(baseline, Qwen3ForCausalLM)
    assert abs(check_same_active(ours, baseline, 0.02)) < 0.02
    with pytest.raises(UserError, match="change baseline.intermediate_size"):
        baseline_model(load_recipe(tiny, ["baseline.intermediate_size=80"]))


def test_ownership_is_balanced_and_complete():
    costs = [5.0, 9.0, 1.0, 7.0, 3.0, 3.0]
    for ranks in (1, 2, 3, 8):
        owners = assign(costs, ranks)
        loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]
        assert set(owners) <= set(range(ranks))
        assert max(loads) <= max(sum(costs) / ranks + max(costs), max(costs))
    assert assign(costs, 2) == [1, 0, 0, 1, 0, 0] or max(loads) <= 14


def test_one_rank_is_muon_and_adamw_with_the_norm_clipped(tiny):
    """The whole optimizer against torch's two, matrices one by one."""
    recipe = load_recipe(tiny, ["train.clip_norm=0.5"])
    ours, theirs = baseline_model(recipe), baseline_model(recipe)
    optimizer = Zero1(ours, recipe.train, Group())
    optimizer.check_views()
    named = dict(theirs.named_parameters())
    matrices = [p for n, p in named.items() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in named.items() if p.ndim != 2 or "embed" in n]
    m, a = recipe.train.muon, recipe.train.adamw
    torchs = [
        torch_muon(matrices, lr=m.learning_rate * 0.5, momentum=m.momentum, weight_decay=m.weight_decay),
        torch.optim.AdamW(others, lr=a.learning_rate * 0.5, betas=(a.beta1, a.beta2), eps=a.eps, weight_decay=0.0),
    ]
    start = {n: p.detach().clone() for n, p in named.items()}
    torch.manual_seed(5)
    for _ in range(3):
        for n, p in ours.named_parameters():
            p.grad = torch.randn_like(p)
            named[n].grad = p.grad.clone()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert optimizer.step(0.5) == pytest.approx(float(expected), rel=1e-5)
        for o in torchs:
            o.step()
    for n, p in ours.named_parameters():
        assert p.grad is None
        difference, moved = (p - named[n]).norm(), (named[n] - start[n]).norm()
        assert difference <= 0.01 * moved, (n, float(difference / moved))
    assert math.isfinite(float(moved))
