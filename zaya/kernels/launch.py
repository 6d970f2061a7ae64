"""Launching kernels with little work on the host: at a few thousand tokens that work is what a user waits for."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from zaya.errors import UserError

HIP = torch.version.hip is not None


class Launch:
    """`Launch(kernel, **constants)(grid, *arguments)` is `kernel[grid](*arguments, **constants)` in half the time.

    Triton binds the arguments by name at every call. Here the compiled kernel is looked up by what Triton specialises
    on: the dtype and alignment of a tensor, and whether an integer is 1, a multiple of 16, or wider than 32 bits.
    `constants` are the kernel's constexpr arguments, which come after all others, and launch options.
    """

    def __init__(self, kernel: Any, **constants: Any):
        self.kernel, self.constants = kernel, constants
        self.compiled: dict[tuple, Any] = {}
        self.interpreted = isinstance(kernel, InterpretedFunction)
        if not self.interpreted:
            fixed = [p.name for p in kernel.params if p.is_constexpr]
            assert [p.name for p in kernel.params][-len(fixed) :] == fixed, "constexpr arguments come last"
            self.tail = tuple(constants[name] for name in fixed)

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        if self.interpreted:
            self.kernel[grid](*arguments, **self.constants)
            return
        key = (driver.active.get_current_device(), *map(specialisation, arguments))
        compiled = self.compiled.get(key)
        if compiled is None:
            self.compiled[key] = self.kernel[grid](*arguments, **self.constants)
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments, *self.tail)


def specialisation(argument: Any) -> Any:
    """What Triton compiles a kernel anew for when it changes in this argument."""
    if isinstance(argument, Tensor):
        aligned = not argument.data_ptr() & 15
        if HIP:  # addresses within 2 GiB are 32-bit offsets
            return argument.dtype, aligned, argument.untyped_storage().nbytes() < 2**31
        return argument.dtype, aligned
    if isinstance(argument, int):
        return argument == 1, not argument & 15, argument.bit_length() > 31
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return type(argument)


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Launches go to the current device: make it the one of x."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def ready(x: Tensor, kernel: Any) -> contextlib.AbstractContextManager:
    """`on_device`; raises UserError for a tensor that is on no GPU, unless `kernel` is interpreted."""
    if not (x.is_cuda or isinstance(kernel, InterpretedFunction)):
        raise UserError(f"kernels: no Triton kernel runs on {x.device.type}; use 'auto' or 'reference' (ZAYA_KERNELS)")
    return on_device(x)


def backend_of(x: Tensor) -> str:
    """The row of the tile tables for x's device: "cuda", "hip" or "interpreter"."""
    if x.device.type == "cpu":
        return "interpreter"
    return "hip" if HIP else "cuda"


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 7


def watched(*tensors: Tensor) -> bool:
    """Whether somebody beside autograd must see operators: a compiler, a dispatch mode, functorch, a tensor subclass.

    When nobody does, an op's implementation is called directly: the dispatcher's way to a Python operator and back
    costs as much as several launches.
    """
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return True
    return any(type(t) not in (Tensor, nn.Parameter) for t in tensors)


def eager(operator: Callable, implementation: Callable, autograd: tuple[Callable, Callable] | None = None) -> Callable:
    """`operator`, or, when nobody watches, the `implementation` that it was made of, called directly.

    `autograd` is the setup_context and the backward of its `register_autograd`, where it has one. What is called
    directly can be differentiated once.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = implementation(*inputs)
            autograd[0](ctx, inputs, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx, *dy):
            return autograd[1](ctx, *dy)

    def call(*inputs):
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if watched(*tensors):
            return operator(*inputs)
        wanted = autograd and torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return (Direct.apply if wanted else implementation)(*inputs)

    return call
