"""Recurrent layers as one loop over the sequence, and one back."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynaxla.bucketing.pad_rules import recurrent as recurrent_rules
from dynaxla.custom_ops.recurrence import RECURRENCE, RECURRENCE_BACKWARD
from dynaxla.ops.dtypes import FLOATS
from dynaxla.ops.promotion import JNP_DTYPES, opmath_dtype, torch_dtype
from dynaxla.ops.record import OpFamily

OPS = OpFamily()

Gates = tuple[Array, ...]
"""A step's gates before their nonlinearities: the sum of the input's part and the hidden state's; a GRU's two parts apart."""


@OPS.op(RECURRENCE, dtypes=FLOATS, pad=recurrent_rules.recurrence)
def recurrence(gates: Array, state: Array, weights: list[Array], kind: str) -> Array:
    """The state is rounded to the layer's dtype after each step; a step computes in float32 for the 16-bit floats."""

    def step(before: Array, given: Array) -> tuple[Array, Array]:
        into = _join(kind, given, _hidden_gates(before, weights, kind))
        after = _advance(kind, into, _wide(before), _projection(kind, weights)).astype(before.dtype)
        return after, after

    states: Array = lax.scan(step, state, gates)[1]
    return states


@OPS.op(RECURRENCE_BACKWARD, dtypes=FLOATS, pad=recurrent_rules.recurrence_backward)
def recurrence_backward(
    grad: Array,
    states: Array,
    gates: Array,
    state: Array,
    weights: list[Array],
    kind: str,
) -> tuple[Array, ...]:
    """The gates are computed again from the saved states, in one product for all steps, and so are the weights' gradients."""
    before = jnp.concatenate([state[None], states])[:-1]
    into = _join(kind, gates, _hidden_gates(before, weights, kind))
    weight, projection = _wide(weights[0]), _projection(kind, weights)
    size = weight.shape[1]

    def step(carried: tuple[Array, Array | None], given: tuple[Array, Gates, Array]) -> Any:
        _, pull = jax.vjp(partial(_advance, kind), *given[1:], projection)
        of_gates, of_state, of_projection = pull(carried[0] + given[0])
        of_state = of_state.at[:, :size].add(_product(of_gates[-1], weight))
        return (of_state, jax.tree.map(jnp.add, carried[1], of_projection)), of_gates

    start = (jnp.zeros_like(_wide(state)), jax.tree.map(jnp.zeros_like, projection))
    (of_state, of_projection), of_gates = lax.scan(step, start, (_wide(grad), into, _wide(before)), reverse=True)
    of_weight = jnp.einsum("tbg,tbh->gh", of_gates[-1], _wide(before[..., :size]), precision=lax.Precision.HIGHEST)
    of_more = [of_gates[-1].sum((0, 1))] if kind == "gru" else [of_projection]
    results = (of_gates[0], of_state, of_weight, *of_more)
    return tuple(
        result.astype(operand.dtype) for result, operand in zip(results, (gates, state, *weights), strict=False)
    )


def _wide(x: Array) -> Array:
    return x.astype(JNP_DTYPES[opmath_dtype(torch_dtype(x))])


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _hidden_gates(states: Array, weights: list[Array], kind: str) -> Array:
    """What hidden states [..., batch, state] add to the gates."""
    weight, *more = map(_wide, weights)
    gates = _product(_wide(states[..., : weight.shape[1]]), weight.T)
    return gates + more[0] if kind == "gru" and more else gates


def _join(kind: str, given: Array, hidden: Array) -> Gates:
    return (_wide(given), hidden) if kind == "gru" else (_wide(given) + hidden,)


def _projection(kind: str, weights: list[Array]) -> Array | None:
    return _wide(weights[1]) if kind == "lstm" and len(weights) > 1 else None


def _advance(kind: str, into: Gates, before: Array, projection: Array | None) -> Array:
    """The state [batch, state] after a step."""
    if kind == "lstm":
        return _advance_lstm(into[0], before, projection)
    if kind == "gru":
        new, kept = (jnp.split(part, 3, -1) for part in into)
        r, z = jax.nn.sigmoid(new[0] + kept[0]), jax.nn.sigmoid(new[1] + kept[1])
        n = jnp.tanh(new[2] + r * kept[2])
        return n + z * (before - n)
    return jnp.tanh(into[0]) if kind == "tanh" else jax.nn.relu(into[0])


def _advance_lstm(gates: Array, before: Array, projection: Array | None) -> Array:
    i, f, g, o = jnp.split(gates, 4, -1)
    cell = jax.nn.sigmoid(f) * before[:, before.shape[1] - i.shape[1] :] + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return jnp.concatenate([hidden if projection is None else _product(hidden, projection.T), cell], -1)
