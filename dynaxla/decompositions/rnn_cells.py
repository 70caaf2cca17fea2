"""Decompositions of recurrent cells, each of which torch calls as one op on devices other than the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _add_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the new hidden and cell states [n, h], and for the backward the gates [n, 4 h]."""
    gates = _add_bias(input_gates, input_bias) + _add_bias(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of the gates, the same for those of the input and of the hidden state, of cx, and of the bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    tanh = cy.tanh()
    grad = grad_hy * o * (1 - tanh * tanh)
    grad = grad if grad_cy is None else grad + grad_cy
    slopes = grad * g * i * (1 - i), grad * cx * f * (1 - f), grad * i * (1 - g * g), grad_hy * tanh * o * (1 - o)
    gates = torch.cat(slopes, 1)
    return gates, grad * f, gates.sum(0) if has_bias else None


def _gru(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the new hidden state [n, h], and for the backward its parts [n, 5 h]."""
    ir, iz, new = _add_bias(input_gates, input_bias).chunk(3, 1)
    hr, hz, hidden = _add_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hidden).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden], 1)


def _gru_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the input's gates, the hidden state's gates, hx, and the two biases."""
    r, z, n, hx, hidden = workspace.chunk(5, 1)
    slope_z = grad_hy * (hx - n) * z * (1 - z)
    slope_n = grad_hy * (1 - z) * (1 - n * n)
    slope_r = slope_n * hidden * r * (1 - r)
    of_input = torch.cat([slope_r, slope_z, slope_n], 1)
    of_hidden = torch.cat([slope_r, slope_z, slope_n * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * z, *biases


RNN_CELL_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: _lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
    aten._thnn_fused_gru_cell.default: _gru,
    aten._thnn_fused_gru_cell_backward.default: _gru_backward,
}
