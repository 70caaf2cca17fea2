"""Rules of views: reshapes, permutations, broadcasts, slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import relaid, size_of_dim
from dynaxla.bucketing.pad_rules.contiguous import along, counted, flat, fronted
from dynaxla.bucketing.padded_value import Dim, Factor, Padded, Unpaddable, is_full, places, run_of, same_places
from dynaxla.bucketing.rule_context import Call
from dynaxla.bucketing.size_expressions import Size, is_fixed
from dynaxla.custom_ops import internal

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)


@takes(size=BUCKET_SIZE, shape=BUCKET_SIZE)
def view(call: Call) -> Padded:
    """Dims merge and split between runs of real elements; if a new dim would split a run, elements are gathered."""
    value: Padded = call.tensors[0]
    try:
        dims = regroup(value.dims, call.true_sizes)
    except Unpaddable:
        value, dims = _gather_to(call, value, call.true_sizes)
    node = call.build.emit(aten.view.default, value.node, [places(d) for d in dims])
    return call.result(node, dims, value.fill)


def _gather_to(call: Call, value: Padded, sizes: Sequence[Size]) -> tuple[Padded, tuple[Dim, ...]]:
    """Gathers the real elements to the positions of dims of these sizes, one run each. Returns the value and the dims."""
    before = 0
    while before < min(len(sizes), len(value.dims)) and size_of_dim(value.dims[before]) == sizes[before]:
        before += 1
    kept = value.dims[:before]
    new = call.build.dims(sizes[before:])
    old: Dim = tuple(factor for dim in value.dims[before:] for factor in dim)
    flat = call.build.emit(aten.view.default, value.node, [*map(places, kept), places(old)])
    moved = relaid(call, Padded(flat, (*kept, old)), before, tuple(factor for dim in new for factor in dim))
    return moved, (*kept, *new)


def regroup(dims: Sequence[Dim], sizes: Sequence[Size]) -> tuple[Dim, ...]:
    """Regroups the factors of these dims, in order, into dims of other true sizes.

    Raises:
        Unpaddable: a dim of the result would begin or end within a run.
    """
    left = deque(f for dim in dims for f in dim if f.size != 1)
    result = tuple(_take(left, size) for size in sizes)
    if left:
        raise Unpaddable(f"its result has other sizes than {_format_dims(dims)}")
    return result


def _take(left: deque[Factor], size: Size) -> Dim:
    """Removes the factors of a dim of this size from the front of `left` and returns them."""
    taken: list[Factor] = []
    missing = sympy.sympify(size)
    while missing != 1:
        if not left:
            raise Unpaddable(f"no whole runs of elements make a dim of size {size}")
        factor = left.popleft()
        rest = missing / factor.size
        if not (rest.is_Number or rest.is_Symbol):
            rest = sympy.cancel(rest)
        if factor.is_full and missing.is_Integer and factor.size > int(missing) and factor.size % int(missing) == 0:
            wanted = int(missing)
            left.appendleft(Factor(factor.padded // wanted, factor.padded // wanted))
            taken.append(Factor(wanted, wanted))
            break
        if rest.is_number and not rest.is_Integer:
            raise Unpaddable(f"a dim of size {size} ends within a run of {factor.size} elements")
        taken.append(factor)
        missing = rest
    return merged(taken)


def merged(factors: Sequence[Factor]) -> Dim:
    """Merges neighbouring full factors."""
    result: list[Factor] = []
    for factor in factors:
        if result and result[-1].is_full and factor.is_full:
            size = result.pop().padded * factor.padded
            factor = Factor(size, size)
        result.append(factor)
    return tuple(result) or _ONE


@takes()
def as_pairs(call: Call) -> Padded:
    """view_as_real: the new last dim of size 2 has no padding."""
    value: Padded = call.tensors[0]
    return call.result(call.same(), (*value.dims, (Factor(2, 2),)))


@takes()
def from_pairs(call: Call) -> Padded:
    """view_as_complex: removes the last dim, which has no padding."""
    value: Padded = call.tensors[0]
    return call.result(call.same(), value.dims[:-1])


@takes(size=BUCKET_SIZE, stride=TRUE_SIZE, storage_offset=TRUE_SIZE)
def as_strided(call: Call) -> Padded:
    """Storage offsets are those of a row-major tensor of the true sizes; padded elements are undefined."""
    value: Padded = call.tensors[0]
    if call.node.target is not internal.GATHER_STRIDED and not _is_row_major(call):
        raise Unpaddable("it reads the memory of a tensor that is not row-major")
    build, dims = call.build, call.build.dims(call.true_sizes)
    row = flat(call, value)
    positions = build.scalar(call["storage_offset"] or 0)
    for place, (dim, stride) in enumerate(zip(dims, call["stride"], strict=True)):
        steps = build.emit(
            aten.mul.Tensor, along(call, counted(call, places(dim)), len(dims), place), build.scalar(stride)
        )
        positions = build.emit(aten.add.Tensor, positions, steps)
    whole = build.emit(aten.expand.default, positions, [places(d) for d in dims])
    read = build.emit(aten.view.default, whole, [-1])
    read = build.emit(aten.clamp.default, read, 0, places(row.dims[0]) - 1)
    node = build.emit(aten.index_select.default, row.node, 0, read)
    return call.result(build.emit(aten.view.default, node, [places(d) for d in dims]), dims)


def _is_row_major(call: Call) -> bool:
    value = call.node.args[0].meta["val"]  # type: ignore[union-attr]
    return bool(value.is_contiguous()) and value.storage_offset() == 0


@takes(dims=LAYOUT, dim0=LAYOUT, dim1=LAYOUT)
def permute(call: Call) -> Padded:
    """permute, transpose, t: padding moves with its dim."""
    value: Padded = call.tensors[0]
    rank = len(value.dims)
    order = list(range(rank))
    if "dims" in call.given:
        order = [d % rank for d in call["dims"]]
    elif rank > 1:
        first, second = (call["dim0"] % rank, call["dim1"] % rank) if "dim0" in call.given else (0, 1)
        order[first], order[second] = order[second], order[first]
    return call.result(call.same(), tuple(value.dims[d] for d in order), value.fill)


@takes(dim=LAYOUT)
def unsqueeze(call: Call) -> Padded:
    """The new dim has size 1; padding stays padding."""
    value: Padded = call.tensors[0]
    place = call["dim"] % (len(value.dims) + 1)
    return call.result(call.same(), (*value.dims[:place], _ONE, *value.dims[place:]), value.fill)


@takes(dim=LAYOUT)
def squeeze(call: Call) -> Padded:
    """Dims of size 1 are removed; padding stays padding."""
    value: Padded = call.tensors[0]
    rank = len(value.dims)
    asked = call.get("dim", list(range(rank)))
    named = {d % rank for d in ([asked] if isinstance(asked, int) else asked)}
    dims = tuple(d for i, d in enumerate(value.dims) if i not in named or d != _ONE)
    node = call.build.emit(aten.view.default, value.node, [places(d) for d in dims])
    return call.result(node, dims, value.fill)


@takes(size=BUCKET_SIZE)
def expand(call: Call) -> Padded:
    """A dim of size 1 is repeated to any size: padding has copies of the element."""
    value: Padded = call.tensors[0]
    new = call.build.dims(call.true_sizes)
    offset = len(new) - len(value.dims)
    dims = tuple(
        new[i] if i < offset or value.dims[i - offset] == _ONE else value.dims[i - offset] for i in range(len(new))
    )
    node = call.build.emit(aten.expand.default, value.node, [places(d) for d in dims])
    grown = any(dim != old and not is_full(dim) for dim, old in zip(dims[offset:], value.dims, strict=True))
    grown = grown or not all(map(is_full, dims[:offset]))
    return call.result(node, dims, None if grown else value.fill)


@takes(dim=LAYOUT, start=TRUE_SIZE, end=TRUE_SIZE, step=TRUE_SIZE)
def slice_(call: Call) -> Padded:
    """A slice that counts from the front stays a slice; one that counts from the end gathers the true positions."""
    value: Padded = call.tensors[0]
    place = call.dim("dim", value)
    size, step = call.true_sizes[place], call.get("step", 1)
    factor = call.build.factor(size)
    dims = tuple((factor,) if i == place else d for i, d in enumerate(value.dims))
    if same_places(value.dims[place], (factor,)):
        return value
    if is_full(value.dims[place]) and all(is_fixed(call[n]) or call[n] is None for n in ("start", "end", "step")):
        return call.result(call.same(), dims, value.fill)
    return call.result(piece(call, value, place, factor, call["start"] or 0, step), dims)


def piece(call: Call, value: Padded, place: int, factor: Factor, start: Size, step: Size = 1) -> Node:
    """The elements of a dim from a true position on; elements after the real ones are undefined."""
    value = fronted(call, value, place)
    if not is_fixed(start) or start < 0 or not is_fixed(step):
        return _gather_from(call, value, place, factor, start, step)
    end = start + (factor.padded - 1) * step + 1
    node = call.build.emit(aten.slice.Tensor, value.node, place, start, end, step)
    return call.build.resized(node, place, factor.padded)


def _gather_from(call: Call, value: Padded, place: int, factor: Factor, start: Size, step: Size) -> Node:
    """Gathers the elements from a true position on; positions past the end, which only padding has, read the last element."""
    build = call.build
    counted = build.emit(aten.arange.default, factor.padded, dtype=torch.int64, device=build.device)
    if step != 1:
        counted = build.emit(aten.mul.Tensor, counted, build.scalar(step))
    positions = build.emit(aten.add.Tensor, counted, position(call, value, place, start))
    last = places(value.dims[place]) - 1
    positions = build.emit(aten.clamp.default, positions, 0, last)
    return build.emit(aten.index_select.default, value.node, place, positions)


def position(call: Call, value: Padded, place: int, index: Size) -> Node:
    """A position in a dim as a 0-d tensor: negative positions count from the true end, clamped to the front.

    The sign of a size (`-s`, `s - t`) may be unknown at compile time: the program then tests it.
    """
    build, index = call.build, sympy.sympify(index)
    if index.is_nonnegative:
        return build.scalar(index)
    from_end = build.scalar(sympy.Max(0, sympy.sympify(run_of(value.dims[place]).size) + index))
    if index.is_negative:
        return from_end
    return build.emit(
        aten.where.self, build.emit(aten.ge.Scalar, build.scalar(index), 0), build.scalar(index), from_end
    )


@takes(dim=LAYOUT, index=TRUE_SIZE)
def select(call: Call) -> Padded:
    """Negative positions count from the true end; padding of the other dims stays padding."""
    value: Padded = call.tensors[0]
    place, index = call.dim("dim", value), call["index"]
    dims = tuple(d for i, d in enumerate(value.dims) if i != place)
    value = value if is_fixed(index) and index == 0 else fronted(call, value, place)
    if is_fixed(index) and (index >= 0 or is_full(value.dims[place])):
        return call.result(call.same(self=value), dims, value.fill)
    where = call.build.emit(aten.view.default, position(call, value, place, index), [1])
    picked = call.build.emit(aten.index_select.default, value.node, place, where)
    node = call.build.emit(aten.view.default, picked, [places(d) for d in dims])
    return call.result(node, dims)


def _format_dims(dims: Sequence[Dim]) -> str:
    return str([sympy.prod(f.size for f in dim) for dim in dims])
