"""Which sizes of a part are bucketed, where a call's sizes are read, and what their buckets are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from dynaxla.bucketing.policy import BucketPolicy
from dynaxla.bucketing.sizes import size_of


@dataclass(frozen=True, slots=True)
class SizeSource:
    """Where a symbol's value is read: `argument` itself, or the size of its dim `dim`, divided by `divisor`."""

    argument: int
    dim: int | None
    divisor: int = 1

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
class BucketPlan:
    """The sizes of a part that vary, and their policies.

    Attributes:
        symbols: in a fixed order, which is that of all values below.
        sources: where each is read.
        policies: from its size to its bucket.
        limits: the largest size of each that the graph holds for, or None.
    """

    symbols: tuple[sympy.Symbol, ...]
    sources: tuple[SizeSource, ...]
    policies: tuple[BucketPolicy, ...]
    limits: tuple[int | None, ...]

    def bucket(self, values: Sequence[int]) -> tuple[int, ...]:
        """The buckets of the symbols' values."""
        return tuple(map(_bucket, values, self.policies, self.limits))

    def at(self, bucket: Sequence[int]) -> Buckets:
        """What is padded at a bucket, and what is not: a size that no other size shares the bucket with."""
        padded: dict[sympy.Symbol, int] = {}
        fixed: dict[sympy.Symbol, int] = {}
        for symbol, size, policy, limit in zip(self.symbols, bucket, self.policies, self.limits, strict=True):
            alone = size <= 1 or _bucket(size - 1, policy, limit) != size
            (fixed if alone else padded)[symbol] = size
        return Buckets(padded, fixed)


@dataclass(frozen=True, slots=True)
class Policies:
    """The policy of every symbol of a graph.

    Attributes:
        default: of those that are not marked.
        marked: by symbol.
    """

    default: BucketPolicy
    marked: Mapping[sympy.Symbol, BucketPolicy]

    def of(self, symbol: sympy.Symbol) -> BucketPolicy:
        return self.marked.get(symbol, self.default)


def _bucket(size: int, policy: BucketPolicy, limit: int | None) -> int:
    """The policy's bucket, but no larger than the limit; a size above the limit is its own."""
    bucket = policy.bucket(size)
    return bucket if limit is None else max(size, min(bucket, limit))


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
    return BucketPlan(symbols, tuple(found[s] for s in symbols), tuple(map(policies.of, symbols)), limits)


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
