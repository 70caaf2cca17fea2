"""Recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`) while AOTAutograd traces: one op for each layer and direction.

torch decomposes them before it consults a decomposition table, into one copy of a step for every element of the sequence,
and without the dropout between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dynaxla.custom_ops.recurrence import Kind, run_recurrence
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.python_kernels import AUTOGRAD, COMPOSITE, replace_python_kernels

aten = torch.ops.aten


def _lstm(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the outputs, and the last hidden and cell states [layers * directions, batch, hidden or cell]."""
    hidden, cell = hx
    states = torch.cat([hidden, cell], 2)
    settings = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    output, last = _run_layers("lstm", input, states, hidden.shape[2], params, *settings)
    size = hidden.shape[2]
    # Not `contiguous`, which gives views of one memory where there is one state.
    return output, last[..., :size].clone(), last[..., size:].clone()


def _rnn(
    kind: Kind, input: Tensor, hx: Tensor, params: Sequence[Tensor], *settings: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """Returns the outputs, and the last hidden states [layers * directions, batch, hidden]."""
    return _run_layers(kind, input, hx, hx.shape[2], params, *settings, **named)


def _run_layers(
    kind: Kind,
    input: Tensor,
    states: Tensor,
    size: int,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs, and the last states [layers * directions, batch, state].

    Args:
        input: [time, batch, in], or [batch, time, in] if `batch_first`.
        states: the initial states [layers * directions, batch, state].
        size: of the hidden state, which is in front of a state.
    """
    x = input.transpose(0, 1) if batch_first else input
    directions = (False, True) if bidirectional else (False,)
    given = zip(states.unbind(0), _split(params, len(params) // (num_layers * len(directions))), strict=True)
    last = []
    for layer in range(num_layers):
        outputs = []
        for reverse in directions:
            output, final = _run_direction(kind, x, *next(given), size, has_biases, reverse)
            outputs.append(output)
            last.append(final)
        x = torch.cat(outputs, 2) if bidirectional else outputs[0]
        if train and dropout and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return (x.transpose(0, 1) if batch_first else x), torch.stack(last)


def _split(params: Sequence[Tensor], count: int) -> Iterator[Sequence[Tensor]]:
    return (params[i : i + count] for i in range(0, len(params), count))


def _run_direction(
    kind: Kind, x: Tensor, state: Tensor, params: Sequence[Tensor], size: int, has_biases: bool, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of one direction of a layer [time, batch, hidden], and its last state [batch, state]."""
    input_weight, hidden_weight, *more = params
    weights, bias = [hidden_weight, *more], None
    if has_biases:
        bias, hidden_bias, *projection = more
        weights = [hidden_weight, hidden_bias] if kind == "gru" else [hidden_weight, *projection]
        bias = bias if kind == "gru" else bias + hidden_bias
    gates = F.linear(x, input_weight, bias)
    wide = torch.promote_types(gates.dtype, state.dtype)  # they differ under autocast alone
    given = gates.flip(0) if reverse else gates.contiguous()
    states = run_recurrence(given.to(wide), state.to(wide).contiguous(), [w.to(wide) for w in weights], kind)
    if _keeps_gates_dtype(kind, x, weights):
        states = states.to(gates.dtype)
    last, states = states[-1], states.flip(0) if reverse else states
    return states[..., :size].contiguous(), last


def _keeps_gates_dtype(kind: Kind, x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether eager's states have the gates' dtype under autocast: those of oneDNN, and a nonlinearity's own. Others are sums
    with the state before, and have its dtype if that is wider."""
    return kind in ("tanh", "relu") or (kind == "lstm" and x.device.type == "cpu" and len(weights) == 1)


RNN_LAYER_DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {
        aten.lstm.input: _lstm,
        aten.gru.input: partial(_rnn, "gru"),
        aten.rnn_tanh.input: partial(_rnn, "tanh"),
        aten.rnn_relu.input: partial(_rnn, "relu"),
    }
)


def replace_rnn_layers() -> AbstractContextManager[None]:
    """Context in which these decompositions replace torch's, which are restored at the end."""
    return replace_python_kernels(
        {op: dict.fromkeys((COMPOSITE, AUTOGRAD), layer) for op, layer in RNN_LAYER_DECOMPOSITIONS.items()}
    )
