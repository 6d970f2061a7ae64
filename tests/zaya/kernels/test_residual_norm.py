"""Residual scaling and norm in the interpreter. The oracle is stock transformers' norm, and autograd."""

import pytest
import torch
from transformers.models.zaya.modeling_zaya import ZayaRMSNorm

from zaya.errors import UserError
from zaya.kernels.residual_norm import residual_norm

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned")
EPS = 1e-5


def inputs(shape, dtype=torch.float32):
    """residual fp32, branch, the four scaling vectors and the norm's weight, as leaves that require gradients."""
    width = shape[-1]
    vectors = [torch.randn(width) * 0.2 + (1 if i % 2 == 0 else 0) for i in range(4)]
    rest = [torch.randn(shape), *vectors, torch.randn(width)]
    return [torch.randn(shape).requires_grad_(), *(x.to(dtype).requires_grad_() for x in rest)]


def stock(residual, branch, s, b, rs, rb, weight):
    """Joined stream and its norm, in the inputs' precision, with stock's norm."""
    joined = (branch + b) * s + (residual + rb) * rs
    norm = ZayaRMSNorm(weight.shape[0], EPS)
    norm.weight = torch.nn.Parameter(torch.ones_like(weight))
    return joined, norm(joined) * weight


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)).item()


@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (2, 33, 40)])
def test_equals_stock_forward_and_backward(shape):
    leaves = inputs(shape)
    residual, branch, *scaling, weight = leaves
    got = residual_norm(residual, branch, scaling, (weight, EPS), "triton")
    want = stock(*leaves)
    given = [torch.randn(shape), torch.randn(shape)]
    mine, theirs = torch.autograd.grad(got, leaves, given), torch.autograd.grad(want, leaves, given)
    for a, b in zip([*got, *mine], [*want, *theirs], strict=True):
        assert a.shape == b.shape
        assert relative(a, b) < 2e-6


@pytest.mark.parametrize("used", ["joined", "normed"])
def test_one_result_unused(used):
    leaves = inputs((5, 32))
    residual, branch, *scaling, weight = leaves
    mine = residual_norm(residual, branch, scaling, (weight, EPS), "triton")[used == "normed"].square().sum()
    theirs = stock(*leaves)[used == "normed"].square().sum()
    for a, b in zip(*(torch.autograd.grad(x, leaves, allow_unused=True) for x in (mine, theirs)), strict=True):
        assert a is None if b is None else relative(a, b) < 2e-6


def test_each_half_alone():
    residual, branch, *scaling, weight = leaves = inputs((9, 32))
    joined, none = residual_norm(residual, branch, scaling, None, "triton")
    assert none is None
    same, normed = residual_norm(residual, None, None, (weight, EPS), "triton")
    assert same is residual
    whole = stock(*leaves)
    assert relative(joined, whole[0]) < 2e-6
    given = torch.randn(9, 32)
    used = [residual, branch, *scaling]
    for a, b in zip(
        *(torch.autograd.grad(x, used, given, retain_graph=True) for x in (joined, whole[0])), strict=True
    ):
        assert relative(a, b) < 2e-6
    ones, zeros = torch.ones(32), torch.zeros(32)
    want = stock(residual, torch.zeros(9, 32), ones, zeros, ones, zeros, weight)[1]
    assert relative(normed, want) < 2e-6
    for a, b in zip(*(torch.autograd.grad(x, [residual, weight], given) for x in (normed, want)), strict=True):
        assert relative(a, b) < 2e-6


def test_bf16_is_as_near_to_exact_as_the_reference():
    leaves = inputs((64, 128), torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    given = [torch.randn(64, 128), torch.randn(64, 128).bfloat16()]
    errors = []
    want = stock(*exact)
    want = [*want, *torch.autograd.grad(want, exact, [g.double() for g in given])]
    for backend in ("triton", "reference"):
        residual, branch, *scaling, weight = leaves
        got = residual_norm(residual, branch, scaling, (weight, EPS), backend)
        assert (got[0].dtype, got[1].dtype) == (torch.float32, torch.bfloat16)
        got = [*got, *torch.autograd.grad(got, leaves, given)]
        errors.append([relative(a, b) for a, b in zip(got, want, strict=True)])
    for mine, reference in zip(*errors, strict=True):
        assert mine <= 2 * reference + 1e-6  # the interpreter cuts to bf16 where a GPU rounds; tests/gpu is stricter
        assert mine < 6e-3


def test_strided_rows_and_no_tokens():
    residual, branch, *scaling, weight = (x.detach() for x in inputs((6, 32)))
    wide = torch.randn(6, 80)
    got = residual_norm(residual, wide[:, 8:40], scaling, (weight, EPS), "triton")
    want = residual_norm(residual, wide[:, 8:40], scaling, (weight, EPS), "reference")
    assert all(relative(a, b) < 2e-6 for a, b in zip(got, want, strict=True))
    empty = residual_norm(residual[:0], branch[:0], scaling, (weight, EPS), "triton")
    assert [x.shape for x in empty] == [(0, 32), (0, 32)]


def test_bits_repeat():
    leaves = inputs((70, 64), torch.bfloat16)
    residual, branch, *scaling, weight = leaves
    runs = []
    for _ in range(2):
        got = residual_norm(residual, branch, scaling, (weight, EPS), "triton")
        runs.append(torch.autograd.grad(got, leaves, [x.detach() for x in got]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_operator_is_sound():
    from zaya.kernels.residual_norm import ops

    residual, branch, *scaling, weight = inputs((3, 4, 16))
    torch.library.opcheck(ops.forward_op, (residual, branch, *scaling, weight, EPS))


def test_a_wider_branch_goes_to_the_reference():
    residual, branch, *scaling, weight = (x.detach() for x in inputs((3, 16)))
    joined, _ = residual_norm(residual.bfloat16(), branch, scaling, (weight, EPS), "triton")
    assert joined.dtype == torch.float32


def test_forced_without_a_gpu(monkeypatch):
    from zaya.kernels import launch
    from zaya.kernels.residual_norm import ops

    monkeypatch.setattr(ops, "ready", lambda x, kernel: launch.ready(x, object()))  # no interpreted kernel
    residual, branch, *scaling, weight = (x.detach() for x in inputs((3, 32)))
    with pytest.raises(UserError, match="no Triton kernel runs on cpu"):
        residual_norm(residual, branch, scaling, (weight, EPS), "triton")
