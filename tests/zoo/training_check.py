"""Whether two trainings of one network are the same thing: losses, every gradient, parameters and buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.zoo.training import Trained

LIMIT = 1e-3
NOTHING = 1e-6
"""Of the largest gradient of any parameter: a gradient below it is zero but for rounding, as that of a key's bias is."""

Worst = tuple[float, str]


@dataclass(frozen=True)
class Differences:
    """The largest relative differences of two trainings, each with the name of the tensor.

    A tensor's is max|a - b| / max|b|; infinite where None, NaN or infinity stands in one of the two alone, or where an
    integer differs.

    Attributes:
        loss: of any step.
        gradients: of the first step. Where b is zero but for rounding, so must a be, and the difference counts as zero.
        state: of parameters and buffers after the last step.
        zeros: how many gradients are zero but for rounding.
    """

    loss: float
    gradients: Worst
    state: Worst
    zeros: int

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradients[0], self.state[0])


def compare(mine: Trained, eager: Trained) -> Differences:
    """The differences of `mine`, relative to `eager`.

    Raises:
        AssertionError: they have other parameters or buffers, or eager's losses are no numbers.
    """
    assert all(map(math.isfinite, eager.losses)), eager.losses
    nothing = NOTHING * max((largest(x) for x in eager.gradients.values() if x is not None), default=0.0)
    zeros = {name for name, x in eager.gradients.items() if x is not None and largest(x) <= nothing}
    pairs = _pairs(mine.gradients, eager.gradients)
    gradients = [(_zero_difference(a, nothing) if name in zeros else difference(a, b), name) for name, a, b in pairs]
    state = [(difference(a, b), name) for name, a, b in _pairs(mine.state, eager.state)]
    loss = difference(torch.tensor(mine.losses), torch.tensor(eager.losses))
    return Differences(loss, _worst(gradients), _worst(state), len(zeros))


def _pairs(
    mine: Mapping[str, Tensor | None], eager: Mapping[str, Tensor | None]
) -> Iterable[tuple[str, Tensor | None, Tensor | None]]:
    assert mine.keys() == eager.keys()
    return ((name, mine[name], eager[name]) for name in eager)


def _worst(found: list[Worst]) -> Worst:
    return max(found, default=(0.0, ""))


def _zero_difference(mine: Tensor | None, nothing: float) -> float:
    return 0.0 if mine is not None and largest(mine) <= nothing else math.inf


def largest(x: Tensor) -> float:
    """The largest magnitude; zero of no elements."""
    return x.abs().max().item() if x.numel() else 0.0


def difference(mine: Tensor | None, eager: Tensor | None) -> float:
    """max|mine - eager| / max|eager|, in float64."""
    if mine is None or eager is None:
        return 0.0 if mine is eager else math.inf
    if not eager.is_floating_point():
        return 0.0 if torch.equal(mine, eager) else math.inf
    finite = eager.isfinite()
    if not torch.equal(mine.isfinite(), finite):
        return math.inf
    off = largest((mine.double() - eager.double())[finite])
    scale = largest(eager.double()[finite])
    if off == 0.0:
        return 0.0
    return off / scale if scale > 0.0 else math.inf
