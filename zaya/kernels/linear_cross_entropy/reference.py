"""Sum of cross-entropies of softmax(h W^T + b) against labels, a few tokens at a time.

    loss = sum over labels that count of  l_t - z_t[label_t] + zeta l_t^2,   z_t = W h_t + b,   l_t = logsumexp(z_t)
    d loss / d z_t = (1 + 2 zeta l_t) softmax(z_t) - onehot(label_t)

The gradients are made beside the loss while a block of logits is at hand, so that no [T, V] tensor is ever stored.
"""

import torch

_ELEMENTS_CPU, _ELEMENTS_GPU = 2**20, 2**28  # logits of one block: 4 MiB stays in a CPU's cache, 1 GiB fills a GPU


def linear_cross_entropy_reference(hidden, weight, labels, bias=None, ignore_index=-100, z_loss=0.0):
    """`linear_cross_entropy` in plain torch."""
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, ignore_index, z_loss)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, ignore_index, z_loss):
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        limit = _ELEMENTS_CPU if hidden.device.type == "cpu" else _ELEMENTS_GPU
        block = max(1, min(hidden.shape[0], limit // weight.shape[0]))
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in range(0, hidden.shape[0], block):
            rows, target = hidden[start : start + block], labels[start : start + block]
            valid = target != ignore_index
            target = target.where(valid, 0).unsqueeze(1)
            logits = torch.nn.functional.linear(rows, weight, bias).float()
            loss -= logits.log_softmax(1).gather(1, target).squeeze(1).where(valid, 0).sum()
            total = logits.logsumexp(1).where(valid, 0) if z_loss else None
            if total is not None:
                loss += z_loss * total.square().sum()
            if not any(ctx.needs_input_grad[:3]):
                continue
            grad = logits.softmax(1)
            if total is not None:
                grad *= (1 + 2 * z_loss * total).unsqueeze(1)
            grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0))
            grad = grad.mul_(valid.unsqueeze(1)).to(hidden.dtype)
            if needs_hidden:
                grad_hidden[start : start + block] = grad @ weight
            if needs_weight:
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), rows)
                else:
                    grad_weight += grad.t() @ rows
            if needs_bias:
                grad_bias += grad.float().sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_loss.view(1, 1)).to(grad_hidden.dtype)  # a product in fp32
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.dtypes[0])
        if grad_bias is not None:
            grad_bias = (grad_bias * grad_loss).to(ctx.dtypes[1])
        return grad_hidden, grad_weight, grad_bias, None, None, None
