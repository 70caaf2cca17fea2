"""Shape templates: writes a call's function at new sizes from functions of like calls, instead of lowering it again.

Calls are alike if they differ in sizes alone. Where the functions of two of them are one text but for numbers that stand for
sizes (dims of types, ends of slices, whole numbers that fill a tensor), and every such number is a size of the call or a
product of neighbouring ones, the text at other sizes can be written down. A function is taken from there only if two such
pairs, so at least three lowered functions, give the same one, and if no size and no product of neighbouring sizes is below or
above all of theirs: who lowers may choose by a size (a loop from so many elements on, the smaller of two sizes), and a number
that is none of these may be one number at some sizes alone. So is a number ambiguous that may as well be what an op computes of
sizes: the end of an element's slice is its index and one, which is the length wherever the element is the last one.
Whatever else follows a size (windows, divisors, a choice of ops) shows in the rest of the text, and such calls are lowered at
every size. It shows only if it differs between the examples: so two that agree in what an op may compute of their sizes, such
as the number of elements that a mean divides by, determine nothing where the new sizes differ in it. What this package itself
does to a function by its sizes is done again. Functions of the user's bodies are never written.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from dynaxla.lowering.call_graph import OpCall
from dynaxla.lowering.exact_division import DivisionFlow
from dynaxla.lowering.stablehlo_functions import FunctionFinisher, StablehloFunction
from dynaxla.torch_api.overloads import OpOverload, parameters, takes_sizes
from dynaxla.torch_api.pytree import tree_unflatten
from dynaxla.types import TensorSpec

# The dims of a type, the ends of a slice, an integer that fills a tensor.
_PLACES = re.compile(r"tensor<((?:\d+x)+)|slice %[\w#]+ \[([\d:, ]+)\]|dense<(\d+)>(?= : tensor<[\dx]*i(?:32|64)>)")
_NUMBER = re.compile(r"\d+")
_NAME = "\0"  # stands for the function's symbol
_BEYOND = 1 << 31
_LEAST = 2  # sizes 0 and 1 are lowered otherwise: they broadcast, or are empty
_MOST = 24  # examples of a kind that are kept
_WITNESSES = 2
_MOST_DIMS = 8
_FUNCTIONS = (operator.add, operator.sub, operator.mul, operator.truediv)
"""What an op may compute of two sizes, such as the scale of an interpolation."""

aten = torch.ops.aten
Values: TypeAlias = dict[tuple[int, int], int | None]
"""Maps the pair of a number's values in two examples to its value at the new sizes; None if that is ambiguous."""


class _Blanks:
    """Replaces the sizes in a call's arguments and results by blanks, and collects them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.groups: list[tuple[int, int]] = []
        self.given: list[int] = []

    def leave(self, value: Any, may_be_size: bool = False) -> object:
        """Returns a value with its sizes replaced by blanks."""
        if isinstance(value, TensorSpec):
            return str(value.dtype), self._take(value.shape)
        if may_be_size and (sizes := _as_sizes(value)) is not None:
            self.given.extend(range(len(self.sizes), len(self.sizes) + len(sizes)))
            return "sizes", self._take(sizes)
        if isinstance(value, (list, tuple)):
            return [self.leave(each) for each in value]
        return value

    def _take(self, sizes: Sequence[int]) -> int:
        self.groups.append((len(self.sizes), len(self.sizes) + len(sizes)))
        self.sizes.extend(sizes)
        return len(sizes)


@dataclass(frozen=True, slots=True)
class CallSizes:
    """A call split into its kind and its sizes.

    Attributes:
        kind: the call without its sizes; like calls have equal kinds.
        sizes: the sizes of its operands, of its size arguments and of its results, in order.
        groups: per tensor and per list, the range of its sizes in `sizes`.
        given: the places in `sizes` of what are arguments themselves: sizes, indices, shifts.
        products: the products of neighbouring sizes of every tensor and list, always in the same order.
        counts: the products of any sizes of a tensor or list, always in the same order: as many elements may be reduced to one.
        derived: other numbers that an op may compute, always in the same order: those next to each product, the counts, and the
            sums and differences of an argument and a size.
    """

    kind: str
    sizes: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    given: tuple[int, ...]
    products: tuple[int, ...] = field(init=False)
    counts: tuple[int, ...] = field(init=False)
    derived: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "products", tuple(self._products()))
        object.__setattr__(self, "counts", tuple(self._counts()))
        object.__setattr__(self, "derived", tuple(self._derived()))

    @classmethod
    def of(cls, call: OpCall) -> CallSizes | None:
        """Splits a call. Returns None for an op without a schema, which would say which numbers are sizes."""
        if not isinstance(call.target, OpOverload):
            return None
        args, kwargs = tree_unflatten(list(call.leaves), call.treespec)
        wanted = {parameter.name: parameter for parameter in parameters(call.target)}
        given = {**dict(zip(wanted, args, strict=False)), **kwargs}
        blanks, ranges = _Blanks(), call.target is aten.arange.default  # its end is written as a number of any kind
        left = [(name, blanks.leave(value, ranges or takes_sizes(wanted[name]))) for name, value in given.items()]
        kind = repr((str(call.target), left, [blanks.leave(spec) for spec in call.results]))
        return cls(kind, tuple(blanks.sizes), tuple(blanks.groups), tuple(blanks.given))

    def _products(self) -> Iterator[int]:
        for start, stop in self.groups:
            for first in range(start, stop):
                yield from itertools.accumulate(self.sizes[first:stop], int.__mul__)

    def _counts(self) -> Iterator[int]:
        for start, stop in self.groups:
            rank = stop - start  # of a longer list, such as the sizes of a split, no op multiplies any
            for many in range(2, rank + 1 if rank <= _MOST_DIMS else 0):
                yield from map(math.prod, itertools.combinations(self.sizes[start:stop], many))

    def _derived(self) -> Iterator[int]:
        yield from self.counts
        for product in self.products:
            yield from (product - 1, product + 1)
        for place in self.given:
            for size in self.sizes:
                gap = abs(size - self.sizes[place])
                yield from (size + self.sizes[place], gap, gap - 1)


@dataclass(frozen=True, slots=True)
class _Example:
    """A lowered function as an example of its kind.

    Attributes:
        numbers: the numbers in its text that may stand for sizes, in order.
        rest: the text around the numbers.
    """

    sized: CallSizes
    numbers: tuple[int, ...]
    rest: tuple[str, ...]
    flow: DivisionFlow
    is_finished: bool

    @classmethod
    def of(cls, sized: CallSizes, function: StablehloFunction) -> _Example:
        text = (function.unfinished or f"{function.text}{_NAME * 2}{function.exact}").replace(function.name, _NAME)
        numbers, rest, end = [], [], 0
        for place in _PLACES.finditer(text):
            for number in _NUMBER.finditer(text, *place.span(place.lastindex or 0)):
                numbers.append(int(number.group()))
                rest.append(text[end : number.start()])
                end = number.end()
        return cls(sized, tuple(numbers), (*rest, text[end:]), function.flow, not function.unfinished)

    def is_like(self, other: _Example) -> bool:
        """Whether two examples differ in numbers only."""
        return self.rest == other.rest and self.flow == other.flow and self.is_finished == other.is_finished


class ShapeTemplates:
    """The examples of each kind of call that one lowerer made. Safe from several threads: its values are replaced,
    never changed."""

    def __init__(self) -> None:
        self._examples: dict[tuple[str, str | None, str], tuple[_Example, ...]] = {}

    def learn(self, call: OpCall, function: StablehloFunction, finisher: FunctionFinisher) -> None:
        """Adds a lowered function as an example of its kind."""
        sized = CallSizes.of(call)
        if sized is not None:
            kind = (finisher.platform, finisher.precision, sized.kind)
            self._examples[kind] = (_Example.of(sized, function), *self._examples.get(kind, ()))[:_MOST]

    def function(self, call: OpCall, finisher: FunctionFinisher) -> StablehloFunction | None:
        """Instantiates the function of a call. Returns None unless at least two pairs of examples determine it and
        all agree."""
        sized = CallSizes.of(call)
        if sized is None or max(sized.products, default=0) >= _BEYOND:
            return None
        kept = self._examples.get((finisher.platform, finisher.precision, sized.kind), ())
        examples = [example for example in kept if example.sized.groups == sized.groups]
        if not examples or _is_beyond(sized, examples):
            return None
        found: list[str] = []
        used: list[_Example] = []
        for one, other in itertools.combinations(examples, 2):
            text = _written(one, other, sized)
            if text is None:
                continue
            if found and found[0] != text:
                return None
            found.append(text)
            used += (one, other)
            if len(found) >= _WITNESSES and not _is_beyond(sized, used):
                return _function(text, one, call, finisher)
        return None


def _is_beyond(sized: CallSizes, examples: Sequence[_Example]) -> bool:
    """Whether a size, or a product of sizes, is outside of the range of all examples."""
    known = [(*example.sized.products, *example.sized.counts) for example in examples]
    wanted = (*sized.products, *sized.counts)
    return any(not min(each) <= c <= max(each) for c, *each in zip(wanted, *known, strict=True))


def _function(text: str, example: _Example, call: OpCall, finisher: FunctionFinisher) -> StablehloFunction | None:
    if not example.is_finished:
        return finisher.finish_text(text.replace(_NAME, call.name), call)
    plain, exact = text.split(_NAME * 2)
    return StablehloFunction(call.name, plain.replace(_NAME, call.name), exact.replace(_NAME, call.name), example.flow)


def _written(one: _Example, other: _Example, sized: CallSizes) -> str | None:
    """The text at the new sizes, if two examples determine it; else None."""
    if not _spans(one.sized, other.sized, sized) or not one.is_like(other):
        return None
    values = _values(one.sized, other.sized, sized)
    numbers = [values.get((a, b), a if a == b else None) for a, b in zip(one.numbers, other.numbers, strict=True)]
    if None in numbers:
        return None
    return "".join(piece for both in zip(one.rest, (*map(str, numbers), ""), strict=True) for piece in both)


def _spans(one: CallSizes, other: CallSizes, wanted: CallSizes) -> bool:
    """Whether the new sizes, and what an op may compute of them, differ from the examples' only where the examples differ
    from one another."""
    columns = list(zip(one.sizes, other.sizes, wanted.sizes, strict=True))
    if not all((a == b == c) or (a != b and min(a, b, c) >= _LEAST) for a, b, c in columns):
        return False
    pairs = itertools.combinations({(a, b, c) for a, b, c in columns if a != b}, 2)
    computed = [map(function, *both) for both in pairs for function in _FUNCTIONS]
    counts = zip(one.counts, other.counts, wanted.counts, strict=True)
    return not any(a == b != c for a, b, c in itertools.chain(computed, counts))


def _values(one: CallSizes, other: CallSizes, wanted: CallSizes) -> Values:
    values: Values = {}
    for a, b, c in zip(one.products, other.products, wanted.products, strict=True):
        values[a, b] = c if values.get((a, b), a if a == b else c) == c else None
    for a, b, c in zip(one.derived, other.derived, wanted.derived, strict=True):
        if values.get((a, b), a if a == b else c) != c:
            values[a, b] = None
    return values


def _as_sizes(value: Any) -> Sequence[int] | None:
    """An argument as a list of sizes. -1 (an inferred size) and numbers larger than any tensor are not sizes."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return values if all(type(each) is int and -1 <= each < _BEYOND for each in values) else None
