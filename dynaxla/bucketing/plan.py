"""Which sizes of a part are bucketed, where a call's sizes are read, and what their buckets are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from dynaxla.bucketing.joint import Filling, JointPolicies
from dynaxla.bucketing.sizes import Size, size_of
from dynaxla.policy import BucketPolicy, JointPolicy


@dataclass(frozen=True, slots=True)
class SizeSource:
    """Where a symbol's value is read: `argument` itself, or the size of its dim `dim`, divided by `divisor`."""

    argument: int
    dim: int | None
    divisor: int = 1

    def __str__(self) -> str:
        return f"input {self.argument}" if self.dim is None else f"dim {self.dim} of input {self.argument}"

    def read(self, args: Sequence[Any]) -> int:
        value = args[self.argument] if self.dim is None else args[self.argument].shape[self.dim]
        return int(value) // self.divisor


@dataclass(frozen=True, slots=True)
class Buckets:
    """One bucket of a part.

    Attributes:
        padded: the padded sizes of the symbols that are padded.
        fixed: symbols whose size is alone in its bucket: nothing to pad.
    """

    padded: Mapping[sympy.Symbol, int]
    fixed: Mapping[sympy.Symbol, int]


@dataclass(frozen=True, slots=True)
class Group:
    """Sizes that are bucketed together.

    Attributes:
        members: for each size of the policy: the symbol's place in the plan, or behind a minus sign and reduced by one
            (`~size`) a size that does not vary in this part.
        policy: from the sizes to the buckets.
    """

    members: tuple[int, ...]
    policy: BucketPolicy | JointPolicy

    def bucket(self, values: Sequence[int]) -> tuple[int, ...]:
        """The buckets of the members, for the values of all symbols."""
        sizes = [values[m] if m >= 0 else ~m for m in self.members]
        if isinstance(self.policy, JointPolicy):
            return self.policy.bucket(*sizes)
        return (self.policy.bucket(sizes[0]),)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The sizes of a part that vary, and their policies.

    Attributes:
        symbols: in a fixed order, which is that of all values below.
        sources: where each is read.
        groups: the policies; every symbol is a member of one group.
        limits: the largest size of each that the graph holds for, or None.
    """

    symbols: tuple[sympy.Symbol, ...]
    sources: tuple[SizeSource, ...]
    groups: tuple[Group, ...]
    limits: tuple[int | None, ...]

    def bucket(self, values: Sequence[int]) -> tuple[int, ...]:
        """The buckets of the symbols' values.

        Raises:
            BucketError: a size is above what its policy takes.
        """
        buckets = list(values)
        for group in self.groups:
            for member, bucket in zip(group.members, group.bucket(values), strict=True):
                if member >= 0:
                    limit = self.limits[member]
                    buckets[member] = bucket if limit is None else max(values[member], min(bucket, limit))
        return tuple(buckets)

    def holds(self, bucket: Sequence[int], values: Sequence[int]) -> bool:
        """Whether the program of a bucket runs for these values of the symbols, which may belong to a smaller bucket."""
        buckets = self.at(bucket)
        sizes = zip(self.symbols, values, bucket, strict=True)
        return all(1 < v <= b if s in buckets.padded else v == b for s, v, b in sizes)

    def at(self, bucket: Sequence[int]) -> Buckets:
        """What is padded at a bucket, and what is not: a size that no other size shares the bucket with."""
        padded: dict[sympy.Symbol, int] = {}
        fixed: dict[sympy.Symbol, int] = {}
        for place, (symbol, size) in enumerate(zip(self.symbols, bucket, strict=True)):
            smaller = [*bucket[:place], size - 1, *bucket[place + 1 :]]
            alone = size <= 1 or self.bucket(smaller)[place] != size
            (fixed if alone else padded)[symbol] = size
        return Buckets(padded, fixed)


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a graph's symbols.

    Attributes:
        single: of a symbol that varies alone, where the user says nothing.
        joint: of several that vary, likewise.
        given: the user's, by symbol.
        together: the user's for several sizes together: symbols, or sizes that do not vary.
        shapes: those of the inputs of the whole graph, of which a part sees only some.
    """

    single: BucketPolicy
    joint: JointPolicies | None
    given: Mapping[sympy.Symbol, BucketPolicy] = field(default_factory=dict)
    together: tuple[tuple[tuple[Size, ...], JointPolicy], ...] = ()
    shapes: tuple[tuple[Size, ...], ...] = ()

    def groups(self, symbols: Sequence[sympy.Symbol]) -> tuple[Group, ...]:
        """The policies of a part's symbols. Where it sees only some of the sizes that go together, these go by default."""
        places = {symbol: i for i, symbol in enumerate(symbols)}
        groups = [Group((places[s],), policy) for s, policy in self.given.items() if s in places]
        for sizes, policy in self.together:
            members = [~s if isinstance(s, int) else places.get(s) for s in sizes]
            if None not in members:
                groups.append(Group(tuple(members), policy))  # type: ignore[arg-type]
        told = {member for group in groups for member in group.members}
        rest = tuple(place for place in places.values() if place not in told)
        if self.joint is None or len(rest) == 1:
            return (*groups, *(Group((place,), self.single) for place in rest))
        filling = Filling.of([symbols[place] for place in rest], self.shapes)
        return (*groups, Group(rest, self.joint.of(filling))) if rest else tuple(groups)


def plan_part(placeholders: Sequence[Node], arguments: Iterable[int | None], policies: Policies) -> BucketPlan | None:
    """The plan of a part; None if a symbol's value cannot be read off the arguments.

    Args:
        placeholders: of the part's graph, with `meta["val"]`.
        arguments: for each placeholder the caller's argument, or None where it is none of them.
        policies: of the symbols.
    """
    found: dict[sympy.Symbol, SizeSource] = {}
    wanted: dict[sympy.Symbol, torch.SymInt] = {}
    for node, argument in zip(placeholders, arguments, strict=True):
        value = node.meta["val"]
        sizes = [(i, s) for i, s in enumerate(value.shape)] if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in sizes:
            expression = size_of(size) if isinstance(size, (int, torch.SymInt)) else 0
            if isinstance(expression, int):
                continue
            wanted.update(dict.fromkeys(expression.free_symbols, size))
            source = None if argument is None else _source(expression, argument, dim)
            if source is not None and source[0] not in found:
                found[source[0]] = source[1]
    if set(wanted) - set(found):
        return None
    symbols = tuple(sorted(found, key=str))
    limits = tuple(_limit(symbol, wanted[symbol]) for symbol in symbols)
    return BucketPlan(symbols, tuple(found[s] for s in symbols), policies.groups(symbols), limits)


def _source(size: Any, argument: int, dim: int | None) -> tuple[sympy.Symbol, SizeSource] | None:
    """A symbol that the size alone determines: s, or a whole multiple of s."""
    factor, rest = size.as_coeff_Mul()
    if isinstance(rest, sympy.Symbol) and factor.is_Integer and factor > 0:
        return rest, SizeSource(argument, dim, int(factor))
    return None


def _limit(symbol: sympy.Symbol, size: torch.SymInt) -> int | None:
    """The declared or guarded maximum of a symbol, where the graph knows one."""
    ranges = size.node.shape_env.var_to_range
    upper = ranges[symbol].upper if symbol in ranges else None
    return int(upper) if upper is not None and getattr(upper, "is_Integer", isinstance(upper, int)) else None
