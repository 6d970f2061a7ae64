"""The head and its loss as `torch.library` operators: products by the library, softmax and gradient by one kernel.

A block of tokens at a time: logits = h W^T, then in place their gradient G, then G W and, added up in fp32 over the
blocks, G^T h. Nothing but these gradients outlives the forward pass; backward scales them by the gradient of the loss.
"""

import functools
import os

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zaya.errors import UserError
from zaya.kernels import log_once, tiles
from zaya.kernels.launch import Launch, backend_of, eager, on_device, processors
from zaya.kernels.linear_cross_entropy import triton as kernels

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


def unsupported(hidden: Tensor, weight: Tensor) -> str | None:
    """Why the kernels do not take these tensors, or None when they do."""
    if hidden.device.type == "cpu" and not INTERPRET:
        return "the tensors are on the CPU"
    if not {hidden.dtype, weight.dtype} <= {torch.bfloat16, torch.float16, torch.float32}:
        return f"dtypes {hidden.dtype} and {weight.dtype}"
    return None


def block_rows(tokens: int, stride: int, itemsize: int, limit: int) -> int:
    """Tokens of a block: as many blocks as keep each one's logits within `limit` bytes, all of nearly one size."""
    most = max(128, limit // (stride * itemsize))
    count = -(-tokens // most)
    return min(tokens, -(-tokens // (count * 128)) * 128)


@functools.cache
def _softmax(tile: tiles.HeadTile, grad: bool) -> Launch:
    return Launch(kernels.head_softmax_kernel, BV=tile.block, STAGES=tile.stages, GRAD=grad, num_warps=tile.warps)


@functools.cache
def _dw_launch(tile: tiles.Tile, tma: bool, add: bool) -> Launch:
    return Launch(kernels.head_dw_kernel, **kernels.dw_constants(tile, tma, add), **tile.launch)


@functools.cache
def library_adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library adds a product of two `dtype` matrices to an fp32 one. Tried once: builds differ."""
    if dtype == torch.float32:
        return True
    a, total = torch.ones(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, NotImplementedError) as e:
        log_once(f"linear_cross_entropy: weight gradient by the kernel: {' '.join(str(e).split())[:120]}")
        return False
    return bool((total == 16).all())


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if out.dtype != rows.dtype:
        torch.mm(rows, weight.t(), out_dtype=out.dtype, out=out)
        if bias is not None:
            out += bias
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def _add_product(tile: tiles.HeadTile, grad: Tensor, rows: Tensor, out: Tensor, first: bool) -> None:
    """out (+)= grad^T rows in fp32."""
    if tile.library and library_adds_in_fp32(grad.device, grad.dtype):
        if grad.dtype == torch.float32:
            out.addmm_(grad.t(), rows, beta=0 if first else 1)
        elif first:
            torch.mm(grad.t(), rows, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, grad.t(), rows, out_dtype=torch.float32, out=out)
        return
    t, (count, height), width = tile.dw, grad.shape, rows.shape[1]
    strides = [s * grad.element_size() % 16 for s in (grad.stride(0), rows.stride(0))]
    tma = tile.tma and not any(strides) and not rows.data_ptr() % 16
    blocks = -(-height // t.bm) * -(-width // t.bn)
    grid = min(blocks, processors(grad.device) * t.per_sm) if tma else blocks
    a, b = (_descriptor(grad, [t.bk, t.bm]), _descriptor(rows, [t.bk, t.bn])) if tma else (grad, rows)
    _dw_launch(t, tma, not first)((grid,), a, b, out, count, height, width, grad.stride(0), rows.stride(0))


def _forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, main_grad: Tensor | None,
    ignore_index: int, z_loss: float, dtype: torch.dtype, need_hidden: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, and the gradients of hidden in `dtype`, of weight and bias in fp32, empty where they are not needed)."""
    outputs = _outputs(hidden, weight, bias, dtype, need_hidden, need_weight, need_bias)
    with on_device(hidden), torch.autocast(hidden.device.type, enabled=False):
        losses = _run(hidden, weight, labels, bias, ignore_index, z_loss, dtype, outputs[1:])
        torch.sum(losses, 0, out=outputs[0])
    return outputs


def _run(hidden, weight, labels, bias, ignore_index, z_loss, dtype, gradients):
    """The loss of each token; fills the gradients that are not empty."""
    tile, tokens, vocabulary = tiles.HEAD[backend_of(hidden)], hidden.shape[0], weight.shape[0]
    wanted = any(g.numel() for g in gradients)
    losses = hidden.new_empty(tokens, dtype=torch.float32)
    if not tokens:
        for g in gradients:
            g.zero_()
        return losses
    weight, bias, labels = weight.to(dtype), None if bias is None else bias.to(dtype), labels.contiguous()
    stride = -(-vocabulary // 16) * 16
    wide = torch.float32 if tile.wide else dtype
    size = block_rows(tokens, stride, wide.itemsize, tile.logits_bytes)
    logits = hidden.new_empty(size, stride, dtype=wide)
    grads = logits if wide == dtype or not wanted else hidden.new_empty(size, stride, dtype=dtype)
    for start in range(0, tokens, size):
        rows = hidden[start : start + size].to(dtype)
        count = len(rows)
        block, grad = logits[:count, :vocabulary], grads[:count, :vocabulary]
        _logits(rows, weight, bias, block)
        grid = min(count, processors(hidden.device) * tile.per_sm) if tile.per_sm else count
        _softmax(tile, wanted)(
            (grid,), block, grad, labels[start:], losses[start:], count, vocabulary, stride, ignore_index, z_loss
        )
        if wanted:
            _collect(tile, grad, rows, weight, start, gradients)
    return losses


def _collect(tile, grad, rows, weight, start, gradients):
    """What one block's gradient of the logits gives."""
    grad_hidden, grad_weight, grad_bias = gradients
    if grad_hidden.numel():
        torch.mm(grad, weight, out=grad_hidden[start : start + len(rows)])
    if grad_weight.numel():
        _add_product(tile, grad, rows, grad_weight, start == 0)
    if grad_bias.numel():
        total = grad.sum(0, dtype=torch.float32)
        grad_bias.copy_(total) if start == 0 else grad_bias.add_(total)


def _outputs(hidden, weight, bias, dtype, need_hidden, need_weight, need_bias):
    grad_hidden = hidden.new_empty(hidden.shape if need_hidden else 0, dtype=dtype)
    grad_weight = hidden.new_empty(weight.shape if need_weight else 0, dtype=torch.float32)
    grad_bias = hidden.new_empty(weight.shape[0] if need_bias else 0, dtype=torch.float32)
    return hidden.new_empty((), dtype=torch.float32), grad_hidden, grad_weight, grad_bias


forward_op = torch.library.custom_op("zaya::linear_cross_entropy", _forward, mutates_args=())


@forward_op.register_fake
def _(hidden, weight, labels, bias, main_grad, ignore_index, z_loss, dtype, need_hidden, need_weight, need_bias):
    return _outputs(hidden, weight, bias, dtype, need_hidden, need_weight, need_bias)


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * scale, a product in fp32, in `dtype`. On a GPU without a copy in fp32."""
    out = gradient.new_empty(gradient.shape, dtype=dtype)
    if gradient.dtype != torch.float32:  # else a scalar would be rounded to the gradient's dtype
        scale = scale.view((1,) * gradient.ndim)
    return torch.mul(gradient, scale, out=out)


def _gradients(
    grad_loss: Tensor, grad_hidden: Tensor, grad_weight: Tensor, grad_bias: Tensor, main_grad: Tensor | None,
    hidden_dtype: torch.dtype, weight_dtype: torch.dtype, bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias. That of weight is empty when it went to `main_grad`."""
    if main_grad is None:
        weight = _scaled(grad_weight, grad_loss, weight_dtype)
    else:
        main_grad.addcmul_(grad_weight, grad_loss)
        weight = grad_weight.new_empty(0, dtype=weight_dtype)
    return _scaled(grad_hidden, grad_loss, hidden_dtype), weight, _scaled(grad_bias, grad_loss, bias_dtype)


backward_op = torch.library.custom_op("zaya::linear_cross_entropy_backward", _gradients, mutates_args=("main_grad",))
_eager_gradients = eager(backward_op, _gradients)


@backward_op.register_fake
def _(grad_loss, grad_hidden, grad_weight, grad_bias, main_grad, hidden_dtype, weight_dtype, bias_dtype):
    shape = grad_weight.shape if main_grad is None else 0
    weight = grad_weight.new_empty(shape, dtype=weight_dtype)
    return torch.empty_like(grad_hidden, dtype=hidden_dtype), weight, torch.empty_like(grad_bias, dtype=bias_dtype)


def _keep(ctx, inputs, output):
    hidden, weight, _, bias, ctx.main, *_ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else the outputs that have no gradient get zeros of their size
    ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
    ctx.save_for_backward(*output[1:])


def _backward(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * 11
    saved = ctx.saved_tensors
    main = ctx.main if saved[1].numel() else None
    found = _eager_gradients(grad_loss, *saved, main, *ctx.dtypes)
    dh, dw, db = (g if s.numel() else None for g, s in zip(found, saved, strict=True))
    return dh, None if main is not None else dw, None, db, *(None,) * 7


forward_op.register_autograd(_backward, setup_context=_keep)
_eager_forward = eager(forward_op, _forward, (_keep, _backward))


def linear_cross_entropy_triton(hidden, weight, labels, bias, ignore_index, z_loss):
    """`linear_cross_entropy` by kernels: same arguments and result. Check `unsupported` first."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    need = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    main = _main_gradient(weight) if need[1] else None
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    return _eager_forward(hidden, weight, labels, bias, main, ignore_index, float(z_loss), dtype, *need)[0]


def _main_gradient(parameter: Tensor) -> Tensor | None:
    """The fp32 tensor to add this parameter's gradient into, when training has put one on it."""
    main = getattr(parameter, "main_grad", None)
    if main is None or (main.dtype == torch.float32 and main.shape == parameter.shape and main.is_contiguous()):
        return main
    found = f"{main.dtype} of shape {tuple(main.shape)}"
    raise UserError(f"main_grad must be contiguous float32 of shape {tuple(parameter.shape)}; it is {found}")
