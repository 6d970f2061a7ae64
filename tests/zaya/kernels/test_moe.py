"""The MoE kernels in the interpreter. The oracle is the formula written out expert by expert, and its autograd."""

import dataclasses
import math

import pytest
import torch

from zaya.kernels import tiles
from zaya.kernels.moe import moe
from zaya.kernels.tiles import DecodeTile, MoeTiles, Tile

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned")
NAMES = ("x", "gate_up_proj", "down_proj", "gate_weights")
SMALL = Tile(16, 32, 32, 4, 2, group=2)
POINTERS = MoeTiles(math.inf, 32, False, False, SMALL, SMALL, dataclasses.replace(SMALL, split=2), SMALL, SMALL)
TABLES = {
    "descriptors": tiles.MOE["interpreter"][0],
    "wide": MoeTiles(
        math.inf, 32, True, True, dataclasses.replace(SMALL, wide=True), SMALL, SMALL, SMALL,
        dataclasses.replace(SMALL, split=2),
    ),
    "pointers": POINTERS,
}  # fmt: skip


@pytest.fixture(params=TABLES)
def table(request, monkeypatch):
    """Every way that the op can run its products."""
    monkeypatch.setitem(tiles.MOE, "interpreter", (TABLES[request.param],))


def written_out(x, gate_up_proj, down_proj, ids, weights):
    """y_t = p_t W_down (silu(W_gate x_t) * W_up x_t) over the tokens of each expert; other rows are zero."""
    y = torch.zeros_like(x)
    for e in range(gate_up_proj.shape[0]):
        mine = (ids == e).nonzero().flatten()
        gate, up = (x[mine] @ gate_up_proj[e].T).chunk(2, -1)
        out = (gate * torch.sigmoid(gate) * up) @ down_proj[e].T
        y = y.index_add(0, mine, weights[mine].unsqueeze(1) * out)
    return y


def make(tokens, experts=5, width=48, hidden=32, dtype=torch.float32, seed=0):
    """Inputs of order one; expert 1 gets no token, the last class is skip."""
    torch.manual_seed(seed)
    ids = torch.randint(0, experts + 1, (tokens,))
    ids[ids == 1] = 0
    x = torch.randn(tokens, width).to(dtype)
    up = (torch.randn(experts, 2 * hidden, width) / width**0.5).to(dtype)
    down = (torch.randn(experts, width, hidden) / hidden**0.5).to(dtype)
    return x, up, down, ids, torch.rand(tokens)


def gradients(function, inputs, dy):
    """(y, dx, dW1, dW2, dp) of `function` at detached copies of `inputs`."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    y = function(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    return (y.detach(), *torch.autograd.grad(y, wanted, dy))


def kernels(*inputs):
    return moe(*inputs, backend="triton")


def relative(ours, exact):
    return ((ours.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)).item()


def assert_close(ours, exact, bound):
    for name, a, b in zip(("y", *NAMES), ours, exact, strict=True):
        assert a.isfinite().all(), f"{name} is not finite"
        assert relative(a, b) <= bound, f"{name}: relative error {relative(a, b):.2e}"


@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 133])
def test_output_and_every_gradient(tokens, table):
    inputs = make(tokens)
    dy = torch.randn(tokens, 48)
    assert_close(gradients(kernels, inputs, dy), gradients(written_out, inputs, dy), 2e-6)


def test_bf16_stays_within_its_rounding(table):
    inputs = make(30, dtype=torch.bfloat16)
    dy = torch.randn(30, 48).bfloat16()
    exact = gradients(written_out, [t.float() if t.is_floating_point() else t for t in inputs], dy.float())
    ours = gradients(kernels, inputs, dy)
    assert [t.dtype for t in ours] == [torch.bfloat16] * 4 + [torch.float32]
    # The interpreter truncates to bf16 (2^-8 at most, and up to four roundings follow one another).
    assert_close(ours, exact, 1.5e-2)


def test_no_token_has_an_expert(table):
    x, up, down, _, weights = make(9)
    inputs = (x, up, down, torch.full((9,), 5), weights)
    for result in gradients(kernels, inputs, torch.randn(9, 48)):
        assert torch.equal(result, torch.zeros_like(result))


def test_every_token_has_one_expert(table):
    x, up, down, _, weights = make(18)
    inputs = (x, up, down, torch.full((18,), 3), weights)
    dy = torch.randn(18, 48)
    assert_close(gradients(kernels, inputs, dy), gradients(written_out, inputs, dy), 2e-6)


def test_skipped_tokens_leave_no_trace(table):
    """Their rows of y and dx are zero, so is their weight's gradient, and a NaN in them goes nowhere."""
    x, up, down, ids, weights = make(24)
    skipped = ids == 5
    assert skipped.any()
    x[skipped] = math.nan
    dy = torch.randn(24, 48)
    dy[skipped] = math.nan
    y, dx, dw1, dw2, dp = gradients(kernels, (x, up, down, ids, weights), dy)
    for rows in (y[skipped], dx[skipped], dp[skipped]):
        assert torch.equal(rows, torch.zeros_like(rows))
    clean = gradients(written_out, (x.nan_to_num(), up, down, ids, weights), dy.nan_to_num())
    assert_close((y, dx, dw1, dw2, dp), clean, 2e-6)


def test_an_expert_without_tokens_gets_zero_gradients(table):
    inputs = make(24)
    _, _, dw1, dw2, _ = gradients(kernels, inputs, torch.randn(24, 48))
    assert not (inputs[3] == 1).any()
    assert torch.equal(dw1[1], torch.zeros_like(dw1[1]))
    assert torch.equal(dw2[1], torch.zeros_like(dw2[1]))


def test_rows_and_gradients_may_be_strided(table):
    x, up, down, ids, weights = make(10)
    wide = torch.randn(10, 96)
    dy = torch.randn(48).expand(10, 48)
    inputs = (wide[:, 16:64], up, down, ids, weights)
    assert not inputs[0].is_contiguous()
    assert_close(gradients(kernels, inputs, dy), gradients(written_out, inputs, dy), 2e-6)


def test_only_what_is_asked_for_is_computed():
    """Frozen weights, as under LoRA, and a frozen input."""
    inputs, dy = make(12), torch.randn(12, 48)
    exact = dict(zip(NAMES, gradients(written_out, inputs, dy)[1:], strict=True))
    for wanted in NAMES:
        leaves = dict(zip(("x", "gate_up_proj", "down_proj", "ids", "gate_weights"), inputs, strict=True))
        leaves[wanted] = leaves[wanted].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(kernels(*leaves.values()), leaves[wanted], dy)
        assert relative(gradient, exact[wanted]) <= 2e-6, wanted


def test_main_gradients_accumulate_in_fp32(table):
    inputs, dy = make(12, dtype=torch.bfloat16), torch.randn(12, 48).bfloat16()
    x, up, down, ids, weights = (t.requires_grad_() if t.is_floating_point() else t for t in inputs)
    exact = gradients(written_out, [t.detach().float() if t.is_floating_point() else t for t in inputs], dy.float())
    for parameter in (up, down):
        parameter.main_grad = torch.zeros(parameter.shape)
    for _ in range(2):
        kernels(x, up, down, ids, weights).backward(dy)
    assert up.grad is None
    assert down.grad is None
    assert relative(up.main_grad, 2 * exact[2]) <= 1.5e-2
    assert relative(down.main_grad, 2 * exact[3]) <= 1.5e-2
    assert x.grad is not None
    assert weights.grad is not None


def test_a_main_gradient_of_the_wrong_kind_is_refused():
    x, up, down, ids, weights = (t.requires_grad_() if t.is_floating_point() else t for t in make(3))
    up.main_grad = torch.zeros(up.shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="main_grad must be contiguous float32"):
        kernels(x, up, down, ids, weights)


DECODE = {
    "vector": DecodeTile(64, True, 16, 32, 16, 32, 4, 2),
    "matrix": DecodeTile(64, False, 16, 16, 16, 32, 4, 2),
}


@pytest.mark.parametrize("tile", DECODE)
@pytest.mark.parametrize("tokens", [0, 1, 7, 19])
def test_decoding(tile, tokens, monkeypatch):
    monkeypatch.setitem(tiles.MOE_DECODE, "interpreter", (DECODE[tile],))
    inputs = make(tokens, width=32, hidden=32)
    with torch.no_grad():
        y = kernels(*inputs)
        assert torch.equal(y, kernels(*inputs))
    assert y.isfinite().all()
    assert relative(y, written_out(*inputs)) <= 2e-6
    assert torch.equal(y[inputs[3] == 5], torch.zeros_like(y[inputs[3] == 5]))


@pytest.mark.parametrize("tile", DECODE)
@pytest.mark.parametrize("ids", [[5, 5, 5], [2, 2, 2], [4, 5, 0], [5]])
def test_decoding_with_few_experts(tile, ids, monkeypatch):
    monkeypatch.setitem(tiles.MOE_DECODE, "interpreter", (DECODE[tile],))
    x, up, down, _, weights = make(len(ids), width=32, hidden=32)
    inputs = (x, up, down, torch.tensor(ids), weights)
    with torch.no_grad():
        assert relative(kernels(*inputs), written_out(*inputs)) <= 2e-6


def test_decoding_takes_many_tokens_of_one_expert(monkeypatch):
    """More than one 16-row tile, so a second pass over the panel."""
    monkeypatch.setitem(tiles.MOE_DECODE, "interpreter", (DECODE["matrix"],))
    x, up, down, _, weights = make(41, width=32, hidden=32)
    inputs = (x, up, down, torch.full((41,), 2), weights)
    with torch.no_grad():
        assert relative(kernels(*inputs), written_out(*inputs)) <= 2e-6


@pytest.mark.parametrize(("tokens", "pad"), [(0, 8), (1, 8), (256, 64), (530, 16)])
@pytest.mark.parametrize("experts", [1, 16])
def test_the_permutation_is_a_stable_bijection(tokens, pad, experts):
    from zaya.kernels.moe.permute import max_rows, permutation

    torch.manual_seed(tokens)
    ids = torch.randint(0, experts + 1, (tokens,))
    rows, slot, offs = permutation(ids, experts, pad, max_rows(tokens, experts, pad))
    assert offs[0] == 0
    assert rows.numel() % pad == 0
    for e in range(experts):
        owned, mine = rows[offs[e] : offs[e + 1]], (ids == e).nonzero().flatten()
        assert owned[: len(mine)].tolist() == mine.tolist()
        assert offs[e] % pad == 0
        assert len(owned) - len(mine) < pad
        assert (owned[len(mine) :] == -1).all()
        assert torch.equal(slot[mine], offs[e] + torch.arange(len(mine), dtype=torch.int32))
    skipped = (ids == experts).nonzero().flatten()
    assert (-2 - rows[offs[experts] : offs[experts + 1]]).tolist() == skipped.tolist()
    assert (slot[skipped] == -1).all()


def test_an_id_out_of_range_is_a_skipped_token():
    from zaya.kernels.moe.permute import permutation

    rows, slot, offs = permutation(torch.tensor([0, 99, -3, 1]), 2, 8, 32)
    assert slot.tolist() == [0, -1, -1, 8]
    assert (-2 - rows[offs[2] : offs[3]]).tolist() == [1, 2]


def test_row_offsets_beyond_31_bits(table):
    """A view whose third row starts 2^31 elements after the first. Untouched pages of the storage are never used."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    x = storage.as_strided((3, 32), (2**30, 1))
    values, up, down, ids, weights = make(3, width=32, hidden=32, dtype=torch.bfloat16)
    x.copy_(values)
    ids[:] = torch.tensor([0, 3, 2])
    dy = torch.randn(3, 32).bfloat16()
    exact = gradients(
        written_out, [t.float() if t.is_floating_point() else t for t in (x, up, down, ids, weights)], dy.float()
    )
    assert_close(gradients(kernels, (x, up, down, ids, weights), dy), exact, 1.5e-2)


def test_ops_are_registered_in_full():
    """Schema, fake kernels and autograd, by torch's own checker."""
    from zaya.kernels.moe import ops

    x, up, down, ids, weights = (t.requires_grad_() if t.is_floating_point() else t for t in make(20))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.moe_forward, (x, up, down, ids, weights, True, None, None), test_utils=checks)
    plain = [t.detach() for t in (x, up, down, ids, weights)]
    torch.library.opcheck(ops.moe_decode, tuple(plain), test_utils=checks)
    y, *saved = ops.moe_forward(*plain, True, None, None)
    arguments = (torch.randn_like(y), *plain[:3], plain[4], *saved, True, True, None, None)
    torch.library.opcheck(ops.moe_backward, arguments, test_utils=checks)


def test_one_graph_for_every_number_of_tokens(monkeypatch):
    """Compiled with symbolic T and no graph break, over a change of the tile table's row, forward and backward."""
    rows = (dataclasses.replace(POINTERS, tokens=16), dataclasses.replace(POINTERS, pad=64))
    monkeypatch.setitem(tiles.MOE, "interpreter", rows)
    compiled = torch.compile(kernels, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (9, 20):
        inputs, dy = make(tokens), torch.randn(tokens, 48)
        assert_close(gradients(compiled, inputs, dy), gradients(written_out, inputs, dy), 2e-6)


def test_weights_off_the_16_byte_boundary():
    x, up, down, ids, weights = make(12)
    shifted = torch.empty(up.numel() + 1)[1:].view(up.shape).copy_(up)
    assert shifted.data_ptr() % 16
    inputs, dy = (x, shifted, down, ids, weights), torch.randn(12, 48)
    assert_close(gradients(kernels, inputs, dy), gradients(written_out, inputs, dy), 2e-6)


def test_shapes_the_kernels_do_not_take_go_to_the_reference(caplog):
    inputs, dy = make(9, width=20, hidden=24), torch.randn(9, 20)
    with caplog.at_level("INFO", logger="zaya.kernels"):
        ours = gradients(kernels, inputs, dy)
    assert_close(ours, gradients(written_out, inputs, dy), 2e-6)
    assert [r.message for r in caplog.records] == [
        "moe: the reference instead of the kernels, because of sizes D = 20, F = 24; they take multiples of 16"
    ]


def test_reasons_for_the_reference(monkeypatch):
    from zaya.kernels.moe import ops

    x, up, down, _, _ = make(4)
    assert ops.unsupported(x, up, down) is None
    assert "down_proj" in ops.unsupported(x, up, down[:, :, :16])
    monkeypatch.setattr(ops, "INTERPRET", False)
    assert ops.unsupported(x, up, down) == "the tensors are on the CPU"


@pytest.mark.parametrize("backend", tiles.MOE)
def test_the_tile_tables_hold_together(backend):
    """What a kernel assumes of its tile, for every shipped one; the model's own widths leave every tile as it is."""
    rows = tiles.MOE[backend]
    assert rows[-1].tokens == math.inf
    for table in rows:
        products = {n: getattr(table, n) for n in ("up", "down", "dact", "dx", "dw")}
        for name, tile in products.items():
            assert table.pad % (tile.bk if name == "dw" else tile.bm) == 0, name
            assert tile.fit(2048, 2048) == tile, name
            assert all(v & (v - 1) == 0 for v in (tile.bm, tile.bn, tile.bk)), name
    for tokens in (1, 64, 512, 8192, 131072):
        assert tiles.moe_tiles(backend, tokens).tokens >= tokens
    limits = [t.tokens for t in tiles.MOE_DECODE[backend]]
    assert limits == sorted(limits)
    assert tiles.moe_decode_tile(backend, limits[-1] + 1) is None
