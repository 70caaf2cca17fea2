"""A call of an op as its kind and its sizes: what two calls have in common that differ in sizes alone.

The sizes are those of the memories, then, in the order of the arguments, how long windows are, what expanded dims repeat, and
plain integers that are sizes to the op. Where a window begins is none: programs read that at each call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynaxla.device.op_call import LIST, PLAIN, TENSOR, InternedLayout, OpInvocation, Part
from dynaxla.device.storage import DeviceStorage
from dynaxla.device.view_layout import Ints, ViewLayout, WindowGrid
from dynaxla.diagnostics import ManyPrograms
from dynaxla.isolation.forking import new_lock
from dynaxla.torch_api.frames import user_line
from dynaxla.types import TensorSpec

EXPECTED = 32
"""Up to this number of programs of one op are expected: the layers of a network give it different sizes."""

Group = tuple[Ints, Ints]
"""Dims of a memory, and those of a grid that are cut of them, or joined to them."""


class NotShapeGeneric(Exception):
    """A call has a tensor that has no element, or lies in no grid of its memory, or in one of another dtype."""


@dataclass(frozen=True, slots=True)
class ShapeGenericCall:
    """Attributes:
    kind: what the call is without its sizes.
    values: its sizes.
    """

    kind: Hashable
    values: Ints


@dataclass(frozen=True, slots=True)
class SymbolicView:
    """How a tensor lies in a memory whatever the memory's sizes.

    Attributes:
        memory: which of the call's.
        groups: which dims of the memory are which of the grid.
        layout: that of the call from which this was made.
    """

    memory: int
    groups: tuple[Group, ...]
    layout: ViewLayout


def split_sizes(call: OpInvocation) -> ShapeGenericCall:
    """
    Raises:
        NotShapeGeneric: there is none.
    """
    values = [size for memory in call.memories for size in memory.spec.shape]

    def tensor(part: tuple[Any, ...]) -> Part:
        found, more = _of_tensor(part[2].layout)
        values.extend(more)
        return (TENSOR, part[1], *found)

    def size(value: int) -> None:
        values.append(value)

    parts, named = _mapped(call, tensor, size)
    memories = tuple((memory.spec.dtype, len(memory.spec.shape)) for memory in call.memories)
    return ShapeGenericCall((call.known.op, memories, parts, named), tuple(values))


def symbolic_views(call: OpInvocation) -> list[SymbolicView]:
    """How the tensors of a call lie, in the order of the arguments.

    Raises:
        NotShapeGeneric: a grid's dims are not cut of the memory's.
    """
    found = []

    def tensor(part: tuple[Any, ...]) -> Part:
        layout: ViewLayout = part[2].layout
        assert layout.grid is not None
        groups = _aligned(layout.memory.shape, layout.grid.sizes)
        found.append(SymbolicView(part[1], groups, layout))
        return part

    _mapped(call, tensor, lambda value: value)
    return found


def call_with_sizes(call: OpInvocation, views: Sequence[SymbolicView], values: Sequence[Any]) -> OpInvocation:
    """A call of the same kind with other sizes, which may be symbols. Its memories are empty.

    Raises:
        NotShapeGeneric: dims that are cut of one that varies do not follow from its size.
    """
    rest = iter(values)
    memories = [DeviceStorage(TensorSpec(_next(rest, len(m.spec.shape)), m.spec.dtype)) for m in call.memories]
    each = iter(views)

    def tensor(part: tuple[Any, ...]) -> Part:
        view = next(each)
        return (TENSOR, part[1], InternedLayout(_lying(view, memories[view.memory].spec, rest)))

    parts, named = _mapped(call, tensor, lambda value: next(rest))
    return replace(call, parts=parts, named=named, memories=memories, tensors=[], starts=list(call.starts))


def _mapped(
    call: OpInvocation, tensor: Callable[[tuple[Any, ...]], Part], size: Callable[[int], Any]
) -> tuple[tuple[Part, ...], tuple[tuple[str, Part], ...]]:
    """The call's parts with something in the place of each tensor and of each size."""

    def mapped(part: Part, is_size: bool) -> Part:
        if part is None:
            return None
        if part[0] == TENSOR:
            return tensor(part)
        if part[0] == LIST:
            return (LIST, tuple([mapped(each, is_size) for each in part[1]]))
        return (PLAIN, int, size(part[2])) if is_size and part[0] == PLAIN and part[1] is int else part

    sizes = call.known.sizes
    parts = tuple([mapped(part, place in sizes) for place, part in enumerate(call.parts)])
    return parts, tuple([(name, mapped(part, name in sizes)) for name, part in call.named])


def _of_tensor(layout: ViewLayout) -> tuple[tuple[Any, ...], list[int]]:
    """What is no size of how a tensor lies, and what is one: how long its window is, what is repeated."""
    grid = layout.grid
    if grid is None or layout.is_empty or layout.memory.dtype is not layout.tensor.dtype:
        raise NotShapeGeneric("a tensor lies in no grid of its memory")
    cut = tuple(extent != size for extent, size in zip(grid.extents, grid.sizes, strict=True))
    more = [*itertools.compress(grid.extents, cut), *_repeated(layout)]
    repeats = tuple(place is None and size > 1 for place, size in zip(grid.order, layout.tensor.shape, strict=True))
    return (
        len(grid.sizes),
        grid.steps,
        grid.order,
        grid.ones,
        cut if any(cut) else (),
        repeats if any(repeats) else (),
    ), more


def _repeated(layout: ViewLayout) -> list[int]:
    assert layout.grid is not None
    places = zip(layout.grid.order, layout.tensor.shape, strict=True)
    return [size for place, size in places if place is None and size > 1]


def _lying(view: SymbolicView, memory: TensorSpec, rest: Iterator[Any]) -> ViewLayout:
    """How the tensor of a view lies in a memory of other sizes."""
    was = view.layout.grid
    assert was is not None
    sizes = _cut(view, memory.shape)
    extents = tuple(
        size if old == all_of else next(rest) for size, old, all_of in zip(sizes, was.extents, was.sizes, strict=True)
    )
    grid = WindowGrid(sizes, extents, was.steps, was.order, was.ones)
    counts = grid.counts
    shape = []
    for place, size in zip(was.order, view.layout.tensor.shape, strict=True):
        shape.append(counts[place] if place is not None else next(rest) if size > 1 else 1)
    return ViewLayout(memory, TensorSpec(tuple(shape), memory.dtype), grid=grid)


def _cut(view: SymbolicView, shape: Sequence[Any]) -> tuple[Any, ...]:
    """The sizes of a view's grid in a memory of other sizes.

    Raises:
        NotShapeGeneric: several dims are cut of one of other sizes.
    """
    assert view.layout.grid is not None
    was, sizes = view.layout.memory.shape, list[Any](view.layout.grid.sizes)
    for dims, cut in view.groups:
        if all(type(shape[dim]) is int and shape[dim] == was[dim] for dim in dims):
            continue
        long = [dim for dim in cut if sizes[dim] != 1]
        if len(long) != 1:
            raise NotShapeGeneric("several dims are cut of one that varies")
        product = 1
        for dim in dims:
            product = product * shape[dim]
        sizes[long[0]] = product
    return tuple(sizes)


def _aligned(shape: Ints, cut: Ints) -> tuple[Group, ...]:
    """The shortest runs of dims of two shapes that have as many elements.

    Raises:
        NotShapeGeneric: the shapes have not.
    """
    groups: list[Group] = []
    i = j = 0
    while i < len(shape) or j < len(cut):
        first, begin = i, j
        one, other = 1, 1
        if i < len(shape):
            one, i = shape[i], i + 1
        if j < len(cut):
            other, j = cut[j], j + 1
        while one != other:
            if one < other and i < len(shape):
                one, i = one * shape[i], i + 1
            elif other < one and j < len(cut):
                other, j = other * cut[j], j + 1
            else:
                raise NotShapeGeneric("a tensor's dims are not cut of its memory's")
        groups.append((tuple(range(first, i)), tuple(range(begin, j))))
    return tuple(groups)


def _next(values: Iterator[Any], count: int) -> tuple[Any, ...]:
    return tuple(itertools.islice(values, count))


class OpRecompileWarnings:
    """Counts the programs of calls that differ in sizes and plain numbers alone; warns once of each op that has many.

    Safe from several threads.
    """

    def __init__(self) -> None:
        self._programs: dict[Any, int] = {}
        self._said: set[str] = set()
        self._lock = new_lock()

    def notices(self, call: OpInvocation, refusal: str | None = None) -> Iterator[ManyPrograms]:
        """Counts a program that was made for a call. Yields the warning that is due, if one is.

        Args:
            refusal: why calls like this cannot be padded to buckets, where they cannot.
        """
        kind = call.known.op, _kinds(call.parts), tuple([(name, _kind(part)) for name, part in call.named])
        name = call.known.name
        with self._lock:
            count = self._programs[kind] = self._programs.get(kind, 0) + 1
            if count <= EXPECTED or name in self._said:
                return
            self._said.add(name)
        hint = "Inside of torch.compile sizes that vary are padded to a few buckets"
        reason = "one for each set of sizes, as it is called outside of compiled graphs"
        reason = reason if refusal is None else f"{reason} and cannot be padded ({refusal})"
        yield ManyPrograms(count, reason, f"sizes of {name}{user_line()}", hint, what=name)


def _kinds(parts: tuple[Part, ...]) -> tuple[Any, ...]:
    return tuple([_kind(part) for part in parts])


def _kind(part: Part) -> Any:
    """A part without sizes and plain numbers; of a list of numbers, such as sizes are, that it is one."""
    if part is None:
        return None
    if part[0] == TENSOR:
        tensor = part[2].layout.tensor
        return TENSOR, tensor.dtype, len(tensor.shape)
    if part[0] == LIST:
        kinds = _kinds(part[1])
        return (LIST, *(kinds if any(kind and kind[0] == TENSOR for kind in kinds) else ()))
    return part[:2] if part[0] == PLAIN and part[1] in (int, float) else part
