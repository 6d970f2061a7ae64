"""The MoE kernels as compiled, at ZAYA1-8B's shapes in bf16: python -m pytest -m gpu tests/gpu/test_moe_gpu.py

The oracle is the formula written out expert by expert in fp32, and its autograd; the yardstick is the bf16 reference.
"""

import math

import pytest
import torch

from zaya.kernels import tiles
from zaya.kernels.moe import moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
E, D, F = 16, 2048, 2048


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    up = torch.randn(E, 2 * F, D, device="cuda").div_(D**0.5).bfloat16()
    return up, torch.randn(E, D, F, device="cuda").div_(F**0.5).bfloat16()


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Freed blocks full of NaN for the caching allocator to hand out: what is not written, or read too far, shows."""
    blocks = [torch.full((n,), math.nan, device="cuda") for n in (1 << 12, 1 << 20, 1 << 24, 1 << 26, 1 << 28)]
    del blocks


def make(tokens, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(tokens, D, device="cuda").bfloat16()
    return x, torch.randint(0, E + 1, (tokens,), device="cuda"), torch.rand(tokens, device="cuda")


def written_out(x, up, down, ids, p):
    y = torch.zeros_like(x)
    for e in range(up.shape[0]):
        mine = (ids == e).nonzero().flatten()
        a, b = (x[mine] @ up[e].T).chunk(2, -1)
        y = y.index_add(0, mine, p[mine, None] * ((torch.nn.functional.silu(a) * b) @ down[e].T))
    return y


def gradients(function, x, up, down, ids, p, dy):
    leaves = [t.detach().requires_grad_() for t in (x, up, down, p)]
    y = function(leaves[0], leaves[1], leaves[2], ids, leaves[3])
    return (y.detach(), *torch.autograd.grad(y, leaves, dy))


def kernels(*inputs):
    return moe(*inputs, backend="triton")


def relative(ours, exact, scale=0.0):
    return ((ours.float() - exact).norm() / exact.norm().clamp_min(max(scale, 1e-30))).item()


def inner_product_scale(y, dy, p):
    """The size of dp for directions at random. A few tokens' dp can be far smaller by cancellation, its error not."""
    return ((y / p.unsqueeze(1)).norm() * dy.float().norm() / (dy.shape[1] * max(dy.shape[0], 1)) ** 0.5).item()


def assert_close(ours, exact, dy, p, bound=6e-3):
    scales = [0.0] * 4 + [inner_product_scale(exact[0], dy, p)]
    for name, a, c, scale in zip(("y", "dx", "dup", "ddown", "dp"), ours, exact, scales, strict=True):
        assert a.isfinite().all(), name
        assert relative(a, c, scale) < bound, name


@pytest.mark.parametrize("tokens", [0, 1, 7, 133, 2048, 2049, 8192])
def test_error_against_fp32_is_not_above_the_reference(tokens, weights):
    x, ids, p = make(tokens)
    dy = torch.randn_like(x)
    exact = gradients(written_out, x.float(), *(w.float() for w in weights), ids, p, dy.float())
    ours = gradients(kernels, x, *weights, ids, p, dy)
    theirs = gradients(lambda *a: moe(*a, backend="reference"), x, *weights, ids, p, dy)
    assert_close(ours, exact, dy, p)
    for name, a, b, c in zip(("y", "dx", "dup", "ddown", "dp"), ours, theirs, exact, strict=True):
        assert relative(a, c) <= max(relative(b, c), 1e-4), name


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 64, 128, 129])
def test_decoding_against_fp32(tokens, weights):
    x, ids, p = make(tokens)
    with torch.no_grad():
        y = kernels(x, *weights, ids, p)
        assert torch.equal(y, kernels(x, *weights, ids, p))
    assert relative(y, written_out(x.float(), *(w.float() for w in weights), ids, p)) < 4e-3
    assert not y[ids == E].any()


@pytest.mark.parametrize("tokens", [100, 4096])
def test_two_runs_give_the_same_bits(tokens, weights):
    x, ids, p = make(tokens)
    dy = torch.randn_like(x)
    first, second = (gradients(kernels, x, *weights, ids, p, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("chosen", [[E], [3], [0, 15, E]])
@pytest.mark.parametrize("tokens", [40, 3000])
def test_lopsided_routing(tokens, chosen, weights):
    """All skipped, one expert, experts without tokens; NaN in the rows that no expert reads."""
    x, ids, p = make(tokens)
    ids = torch.tensor(chosen, device="cuda")[torch.arange(tokens, device="cuda") % len(chosen)]
    dy = torch.randn_like(x)
    x[ids == E], dy[ids == E] = math.nan, math.nan
    y, dx, dup, ddown, dp = gradients(kernels, x, *weights, ids, p, dy)
    clean = gradients(
        written_out, x.float().nan_to_num(), *(w.float() for w in weights), ids, p, dy.float().nan_to_num()
    )
    for a, c in zip((y, dx, dup, ddown, dp), clean, strict=True):
        assert relative(a, c) < 6e-3
    idle = [e for e in range(E) if e not in chosen]
    for rows in (y[ids == E], dx[ids == E], dp[ids == E], dup[idle], ddown[idle]):
        assert not rows.any()


def test_buffers_beyond_2_to_the_31_elements(weights):
    """540,000 tokens: 2.2e9 gate and up values. The last tokens are held against fp32."""
    tokens, tail = 540_000, 512
    x, ids, p = make(tokens)
    dy = torch.randn_like(x)
    assert tokens * 2 * F > 2**31
    y, dx, _, _, dp = gradients(kernels, x, *weights, ids, p, dy)
    last = [t[-tail:] for t in (x, ids, p, dy)]
    exact = gradients(written_out, last[0].float(), *(w.float() for w in weights), last[1], last[2], last[3].float())
    for a, c in zip((y, dx, dp), (exact[0], exact[1], exact[4]), strict=True):
        assert relative(a[-tail:], c) < 6e-3


def test_strides_beyond_2_to_the_31_elements(weights):
    storage = torch.empty(2**32 + D, device="cuda", dtype=torch.bfloat16)
    x = storage.as_strided((5, D), (2**30, 1))
    values, ids, p = make(5)
    x.copy_(values)
    ids[:] = torch.tensor([0, 3, E, 3, 2])
    exact = written_out(values.float(), *(w.float() for w in weights), ids, p)
    with torch.no_grad():
        assert relative(kernels(x, *weights, ids, p), exact) < 4e-3
    assert relative(kernels(x.requires_grad_(), *weights, ids, p).detach(), exact) < 4e-3


def test_gradients_with_strides_beyond_2_to_the_31_elements(weights):
    """vllm#5938, vllm#34086, Liger#1248: the rows of x and dy are 2^30 elements apart, in training."""
    apart = [torch.empty(2**32 + D, device="cuda", dtype=torch.bfloat16).as_strided((5, D), (2**30, 1)) for _ in "xy"]
    values, ids, p = make(5)
    ids[:] = torch.tensor([0, 3, E, 3, 2])
    dy = torch.randn_like(values)
    for strided, packed in zip(apart, (values, dy), strict=True):
        strided.copy_(packed)
    ours = gradients(kernels, apart[0], *weights, ids, p, apart[1])
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(kernels, values, *weights, ids, p, dy), strict=True))


def test_weights_of_any_layout(weights):
    """Liger#1377, scattermoe#23: weights stored the other way round, as a view."""
    x, ids, p = make(300)
    dy = torch.randn_like(x)
    turned = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in weights]
    ours, plain = (gradients(kernels, x, *w, ids, p, dy) for w in (turned, weights))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("experts", [1, 31, 32, 63, 64, 128])
@pytest.mark.parametrize("tokens", [16, 200, 3000])
def test_any_number_of_experts(experts, tokens):
    """vllm#17744, aiter#4783: with 64 experts and more, the permutation once asked for too much shared memory."""
    torch.manual_seed(0)
    up = torch.randn(experts, 128, 128, device="cuda").div_(128**0.5).bfloat16()
    down = torch.randn(experts, 128, 64, device="cuda").div_(64**0.5).bfloat16()
    x, ids = (
        torch.randn(tokens, 128, device="cuda").bfloat16(),
        torch.randint(0, experts + 1, (tokens,), device="cuda"),
    )
    p, dy = torch.rand(tokens, device="cuda"), torch.randn_like(x)
    exact = gradients(written_out, x.float(), up.float(), down.float(), ids, p, dy.float())
    assert_close(gradients(kernels, x, up, down, ids, p, dy), exact, dy, p)
    with torch.no_grad():
        assert relative(kernels(x, up, down, ids, p), exact[0]) < 6e-3


@pytest.mark.parametrize("tokens", [1, 16, 300, 8192])
def test_graphs_replay_with_other_routing(tokens, weights):
    """No host synchronisation: a captured graph follows whatever ids it finds."""
    x, ids, p = make(tokens)
    with torch.no_grad():
        kernels(x, *weights, ids, p)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kernels(x, *weights, ids, p)
        for seed in (1, 2):
            for static, new in zip((x, ids, p), make(tokens, seed), strict=True):
                static.copy_(new)
            graph.replay()
            assert torch.equal(y, kernels(x, *weights, ids, p))


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_two_streams_decode_at_once(tokens, weights):
    """Kernels that start before the one before has ended: only the one of their own stream."""
    from zaya.kernels.router import router_from_hidden

    torch.manual_seed(0)
    draw = lambda *s, k=1.0: (torch.randn(*s, device="cuda") * k).bfloat16()
    layers = ((draw(256, 256, k=0.1), draw(256)), (draw(256, 256, k=0.1), draw(256)))
    rest = (draw(256), draw(256), *layers, draw(E + 1, 256, k=0.1), torch.zeros(E + 1, device="cuda"), 1e-5)
    down = draw(256, D, k=0.02), draw(256)

    def steps(x):
        """A chain of blocks, each fed by the one before: what is read too early is another token's."""
        state, found = draw(tokens, 256).zero_(), []
        for _ in range(40):
            routing = router_from_hidden(x, *down, state, *rest, backend="triton")
            y = kernels(x, *weights, routing.expert_ids, routing.gate_weights)
            x, state = (x + y).div_(2), routing.state / 2
            found.append(x)
        return torch.stack(found)

    inputs = [draw(tokens, D) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in inputs]
    with torch.no_grad():
        alone = [steps(x) for x in inputs]
        torch.cuda.synchronize()
        for _ in range(5):
            both = []
            for stream, x in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    both.append(steps(x))
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))


def test_main_gradients_accumulate(weights):
    x, ids, p = make(4096)
    dy = torch.randn_like(x)
    exact = gradients(written_out, x.float(), *(w.float() for w in weights), ids, p, dy.float())
    up, down = (torch.nn.Parameter(w.clone()) for w in weights)
    for parameter in (up, down):
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    for _ in range(2):
        kernels(x, up, down, ids, p).backward(dy)
    assert relative(up.main_grad, 2 * exact[2]) < 4e-3
    assert relative(down.main_grad, 2 * exact[3]) < 4e-3


@pytest.mark.parametrize("width", [(192, 192), (256, 512), (48, 80)])
@pytest.mark.parametrize("tokens", [3, 500, 5000])
def test_other_widths(width, tokens):
    d, f = width
    torch.manual_seed(0)
    up = torch.randn(8, 2 * f, d, device="cuda").div_(d**0.5).bfloat16()
    down = torch.randn(8, d, f, device="cuda").div_(f**0.5).bfloat16()
    x, ids = torch.randn(tokens, d, device="cuda").bfloat16(), torch.randint(0, 9, (tokens,), device="cuda")
    p, dy = torch.rand(tokens, device="cuda"), torch.randn_like(x)
    exact = gradients(written_out, x.float(), up.float(), down.float(), ids, p, dy.float())
    assert_close(gradients(kernels, x, up, down, ids, p, dy), exact, dy, p)


def test_the_pointer_tiles_run_here_too(weights, monkeypatch):
    """What ROCm launches, with CUDA's launch options: the same source, the other way of reading operands."""
    import dataclasses

    plain = {
        n: dataclasses.replace(getattr(tiles.MOE["hip"][1], n), options={}) for n in ("up", "down", "dact", "dx", "dw")
    }
    monkeypatch.setitem(tiles.MOE, "cuda", (dataclasses.replace(tiles.MOE["hip"][1], tokens=math.inf, **plain),))
    x, ids, p = make(1000)
    dy = torch.randn_like(x)
    exact = gradients(written_out, x.float(), *(w.float() for w in weights), ids, p, dy.float())
    assert_close(gradients(kernels, x, *weights, ids, p, dy), exact, dy, p)


@pytest.mark.parametrize("tokens", [9, 3000])
def test_a_block_whose_tokens_are_all_skipped(tokens):
    """pytorch#192497, transformers#48687: zeros forward and backward, in the router's weights too."""
    from zaya import ZayaConfig
    from zaya.modeling_zaya import ZayaMoE

    module = ZayaMoE(ZayaConfig.nano(kernels="triton"), 1).cuda().bfloat16()
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.1)
    module.gate.balancing_biases[:] = 0
    module.gate.balancing_biases[-1] = 9.0
    config = module.config
    h = torch.randn(1, tokens, config.hidden_size, device="cuda").bfloat16().requires_grad_()
    state = torch.randn(tokens, config.router_hidden_size, device="cuda").bfloat16()
    y, _ = module(h, state)
    y.backward(torch.randn_like(y))
    for found in (y, h.grad, *(parameter.grad for parameter in module.parameters())):
        assert torch.equal(found, torch.zeros_like(found))


def losses(backend, nudge=0.0, steps=100):
    """Loss of each of `steps` AdamW steps of an 8-layer model on text of a fixed Markov chain."""
    from zaya import ZayaConfig, ZayaForCausalLM

    torch.manual_seed(0)
    config = ZayaConfig.nano(num_hidden_layers=8, vocab_size=512, kernels=backend)
    model = ZayaForCausalLM(config).cuda().bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge * torch.randn_like(parameter, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator("cuda").manual_seed(1)
    successors = torch.randint(0, 512, (512, 4), device="cuda", generator=generator)
    curve = []
    for _ in range(steps):
        ids = [torch.randint(0, 512, (8,), device="cuda", generator=generator)]
        for _ in range(255):
            choice = torch.randint(0, 4, (8,), device="cuda", generator=generator)
            ids.append(successors[ids[-1], choice])
        ids = torch.stack(ids, 1)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.detach())
    return torch.stack(curve).float().cpu()


def test_a_training_run_stays_within_noise_of_the_reference():
    """Noise: what moving every weight by a bf16 rounding (2^-8) does to the reference's own curve."""
    reference, moved, ours = losses("reference"), losses("reference", nudge=2**-8), losses("triton")
    noise, difference = (moved - reference).abs().mean().item(), (ours - reference).abs().mean().item()
    print(f"loss {reference[0]:.3f} -> {reference[-10:].mean():.3f}; ours {ours[-10:].mean():.3f}; "
          f"mean difference {difference:.4f}, noise {noise:.4f}")  # fmt: skip
    assert reference[-10:].mean() < reference[0] - 1
    assert difference <= 2 * noise
