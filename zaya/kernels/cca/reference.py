"""Compressed convolutional attention (arXiv 2510.04476, section 3) from its projections on, in plain torch.

    (q', k') = grouped(depthwise(q || k))     two causal convolutions with nothing between them
    query = norm(q' + (q + repeat(k)) / 2),  key = norm(k' + mean of (q + repeat(k)) / 2 over a group's heads)
    value_t = v_current_t || v_delayed_{t-1}

Norm is to length sqrt(d), keys times a temperature; then the first channels rotate (RoFormer, arXiv 2104.09864).

    z_t = b0 + sum_j w0[j] * x_{t-j}                 depthwise, k0 taps
    y_t = b1 + sum_j W1[j] z_{t-j}                   grouped, one group per head, k1 taps

x is zero before a document's first token, so z is b0 there: the grouped convolution sees the depthwise bias.
"""

import torch
import torch.nn.functional as F


def cca_reference(qkv, depthwise, grouped, temp, rope, first=None, state=None, depth=None):
    """qkv [B, S, (H + 2 G) d] -> query [B, S, H, d], key and value [B, S, G, d], all in qkv's dtype.

    qkv: the projections side by side: q [H d], k [G d], v_current [G d / 2], v_delayed [G d / 2]. depthwise, grouped:
    as in `convolve`. temp [G]. rope: (cos, sin) [B or 1, S, rotated / 2] fp32. first: the delayed value of a
    document's first token, [G d / 2], or None for zero. state: (columns [B, k0 + k1 - 2, C], delayed [B, 1, G d / 2])
    of the tokens before, or None at the start. depth: [B, S] tokens since the document's start, or None for one
    document.
    """
    groups, size = temp.shape[0], grouped[0].shape[1]
    heads, reach = grouped[0].shape[0] // size, depthwise[0].shape[2] + grouped[0].shape[2] - 2
    mix = lambda columns: convolve(columns, depthwise, grouped, heads, depth)
    norm = lambda query, key: normalise(query, key, temp)
    return assemble(mix, norm, qkv, (heads - groups, groups, size), reach, rope, first, state, depth)


def assemble(mix, norm, qkv, sizes, reach, rope, first, state, depth):
    """`cca_reference` with any convolutions, mix(columns [B, reach + S, C]) -> [B, S, H + G, d], and any
    norm(query, key). sizes: (H, G, d)."""
    heads, groups, size = sizes
    columns, current, delayed = qkv.split([(heads + groups) * size, groups * size // 2, groups * size // 2], dim=-1)
    q, k = columns.split([heads * size, groups * size], dim=-1)
    mixed = mix(with_past(columns, state, reach))
    mean_q, mean_k = means(q, k, groups, size)
    query, key = norm(mixed[:, :, :heads] + mean_q, mixed[:, :, heads:] + mean_k)
    start = delayed.new_zeros(delayed.shape[0], 1, delayed.shape[2])
    start = start if first is None else start + first
    late = late_values(delayed, start, start if state is None else state[1], depth)
    value = torch.cat([current, late], dim=-1).unflatten(-1, (groups, size))
    return rotate(query, *rope).to(qkv.dtype), rotate(key, *rope).to(qkv.dtype), value


def with_past(columns, state, reach):
    """columns [B, S, C] behind the `reach` before them: the state's, or zeros at the start."""
    return F.pad(columns, (0, 0, reach, 0)) if state is None else torch.cat([state[0], columns], dim=1)


def means(q, k, groups, size):
    """q [B, S, H d], k [B, S, G d] -> what queries [B, S, H, d] and keys [B, S, G, d] get past the convolutions."""
    mean_q = (q.unflatten(-1, (groups, -1, size)) + k.unflatten(-1, (groups, 1, size))) * 0.5
    return mean_q.flatten(2, 3), mean_q.mean(dim=3)


def normalise(query, key, temp):
    """query [B, S, H, d], key [B, S, G, d] -> both at length sqrt(d), keys times temp [G], in fp32."""
    eps, length = torch.finfo(query.dtype).eps, query.shape[-1] ** 0.5
    query, key = query.float(), key.float()
    query = query * (length / query.norm(dim=-1, keepdim=True).clamp_min(eps))
    return query, key * (length * temp.float().unsqueeze(-1) / key.norm(dim=-1, keepdim=True).clamp_min(eps))


def rotate(x, cos, sin):
    """Rotate the first channels of x [B, S, heads, d], in halves, by cos and sin [B, S, rotated / 2]."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def late_values(delayed, start, before, depth):
    """delayed [B, S, W] one token later: `before` [B, 1, W] comes first, and `start` where a document starts."""
    late = torch.cat([before, delayed[:, :-1]], dim=1)
    return late if depth is None else late.where((depth > 0).unsqueeze(-1), start)


def convolve(columns, depthwise, grouped, heads, depth=None):
    """columns [B, k0 + k1 - 2 + S, C] -> [B, S, heads, C / heads].

    depthwise: (weight [C, 1, k0], bias [C]); grouped: (weight [C, C / heads, k1], bias [C]), as nn.Conv1d holds them.
    depth: [B, S] tokens since the document's start, or None when the columns belong to one document.
    The depthwise sum is in fp32, the products in columns' dtype.
    """
    narrow = _depthwise(columns, *depthwise, depth, columns.shape[1] - depthwise[0].shape[2] + 1)
    weight, bias = grouped
    taps, size = weight.shape[2], weight.shape[1]
    batch, length = narrow.shape[0], narrow.shape[1] - taps + 1
    seen = [_within(narrow[:, j : j + length], depth, taps - 1 - j, depthwise[1]) for j in range(taps)]
    stacked = torch.stack(seen, dim=2).view(batch, length, taps, heads, size)
    stacked = stacked.permute(3, 0, 1, 2, 4).reshape(heads, batch * length, taps * size)
    weight = weight.view(heads, size, size, taps).permute(0, 3, 2, 1).reshape(heads, taps * size, size)
    out = torch.baddbmm(bias.view(heads, 1, size), stacked, weight)
    return out.view(heads, batch, length, size).permute(1, 2, 0, 3)


def convolve_called(columns, depthwise, grouped, reach, depth=None):
    """What `convolve` computes, [B, S, C], by calling the two convolutions, whatever modules stand in their places.

    columns [B, reach + S, C]; depthwise, grouped: modules [B, C, S] -> [B, C, S - taps + 1]; depth as in `convolve`.
    With documents every token gets its own window of reach + 1 columns, zero before its document.
    """
    if depth is None:
        return grouped(depthwise(columns.transpose(1, 2))).transpose(1, 2)
    batch, length = depth.shape
    windows = columns.unfold(1, reach + 1, 1)  # [B, S, C, reach + 1]
    back = torch.arange(reach, -1, -1, device=depth.device)
    windows = windows.where((depth.unsqueeze(-1) >= back).unsqueeze(2), 0)
    return grouped(depthwise(windows.flatten(0, 1))).view(batch, length, -1)


def _depthwise(columns, weight, bias, depth, length):
    if depth is not None:  # the columns before the call count down from its first token
        back = torch.arange(depth.shape[1] - length, 0, device=depth.device)
        depth = torch.cat([depth[:, :1] + back, depth], dim=1)
    out, taps = bias.float(), weight.shape[2]
    for j in range(taps):
        out = out + _within(columns[:, j : j + length], depth, taps - 1 - j, 0) * weight[:, 0, j].float()
    return out.to(columns.dtype)


def _within(seen, depth, back, before):
    """seen [B, S, C]: what lies `back` tokens before each token; `before` where that is another document."""
    return seen if depth is None or back == 0 else torch.where((depth >= back).unsqueeze(-1), seen, before)


def halo_gradients(dy, columns, w0, matrix, depth):
    """What the two columns before a call take part in beyond the call's own tokens, for two convolutions of two taps.

    dy [B, S, C]: gradient of the convolutions' output; columns [B, 2, C]; w0 [C, 1, 2]; matrix [heads, 2, d, d] (head,
    tap, in, out). Returns the gradient of the columns, and shares in those of the depthwise weight and bias, fp32.
    """
    heads, size = matrix.shape[0], matrix.shape[2]
    reached = torch.full_like(dy[:, :2, 0], 2, dtype=torch.int64) if depth is None else depth[:, :2]
    first = [dy[:, i].float() if i < dy.shape[1] else dy.new_zeros(dy.shape[0], dy.shape[2]).float() for i in (0, 1)]
    back, now = (matrix[:, i].float() for i in (0, 1))
    through = lambda d, w: torch.einsum("bhn,hkn->bhk", d.view(-1, heads, size), w).flatten(1)
    within = lambda i, least: (reached[:, min(i, reached.shape[1] - 1), None] >= least).float()
    dz_before = through(first[0], back) * within(0, 1)
    dz = through(first[0], now) + through(first[1], back) * within(1, 1)
    w_back, w_now = w0[:, 0, 0].float(), w0[:, 0, 1].float()
    newest = w_now * dz_before + w_back * dz * within(0, 1)
    oldest = w_back * dz_before * within(0, 2)
    x = columns.float()
    dw0 = torch.stack([(dz_before * x[:, 0] * within(0, 2)).sum(0), (dz_before * x[:, 1]).sum(0)], dim=1).unsqueeze(1)
    return torch.stack([oldest, newest], dim=1).to(columns.dtype), dw0, dz_before.sum(0)
