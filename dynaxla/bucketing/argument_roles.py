"""The role of each argument of an op in its pad rule: the one place that decides where a bucket may replace a true size.

A symbolic size that reaches an op as an argument means its true value. The bucket's size replaces it only where the rule gives
that argument the role BUCKET_SIZE. Where the role allows no size at all, the op cannot be padded, and the reason names the
argument. `check_arguments` makes sure, when the rules are loaded, that every argument of every op with a rule has a role.
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
    """The role of an argument in a pad rule."""

    DATA = "a tensor: real elements and padding"
    TRUE_SIZE = "a number that may be made of sizes: the rule computes with the true sizes' value"
    BUCKET_SIZE = "a size of an operand or of the result, which has the bucket's"
    LAYOUT = "which dims, windows, orders or kinds are meant: the same at all sizes"
    CONSTANT = "a number of the op's arithmetic that is the same at all sizes"


DATA, TRUE_SIZE, BUCKET_SIZE, LAYOUT, CONSTANT = Takes
_SIZES = (TRUE_SIZE, BUCKET_SIZE, DATA)  # in a tensor's place, as in `x * s`, a size stands for a tensor of no dims
_NEVER_SIZES = ("bool", "str", "ScalarType", "Device", "Layout", "MemoryFormat", "Generator")


Body = Callable[[Any], Results]
"""Computes the result of a call on padded values; its argument is a `bucketing.rule_context.RuleContext`, which imports
this module."""


@dataclass(frozen=True, slots=True, eq=False)
class PadRule:
    """What an op does to padding: how it runs on padded values, and the role of each of its arguments.

    Attributes:
        body: computes the padded result, or a tuple of results (None for one that is unknown on padded values); raises
            Unpaddable.
        numbers: the role of each number, by the argument's name. Tensors are DATA; arguments that are neither are LAYOUT.
        others: the role of numbers that `numbers` does not name; None if the rule supports no others.
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
        """The first line of the body's docstring, which says what the op does to padding."""
        return (self.body.__doc__ or "").partition("\n")[0].removesuffix(".")

    def takes(self, argument: torch.Argument) -> Takes | None:
        """The role of an argument; None if the rule does not say."""
        kind = str(argument.real_type)
        if "Tensor" in kind:
            return DATA
        if any(name in kind for name in _NEVER_SIZES):
            return LAYOUT
        return self.numbers.get(argument.name, self.others)

    def arguments(self, target: OpOverload) -> dict[str, Takes | None]:
        """The role of every argument of an op, by name."""
        return {argument.name: self.takes(argument) for argument in parameters(target)}


def takes(_others: Takes | None = None, /, **numbers: Takes) -> Callable[[Body], PadRule]:
    """Makes a function a pad rule: each keyword is the role of the argument of that name, `_others` that of all
    other numbers."""
    return lambda body: PadRule(body, numbers, _others)


def check_sizes_allowed(arguments: Mapping[str, Takes | None], given: Mapping[str, object]) -> None:
    """Raises Unpaddable if a symbolic size reaches an argument whose role allows no size."""
    for name, number in non_size_arguments(arguments, given):
        if is_varying(number):
            raise Unpaddable(f"its {name} is the size {number}, and the rule takes no size there")


def non_size_arguments(
    arguments: Mapping[str, Takes | None], given: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Yields (name, value) of the arguments whose role allows no size; elements of lists one by one."""
    for name, value in given.items():
        if arguments[name] not in _SIZES:
            yield from ((name, part) for part in (value if isinstance(value, (list, tuple)) else (value,)))


@takes()
def no_rule(call: object) -> Results:
    """The rule of ops without one: they cannot be padded."""
    raise Unpaddable("it has no rule for padded values")


def check_arguments(rules: Mapping[OpOverload, PadRule]) -> None:
    """Checks that every rule gives each argument of its ops a role.

    Args:
        rules: the rule of each op.

    Raises:
        TypeError: a rule gives an argument no role, names an argument that none of its ops has, or shares its name with
            another rule.
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
