"""The router's kernels in the interpreter. The oracle is stock transformers' router, in fp32, and its autograd."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.zaya import ZayaConfig
from transformers.models.zaya.modeling_zaya import ZayaRouter

from zaya.errors import UserError
from zaya.kernels.router import router, router_from_hidden

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned")
EXPERTS, WIDTH = 6, 32
LAYERS = ("norm.weight", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "out_proj.weight")


def stock_router(layer: int, width: int = WIDTH, hidden: int = 48, seed: int = 0) -> ZayaRouter:
    """Stock's module with weights that spread the choices over all classes, the skip class too."""
    torch.manual_seed(seed)
    config = ZayaConfig(hidden_size=hidden, router_hidden_size=width, num_experts=EXPERTS, num_hidden_layers=2)
    module = ZayaRouter(config, layer)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.ndim == 1 else 2.5 / parameter.shape[1] ** 0.5)
        if name.endswith(("norm.weight", "scale")):
            parameter.data.add_(1.0)
    module.balancing_biases.copy_(torch.randn(EXPERTS + 1) / 20)
    return module


def arguments(module: ZayaRouter, dtype: torch.dtype = torch.float32):
    """The op's parameters, in its order, as leaves that require gradients."""
    mlp = module.router_mlp
    leaf = lambda p: p.detach().to(dtype).requires_grad_()
    scale = leaf(module.router_states_scale) if module.use_eda else None
    fc1, fc2 = ((leaf(m.weight), leaf(m.bias)) for m in (mlp.fc1, mlp.fc2))
    return (
        scale,
        leaf(mlp.norm.weight),
        fc1,
        fc2,
        leaf(mlp.out_proj.weight),
        module.balancing_biases,
        mlp.norm.variance_epsilon,
    )


def stock_routing(module: ZayaRouter, u, prev):
    """(ids, gate weights, state) from stock's layers. The skip class keeps its probability; stock masks it later."""
    state = u if prev is None else u + prev * module.router_states_scale
    probs = module.router_mlp(state).softmax(-1)
    ids = (probs.detach() + module.balancing_biases).topk(1, dim=-1).indices
    return ids.squeeze(1), probs.gather(1, ids).squeeze(1), state


def flat(parameters) -> list[torch.Tensor]:
    scale, norm, fc1, fc2, out, _, _ = parameters
    return [x for x in (scale, norm, *fc1, *fc2, out) if x is not None]


@pytest.mark.parametrize("tokens", [1, 7, 133])
@pytest.mark.parametrize("layer", [0, 1])
def test_forward_equals_stock(tokens, layer):
    module = stock_router(layer)
    u = torch.randn(tokens, WIDTH)
    prev = torch.randn(tokens, WIDTH) if layer else None
    got = router(u, prev, *arguments(module), backend="triton")
    ids, weights, state = stock_routing(module, u, prev)
    assert torch.equal(got.expert_ids, ids)
    torch.testing.assert_close(got.gate_weights, weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.state, state, rtol=1e-6, atol=1e-6)
    assert torch.equal(got.counts.long(), torch.bincount(ids, minlength=EXPERTS + 1))
    spread = len(ids.unique()) >= 4 and EXPERTS in ids
    assert tokens < 100 or spread, "vacuous: the choices must spread, the skip class among them"


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("layer", [0, 1])
def test_gradients_equal_autograd_of_stock(tokens, layer):
    module = stock_router(layer)
    u = torch.randn(tokens, WIDTH, requires_grad=True)
    prev = torch.randn(tokens, WIDTH, requires_grad=True) if layer else None
    dweights, dstate = torch.randn(tokens), torch.randn(tokens, WIDTH)
    parameters = arguments(module)
    got = router(u, prev, *parameters, backend="triton")
    leaves = [x for x in (u, prev) if x is not None]
    mine = torch.autograd.grad([got.gate_weights, got.state], leaves + flat(parameters), [dweights, dstate])
    _, weights, state = stock_routing(module, u, prev)
    names = (["router_states_scale"] if layer else []) + [f"router_mlp.{n}" for n in LAYERS]
    theirs = torch.autograd.grad(
        [weights, state], leaves + [module.get_parameter(n) for n in names], [dweights, dstate]
    )
    for name, a, b in zip(["u", "prev"][: len(leaves)] + names, mine, theirs, strict=True):
        assert ((a - b).norm() / b.norm().clamp_min(1e-9)).item() < 2e-5, name


def test_bf16_is_as_near_to_fp32_as_stock_in_bf16():
    module = stock_router(1, seed=1)
    u, prev = (torch.randn(128, WIDTH).bfloat16() for _ in range(2))
    parameters = arguments(module, torch.bfloat16)
    _, exact, _ = stock_routing(module.float(), u.float(), prev.float())
    got = router(u, prev, *parameters, backend="triton")
    ids, weights, _ = stock_routing(module.bfloat16(), u, prev)
    same = got.expert_ids == ids
    assert same.float().mean() > 0.9
    ours, theirs = ((w.float()[same] - exact[same]).norm() / exact[same].norm() for w in (got.gate_weights, weights))
    assert ours < max(1.2 * theirs, 1e-3), f"ours {ours:.2e}, stock {theirs:.2e}"


def test_bf16_gradients():
    module = stock_router(1, seed=2)
    u, prev = (torch.randn(96, WIDTH).bfloat16().requires_grad_() for _ in range(2))
    parameters = arguments(module, torch.bfloat16)
    got = router(u, prev, *parameters, backend="triton")
    dweights = torch.randn(96)
    mine = torch.autograd.grad([got.gate_weights], [u, prev, *flat(parameters)], [dweights])
    exact = [x.detach().float().requires_grad_() for x in (u, prev)]
    probs = module.router_mlp(exact[0] + exact[1] * module.router_states_scale).softmax(-1)
    weights = probs.gather(1, got.expert_ids.unsqueeze(1)).squeeze(1)  # the same choice: ties may fall otherwise
    wanted = [module.router_states_scale, *(module.get_parameter(f"router_mlp.{n}") for n in LAYERS)]
    theirs = torch.autograd.grad([weights], exact + wanted, [dweights])
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert a.dtype == torch.bfloat16
        assert ((a.float() - b).norm() / b.norm()).item() < 0.04, i


def test_fp32_parameters_with_bf16_tokens():
    """Under autocast the tokens are bf16 and the parameters fp32; their gradients must come back in fp32."""
    module = stock_router(0)
    u = torch.randn(20, WIDTH).bfloat16().requires_grad_()
    parameters = arguments(module)
    router(u, None, *parameters, backend="triton").gate_weights.sum().backward()
    assert u.grad.dtype == torch.bfloat16
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in flat(parameters))


def test_no_tokens():
    module = stock_router(1)
    u = torch.randn(0, WIDTH, requires_grad=True)
    parameters = arguments(module)
    got = router(u, torch.randn(0, WIDTH), *parameters, backend="triton")
    (got.gate_weights.sum() + got.state.sum()).backward()
    assert got.expert_ids.shape == (0,)
    assert got.counts.tolist() == [0] * (EXPERTS + 1)
    assert all(x.grad is not None and not x.grad.any() for x in flat(parameters))


def test_ties_take_the_lowest_class_and_nan_reaches_the_weight():
    module = stock_router(0)
    scale, norm, fc1, fc2, out, biases, eps = arguments(module)
    u = torch.randn(5, WIDTH)
    u[2] = float("nan")
    flat_biases = torch.zeros_like(biases)
    got = router(u, None, scale, norm, fc1, fc2, torch.zeros_like(out), flat_biases, eps, backend="triton")
    assert got.expert_ids.tolist() == [0] * 5
    assert got.gate_weights.isnan().tolist() == [False, False, True, False, False]
    only_skip = torch.tensor([0.0] * EXPERTS + [9.0])
    got = router(u[:2], None, scale, norm, fc1, fc2, out, only_skip, eps, backend="triton")
    assert got.expert_ids.tolist() == [EXPERTS] * 2


def test_rows_with_a_stride():
    module = stock_router(1)
    wide = torch.randn(9, 3 * WIDTH)
    u, prev = wide[:, :WIDTH], wide[:, WIDTH : 2 * WIDTH]
    parameters = arguments(module)
    strided = router(u, prev, *parameters, backend="triton")
    packed = router(u.contiguous(), prev.contiguous(), *parameters, backend="triton")
    for a, b in zip(strided, packed, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize(("tokens", "decode"), [(0, False), (1, True), (4, True), (19, True), (33, True), (70, False)])
@pytest.mark.parametrize("layer", [0, 1])
def test_from_hidden_equals_stock(tokens, decode, layer):
    from zaya.kernels.router import ops

    module = stock_router(layer, width=64, hidden=2048)
    x = torch.randn(tokens, 2048)
    prev = torch.randn(tokens, 64) if layer else None
    weight, bias = module.down_proj.weight, module.down_proj.bias
    with torch.no_grad():
        got = router_from_hidden(x, weight, bias, prev, *arguments(module), backend="triton")
        ids, weights, state = stock_routing(module, F.linear(x, weight, bias), prev)
    assert ops.decode_takes(x, weight) == decode
    assert torch.equal(got.expert_ids, ids)
    torch.testing.assert_close(got.gate_weights, weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.state, state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [1024, 3072])
def test_from_hidden_of_other_widths(hidden):
    module = stock_router(1, width=64, hidden=hidden)
    x, prev = torch.randn(1, hidden), torch.randn(1, 64)
    weight, bias = module.down_proj.weight, module.down_proj.bias
    with torch.no_grad():
        got = router_from_hidden(x, weight, bias, prev, *arguments(module), backend="triton")
        ids, weights, _ = stock_routing(module, F.linear(x, weight, bias), prev)
    assert torch.equal(got.expert_ids, ids)
    torch.testing.assert_close(got.gate_weights, weights, rtol=1e-4, atol=1e-5)


def test_from_hidden_of_ties_and_nan():
    module = stock_router(0, width=64, hidden=2048)
    module.router_mlp.out_proj.weight.data.zero_()
    biases = module.balancing_biases.zero_()
    biases[[1, 3]] = 1.0
    x = torch.randn(3, 2048)
    x[2] = float("nan")
    weight, bias = module.down_proj.weight, module.down_proj.bias
    with torch.no_grad():
        got = router_from_hidden(x, weight, bias, None, *arguments(module), backend="triton")
    assert got.expert_ids.tolist() == [1, 1, 0]
    assert got.gate_weights.isnan().tolist() == [False, False, True]


def test_one_graph_of_from_hidden_serves_every_number_of_tokens():
    module = stock_router(0, width=64, hidden=2048)
    weight, bias, parameters = module.down_proj.weight, module.down_proj.bias, arguments(module)

    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def run(x):
        return router_from_hidden(x, weight, bias, None, *parameters, backend="triton").expert_ids

    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (70, 19, 4):
            x = torch.randn(tokens, 2048)
            assert torch.equal(run(x), stock_routing(module, F.linear(x, weight, bias), None)[0])


def test_from_hidden_gives_gradients_where_they_are_wanted():
    module = stock_router(0, width=64, hidden=2048)
    x = torch.randn(3, 2048, requires_grad=True)
    got = router_from_hidden(
        x, module.down_proj.weight, module.down_proj.bias, None, *arguments(module), backend="triton"
    )
    got.gate_weights.sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("layer", [0, 1])
def test_operator_registration(layer):
    """Schema, fake kernel and autograd registration, as torch itself checks them."""
    from zaya.kernels.router import ops

    scale, norm, fc1, fc2, out, biases, eps = arguments(stock_router(layer))
    u = torch.randn(18, WIDTH, requires_grad=True)
    prev = torch.randn(18, WIDTH, requires_grad=True) if layer else None
    inputs = (u, prev, scale, norm, *fc1, *fc2, out, biases, eps)
    torch.library.opcheck(
        ops.router_op, inputs, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_unsupported_width_falls_back_and_says_so(caplog):
    module = stock_router(0, width=48)
    u = torch.randn(4, 48)
    with caplog.at_level("INFO", logger="zaya.kernels"):
        got = router(u, None, *arguments(module), backend="triton")
    assert torch.equal(got.expert_ids, stock_routing(module, u, None)[0])
    assert "router width 48" in caplog.text


def test_forced_triton_without_a_gpu_is_a_user_error(monkeypatch):
    from zaya.kernels import launch
    from zaya.kernels.router import ops

    monkeypatch.setattr(ops, "ready", lambda x, kernel: launch.ready(x, object()))  # no interpreted kernel
    with pytest.raises(UserError, match="no Triton kernel runs on cpu"):
        router(torch.randn(4, WIDTH), None, *arguments(stock_router(0)), backend="triton")
