"""What the buckets of a part's sizes are, and where a call's sizes are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from dynaxla.bucket_policy import BucketPolicy, JointPolicy
from dynaxla.bucketing.joint_policy import Filling, JointPolicies
from dynaxla.bucketing.size_expressions import Size, is_fixed, size_of


@dataclass(frozen=True, slots=True)
class SizeSource:
    """Where a symbol's value is read: `argument` itself, or the size of its dim `dim`, less `offset`, divided by `divisor`."""

    argument: int
    dim: int | None
    divisor: int = 1
    offset: int = 0

    def __str__(self) -> str:
        return f"input {self.argument}" if self.dim is None else f"dim {self.dim} of input {self.argument}"

    def read(self, args: Sequence[Any]) -> int:
        value = args[self.argument] if self.dim is None else args[self.argument].shape[self.dim]
        return (int(value) - self.offset) // self.divisor


@dataclass(frozen=True, slots=True)
class Buckets:
    """One bucket of a part.

    Attributes:
        padded: the padded sizes of the symbols that are padded.
        fixed: symbols whose size is alone in its bucket: nothing to pad.
        same: symbols that have the size of a padded one in every call that the bucket is for, and that symbol.
        scalars: symbols that are numbers: the bucket is for all of their values.
    """

    padded: Mapping[sympy.Symbol, int]
    fixed: Mapping[sympy.Symbol, int]
    same: Mapping[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    scalars: tuple[sympy.Symbol, ...] = ()

    @property
    def read(self) -> tuple[sympy.Symbol, ...]:
        """The symbols whose true values the program is given, in their order."""
        return (*self.padded, *self.scalars)


@dataclass(frozen=True, slots=True)
class Group:
    """Sizes that are bucketed together.

    Attributes:
        members: for each size that the policy takes, the number of its class; or `~size`, which is negative, for a size that
            does not vary in this part.
        policy: from the sizes to the buckets.
    """

    members: tuple[int, ...]
    policy: BucketPolicy | JointPolicy

    def bucket(self, values: Sequence[int]) -> tuple[int, ...]:
        """The buckets of the members, for the sizes of all classes."""
        sizes = [values[m] if m >= 0 else ~m for m in self.members]
        if isinstance(self.policy, JointPolicy):
            return self.policy.bucket(*sizes)
        return (self.policy.bucket(sizes[0]),)


@dataclass(frozen=True, slots=True)
class Sizing:
    """How the sizes of a part that vary are read and bucketed. Symbols that had one size in every call so far are one class.

    Attributes:
        symbols: in a fixed order, which is that of the values that calls have.
        sources: where each is read, and behind them where the scalars are.
        limits: the largest size of each that the graph holds for, or None.
        policies: of the symbols.
        classes: for each symbol the number of its class; classes are counted by their first symbols.
        groups: the policies; every class is a member of one group.
        scalars: symbols that no size of a tensor of the part depends on: numbers, and strides. One program does for any
            value of theirs, so that they have no buckets. A call's values of them come last.
        cells: the buckets of a plan that was made of the calls' sizes; else none.
    """

    symbols: tuple[sympy.Symbol, ...]
    sources: tuple[SizeSource, ...]
    limits: tuple[int | None, ...]
    policies: Policies
    classes: tuple[int, ...]
    groups: tuple[Group, ...]
    scalars: tuple[sympy.Symbol, ...] = ()
    cells: frozenset[tuple[int, ...]] = frozenset()

    @classmethod
    def coarsest(
        cls,
        symbols: tuple[sympy.Symbol, ...],
        sources: tuple[SizeSource, ...],
        limits: tuple[int | None, ...],
        policies: Policies,
        scalars: tuple[sympy.Symbol, ...] = (),
    ) -> Sizing:
        """The sizing before any call: symbols that may have one size are one class, until a call shows that they have two."""
        classes = _numbered([policies.kind(symbol) for symbol in symbols])
        return cls(symbols, sources, limits, policies, classes, policies.groups(symbols, classes), scalars)

    def refined(self, values: Sequence[int]) -> Sizing:
        """The sizing in which classes are split by these sizes of their symbols."""
        classes = _numbered(list(zip(self.classes, values[: len(self.symbols)], strict=True)))
        return replace(self, classes=classes, groups=self.policies.groups(self.symbols, classes))

    @property
    def order(self) -> tuple[sympy.Symbol, ...]:
        """The symbols in the order of a call's values."""
        return (*self.symbols, *self.scalars)

    @property
    def count(self) -> int:
        """How many classes there are, which is the length of a bucket."""
        return max(self.classes, default=-1) + 1

    def spread(self, bucket: Sequence[int]) -> tuple[int, ...]:
        """For each symbol the size of its class."""
        return tuple([bucket[number] for number in self.classes])

    def fits(self, values: Sequence[int]) -> bool:
        """Whether the symbols of every class have one size."""
        return self.spread(self._sizes(values)) == tuple(values[: len(self.symbols)])

    def bucket(self, values: Sequence[int]) -> tuple[int, ...]:
        """The buckets of the classes, for values of the symbols that fit.

        A refined sizing has more classes, so that the length of a bucket tells which sizing of a part it is of.

        Raises:
            BucketError: a size is above what its policy takes.
        """
        return self._bucket(self._sizes(values))

    def planned(self, cells: Collection[tuple[int, ...]], policy: JointPolicy) -> Sizing:
        """The same sizes in the cells of a plan, which has a bound for each class.

        Args:
            policy: from sizes to the cells.
        """
        return replace(self, groups=(Group(tuple(range(self.count)), policy),), cells=frozenset(cells))

    def covers(self, values: Sequence[int]) -> bool:
        """Whether the cells of a plan hold these values of the symbols, which fit."""
        return self._bucket(self._sizes(values)) in self.cells

    def holds(self, bucket: Sequence[int], values: Sequence[int]) -> bool:
        """Whether the program of a bucket runs for these values of the symbols, which may belong to a smaller bucket."""
        buckets = self.at(bucket)
        firsts = zip(self._firsts(), self._sizes(values), bucket, strict=True)
        return self.fits(values) and all(
            1 < v <= b if self.symbols[first] in buckets.padded else v == b for first, v, b in firsts
        )

    def at(self, bucket: Sequence[int]) -> Buckets:
        """What is padded at a bucket, and what is not: a size that is alone in its bucket.

        In a plan only sizes 0 and 1 are: a later plan may have fewer cells, and the programs of this one.
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
        return Buckets(padded, fixed, same, self.scalars)

    def _bucket(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The buckets of the classes' sizes."""
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
        """The place of the first symbol of each class."""
        return [self.classes.index(number) for number in range(self.count)]


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a graph's symbols.

    Attributes:
        single: of a symbol that varies alone, where the user says nothing.
        joint: of several that vary, likewise.
        given: the user's, by symbol.
        together: the user's for several sizes together: symbols, or sizes that do not vary.
        shapes: those of the inputs of the whole graph, of which a part sees only some.
        results: those of its results.
        apart: whether symbols of equal size stay two sizes: warm-up calls a graph at sizes that are equal only there.
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
        """Whether the user said anything of buckets."""
        return self.joint is None or bool(self.given) or bool(self.together)

    def kind(self, symbol: sympy.Symbol) -> sympy.Symbol | frozenset[int]:
        """What symbols must have in common to be one size: the user says nothing of them, and they fill the same dims.

        A batch and a length that happen to be equal at the first call are two sizes.
        """
        if self.apart or symbol in self.given or any(symbol in sizes for sizes, _ in self.together):
            return symbol
        return frozenset(dim for shape in self.shapes for dim, size in enumerate(shape) if size == symbol)

    def groups(self, symbols: Sequence[sympy.Symbol], classes: Sequence[int]) -> tuple[Group, ...]:
        """The policies of a part's classes. The user's joint policies hold where the part has all of their sizes."""
        firsts = {number: symbols[place] for place, number in reversed(list(enumerate(classes)))}
        same = {symbol: firsts[number] for symbol, number in zip(symbols, classes, strict=True)}
        numbers = dict(zip(symbols, classes, strict=True))
        groups = [Group((numbers[s],), policy) for s, policy in self.given.items() if s in numbers]
        for sizes, policy in self.together:
            members = [~s if isinstance(s, int) else numbers.get(s) for s in sizes]
            if None not in members:
                groups.append(Group(tuple(members), policy))  # type: ignore[arg-type]
        told = {member for group in groups for member in group.members}
        rest = tuple(number for number in sorted(firsts) if number not in told)
        if self.joint is None or not rest:
            return (*groups, *(Group((number,), self.single) for number in rest))
        shapes, results = (
            [[size if is_fixed(size) else size_of(size.xreplace(same)) for size in shape] for shape in every]
            for every in (self.shapes, self.results)
        )
        filling = Filling.of([firsts[number] for number in rest], shapes, results)
        alone = len(rest) == 1 and not filling.cached and not filling.prompts
        return (*groups, Group(rest, self.single if alone else self.joint.of(filling)))

    def settled(self, replace_symbols: Callable[[sympy.Expr], sympy.Expr]) -> Policies:
        """The policies where guards, meanwhile, have made one symbol of two."""

        def replaced(size: Size) -> Size:
            return size if is_fixed(size) else size_of(replace_symbols(size))

        given = {replaced(symbol): policy for symbol, policy in self.given.items()}
        together = tuple((tuple(map(replaced, sizes)), policy) for sizes, policy in self.together)
        shapes, results = (tuple(tuple(map(replaced, s)) for s in every) for every in (self.shapes, self.results))
        return replace(self, given=given, together=together, shapes=shapes, results=results)


def _numbered(kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """A number for each kind, counted by where it comes first."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds)
