"""Launches keyed like Triton's own, and operators that are skipped only when nobody looks."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zaya.kernels import launch


def arguments():
    values = torch.zeros(64)
    tensors = [
        values,
        values[1:],
        values[4:],
        values.bfloat16(),
        values.long(),
        torch.empty(16, dtype=torch.int8),
        torch.empty(2**31 + 16, dtype=torch.int8),
    ]
    return [*tensors, -16, -1, 0, 1, 2, 16, 17, 2**31 - 1, 2**31, 2**31 + 1, 2**40, 0.0, 1.0, 1e-5]


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_a_kernel_is_found_again_only_for_what_triton_compiles_alike(target, monkeypatch, interpreter):
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32) if target == "cuda" else GPUTarget("hip", "gfx942", 64))
    monkeypatch.setattr(launch, "HIP", target == "hip")
    found = [(launch.specialisation(x), native_specialize_impl(backend, x, False, True, True)) for x in arguments()]
    for (ours, theirs), (others, their_others) in itertools.combinations(found, 2):
        assert ours != others or theirs == their_others


def test_descriptors_of_other_blocks_or_types_are_other_kernels():
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.zeros(64, 64)
    kinds = [TensorDescriptor.from_tensor(*a) for a in ((x, [16, 16]), (x, [16, 32]), (x.half(), [16, 16]))]
    assert len({launch.specialisation(d) for d in kinds}) == 3


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def moe_inputs():
    torch.manual_seed(0)
    x, up, down = torch.randn(100, 32), torch.randn(4, 64, 32) / 6, torch.randn(4, 32, 32) / 6
    return x, up, down, torch.randint(0, 5, (100,)), torch.rand(100)


def with_gradients(function, *inputs):
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y.square().sum(), [t for t in leaves if t.requires_grad])]


def test_the_direct_way_gives_the_bits_of_the_operators(interpreter, monkeypatch):
    from zaya.kernels.moe import moe

    def run(*inputs):
        return moe(*inputs, backend="triton")

    direct = with_gradients(run, *moe_inputs())
    monkeypatch.setattr(launch, "watched", lambda *tensors: True)
    operators = with_gradients(run, *moe_inputs())
    assert all(torch.equal(a, b) for a, b in zip(direct, operators, strict=True))


def test_a_dispatch_mode_sees_the_operators(interpreter):
    from zaya.kernels.moe import moe
    from zaya.kernels.router import router_from_hidden

    x, up, down, ids, weights = moe_inputs()
    with Seen() as seen, torch.no_grad():
        moe(x, up, down, ids, weights, backend="triton")
        moe(x[:1], up, down, ids[:1], weights[:1], backend="triton")
        layer = torch.randn(16, 16), torch.randn(16)
        router_from_hidden(
            x, torch.randn(16, 32), torch.randn(16), None, None, torch.ones(16), layer, layer, torch.randn(5, 16),
            torch.zeros(5), 1e-5, backend="triton",
        )  # fmt: skip
    ours = [name for name in seen.names if "zaya" in name]
    assert ours == ["zaya.moe_forward.default", "zaya.moe_decode.default", "zaya.router_from_hidden.default"]


def test_who_is_watching():
    x = torch.zeros(2)
    assert not launch.watched(x, torch.nn.Parameter(x))
    assert launch.watched(x, torch.nn.Buffer(x).as_subclass(type("Other", (torch.Tensor,), {})))
    with Seen():
        assert launch.watched(x)
    seen = torch.func.vmap(lambda t: t + (1.0 if launch.watched(t) else 0.0))(x)
    assert (seen == 1).all()


def test_a_second_derivative_is_refused(interpreter):
    from zaya.kernels.moe import moe

    x, up, down, ids, weights = moe_inputs()
    y = moe(x.requires_grad_(), up, down, ids, weights, backend="triton")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
