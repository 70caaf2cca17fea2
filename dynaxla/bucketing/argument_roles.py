"""What a pad rule takes each argument of its op for: the one place that says where a bucket may stand for a size.

A size of the symbolic graph that reaches an op as an argument stands for its true value. The bucket's size takes its place
only where the rule says so of this argument. Where the rule takes no size at all, the op cannot be padded, and the reason
names the argument. Every argument of every op with a rule is one of `Takes`, which `check_arguments` makes sure of when the
rules are loaded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dynaxla.bucketing.padded_value import Results, Unpaddable
from dynaxla.bucketing.size_expressions import is_varying
from dynaxla.torch_api.overloads import OpOverload, parameters


class Takes(enum.Enum):
    """What an argument is to a rule."""

    DATA = "a tensor: real elements and padding"
    TRUE_SIZE = "a number that may be made of sizes: the rule computes with the true sizes' value"
    BUCKET_SIZE = "a size of an operand or of the result, which has the bucket's"
    LAYOUT = "which dims, windows, orders or kinds are meant: the same at all sizes"
    CONSTANT = "a number of the op's arithmetic that is the same at all sizes"


DATA, TRUE_SIZE, BUCKET_SIZE, LAYOUT, CONSTANT = Takes
_SIZES = (TRUE_SIZE, BUCKET_SIZE, DATA)  # in a tensor's place, as in `x * s`, a size stands for a tensor of no dims
_NEVER_SIZES = ("bool", "str", "ScalarType", "Device", "Layout", "MemoryFormat", "Generator")


Body = Callable[[Any], Results]
"""From a `Call`, which is made of what stands here, to its result on padded values."""


@dataclass(frozen=True, slots=True, eq=False)
class PadRule:
    """What an op does to padding: how it is made to run on padded values, and what it takes its arguments for.

    Attributes:
        body: gives the padded result, or a tuple of results (None for one that cannot be had); raises Unpaddable.
        numbers: what it takes each number for, by the argument's name. Tensors are data, all else that is no number layout.
        others: what it takes numbers of other names for; None where it knows no others.
    """

    body: Body
    numbers: Mapping[str, Takes]
    others: Takes | None = None

    def __call__(self, call: Any) -> Results:
        return self.body(call)

    @property
    def name(self) -> str:
        return self.body.__name__.rstrip("_")

    @property
    def summary(self) -> str:
        """What it does to padding: the first line of its docstring."""
        return (self.body.__doc__ or "").partition("\n")[0].removesuffix(".")

    def takes(self, argument: torch.Argument) -> Takes | None:
        """What it takes an argument for; None if it does not say."""
        kind = str(argument.real_type)
        if "Tensor" in kind:
            return DATA
        if any(name in kind for name in _NEVER_SIZES):
            return LAYOUT
        return self.numbers.get(argument.name, self.others)

    def arguments(self, target: OpOverload) -> dict[str, Takes | None]:
        """What it takes every argument of an op for."""
        return {argument.name: self.takes(argument) for argument in parameters(target)}


def takes(_others: Takes | None = None, /, **numbers: Takes) -> Callable[[Body], PadRule]:
    """Makes a function a pad rule: each keyword says what it takes that argument for, `_others` what all other numbers."""
    return lambda body: PadRule(body, numbers, _others)


def require_claimed(arguments: Mapping[str, Takes | None], given: Mapping[str, object]) -> None:
    """Raises Unpaddable where a size that varies reaches an argument that the rule takes for no size."""
    for name, number in unclaimed(arguments, given):
        if is_varying(number):
            raise Unpaddable(f"its {name} is the size {number}, and the rule takes no size there")


def unclaimed(arguments: Mapping[str, Takes | None], given: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """What is given for the arguments that the rule takes for no size, by their names."""
    for name, value in given.items():
        if arguments[name] not in _SIZES:
            yield from ((name, part) for part in (value if isinstance(value, (list, tuple)) else (value,)))


@takes()
def no_rule(call: object) -> Results:
    """Of an op whose rule is not known: it cannot be padded."""
    raise Unpaddable("it has no rule for padded values")


def check_arguments(rules: Mapping[OpOverload, PadRule]) -> None:
    """Makes sure that every rule says what it takes each argument of its ops for.

    Args:
        rules: by their ops.

    Raises:
        TypeError: a rule does not say what it takes an argument for, names an argument that none of its ops has, or is
            called as another.
    """
    by_name: dict[str, PadRule] = {}
    known: dict[str, set[str]] = {}
    for target, rule in rules.items():
        if by_name.setdefault(rule.name, rule) is not rule:
            raise TypeError(f"two pad rules are called {rule.name}")
        arguments = rule.arguments(target)
        known.setdefault(rule.name, set()).update(arguments)
        if silent := [argument for argument, what in arguments.items() if what is None]:
            raise TypeError(f"the pad rule {rule.name} does not say what it takes {_listed(silent)} of {target} for")
    for name, rule in by_name.items():
        if unknown := rule.numbers.keys() - known[name]:
            raise TypeError(f"the pad rule {name} names {_listed(unknown)}, which none of its ops takes")


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
