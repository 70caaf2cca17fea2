"""Cases of recurrent layers, forward and backward: the length of the sequence varies, or the batch."""

from __future__ import annotations

from torch import Tensor

from dynaxla.custom_ops.recurrence import RECURRENCE, RECURRENCE_BACKWARD, Kind
from tests.bucketing.plain_cases import floats
from tests.bucketing.poison import Case, case

SIZES: dict[Kind, tuple[int, int, tuple[tuple[int, ...], ...]]] = {
    "tanh": (3, 3, ((3, 3),)),
    "relu": (3, 3, ((3, 3),)),
    "gru": (3, 1, ((3, 1), (3,))),
    "lstm": (4, 2, ((4, 1),)),
}
"""By kind: the sizes of the gates and the state, and the shapes of the weights."""


def _states(kind: Kind, gates: Tensor, state: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    states = RECURRENCE(gates, state, list(weights), kind)
    return states, states[-1], states.sum(0)


def _gradients(kind: Kind, grad: Tensor, gates: Tensor, state: Tensor, *weights: Tensor) -> list[Tensor]:
    states = RECURRENCE(gates, state, list(weights), kind)
    found: list[Tensor] = RECURRENCE_BACKWARD(grad, states, gates, state, list(weights), kind)
    return found


def _cases(kind: Kind) -> list[Case]:
    gates, state, weights = SIZES[kind]
    shapes = [floats(*shape) for shape in weights]
    made = []
    for name, time, batch in (("time", None, 2), ("batch", 3, None), ("both", None, None)):
        operands = (floats(time, batch, gates), floats(batch, state), *shapes)
        made += [
            case("recurrence", f"{kind}_{name}", lambda *args: _states(kind, *args), *operands),
            case(
                "recurrence_backward",
                f"{kind}_backward_{name}",
                lambda *args: _gradients(kind, *args),
                floats(time, batch, state),
                *operands,
            ),
        ]
    return made


CASES: list[Case] = [each for kind in SIZES for each in _cases(kind)]
