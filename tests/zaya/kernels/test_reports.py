"""Faults that users of other MoE kernels reported, kept away here. docs/kernels.md lists every report and its test."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
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


# ------------------------------------------------------------------------------------------- what must not be there


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
