"""Newton-Schulz in the interpreter. The oracles are torch.optim.Muon's own iteration and the scalar polynomial."""

from dataclasses import replace

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz as torchs

from zaya.kernels import tiles
from zaya.kernels.newton_schulz import COEFFICIENTS, newton_schulz
from zaya.kernels.tiles import NewtonSchulzTiles, Tile

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned")
SQUARE = Tile(16, 16, 16, 4, 2, group=2)
TABLES = {
    "descriptors": tiles.NEWTON_SCHULZ["interpreter"][0],
    "square": NewtonSchulzTiles(float("inf"), True, False, SQUARE, SQUARE),
    "pointers": replace(tiles.NEWTON_SCHULZ["interpreter"][0], tma=False, persistent=False),
}
SHAPES = [(16, 32), (48, 80), (33, 7), (2, 3, 20, 37), (3, 40, 17), (1, 12)]


@pytest.fixture(params=TABLES)
def table(request, monkeypatch):
    """Every way that the products can run."""
    monkeypatch.setitem(tiles.NEWTON_SCHULZ, "interpreter", (TABLES[request.param],))


def relative(ours, exact):
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


def by_singular_values(x, steps=5):
    """The iteration acts on singular values alone."""
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(x.double() / x.double().norm(dim=(-2, -1), keepdim=True), full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ v


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_are_the_polynomial_of_singular_values(shape):
    x = torch.randn(shape)
    ours = newton_schulz(x, dtype=torch.float32, backend="triton")
    assert ours.shape == x.shape
    assert relative(ours, by_singular_values(x)) < 1e-4


@pytest.mark.usefixtures("table")
def test_bf16_is_as_near_as_torchs():
    x = torch.randn(2, 24, 40)
    exact = by_singular_values(x.bfloat16())
    theirs = torch.stack([torchs(m, COEFFICIENTS, 5, 1e-7) for m in x])
    ours = newton_schulz(x, backend="triton")
    assert ours.dtype == torch.bfloat16
    assert relative(ours, exact) < 2 * relative(theirs, exact) < 0.1  # the interpreter truncates what a GPU rounds


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)], ids=str)
def test_reference_is_torchs_iteration(shape):
    x = torch.randn(shape)
    assert relative(newton_schulz(x, backend="reference"), torchs(x, COEFFICIENTS, 5, 1e-7)) < 3e-2
    stack = torch.stack([x, 3 * x])
    assert relative(newton_schulz(stack, backend="reference")[1], newton_schulz(x, backend="reference")) < 3e-2


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_zeros_stay_zeros_and_an_empty_stack_is_empty(backend):
    assert not newton_schulz(torch.zeros(2, 8, 16), backend=backend).any()
    assert newton_schulz(torch.zeros(0, 8, 16), backend=backend).shape == (0, 8, 16)


@pytest.mark.parametrize("ratio", [1, 2])
def test_tiles_cover_the_diagonal_and_above_once(ratio):
    from zaya.kernels.newton_schulz import ops

    for blocks in range(1, 9):
        tile = Tile(16, 16 * ratio, 16, 4, 2)
        size = 16 * ratio * blocks
        seen = [(i, j) for j in range(blocks) for i in range(ratio * (j + 1))]
        assert ops.tiles_of(tile, size) == len(seen)


@pytest.mark.usefixtures("table")
def test_the_neighbour_in_a_stack_does_not_matter():
    """A matrix of NaN beside a matrix whose sizes no tile divides."""
    x = torch.randn(2, 20, 37)
    alone = newton_schulz(x[:1], dtype=torch.float32, backend="triton")
    x[1] = float("nan")
    torch.testing.assert_close(newton_schulz(x, dtype=torch.float32, backend="triton")[:1], alone)
