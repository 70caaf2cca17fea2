"""Recurrent layers as one scan over the sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from dynaxla.ops.record import OpFamily

OPS = OpFamily()
_LSTM_MODE = 2


def check_recurrent(node: torch.fx.Node) -> str | None:
    mode, _, _, _, _, _, train = node.args[9:16]
    batch_sizes = node.args[8]
    if mode != _LSTM_MODE:
        return "only LSTM layers are compiled"
    if batch_sizes:
        return "packed sequences are not compiled"
    return "the layer keeps a workspace for its backward" if train else None


aten = torch.ops.aten


@OPS.op(aten.mkldnn_rnn_layer.default, check=check_recurrent, limits="LSTM, inference")
def mkldnn_rnn_layer(
    x: Array,
    input_weight: Array,
    hidden_weight: Array,
    input_bias: Array,
    hidden_bias: Array,
    hidden: Array,
    cell: Array,
    reverse: bool,
    batch_sizes: list[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Array, Array, Array, Array]:
    """One direction of one LSTM layer: x [time, batch, in], hidden and cell [1, batch, hidden]; gates in the order i f g o.

    Returns the outputs [time, batch, hidden], the last hidden and cell state [1, batch, hidden], and an empty workspace.
    """
    gates = jnp.einsum("tbi,gi->tbg", x, input_weight)
    if has_biases:
        gates = gates + input_bias + hidden_bias

    def step(state: tuple[Array, Array], given: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = state
        i, f, g, o = jnp.split(given + h @ hidden_weight.T, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    first = (hidden.reshape(x.shape[1], hidden_size), cell.reshape(x.shape[1], hidden_size))
    (h, c), outputs = lax.scan(step, first, gates, reverse=reverse)
    return outputs, h.reshape(hidden.shape), c.reshape(cell.shape), jnp.zeros((0,), jnp.uint8)
