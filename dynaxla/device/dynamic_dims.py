"""Which sizes of a kind of calls vary, from the sizes of those that were made programs of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaxla.device.view_layout import Ints

MANY = 12
"""Programs of a kind that differ in the same sizes, behind which more are expected: a program of fixed sizes takes 20 ms, a
graph with its first program ten times that. The layers of a network seldom differ so often in one size alone."""

MANY_APART = 40
"""Likewise of kinds of which several sizes vary independently, as those of a network's layers do: more than these have."""

MOST_APART = 3


@dataclass(frozen=True, slots=True)
class DynamicDims:
    """Which sizes of a kind vary.

    Attributes:
        base: the sizes of one call.
        classes: for each size the number of the class that it varies with; -1: it does not vary.
    """

    base: Ints
    classes: Ints

    def takes(self, values: Ints) -> bool:
        """Whether a call of these sizes differs in nothing else: sizes of one class are equal, and 2 or more."""
        found: dict[int, int] = {}
        for value, was, number in zip(values, self.base, self.classes, strict=True):
            if (value != was) if number < 0 else (value < 2 or found.setdefault(number, value) != value):
                return False
        return True

    def examples(self) -> list[int]:
        """A size of each class."""
        return [self.base[self.classes.index(number)] for number in range(max(self.classes) + 1)]


def find_dynamic_dims(seen: Sequence[Ints], values: Ints) -> DynamicDims | None:
    """The sizes in which many calls, the last of them of these values, differ alone: `MANY` where these move together, else
    `MANY_APART`; None if they differ in others."""
    differing = (
        tuple(i for i, (one, two) in enumerate(zip(values, other, strict=True)) if one != two)
        for other in reversed(seen)
    )
    for varying in dict.fromkeys(differing):
        fixed = [i for i in range(len(values)) if i not in varying]
        alike = [values, *(each for each in seen if all(each[i] == values[i] for i in fixed))]
        columns = {i: tuple(each[i] for each in alike) for i in varying}
        numbers = {column: number for number, column in enumerate(dict.fromkeys(columns.values()))}
        moves = {tuple(size - column[0] for size in column) for column in numbers}
        if len(alike) < (MANY if len(moves) == 1 else MANY_APART) or len(moves) > MOST_APART:
            continue
        classes = tuple(numbers[columns[i]] if i in columns else -1 for i in range(len(values)))
        examples = [values[i] for i in varying]
        if min(examples) >= 2 and len(set(examples)) == len(numbers):
            return DynamicDims(values, classes)
    return None
