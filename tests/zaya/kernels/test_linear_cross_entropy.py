"""The head's kernels in the interpreter. The oracle is autograd of torch's cross-entropy on whole logits."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from zaya.errors import UserError
from zaya.kernels import tiles
from zaya.kernels.linear_cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned")
BASE = tiles.HEAD["interpreter"]
WHOLE = replace(BASE.dw, bn=16, split=1)
TABLES = {
    "descriptors": BASE,
    "pointers": replace(BASE, tma=False, per_sm=0, dw=WHOLE),
    "one block": replace(BASE, logits_bytes=2**30, block=256),
}


@pytest.fixture(params=TABLES)
def table(request, monkeypatch):
    """Every way that the op can run."""
    monkeypatch.setitem(tiles.HEAD, "interpreter", TABLES[request.param])


def make(tokens=300, width=24, vocabulary=83, dtype=torch.float32, bias=True):
    """Hidden rows and weights whose logits are of order 3; every fourth label does not count."""
    hidden = torch.randn(tokens, width).to(dtype)
    weight = (3 * torch.randn(vocabulary, width) / width**0.5).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,))
    labels[::4] = -100
    return hidden, weight, labels, torch.randn(vocabulary).to(dtype) if bias else None


def exact(hidden, weight, labels, bias, z_loss):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss + z_loss * logits.logsumexp(1)[labels != -100].square().sum()


def everything(function, inputs, scale, wide=False):
    """(loss, gradients) of scale * loss at detached copies of the inputs."""
    leaves = [
        t if t is None or t.dtype == torch.int64 else t.detach().double() if wide else t.detach() for t in inputs
    ]
    for t in leaves:
        if t is not None and t.is_floating_point():
            t.requires_grad_()
    loss = function(*leaves)
    return loss.detach(), *torch.autograd.grad(scale * loss, [t for t in leaves if t is not None and t.requires_grad])


def relative(ours, wanted):
    return ((ours.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)).item()


def compare(inputs, z_loss, bound, scale=0.25, backend="triton"):
    ours = everything(lambda *a: linear_cross_entropy(*a, z_loss=z_loss, backend=backend), inputs, scale)
    wanted = everything(lambda *a: exact(*a, z_loss), inputs, scale, wide=True)
    for i, (a, b) in enumerate(zip(ours, wanted, strict=True)):
        assert a.isfinite().all(), i
        assert relative(a, b) < bound, (i, relative(a, b))
    return ours


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_loss_and_gradients_in_fp32(bias, z_loss):
    compare(make(bias=bias), z_loss, 1e-5)


@pytest.mark.usefixtures("table")
def test_loss_and_gradients_in_bf16():
    inputs = make(dtype=torch.bfloat16, vocabulary=96, width=32)
    ours = compare(inputs, 0.01, 1.5e-2)
    assert [g.dtype for g in ours] == [torch.float32] + [torch.bfloat16] * 3


def test_the_references_z_loss():
    compare(make(), 0.01, 1e-5, backend="reference")


def test_blocks_are_even_and_within_their_limit():
    from zaya.kernels.linear_cross_entropy.ops import block_rows

    assert block_rows(16384, 262272, 2, 1_500_000_000) == 2816  # six blocks, not five of 2,859 and a rest of 2,089
    assert block_rows(16384, 262272, 2, 2_200_000_000) == 4096
    assert block_rows(7, 262272, 2, 2**31) == 7
    assert block_rows(1000, 262272, 2, 1) == 128


def test_without_gradients_none_is_made(monkeypatch):
    from zaya.kernels.linear_cross_entropy import ops

    hidden, weight, labels, bias = make()
    monkeypatch.setattr(ops, "_collect", None)
    loss = linear_cross_entropy(hidden, weight, labels, bias, backend="triton")
    assert relative(loss, exact(hidden.double(), weight.double(), labels, bias.double(), 0.0)) < 1e-5
    with torch.no_grad():
        again = linear_cross_entropy(hidden.requires_grad_(), weight, labels, bias, backend="triton")
    assert torch.equal(again, loss)


def test_only_what_is_wanted():
    hidden, weight, labels, _ = make(bias=False)
    leaf = weight.clone().requires_grad_()
    linear_cross_entropy(hidden, leaf, labels, backend="triton").backward()
    other = hidden.clone().requires_grad_()
    linear_cross_entropy(other, weight, labels, backend="triton").backward()
    _, dh, dw = everything(lambda *a: exact(*a, 0.0), (hidden, weight, labels, None), 1.0, wide=True)
    assert relative(leaf.grad, dw) < 1e-5
    assert relative(other.grad, dh) < 1e-5


def test_the_main_gradient_is_added_to():
    hidden, weight, labels, _ = make(dtype=torch.bfloat16)
    _, _, wanted = everything(lambda *a: exact(*a, 0.0), (hidden, weight, labels, None), 0.5, wide=True)
    leaf = torch.nn.Parameter(weight)
    leaf.main_grad = torch.full_like(weight, 2.0, dtype=torch.float32)
    (0.5 * linear_cross_entropy(hidden, leaf, labels, backend="triton")).backward()
    assert leaf.grad is None
    assert relative(leaf.main_grad - 2.0, wanted) < 1.5e-2
    leaf.main_grad = torch.zeros(3)
    with pytest.raises(UserError, match="main_grad must be contiguous float32"):
        linear_cross_entropy(hidden, leaf, labels, backend="triton")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_no_label_counts(backend):
    hidden, weight, labels, bias = make(tokens=40)
    loss, *gradients = everything(
        lambda *a: linear_cross_entropy(*a, backend=backend, z_loss=0.1),
        (hidden, weight, labels.fill_(-100), bias),
        1.0,
    )
    assert loss == 0
    assert not any(g.any() for g in gradients)


def test_a_label_outside_is_nan_and_reads_no_memory():
    hidden, weight, labels, _ = make(tokens=20)
    labels[3] = 10**9
    assert math.isnan(linear_cross_entropy(hidden, weight, labels, backend="triton").item())


def test_under_autocast_the_gradients_have_the_parameters_dtypes():
    inputs = make(bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        ours = everything(lambda *a: linear_cross_entropy(*a, backend="triton"), inputs, 1.0)
    wanted = everything(lambda *a: exact(*a, 0.0), inputs, 1.0, wide=True)
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == torch.float32
        assert 1e-6 < relative(a, b) < 2e-2


def test_operators_are_what_torch_expects():
    from zaya.kernels.linear_cross_entropy import ops

    hidden, weight, labels, _ = make(tokens=20)
    arguments = hidden.requires_grad_(), weight.requires_grad_(), labels, None, None, -100, 0.0, torch.float32
    torch.library.opcheck(
        ops.forward_op, (*arguments, True, True, False), test_utils=("test_schema", "test_faketensor")
    )
