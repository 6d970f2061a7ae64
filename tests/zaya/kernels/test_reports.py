"""Faults that users of other MoE kernels reported, kept away here. docs/kernels.md lists every report and its test."""

import ast
import importlib
import inspect
import itertools
import json
import math
import pkgutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zaya
import zaya.kernels
from tests.zaya.kernels.test_aot import child
from tests.zaya.kernels.test_moe import POINTERS, assert_close, gradients, kernels, make, relative, written_out
from tests.zaya.kernels.test_router import arguments, stock_router
from zaya.kernels import launch, tiles
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
        results.append([leaf.grad, *(p.grad for p in module.parameters())])
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


# -------------------------------------------------------------------------------------------- addresses over 2^31


@pytest.fixture
def last_program(monkeypatch):
    """Each launch runs its last program only: addresses over 2^31 without the work in front of them. `torch.empty`
    takes no memory until it is written."""
    from triton.runtime import interpreter

    at: dict[str, tuple[int, ...]] = {}

    def make_handle(value):
        return interpreter.TensorHandle(np.array([value], dtype=np.int32), interpreter.tl.int32)

    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_get_program_id", lambda _, axis: make_handle(at["grid"][axis] - 1))
    monkeypatch.setattr(builder, "create_get_num_programs", lambda _, axis: make_handle(at["grid"][axis]))

    def run(kernel, grid, *arguments, **constants):
        at["grid"] = (*grid, 1, 1)[:3]
        kernel[(1,)](*arguments, **constants)

    monkeypatch.setattr(launch.Launch, "__call__", lambda self, grid, *a: run(self.kernel, grid, *a, **self.constants))
    return run


BF16 = torch.bfloat16
WIDE, ROWS = 2**15, 2**16 + 32  # more than 2^31 elements together
TILE = {"E": 1, "E_PAD": 1, "BM": 16, "BN": 32, "BK": 16, "GROUP": 4, "TMA": False, "FLATTEN": False}
LIVE, TOKENS = slice(ROWS - 16, ROWS - 14), [ROWS - 1, ROWS - 3]  # the rows of the last tile that hold tokens


def far(*shape: int, dtype=BF16) -> torch.Tensor:
    assert math.prod(shape) > 2**31
    return torch.empty(shape, dtype=dtype)


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(BF16)


def layout(experts: int = 1, rows: int = ROWS, tokens=TOKENS):
    """(rows, offs): all rows are the last expert's, and only its last 16 hold tokens."""
    codes = torch.full((rows,), -1, dtype=torch.int32)
    codes[rows - 16 : rows - 16 + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    offs = torch.full((experts + 2,), rows, dtype=torch.int32)
    offs[:experts] = rows - 16 if experts > 1 else 0
    return codes, offs


def strided(values: torch.Tensor) -> torch.Tensor:
    """[ROWS, width] with rows WIDE apart, of which TOKENS are the values."""
    x = far(ROWS, WIDE)[:, : values.shape[1]]
    x[TOKENS] = values
    return x


def test_up_and_activation_gradient_beyond_31_bits(last_program):
    """vllm#5938, vllm#34086, Liger#1248, sglang#20389, megablocks#186: rows times a stride, in 32 bits."""
    from zaya.kernels.moe import triton as k

    values, pre, act, dpre = normal(2, 16), far(ROWS, 2 * WIDE), far(ROWS, WIDE), far(ROWS, 2 * WIDE)
    x, (codes, offs), grid = strided(values), layout(), (ROWS // 16 * (WIDE // 32),)
    up = normal(2 * WIDE, 16, scale=0.25)
    constants = TILE | {"WIDE": False, "SAVE": True, "DTYPE": k.tl.bfloat16}
    last_program(k.moe_up_kernel, grid, x, up, pre, act, codes, offs, 16, WIDE, x.stride(0), **constants)
    gate, value = (values.float() @ up[end - 32 : end].float().T for end in (WIDE, 2 * WIDE))
    for got, want in (
        (pre[LIVE, WIDE - 32 : WIDE], gate),
        (pre[LIVE, -32:], value),
        (act[LIVE, -32:], F.silu(gate) * value),
    ):
        assert relative(got, want) < 1e-2

    down, p, parts = normal(16, WIDE, scale=0.25), torch.zeros(ROWS), torch.empty(WIDE // 32, ROWS)
    p[TOKENS] = torch.tensor([0.5, 2.0])
    constants = TILE | {"SUB": 1, "DTYPE": k.tl.bfloat16}
    arguments = (x, down, pre, dpre, act, parts, p, codes, offs, 16, WIDE, ROWS, x.stride(0))
    last_program(k.moe_dact_kernel, grid, *arguments, **constants)
    gate, value = (pre[LIVE, end - 32 : end].float().requires_grad_() for end in (WIDE, 2 * WIDE))
    hidden, g = F.silu(gate) * value, values.float() @ down[:, -32:].float()
    want = torch.autograd.grad(hidden, (gate, value), g * p[TOKENS, None])
    assert relative(dpre[LIVE, WIDE - 32 : WIDE], want[0]) < 1e-2
    assert relative(dpre[LIVE, -32:], want[1]) < 1e-2
    assert relative(act[LIVE, -32:], hidden.detach() * p[TOKENS, None]) < 1e-2
    assert relative(parts[-1, LIVE], (g * hidden.detach()).sum(1)) < 1e-2


def test_down_projection_beyond_31_bits(last_program):
    """sglang#4727, Liger#1296, Sparse-vLLM#15: the output's offset, the expert's, and the row's, each above 2^31."""
    from zaya.kernels.moe import triton as k

    tokens = [2**21 + 6, 2**21 + 4]
    a, w, out, p = far(ROWS, WIDE), far(128 * 1024, WIDE), far(2**21 + 8, 1024), torch.zeros(2**21 + 8)
    codes, offs = layout(128, tokens=tokens)
    a[LIVE], w[-32:], p[tokens] = normal(2, WIDE), normal(32, WIDE, scale=WIDE**-0.5), torch.tensor([0.5, 2.0])
    constants = TILE | {"E": 128, "E_PAD": 128, "BK": 2048, "NT": True, "WEIGHTED": True, "SPLIT": False}
    last_program(k.moe_rows_kernel, (ROWS // 16 * 32,), a, w, out, p, codes, offs, WIDE, 1024, **constants)
    assert relative(out[tokens, -32:], p[tokens, None] * (a[LIVE].float() @ w[-32:].float().T)) < 1e-2


def test_weight_gradient_beyond_31_bits(last_program):
    """Liger#1296, vllm#5938: the last of 128 experts, for rows in expert order and in token order."""
    from zaya.kernels.moe import triton as k

    rows, m, n = 2**18 + 32, 2**13, 2**12
    a, values, out = far(rows, m), normal(2, n), far(128, m, n)
    b, (codes, offs) = strided(values), layout(128, rows)
    a[rows - 16 : rows - 14] = normal(2, m)
    constants = {"E": 128, "BM": 32, "BN": 32, "BT": 16, "GROUP": 4, "TMA": False, "FLATTEN": False}
    constants |= {"A_TOKENS": False, "B_TOKENS": True, "ADD": False, "SPLIT": False}
    grid = (128 * (m // 32) * (n // 32),)
    last_program(k.moe_dw_kernel, grid, a, b, out, codes, offs, m, n, a.stride(0), b.stride(0), **constants)
    want = a[rows - 16 : rows - 14, -32:].float().T @ values[:, -32:].float()
    assert relative(out[-1, -32:, -32:], want) < 1e-2


def test_copies_and_sums_beyond_31_bits(last_program):
    """megablocks#186, flashinfer#2642, sglang#20389: gathering, zeroing skipped tokens, and adding partial sums."""
    from zaya.kernels.moe import permute
    from zaya.kernels.moe import triton as k
    from zaya.kernels.router.triton import router_add_kernel

    src, dst, zero, (codes, offs) = far(ROWS, WIDE), far(ROWS, WIDE), far(ROWS, WIDE), layout()
    codes[-8:] = torch.tensor([*TOKENS, -1, -1, -2 - (ROWS - 2), -2 - (ROWS - 4), -1, -1])
    offs[1] = ROWS - 4
    src[TOKENS] = normal(2, WIDE)
    zero[[ROWS - 2, ROWS - 4]] = dst[-8:-4] = math.nan
    given = (src, src, dst, dst, zero, codes, offs, WIDE, WIDE, WIDE)
    last_program(permute.moe_gather_kernel, (ROWS // 8,), *given, E=1, BR=8, BD=4096, COPY=True, PAIR=False)
    assert torch.equal(dst[-8:-6], src[TOKENS])
    assert not dst[-6:-4].any()
    assert not zero[[ROWS - 2, ROWS - 4]].any()

    count, size = 40, 2**26
    parts, slot = far(count, size, dtype=torch.float32), torch.tensor([size - 1, -1, size - 3], dtype=torch.int32)
    parts[:, -16:] = torch.arange(count * 16.0).view(count, 16)
    sums = parts[:, -16:].sum(0)
    out = torch.empty(3)
    last_program(k.moe_weight_sums_kernel, (1,), parts, slot, out, 3, size, count, BT=4)
    assert torch.equal(out, torch.stack([sums[-1], torch.tensor(0.0), sums[-3]]))
    out = torch.empty(size)
    last_program(router_add_kernel, (size // 16,), parts, out, count, size, size, BP=16, BN=16)
    assert torch.equal(out[-16:], sums)


def test_router_beyond_31_bits(last_program, monkeypatch):
    """vllm#5938, megablocks#186, Liger#1248: 2^26 tokens of width 32, of which the last five are looked at."""
    from zaya.kernels.router import ops
    from zaya.kernels.router import triton as k

    skipped = {k.router_dw_kernel.__name__, k.router_add_kernel.__name__}
    run = launch.Launch.__call__
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *a: self.kernel.__name__ in skipped or run(self, *a))
    scale, norm, fc1, fc2, out, biases, eps = arguments(stock_router(1), BF16)
    tokens, weights = 2**26 + 5, [t.detach() for t in (scale, norm, *fc1, *fc2, out)]
    u, prev, dstate, dweights = far(tokens, 32), far(tokens, 32), far(tokens, 32), torch.empty(tokens)
    for t in (u, prev, dstate):
        t[-5:] = normal(5, 32)
    dweights[-5:] = torch.randn(5)

    def both(u, prev, dweights, dstate):
        ids, weight, state, _ = ops._forward(u, prev, *weights, biases, eps)
        du, dprev, *_ = ops._gradients(dweights, dstate, state, ids, prev, *weights, eps)
        return [t[-5:] for t in (ids, weight, state, du, dprev)]

    large, small = both(u, prev, dweights, dstate), both(u[-5:], prev[-5:], dweights[-5:], dstate[-5:])
    assert all(torch.equal(a, b) for a, b in zip(large, small, strict=True))

    grads, acts, parts = far(2**26, 80), far(2**26, 96), far(2**20, 80, 32, dtype=torch.float32)
    grads[-64:], acts[-64:] = normal(64, 80), normal(64, 96)
    blocks = {"BM": 32, "BN": 32, "BT": 64}
    last_program(k.router_dw_kernel, (3, 2**20), grads, acts, parts, 2**26, 64, R=32, C_PAD=16, **blocks)
    assert relative(parts[-1, 64:], grads[-64:, 64:].float().T @ acts[-64:, 64:].float()) < 1e-5


def test_decoding_beyond_31_bits(last_program):
    """vllm#34086, Liger#1296: the last of 128 experts of 2^25 values."""
    from zaya.kernels.moe import decode

    hidden, width = 1024, 2**14
    up, down, p = far(128, 2 * hidden, width), far(128, width, 2 * hidden), torch.tensor([0.5])
    x, ids = normal(1, width), torch.tensor([127])
    rows = normal(32, width, scale=width**-0.5)
    up[127, hidden - 16 : hidden], up[127, -16:] = rows[:16], rows[16:]
    down[127, -16:] = normal(16, 2 * hidden, scale=hidden**-0.5)
    for vec in (True, False):
        act, y = normal(1, 2 * hidden), torch.empty(1, width, dtype=BF16)
        constants = {"E": 128, "E_PAD": 128, "T_PAD": 1, "BM": 1 if vec else 16, "BN": 16, "VEC": vec, "PDL": False}
        want = act.float() @ down[127, -16:].float().T * 0.5
        given = (act, down, y, p, ids, 1, width, 2 * hidden)
        last_program(decode.moe_decode_down_kernel, (width // 16, 1), *given, BK=hidden, **constants)
        assert relative(y[:, -16:], want) < 1e-2
        given = (x, up, act, ids, 1, width, hidden, width)
        last_program(decode.moe_decode_up_kernel, (hidden // 16, 1), *given, BK=2048, **constants)
        gate, value = (x.float() @ rows.float().T).chunk(2, -1)
        assert relative(act[:, hidden - 16 : hidden], F.silu(gate) * value) < 1e-2


@pytest.mark.parametrize("tokens", [3, 5])
def test_decoding_rows_apart_by_more_than_31_bits(tokens):
    """vllm#5938, vllm#34086: rows of x and of the state before, 2^30 elements apart, where nothing is copied first."""
    apart = lambda t: torch.empty(2**30 * tokens + 4096, dtype=t.dtype).as_strided(t.shape, (2**30, 1)).copy_(t)
    module = stock_router(1, width=64, hidden=2048)
    weight, bias, rest = module.down_proj.weight, module.down_proj.bias, arguments(module)
    x, state = torch.randn(tokens, 2048), torch.randn(tokens, 64)
    _, up, down, _, p = make(tokens, width=32, hidden=32)
    ids = torch.arange(tokens) % 3
    with torch.no_grad():
        got, want = (
            router_from_hidden(f(x), weight, bias, f(state), *rest, backend="triton") for f in (apart, torch.clone)
        )
        assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))
        y, exact = (kernels(f(x[:, :32]), up, down, ids, p) for f in (apart, torch.clone))
    assert torch.equal(y, exact)


# ------------------------------------------------------------------------------------- what the host decides from T


@pytest.fixture(params=["cuda", "hip"])
def launches(request, monkeypatch):
    """Launches are written down instead of run, with the tiles of a GPU: the host reads no result of a kernel."""
    from zaya.kernels.moe import ops as moe_ops
    from zaya.kernels.router import ops as router_ops

    monkeypatch.setattr(moe_ops, "backend_of", lambda x: request.param)
    monkeypatch.setattr(router_ops, "BACKEND", request.param)
    found: list[tuple] = []
    record = lambda self, grid, *a: found.append(
        (self.kernel.__name__, self.constants, grid, a, self.kernel.arg_names)
    )
    monkeypatch.setattr(launch.Launch, "__call__", record)
    return found


def call_everything(tokens: int, decode: bool, hidden: int = 32) -> None:
    """The launches of a block's forward and backward pass, or of a step of decoding."""
    x = torch.empty(tokens, hidden, dtype=BF16, requires_grad=not decode)
    up, down = (torch.empty(4, *size, dtype=BF16, requires_grad=True) for size in ((64, hidden), (hidden, 32)))
    ids, p = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens)
    layer = torch.empty(32, 32, dtype=BF16), torch.empty(32, dtype=BF16)
    rest = (layer[1], layer[1], layer, layer, torch.empty(5, 32, dtype=BF16), torch.empty(5), 1e-5)
    weight, state = torch.empty(32, hidden, dtype=BF16), torch.empty(tokens, 32, dtype=BF16)
    with torch.set_grad_enabled(not decode):
        routing = router_from_hidden(x, weight, layer[1], state, *rest, backend="triton")
        y = kernels(x, up, down, ids, p)
    if not decode:
        torch.autograd.backward([y, routing.gate_weights], [torch.empty_like(y), p])


def kernels_for(launches, counts) -> set[tuple]:
    """What is compiled for these numbers of tokens."""
    launches.clear()
    for tokens, decode in itertools.product(counts, (True, False)):
        call_everything(tokens, decode)
    return {(name, *c.items(), *map(launch.specialisation, given)) for name, c, _, given, _ in launches}


def test_few_kernels_serve_every_number_of_tokens(launches):
    """xformers#1037, TGI#1924, unsloth#20: kernels tuned or compiled anew for each number of tokens. Here that number
    is in no key but by being 1 or a multiple of 16, and by the row of a table."""
    for first in (33, 129, 5000):
        seen = kernels_for(launches, range(first, first + 16))
        assert kernels_for(launches, range(first + 16, first + 31)) <= seen, first
    counts = (*range(1, 20), 64, 65, 128, 256, 257, 2048, 2049, 4096, 4097, 9000, 16384, 16385, 40_000)
    assert len(kernels_for(launches, counts)) < 250


def test_every_launch_covers_what_its_tile_must(launches):
    """intel-xpu-backend#7776: a grid from another tile than the one that ran. Each grid is held against the constants
    of its own launch, on both backends."""
    for tokens, decode in itertools.product((1, 3, 17, 64, 65, 300, 5000, 20_000), (True, False)):
        call_everything(tokens, decode, hidden=2048)
    seen = set()
    for name, c, grid, given, names in launches:
        a = dict(zip(names, given, strict=False))
        seen.add(name)
        if name in (
            "router_fwd_kernel",
            "router_bwd_outer_kernel",
            "router_bwd_inner_kernel",
            "moe_weight_sums_kernel",
        ):
            assert grid[0] * c["BT"] >= a["T"], name
        elif name in ("moe_count_kernel", "moe_place_kernel"):
            assert grid[0] * c["BLOCK"] >= a["T"], name
        elif name == "moe_gather_kernel":
            assert grid[0] * c["BR"] >= a["rows_ptr"].numel()
        elif name == "router_dw_kernel":
            assert grid[0] * c["BM"] * c["BN"] >= a["grads_ptr"].shape[1] * c["R"]
            assert grid[1] * a["rows"] >= a["T"]
            assert a["rows"] % c["BT"] == 0
        elif name == "router_add_kernel":
            assert grid[0] * c["BN"] >= a["N"]
        elif name == "router_project_kernel":
            assert (grid[0] * c["BN"], grid[1]) == (c["R"], c["SPLITS"])
            assert grid[2] * c["BT"] >= a["T"]
            assert a["D"] % (c["SPLITS"] * c["BK"]) == 0
        elif name == "router_decode_kernel":
            assert grid[0] * c["BC"] == c["R"]
            assert grid[1] * c["BT"] >= a["T"]
        elif name in ("router_project_vec_kernel", "router_decode_vec_kernel"):
            assert grid[0] * c["BN" if "BN" in c else "BC"] == c["R"]
        elif name in ("moe_decode_up_kernel", "moe_decode_down_kernel"):
            columns, depth = (a["F"], a["D"]) if "up" in name else (a["D"], a["F"])
            assert grid[0] * c["BN"] == columns
            assert depth % c["BK"] == 0
            assert grid[1] == min(a["T"], c["E"])
            assert c["T_PAD"] >= a["T"]
        else:  # these walk over all tiles whatever their grid
            assert name in ("moe_up_kernel", "moe_rows_kernel", "moe_dact_kernel", "moe_dw_kernel"), name
            assert grid[0] >= 1
    assert len(seen) == 19


def test_a_few_tokens_take_two_launches(launches):
    """vllm#55225: a fixed cost of routing, and rows padded to 64, at every decoding step."""
    for tokens in (1, 2, 16, 64):
        launches.clear()
        x, up, down = (
            torch.empty(tokens, 64, dtype=BF16),
            torch.empty(4, 64, 64, dtype=BF16),
            torch.empty(4, 64, 32, dtype=BF16),
        )
        with torch.no_grad():
            kernels(x, up, down, torch.empty(tokens, dtype=torch.int64), torch.empty(tokens))
        assert [c[0] for c in launches] == ["moe_decode_up_kernel", "moe_decode_down_kernel"]
        assert all(c[1]["BM"] <= 16 for c in launches)


@pytest.mark.parametrize("backend", tiles.MOE)
def test_tiles_fit_every_shape(backend):
    """aiter#4783, aiter#2946, aiter#5049: shapes without an entry in a table fault. Any multiple of 16 has a tile that
    divides it."""
    for table, (n, k) in itertools.product(tiles.MOE[backend], itertools.product((16, 48, 80, 1536, 11008), repeat=2)):
        for name in ("up", "down", "dact", "dx", "dw"):
            tile = getattr(table, name).fit(n, k)
            assert n % tile.bn == 0, name
            assert k % tile.bk == 0, name
            assert all(v >= 16 and v & (v - 1) == 0 for v in (tile.bm, tile.bn, tile.bk)), name
            assert tile.bn // tile.split >= 8, name


def test_experts_beyond_one_tile_of_the_permutation():
    """aiter#4783, vllm#17744: with 64 experts and more, the permutation asked for more shared memory than there is."""
    from zaya.kernels.moe.permute import _classes, max_rows, permutation

    for experts in (16, 31, 32, 63, 64, 128):
        classes = _classes(experts)
        assert classes["E_PAD"] > experts
        assert classes["BLOCK"] * classes["E_PAD"] <= 8192
    ids = torch.randint(0, 129, (300,))
    rows, slot, offs = permutation(ids, 128, 16, max_rows(300, 128, 16))
    rows = rows[: offs[-1]]
    assert torch.equal(rows[rows >= 0].sort().values, (ids < 128).nonzero().flatten().int())
    assert torch.equal(rows[slot[ids < 128]], (ids < 128).nonzero().flatten().int())
    assert all(
        (ids[rows[offs[e] : offs[e + 1]].clamp(min=0)] == e)[rows[offs[e] : offs[e + 1]] >= 0].all()
        for e in range(128)
    )


def test_the_permutation_of_many_blocks():
    """vllm-xpu-kernels#453: all but the first tokens were lost. More blocks than are counted in one step."""
    from zaya.kernels.moe.permute import BLOCK, CHUNK, max_rows, permutation

    tokens = BLOCK * CHUNK + 300
    ids = torch.randint(0, 3, (tokens,))
    rows, slot, offs = permutation(ids, 2, 16, max_rows(tokens, 2, 16))
    want = [torch.nonzero(ids == e).flatten().int() for e in range(3)]
    for e in range(2):
        assert torch.equal(rows[offs[e] : offs[e] + len(want[e])], want[e])
        assert torch.equal(slot[want[e]], offs[e] + torch.arange(len(want[e]), dtype=torch.int32))
    assert torch.equal(-2 - rows[offs[2] : offs[3]], want[2])


# ------------------------------------------------------------------------------------------------------- the head


def test_the_gradient_of_the_head_is_added_up_in_fp32(monkeypatch):
    """Liger#512, Liger#1391, axolotl#1601, OLMo-core#370: in bf16, what later blocks of tokens add is rounded away."""
    from zaya.kernels.linear_cross_entropy import linear_cross_entropy, reference

    monkeypatch.setattr(reference, "_ELEMENTS_CPU", 30)  # a token at a time
    hidden, weight, labels = torch.randn(600, 8).to(BF16), torch.randn(30, 8).to(BF16), torch.randint(0, 30, (600,))
    ours, exact = weight.clone().requires_grad_(), weight.float().requires_grad_()
    linear_cross_entropy(hidden, ours, labels).backward()
    F.cross_entropy(hidden.float() @ exact.T, labels, reduction="sum").backward()
    assert relative(ours.grad, exact.grad) < 1e-2


# ------------------------------------------------------------------------------------------- what must not be there


def test_nothing_is_tuned_at_run_time():
    """triton#11602, ao#4880, xformers#1037, TGI#1924, unsloth#20, aiter#5339: keys of autotuning that stopped working,
    tuning for minutes, and tuning that added a result twice. Tiles come from tables."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    for found in pkgutil.walk_packages(zaya.kernels.__path__, "zaya.kernels."):
        for name, value in vars(importlib.import_module(found.name)).items():
            assert not isinstance(value, (Autotuner, Heuristics)), f"{found.name}.{name}"


def test_products_of_the_kernels_are_full_fp32_where_they_take_it():
    """scattermoe#5: an error of 0.18 was mostly TF32. Every product asks for IEEE arithmetic, and none is written
    without the helper that also widens bf16 for the interpreter (triton#11584, #4972, #10945, #11604)."""
    from zaya.kernels.moe import decode, permute
    from zaya.kernels.moe import triton as moe_triton
    from zaya.kernels.router import decode as router_decode
    from zaya.kernels.router import triton as router_triton

    calls = []
    for module in (moe_triton, decode, permute, router_triton, router_decode):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.dot", "tl.dot_scaled"):
                calls.append((module.__name__, ast.unparse(node)))
    one = "tl.dot(a, b, acc, input_precision='ieee')"
    assert calls == [(m.__name__, one) for m in (moe_triton, router_triton)]


def test_fp32_on_a_gpu_takes_the_reference(monkeypatch):
    """scattermoe#5, aiter#4783: tiles are made for 16 bits; in fp32 the router would spill 90 KB a thread on sm_90."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zaya.kernels.moe import ops as moe_ops
    from zaya.kernels.router import ops as router_ops

    monkeypatch.setattr(moe_ops, "INTERPRET", False)
    with FakeTensorMode():
        x, out, up, down = (torch.empty(*n, device="cuda") for n in ((3, 32), (5, 32), (4, 64, 32), (4, 32, 32)))
        assert "float32" in router_ops.unsupported(x, out)
        assert "float32" in moe_ops.unsupported(x, up, down)
        assert router_ops.unsupported(x.bfloat16(), out) is None
        assert moe_ops.unsupported(x.bfloat16(), up, down) is None


def test_no_kernel_path_needs_grouped_mm(monkeypatch):
    """torchtitan#1523, pytorch#161366, pytorch#166816: torch's grouped_mm is missing on some ROCm builds."""

    def missing(*args, **kwargs):
        raise AssertionError("grouped_mm")

    monkeypatch.setattr(F, "grouped_mm", missing)
    monkeypatch.setattr(torch, "_grouped_mm", missing)
    inputs, dy = make(9), torch.randn(9, 48)
    exact = gradients(written_out, inputs, dy)
    assert_close(gradients(kernels, inputs, dy), exact, 2e-6)
    assert_close(gradients(lambda *a: zaya.kernels.moe.moe(*a, backend="reference"), inputs, dy), exact, 2e-6)


ODD = """
import dataclasses, json, math
import triton
from zaya.kernels import aot, tiles
from zaya.kernels.moe import permute, variants

found = {}
for backend in aot.BACKENDS:
    one = variants.EXPERTS
    table = tiles.MOE[backend][-1]
    fit = {n: getattr(table, n).fit(48, 80) for n in ("up", "down", "dact", "dx")}
    fit["dw"] = dataclasses.replace(table.dw.fit(48, table.dw.bk), bm=16)
    variants.EXPERTS = 1
    odd = dataclasses.replace(table, **fit)
    many = permute._classes(128)
    places = [v for v in aot.op_variants("moe", backend) if v.name.startswith("place")]
    many |= {"CHUNK": permute._place(128, table.pad, False).constants["CHUNK"]}
    wide = lambda v: dataclasses.replace(v, constexprs={**v.constexprs, **many})
    checked = [wide(v) for v in (places[0], places[1], places[-1])]
    checked += [variants._up(odd, "", True), variants._rows(odd, "", "down", odd.down, True)]
    checked += [variants._dact(odd, ""), variants._dw(odd, "", "dw1", False)]
    variants.EXPERTS = one
    for v in checked:
        kernel = aot.compile_variant(v, backend)
        found[f"{backend} {v.name}"] = (kernel.metadata.shared, kernel.metadata.num_warps)
print(json.dumps(found))
"""


@pytest.mark.aot
def test_other_sizes_compile_within_the_memory_of_a_multiprocessor():
    """vllm#17744, vllm#47209, aiter#2723, aiter#3257, aiter#4783: a first launch at a size that no gate had seen asked
    for too much shared memory. 128 experts; and one, at widths of 48 and 80."""
    done = child("-c", ODD)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 14
    for name, (shared, warps) in found.items():
        hip = name.startswith("hip")
        assert shared <= (65536 if hip else 227 * 1024), name
        assert warps * (64 if hip else 32) <= 1024, name


COMPILED = """
import json
from zaya.kernels import aot

found = next(v for v in aot.op_variants("router", "hip") if v.name.startswith("project T"))
print(json.dumps(aot.report_variant("router", "hip", found)["found"]))
"""


@pytest.mark.aot
def test_the_cache_knows_the_buffer_knob(tmp_path, monkeypatch):
    """unsloth#11614: code compiled under one setting of AMDGCN_USE_BUFFER_OPS was found again under the other."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = []
    for knob in ("1", "0", "1"):
        monkeypatch.setenv("AMDGCN_USE_BUFFER_OPS", knob)
        done = child("-c", COMPILED)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0]["buffer_loads"] > 0 == found[1]["buffer_loads"]
    assert found[2] == found[0]
