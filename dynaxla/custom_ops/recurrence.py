"""A recurrent layer over a sequence, one direction of it, as one op; its backward as another."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dynaxla.torch_api.transforms import is_batched, is_in_transform

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
    return _return_all(grad, states, gates, state, weights, kind)


@recurrence_backward.register_fake
def _(
    grad: Tensor,
    states: Tensor,
    gates: Tensor,
    state: Tensor,
    weights: list[Tensor],
    kind: str,
) -> list[Tensor]:
    # Where a capture has a size of its own for each saved tensor (compiled autograd), this says that they are one.
    for operand, like in ((states, gates), (grad, states)):
        if operand.shape[:2] != like.shape[:2]:
            raise ValueError("gradients, states and gates have the same steps and rows")
    return [operand.new_empty(operand.shape) for operand in (gates, state, *weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gates, state, weights, ctx.kind = inputs
    ctx.save_for_backward(output, gates, state, *weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    states, gates, state, *weights = ctx.saved_tensors
    # Plain ops have gradients of their own, and rules for vmap.
    run = _return_all if torch.is_grad_enabled() or is_batched(grad) else RECURRENCE_BACKWARD
    of_gates, of_state, *of_weights = run(grad, states, gates, state, weights, ctx.kind)
    return of_gates, of_state, of_weights, None


recurrence.register_autograd(_backward, setup_context=_save)


def run_recurrence(gates: Tensor, state: Tensor, weights: list[Tensor], kind: Kind) -> Tensor:
    """Calls the op or, within transforms of torch.func, for which it has no rules, computes the states step by step."""
    states: Tensor = (_run if is_in_transform() else RECURRENCE)(gates, state, weights, kind)
    return states


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


def _return_all(
    grad: Tensor, states: Tensor, gates: Tensor, state: Tensor, weights: list[Tensor], kind: str
) -> list[Tensor]:
    before = torch.cat([state[None], states])[:-1]
    of_state, of_weights = torch.zeros_like(state), [torch.zeros_like(weight) for weight in weights]
    of_gates = []
    for slope, given, earlier, later in zip(*(x.flip(0) for x in (grad, gates, before, states)), strict=True):
        step, of_state, more = _return(slope + of_state, given, earlier, later, weights, kind)
        of_gates.append(step)
        of_weights = [one + other for one, other in zip(of_weights, more, strict=True)]
    return [torch.stack(of_gates[::-1]), of_state, *of_weights]


def _return(
    flow: Tensor, given: Tensor, before: Tensor, after: Tensor, weights: list[Tensor], kind: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of a step's gates, of the state before it, and of the weights, from that of the state after it."""
    weight, *more = weights
    hidden = before[:, : weight.shape[1]]
    if kind == "lstm":
        slopes, of_cell, of_more = _return_lstm(flow, given + F.linear(hidden, weight), before, weights)
        return slopes, torch.cat([slopes @ weight, of_cell], 1), [slopes.t() @ hidden, *of_more]
    if kind != "gru":
        slopes = flow * (1 - after * after) if kind == "tanh" else flow * (after > 0)
        return slopes, slopes @ weight, [slopes.t() @ hidden]
    new, kept = given.chunk(3, 1), F.linear(hidden, weight, *more).chunk(3, 1)
    r, z = (new[0] + kept[0]).sigmoid(), (new[1] + kept[1]).sigmoid()
    n = (new[2] + r * kept[2]).tanh()
    of_n = flow * (1 - z) * (1 - n * n)
    of_r, of_z = of_n * kept[2] * r * (1 - r), flow * (hidden - n) * z * (1 - z)
    of_kept = torch.cat([of_r, of_z, of_n * r], 1)
    of_weights = [of_kept.t() @ hidden, *(of_kept.sum(0) for _ in more)]
    return torch.cat([of_r, of_z, of_n], 1), flow * z + of_kept @ weight, of_weights


def _return_lstm(
    flow: Tensor, gates: Tensor, before: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of an LSTM's gates, of its cell state before the step, and of its projection."""
    weight, *projection = weights
    size = weight.shape[1]
    i, f, g, o = (part.tanh() if place == 2 else part.sigmoid() for place, part in enumerate(gates.chunk(4, 1)))
    cell = (f * before[:, size:] + i * g).tanh()
    of_hidden = flow[:, :size]
    of_projection = [of_hidden.t() @ (o * cell) for _ in projection]
    of_output = of_hidden @ projection[0] if projection else of_hidden
    of_cell = flow[:, size:] + of_output * o * (1 - cell * cell)
    of_i, of_f = of_cell * g * i * (1 - i), of_cell * before[:, size:] * f * (1 - f)
    of_g, of_o = of_cell * i * (1 - g * g), of_output * cell * o * (1 - o)
    return torch.cat([of_i, of_f, of_g, of_o], 1), of_cell * f, of_projection


RECURRENCE = torch.ops.dynaxla.recurrence.default
RECURRENCE_BACKWARD = torch.ops.dynaxla.recurrence_backward.default
