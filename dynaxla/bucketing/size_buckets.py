"""The bucket scheme of a part: where a call's sizes are read, and which bucket each of them has."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from dynaxla.bucket_policy import BucketPolicy, JointPolicy
from dynaxla.bucketing.joint_policy import DimUsage, JointPolicies
from dynaxla.bucketing.size_expressions import Size, is_fixed, size_of
from dynaxla.errors import BucketError


@dataclass(frozen=True, slots=True)
class SizeSource:
    """Where a symbol's value is read: (value - offset) // divisor, where value is argument number `argument`, or the size of
    its dim `dim`."""

    argument: int
    dim: int | None
    divisor: int = 1
    offset: int = 0

    def __str__(self) -> str:
        return f"input {self.argument}" if self.dim is None else f"dim {self.dim} of input {self.argument}"

    def read(self, args: Sequence[Any]) -> int:
        value = args[self.argument] if self.dim is None else args[self.argument].shape[self.dim]
        if isinstance(value, float):  # its bits: a size that it was made of, as n / 3, is never padded
            return int.from_bytes(struct.pack("d", value), "little")
        return (int(value) - self.offset) // self.divisor


@dataclass(frozen=True, slots=True)
class PartBucket:
    """One bucket of a part.

    Attributes:
        padded: the padded size of each symbol that is padded.
        fixed: symbols that have one size in this bucket, so that nothing is padded.
        same: maps symbols to a padded symbol that they equal in every call of this bucket.
        scalars: symbols that are runtime scalars: the bucket holds for all of their values.
    """

    padded: Mapping[sympy.Symbol, int]
    fixed: Mapping[sympy.Symbol, int]
    same: Mapping[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    scalars: tuple[sympy.Symbol, ...] = ()

    @property
    def read(self) -> tuple[sympy.Symbol, ...]:
        """The symbols whose true values are inputs of the program, in this order."""
        return (*self.padded, *self.scalars)


@dataclass(frozen=True, slots=True)
class PolicyGroup:
    """Sizes that one policy buckets together.

    Attributes:
        members: per size that the policy takes, the number of its class; or `~size` (negative) for a size that is fixed in this
            part.
        policy: maps the sizes to buckets.
    """

    members: tuple[int, ...]
    policy: BucketPolicy | JointPolicy

    def bucket(self, values: Sequence[int]) -> tuple[int, ...]:
        """The buckets of the members, given the sizes of all classes.

        Raises:
            BucketError: the policy, which may be a class of the user's, gives no bucket for a size, or a smaller one.
        """
        sizes = [values[m] if m >= 0 else ~m for m in self.members]
        policy = self.policy
        buckets: Sequence[int] = (
            policy.bucket(*sizes) if isinstance(policy, JointPolicy) else (policy.bucket(sizes[0]),)
        )
        if len(buckets) != len(sizes) or any(map(operator.lt, buckets, sizes)):
            raise BucketError(
                f"{policy} gives the sizes {tuple(sizes)} the buckets {buckets}",
                "a policy gives each size one bucket, which is at least as large",
            )
        return tuple(buckets)


@dataclass(frozen=True, slots=True)
class BucketScheme:
    """How a part's symbolic sizes are read and bucketed. Symbols that were equal in every call so far form one class.

    Attributes:
        symbols: the symbols, in the order of a call's size values.
        sources: where each symbol is read, followed by where the scalars are read.
        limits: per symbol the largest size for which the graph's guards hold, or None.
        policies: the policies of the graph's symbols.
        classes: per symbol the number of its class; classes are numbered in the order of their first symbols.
        groups: the policies by class; every class is a member of exactly one group.
        scalars: symbols on which no tensor's size depends (numbers, strides). One program serves all of their values, so they
            have no buckets. Their values come last in a call's size values.
        cells: the cells of a plan; empty for a scheme that is not a plan.
    """

    symbols: tuple[sympy.Symbol, ...]
    sources: tuple[SizeSource, ...]
    limits: tuple[int | None, ...]
    policies: SymbolPolicies
    classes: tuple[int, ...]
    groups: tuple[PolicyGroup, ...]
    scalars: tuple[sympy.Symbol, ...] = ()
    cells: frozenset[tuple[int, ...]] = frozenset()

    @classmethod
    def initial(
        cls,
        symbols: tuple[sympy.Symbol, ...],
        sources: tuple[SizeSource, ...],
        limits: tuple[int | None, ...],
        policies: SymbolPolicies,
        scalars: tuple[sympy.Symbol, ...] = (),
    ) -> BucketScheme:
        """The scheme before any call: symbols that may be equal form one class until a call in which they differ."""
        classes = _numbered([policies.kind(symbol) for symbol in symbols])
        return cls(symbols, sources, limits, policies, classes, policies.groups(symbols, classes), scalars)

    def refine(self, values: Sequence[int]) -> BucketScheme:
        """The scheme whose classes are split where these sizes differ."""
        classes = _numbered(list(zip(self.classes, values[: len(self.symbols)], strict=True)))
        return replace(self, classes=classes, groups=self.policies.groups(self.symbols, classes))

    @property
    def order(self) -> tuple[sympy.Symbol, ...]:
        """The symbols in the order of a call's values."""
        return (*self.symbols, *self.scalars)

    @property
    def count(self) -> int:
        """The number of classes, which is the length of a bucket."""
        return max(self.classes, default=-1) + 1

    def spread(self, bucket: Sequence[int]) -> tuple[int, ...]:
        """Expands the sizes of the classes to one size per symbol."""
        return tuple([bucket[number] for number in self.classes])

    def fits(self, values: Sequence[int]) -> bool:
        """Whether the symbols of every class are equal in these values."""
        return self.spread(self._sizes(values)) == tuple(values[: len(self.symbols)])

    def bucket(self, values: Sequence[int]) -> tuple[int, ...]:
        """The buckets of the classes, for values that fit.

        A refined scheme has more classes, so the length of a bucket identifies the scheme of a part to which it belongs.

        Raises:
            BucketError: a size is above the largest bucket, and its policy says that this is an error.
        """
        return self._bucket(self._sizes(values))

    def replace_plan(self, cells: Collection[tuple[int, ...]], policy: JointPolicy) -> BucketScheme:
        """The scheme that buckets the same sizes by a plan.

        Args:
            cells: the plan's cells, one bound per class.
            policy: maps sizes to the cells.
        """
        return replace(self, groups=(PolicyGroup(tuple(range(self.count)), policy),), cells=frozenset(cells))

    def covers(self, values: Sequence[int]) -> bool:
        """Whether a cell of the plan holds these values, which must fit."""
        return self._bucket(self._sizes(values)) in self.cells

    def holds(self, bucket: Sequence[int], values: Sequence[int]) -> bool:
        """Whether the program of `bucket` can serve these values; they may belong to a smaller bucket."""
        buckets = self.make_bucket(bucket)
        firsts = zip(self._firsts(), self._sizes(values), bucket, strict=True)
        return self.fits(values) and all(
            1 < v <= b if self.symbols[first] in buckets.padded else v == b for first, v, b in firsts
        )

    def make_bucket(self, bucket: Sequence[int]) -> PartBucket:
        """What is padded in a bucket, and what is fixed because its bucket holds one size only.

        In a plan only sizes 0 and 1 are fixed: a later plan with fewer cells may use the programs of this one.
        """
        firsts = self._firsts()
        alone = [
            size <= 1
            or (not self.cells and self._bucket([*bucket[:place], size - 1, *bucket[place + 1 :]])[place] != size)
            for place, size in enumerate(bucket)
        ]
        padded: dict[sympy.Symbol, int] = {}
        fixed: dict[sympy.Symbol, int] = {}
        same: dict[sympy.Symbol, sympy.Symbol] = {}
        for place, (symbol, number) in enumerate(zip(self.symbols, self.classes, strict=True)):
            if alone[number]:
                fixed[symbol] = bucket[number]
            elif place == firsts[number]:
                padded[symbol] = bucket[number]
            else:
                same[symbol] = self.symbols[firsts[number]]
        return PartBucket(padded, fixed, same, self.scalars)

    def _bucket(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The buckets of the classes, given the sizes of the classes."""
        buckets = list(sizes)
        for group in self.groups:
            for member, bucket in zip(group.members, group.bucket(sizes), strict=True):
                if member >= 0:
                    limit = self._limit(member)
                    buckets[member] = bucket if limit is None else max(sizes[member], min(bucket, limit))
        return tuple(buckets)

    def _limit(self, number: int) -> int | None:
        limits = [limit for limit, c in zip(self.limits, self.classes, strict=True) if c == number]
        return min((limit for limit in limits if limit is not None), default=None)

    def sizes_of(self, values: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the classes, for values of the symbols."""
        return tuple(self._sizes(values))

    def _sizes(self, values: Sequence[int]) -> list[int]:
        return [values[first] for first in self._firsts()]

    def _firsts(self) -> list[int]:
        """The index of the first symbol of each class."""
        return [self.classes.index(number) for number in range(self.count)]


@dataclass(frozen=True, slots=True)
class SymbolPolicies:
    """The bucket policies of a graph's symbols.

    Attributes:
        single: the default policy of a symbol that varies alone.
        joint: the default policies of several symbols that vary together; None if the user gave one policy for all sizes.
        given: the user's policies, by symbol.
        together: the user's joint policies: (the sizes that each takes, symbolic or fixed; the policy).
        shapes: the shapes of the whole graph's inputs, of which a part sees only some.
        results: the shapes of the whole graph's results.
        apart: whether equal symbols stay separate classes, as in a warm-up, whose examples may be equal by chance.
    """

    single: BucketPolicy
    joint: JointPolicies | None
    given: Mapping[sympy.Symbol, BucketPolicy] = field(default_factory=dict)
    together: tuple[tuple[tuple[Size, ...], JointPolicy], ...] = ()
    shapes: tuple[tuple[Size, ...], ...] = ()
    apart: bool = False
    results: tuple[tuple[Size, ...], ...] = ()

    @property
    def chosen(self) -> bool:
        """Whether the user chose buckets."""
        return self.joint is None or bool(self.given) or bool(self.together)

    def kind(self, symbol: sympy.Symbol) -> sympy.Symbol | frozenset[int]:
        """What symbols must share to form one class: the user gave them no policy, and they are sizes of the same dims.

        A batch and a length that happen to be equal in the first call are therefore separate.
        """
        if self.apart or symbol in self.given or any(symbol in sizes for sizes, _ in self.together):
            return symbol
        return frozenset(dim for shape in self.shapes for dim, size in enumerate(shape) if size == symbol)

    def groups(self, symbols: Sequence[sympy.Symbol], classes: Sequence[int]) -> tuple[PolicyGroup, ...]:
        """The policy groups of a part's classes. A joint policy of the user's applies if the part has all of its sizes."""
        firsts = {number: symbols[place] for place, number in reversed(list(enumerate(classes)))}
        same = {symbol: firsts[number] for symbol, number in zip(symbols, classes, strict=True)}
        numbers = dict(zip(symbols, classes, strict=True))
        groups = [PolicyGroup((numbers[s],), policy) for s, policy in self.given.items() if s in numbers]
        for sizes, policy in self.together:
            members = [~s if isinstance(s, int) else numbers.get(s) for s in sizes]
            if None not in members:
                groups.append(PolicyGroup(tuple(members), policy))  # type: ignore[arg-type]
        told = {member for group in groups for member in group.members}
        rest = tuple(number for number in sorted(firsts) if number not in told)
        if self.joint is None or not rest:
            return (*groups, *(PolicyGroup((number,), self.single) for number in rest))
        shapes, results = (
            [[size if is_fixed(size) else size_of(size.xreplace(same)) for size in shape] for shape in every]
            for every in (self.shapes, self.results)
        )
        filling = DimUsage.of([firsts[number] for number in rest], shapes, results)
        alone = len(rest) == 1 and not filling.cached and not filling.prompts
        return (*groups, PolicyGroup(rest, self.single if alone else self.joint.of(filling)))

    def settle(self, replace_symbols: Callable[[sympy.Expr], sympy.Expr]) -> SymbolPolicies:
        """The policies after guards have replaced symbols by others (`replace_symbols`)."""

        def replaced(size: Size) -> Size:
            return size if is_fixed(size) else size_of(replace_symbols(size))

        given = {replaced(symbol): policy for symbol, policy in self.given.items()}
        together = tuple((tuple(map(replaced, sizes)), policy) for sizes, policy in self.together)
        shapes, results = (tuple(tuple(map(replaced, s)) for s in every) for every in (self.shapes, self.results))
        return replace(self, given=given, together=together, shapes=shapes, results=results)


def _numbered(kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """Numbers equal values alike, in the order of their first occurrence."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds)
