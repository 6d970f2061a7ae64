"""The router's kernels on a GPU, at the model's width, against the reference in fp32."""

import pytest
import torch
import torch.nn.functional as F

from zaya.kernels.router import router, router_from_hidden
from zaya.kernels.router.reference import router_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
HIDDEN, WIDTH, CLASSES = 2048, 256, 17


def parameters(dtype: torch.dtype = torch.bfloat16, grad: bool = False):
    """(down weight, down bias) and the op's parameters from state_scale on, spread so that every class is chosen."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int, scale: float, mean: float = 0.0) -> torch.Tensor:
        x = torch.randn(*shape, device="cuda", generator=generator) * scale + mean
        return x.bfloat16().to(dtype).requires_grad_(grad)

    down = draw(WIDTH, HIDDEN, scale=HIDDEN**-0.5), draw(WIDTH, scale=0.1)
    scale, norm = (draw(WIDTH, scale=0.1, mean=1.0) for _ in range(2))
    fc1, fc2 = ((draw(WIDTH, WIDTH, scale=2 / 16), draw(WIDTH, scale=0.5)) for _ in range(2))
    out = draw(CLASSES, WIDTH, scale=2 / 16)
    biases = torch.randn(CLASSES, device="cuda", generator=generator) / 20
    return down, (scale, norm, fc1, fc2, out, biases, 1e-5)


def tokens_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    return tuple(torch.randn(count, n, device="cuda").bfloat16() for n in (WIDTH, WIDTH))


def regret(ids: torch.Tensor, exact) -> float:
    """How far below the best class the chosen one scores, at most."""
    score = exact.logits.softmax(-1) + parameters()[1][5]
    return float((score.amax(-1) - score.gather(1, ids.unsqueeze(1)).squeeze(1)).max())


@pytest.mark.parametrize("count", [1, 16, 300, 8192, 32768])
def test_choice_and_weight(count):
    u, prev = tokens_of(count)
    got = router(u, prev, *parameters()[1], backend="triton")
    exact = router_reference(u.float(), prev.float(), *parameters(torch.float32)[1])
    assert regret(got.expert_ids, exact) < 0.03
    weights = exact.logits.softmax(-1).gather(1, got.expert_ids.unsqueeze(1)).squeeze(1)
    assert ((got.gate_weights - weights).norm() / weights.norm()).item() < 8e-3
    assert torch.equal(got.counts.long(), torch.bincount(got.expert_ids, minlength=CLASSES))


@pytest.mark.parametrize("count", [1, 2, 5, 33, 64])
def test_decode(count):
    _, prev = tokens_of(count)
    x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
    (weight, bias), rest = parameters()
    (weight32, bias32), rest32 = parameters(torch.float32)
    with torch.no_grad():
        runs = [router_from_hidden(x, weight, bias, prev, *rest, backend="triton") for _ in range(2)]
        exact = router_reference(F.linear(x.float(), weight32, bias32), prev.float(), *rest32)
    assert all(torch.equal(a, b) for a, b in zip(runs[0][:3], runs[1][:3], strict=True))
    assert regret(runs[0].expert_ids, exact) < 0.03
    assert ((runs[0].state.float() - exact.state).norm() / exact.state.norm()).item() < 4e-3


@pytest.mark.parametrize("count", [1, 300, 8192])
def test_gradients_are_no_farther_from_fp32_than_the_reference_in_bf16(count):
    u, prev = tokens_of(count)
    dweights, dstate = torch.randn(count, device="cuda"), torch.randn(count, WIDTH, device="cuda").bfloat16() / 100
    ids = router(u, prev, *parameters()[1], backend="triton").expert_ids

    def gradients(run, dtype: torch.dtype):
        _, rest = parameters(dtype, grad=True)
        leaves = [x.to(dtype).requires_grad_() for x in (u, prev)]
        found = run(*leaves, *rest)
        weights = found.gate_weights
        if found.logits is not None:  # the reference: of the classes that the kernel chose
            weights = found.logits.softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
        scale, norm, fc1, fc2, out, _, _ = rest
        wanted = [*leaves, scale, norm, *fc1, *fc2, out]
        return torch.autograd.grad([weights, found.state], wanted, [dweights, dstate.to(dtype)])

    ours, again = (gradients(lambda *a: router(*a, backend="triton"), torch.bfloat16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    exact, rounded = (gradients(router_reference, d) for d in (torch.float32, torch.bfloat16))
    for a, b, e in zip(ours, rounded, exact, strict=True):
        mine, theirs = ((x.float() - e).norm() / e.norm() for x in (a, b))
        assert mine < max(1.1 * theirs, 5e-3)


def test_more_values_than_32_bits_count():
    count = 2**31 // WIDTH + 4096
    u = torch.randn(4096, WIDTH, device="cuda").bfloat16().repeat(-(-count // 4096), 1)[:count]
    got = router(u, None, None, *parameters()[1][1:], backend="triton")
    first = router(u[:4096].clone(), None, None, *parameters()[1][1:], backend="triton")
    tail = count % 4096 or 4096
    assert torch.equal(got.expert_ids[-tail:], first.expert_ids[:tail])
    assert torch.equal(got.state[-tail:], u[-tail:])


def test_runs_in_a_cuda_graph():
    u, prev = tokens_of(64)
    rest = parameters()[1]
    graph = torch.cuda.CUDAGraph()
    eager = router(u, prev, *rest, backend="triton")
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = router(u, prev, *rest, backend="triton")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.expert_ids, eager.expert_ids)
    assert torch.equal(captured.counts, eager.counts)


@pytest.mark.parametrize("count", [1, 5, 64, 300])
def test_training_without_gradients_makes_the_choices_of_training_with_them(count):
    """Liger#1255: reentrant checkpointing runs the first forward without gradients, the recomputation with them."""
    from zaya import ZayaConfig
    from zaya.modeling_zaya import ZayaRouter

    sizes = {"hidden_size": HIDDEN, "router_hidden_size": WIDTH, "num_experts": CLASSES - 1}
    module = ZayaRouter(ZayaConfig.nano(kernels="triton", **sizes), 1).cuda().bfloat16().train()
    for name, parameter in module.named_parameters():
        mean = float(name.endswith(("norm.weight", "scale")))
        torch.nn.init.normal_(parameter, mean=mean, std=0.1 if parameter.ndim == 1 else 2 / parameter.shape[1] ** 0.5)
    h, state = torch.randn(count, HIDDEN, device="cuda").bfloat16(), tokens_of(count)[1]
    with torch.no_grad():
        first = module(h, state)
    again = module(h, state)
    for name in ("expert_ids", "gate_weights", "state"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name


def test_vectors_with_a_stride():
    """Liger#1377, scattermoe#23: norm weight, scale and bias every other element of a longer vector."""
    apart = lambda x: torch.stack([x, torch.full_like(x, 7)], 1)[:, 0]
    (weight, bias), (scale, norm, *rest) = parameters()
    for count in (2, 40, 300):
        x, prev = torch.randn(count, HIDDEN, device="cuda").bfloat16(), tokens_of(count)[1]
        with torch.no_grad():
            strided = router_from_hidden(x, weight, apart(bias), prev, apart(scale), apart(norm), *rest)
            packed = router_from_hidden(x, weight, bias, prev, scale, norm, *rest)
        assert all(torch.equal(a, b) for a, b in zip(strided[:3], packed[:3], strict=True))


def test_fp32_takes_the_reference():
    """aiter#4783: the tiles are made for 16 bits; in fp32 they would spill."""
    u, prev = (x.float() for x in tokens_of(300))
    rest = parameters(torch.float32)[1]
    got, exact = router(u, prev, *rest, backend="triton"), router_reference(u, prev, *rest)
    assert torch.equal(got.expert_ids, exact.expert_ids)
    assert torch.equal(got.gate_weights, exact.gate_weights)
