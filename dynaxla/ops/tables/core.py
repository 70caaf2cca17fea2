"""Rows of the package's own operators, and of ops that are families of their own."""

from __future__ import annotations

import torch
from torch.fx import Node

from dynaxla.ops import internal
from dynaxla.ops.random import RANDOM
from dynaxla.ops.spec import OpSpec, Support
from dynaxla.ops.tables.data import argument, tensor_of

_LSTM_MODE = 2
_GROUPED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int32})  # int32: offs


def _check_recurrent(node: Node) -> str | None:
    mode, _, _, _, _, _, train = node.args[9:16]
    batch_sizes = node.args[8]
    if mode != _LSTM_MODE:
        return "only LSTM layers have a rule"
    if batch_sizes:
        return "packed sequences have no rule"
    return "the layer keeps a workspace for its backward" if train else None


def _check_grouped(node: Node) -> str | None:
    rows, matrices = tensor_of(node, "self"), tensor_of(node, "mat2")
    if (rows.dim(), matrices.dim()) != (2, 3) or argument(node, "offs") is None:
        return "only rows in groups times one matrix per group have a rule"
    if argument(node, "bias") is not None:
        return "a bias"
    return None if argument(node, "out_dtype") in (None, rows.dtype) else "a result in another dtype than the input's"


ROWS = (
    OpSpec(torch.ops.aten.mkldnn_rnn_layer.default, Support.JAX, check=_check_recurrent, limits="LSTM, inference"),
    OpSpec(internal.LINEAR, Support.JAX),
    OpSpec(internal.KERNEL, Support.JAX),
    OpSpec(internal.CONVOLUTION, Support.JAX),
    OpSpec(internal.GATHER_STRIDED, Support.JAX),
    OpSpec(internal.GROUPED_PRODUCT, Support.JAX),
    OpSpec(internal.GROUP_PRODUCTS, Support.JAX),
    OpSpec(
        torch.ops.aten._grouped_mm.default,
        Support.JAX,
        check=_check_grouped,
        dtypes=_GROUPED_DTYPES,
        limits="rows in groups times one matrix per group (2-d, 3-d, offs), result in the input's dtype, no bias",
    ),
    OpSpec(internal.ATTENTION, Support.JAX),
    OpSpec(RANDOM, Support.JAX),
    OpSpec(internal.ATTENTION_BACKWARD, Support.JAX),
)
