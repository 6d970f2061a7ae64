"""Faults that users of other MoE kernels reported, second part: addresses over 2^31. See docs/kernels.md."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.zaya.kernels.test_moe import kernels, make, relative
from tests.zaya.kernels.test_router import arguments, stock_router
from zaya.kernels import launch
from zaya.kernels.router import router_from_hidden

pytestmark = pytest.mark.usefixtures("interpreter")


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
