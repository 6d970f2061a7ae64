"""The kernels of compressed convolutional attention in the interpreter, held to plain torch (which tests/zaya holds to
stock transformers) in fp32, forward and every gradient."""

import pytest
import torch

from zaya.kernels.cca import cca, cca_step
from zaya.kernels.cca.reference import cca_reference

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned")
D = 32


def weights(heads, groups, seed=0):
    """depthwise, grouped, temp and the first delayed value."""
    torch.manual_seed(seed)
    c = (heads + groups) * D
    depthwise = (torch.randn(c, 1, 2), torch.randn(c) * 0.3)
    grouped = (torch.randn(c, D, 2) / D**0.5, torch.randn(c) * 0.3)
    return depthwise, grouped, 1 + 0.3 * torch.randn(groups), torch.randn(groups * D // 2)


def problem(batch, length, heads, groups, half, state=False, documents=False):
    """All arguments of `cca`, and the tensors among them that want gradients."""
    depthwise, grouped, temp, first = weights(heads, groups)
    qkv = torch.randn(batch, length, (heads + 2 * groups) * D)
    angles = torch.rand(batch if documents else 1, length, half) * 6
    before = None
    if state:
        before = torch.randn(batch, 2, (heads + groups) * D), torch.randn(batch, 1, groups * D // 2)
    depth = None
    if documents:
        place = torch.arange(length)
        depth = torch.stack([place - (place // (3 + b)) * (3 + b) for b in range(batch)])
        depth = depth + (torch.arange(batch)[:, None] if state else 0) * (depth == place)  # goes on from the state
    leaves = [qkv, *depthwise, *grouped, temp, first, *(before or ())]
    for x in leaves:
        x.requires_grad_()
    return (qkv, depthwise, grouped, temp, (angles.cos(), angles.sin()), first, before, depth), leaves


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)).item()


SHAPES = [(1, 1, 4, 2, 8), (2, 7, 4, 2, 8), (1, 133, 4, 2, 16), (3, 50, 3, 1, 4), (1, 5, 2, 2, 8)]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_every_gradient(shape, state, documents):
    arguments, leaves = problem(*shape, state=state, documents=documents)
    got, want = cca(*arguments, backend="triton"), cca_reference(*arguments)
    given = [torch.randn_like(x) for x in want]
    mine, theirs = (torch.autograd.grad(x, leaves, given, materialize_grads=True) for x in (got, want))
    names = ("query", "key", "value", "qkv", "w0", "b0", "w1", "b1", "temp", "first", "columns", "delayed")
    for name, a, b in zip(names, [*got, *mine], [*want, *theirs], strict=False):
        assert a.shape == b.shape, name
        assert relative(a, b) < 2e-5 or (a - b).abs().max() < 1e-5, (name, relative(a, b))


def test_halves_with_a_halo_are_the_whole():
    """Context parallelism: the second half, given the first half's last columns, and the gradient that goes back."""
    arguments, _ = problem(1, 40, 4, 2, 8)
    qkv, depthwise, grouped, temp, rope, first, _, _ = arguments
    whole = cca_reference(*arguments)
    given = [torch.randn_like(x) for x in whole]
    (wanted,) = torch.autograd.grad(whole, [qkv], given)
    channels = 6 * D
    leaf = qkv.detach().requires_grad_()
    left, right = leaf[:, :23], leaf[:, 23:]
    halo = left[:, -2:, :channels], left[:, -1:, channels + D :]
    sides = [tuple(x[:, :23] for x in rope), tuple(x[:, 23:] for x in rope)]
    one = cca(left, depthwise, grouped, temp, sides[0], first, backend="triton")
    two = cca(right, depthwise, grouped, temp, sides[1], first, halo, backend="triton")
    for a, b, want in zip(one, two, whole, strict=True):
        assert relative(torch.cat([a, b], 1), want) < 2e-6
    (got,) = torch.autograd.grad([*one, *two], [leaf], [*(g[:, :23] for g in given), *(g[:, 23:] for g in given)])
    assert relative(got, wanted) < 2e-5


@pytest.mark.parametrize("batch", [1, 3, 37])
@pytest.mark.parametrize("paged", [False, True])
def test_steps_with_a_state_in_place_are_the_whole(batch, paged):
    arguments, _ = problem(batch, 6, 4, 2, 8)
    qkv, depthwise, grouped, temp, rope, first, _, _ = arguments
    with torch.no_grad():
        whole = cca_reference(*arguments)
        channels, slots = 6 * D, torch.randperm(batch + 4)[:batch]
        if paged:
            conv, delayed = torch.full((batch + 4, 2, channels), 9.0), torch.full((batch + 4, D), 9.0)
        else:  # transformers' static cache holds columns before taps
            slots = torch.arange(batch)
            conv, delayed = torch.zeros(batch, channels, 2).transpose(1, 2), torch.zeros(batch, D)
        conv[slots] = qkv[:, :2, :channels]
        delayed[slots] = qkv[:, 1, channels + D :]
        untouched = [s for s in range(len(conv)) if s not in slots]
        for t in range(2, 6):
            now = tuple(x[:, t : t + 1] for x in rope)
            got = cca_step(
                qkv[:, t : t + 1], depthwise, grouped, temp, now, conv, delayed, slots if paged else None, "triton"
            )
            for a, b in zip(got, whole, strict=True):
                assert relative(a, b[:, t : t + 1]) < 2e-6
        assert torch.equal(conv[slots], qkv[:, 4:6, :channels])
        assert torch.equal(delayed[slots], qkv[:, 5, channels + D :])
        assert (conv[untouched] == 9.0).all()


def test_bf16_is_near_exact():
    arguments, _ = problem(2, 33, 4, 2, 8)
    narrow = lambda x: tuple(map(narrow, x)) if isinstance(x, tuple) else x.detach().bfloat16()
    qkv, depthwise, grouped, temp, rope, first, _, _ = arguments
    low = [narrow(x) for x in (qkv, depthwise, grouped, temp)]
    exact = [tuple(y.double() for y in x) if isinstance(x, tuple) else x.double() for x in low]
    want = cca_reference(*exact, tuple(x.double() for x in rope), narrow(first).double())
    mine = cca(*low, rope, narrow(first), backend="triton")
    reference = cca_reference(*low, rope, narrow(first))
    for a, b, c in zip(mine, reference, want, strict=True):
        # the interpreter cuts to bf16 where a GPU rounds; tests/gpu is stricter
        assert a.dtype == torch.bfloat16
        assert relative(a, c) <= 2 * relative(b, c) + 1e-6


def test_the_operators_are_sound():
    from zaya.kernels.cca import ops

    (qkv, depthwise, grouped, temp, rope, first, before, depth), _ = problem(2, 5, 2, 1, 8, True, True)
    arguments = (qkv, *depthwise, *grouped, temp, *rope, first, before[0], before[1].squeeze(1), depth)
    torch.library.opcheck(ops.cca_op, arguments)


def test_other_shapes_take_the_reference():
    depthwise, grouped = (torch.randn(96, 1, 3), torch.randn(96)), (torch.randn(96, 48, 2), torch.randn(96))
    rope = torch.ones(1, 5, 8), torch.zeros(1, 5, 8)
    query, _, _ = cca(torch.randn(1, 5, 144), depthwise, grouped, torch.ones(1), rope, backend="triton")
    assert query.shape == (1, 5, 1, 48)
