"""Faults that users of other MoE kernels reported, third part: launches and compiled code (docs/kernels.md)."""

import ast
import importlib
import inspect
import itertools
import json
import pkgutil

import pytest
import torch
from torch.nn import functional as F

import zaya
import zaya.kernels
from tests.zaya.kernels.test_aot import child
from tests.zaya.kernels.test_moe import assert_close, gradients, kernels, make, relative, written_out
from zaya.kernels import launch, tiles
from zaya.kernels.router import router_from_hidden

pytestmark = pytest.mark.usefixtures("interpreter")
BF16 = torch.bfloat16

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
    from zaya.kernels import products
    from zaya.kernels.linear_cross_entropy import triton as head_triton
    from zaya.kernels.moe import decode, permute
    from zaya.kernels.moe import triton as moe_triton
    from zaya.kernels.newton_schulz import triton as newton_schulz_triton
    from zaya.kernels.router import decode as router_decode
    from zaya.kernels.router import triton as router_triton

    calls = []
    for module in (
        moe_triton,
        decode,
        permute,
        router_triton,
        router_decode,
        products,
        head_triton,
        newton_schulz_triton,
    ):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.dot", "tl.dot_scaled"):
                calls.append((module.__name__, ast.unparse(node)))
    one = "tl.dot(a, b, acc, input_precision='ieee')"
    assert calls == [(m.__name__, one) for m in (products,)]


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
