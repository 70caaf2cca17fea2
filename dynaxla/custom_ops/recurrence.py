"""A recurrent layer over a sequence, one direction of it, as one op; its backward as another."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["lstm", "gru", "tanh", "relu"]


@torch.library.custom_op("dynaxla::recurrence", mutates_args=())
def recurrence(gates: Tensor, state: Tensor, weights: list[Tensor], kind: str) -> Tensor:
    """Computes the states of a recurrent layer after each step.

    Args:
        gates: what the input adds to the gates [time, batch, gates], in torch's order: i f g o of an LSTM, r z n of a GRU.
        state: the initial state [batch, state]: the hidden state, and behind it an LSTM's cell state.
        weights: the hidden state's weight [gates, hidden]; behind it a GRU's bias of the hidden state [gates], or an LSTM's
            projection [hidden, cell], if there is one.
        kind: "lstm", "gru", or the nonlinearity of a plain layer, "tanh" or "relu".

    Returns:
        The states [time, batch, state].
    """
    return _run(gates, state, weights, kind)


@recurrence.register_fake
def _(gates: Tensor, state: Tensor, weights: list[Tensor], kind: str) -> Tensor:
    return gates.new_empty([*gates.shape[:2], state.shape[1]])


@torch.library.custom_op("dynaxla::recurrence_backward", mutates_args=())
def recurrence_backward(
    grad: Tensor,
    states: Tensor,
    gates: Tensor,
    state: Tensor,
    weights: list[Tensor],
    kind: str,
) -> list[Tensor]:
    """Returns the gradients of `gates`, `state` and each of `weights`, from that of the states [time, batch, state]."""
    pull = torch.func.vjp(partial(_run, kind=kind), gates, state, weights)[1]
    of_gates, of_state, of_weights = pull(grad)
    return [of_gates, of_state, *of_weights]


@recurrence_backward.register_fake
def _(
    grad: Tensor,
    states: Tensor,
    gates: Tensor,
    state: Tensor,
    weights: list[Tensor],
    kind: str,
) -> list[Tensor]:
    return [operand.new_empty(operand.shape) for operand in (gates, state, *weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gates, state, weights, ctx.kind = inputs
    ctx.save_for_backward(output, gates, state, *weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    states, gates, state, *weights = ctx.saved_tensors
    of_gates, of_state, *of_weights = RECURRENCE_BACKWARD(grad, states, gates, state, weights, ctx.kind)
    return of_gates, of_state, of_weights, None


recurrence.register_autograd(_backward, setup_context=_save)


def _run(gates: Tensor, state: Tensor, weights: list[Tensor], kind: str) -> Tensor:
    states = []
    for given in gates:
        state = _advance(given, state, weights, kind)
        states.append(state)
    return torch.stack(states)


def _advance(given: Tensor, state: Tensor, weights: list[Tensor], kind: str) -> Tensor:
    weight, *more = weights
    hidden = state[:, : weight.shape[1]]
    if kind == "gru":
        new, kept = given.chunk(3, 1), F.linear(hidden, weight, *more).chunk(3, 1)
        r, z = (new[0] + kept[0]).sigmoid(), (new[1] + kept[1]).sigmoid()
        n = (new[2] + r * kept[2]).tanh()
        return n + z * (hidden - n)
    gates = given + F.linear(hidden, weight)
    if kind != "lstm":
        return gates.tanh() if kind == "tanh" else gates.relu()
    i, f, g, o = gates.chunk(4, 1)
    cell = f.sigmoid() * state[:, weight.shape[1] :] + i.sigmoid() * g.tanh()
    hidden = o.sigmoid() * cell.tanh()
    return torch.cat([F.linear(hidden, *more) if more else hidden, cell], 1)


RECURRENCE = torch.ops.dynaxla.recurrence.default
RECURRENCE_BACKWARD = torch.ops.dynaxla.recurrence_backward.default
