"""Rows of the package's own operators, and of ops that are families of their own."""

from __future__ import annotations

import torch
from torch.fx import Node

from dynaxla.ops import internal
from dynaxla.ops.spec import OpSpec, Support

_LSTM_MODE = 2


def _check_recurrent(node: Node) -> str | None:
    mode, _, _, _, _, _, train = node.args[9:16]
    batch_sizes = node.args[8]
    if mode != _LSTM_MODE:
        return "only LSTM layers have a rule"
    if batch_sizes:
        return "packed sequences have no rule"
    return "the layer keeps a workspace for its backward" if train else None


ROWS = (
    OpSpec(torch.ops.aten.mkldnn_rnn_layer.default, Support.JAX, check=_check_recurrent, limits="LSTM, inference"),
    OpSpec(internal.LINEAR, Support.JAX),
    OpSpec(internal.KERNEL, Support.JAX),
    OpSpec(internal.CONVOLUTION, Support.JAX),
    OpSpec(internal.GATHER_STRIDED, Support.JAX),
    OpSpec(internal.ATTENTION, Support.JAX),
    OpSpec(internal.ATTENTION_BACKWARD, Support.JAX),
)
