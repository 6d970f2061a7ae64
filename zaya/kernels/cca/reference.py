"""The convolutions of compressed convolutional attention (arXiv 2510.04476), in plain torch.

    z_t = b0 + sum_j w0[j] * x_{t-j}                 depthwise, k0 taps
    y_t = b1 + sum_j W1[j] z_{t-j}                   grouped, one group per head, k1 taps

x is zero before a document's first token, so z is b0 there: the grouped convolution sees the depthwise bias.
"""

import torch
import torch.nn.functional as F


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
    if depth is not None:  # columns before the call's first token are a document's past
        depth = F.pad(depth, (length - depth.shape[1], 0), value=columns.shape[1])
    out, taps = bias.float(), weight.shape[2]
    for j in range(taps):
        out = out + _within(columns[:, j : j + length], depth, taps - 1 - j, 0) * weight[:, 0, j].float()
    return out.to(columns.dtype)


def _within(seen, depth, back, before):
    """seen [B, S, C]: what lies `back` tokens before each token; `before` where that is another document."""
    return seen if depth is None or back == 0 else torch.where((depth >= back).unsqueeze(-1), seen, before)
