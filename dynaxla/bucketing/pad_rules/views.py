"""Rules of views: reshapes, permutations, broadcasts, slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import move_elements, size_of_dim
from dynaxla.bucketing.pad_rules.contiguous import broadcast_along, flatten, iota, move_to_front
from dynaxla.bucketing.padded_value import (
    Dim,
    Factor,
    PaddedValue,
    Unpaddable,
    have_same_layout,
    is_full,
    padded_size,
    single_factor,
)
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size, is_fixed
from dynaxla.custom_ops import internal

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)


@takes(size=BUCKET_SIZE, shape=BUCKET_SIZE)
def view(call: RuleContext) -> PaddedValue:
    """Dims merge and split between runs of real elements; if a new dim would split a run, elements are gathered."""
    value: PaddedValue = call.tensors[0]
    try:
        is_empty = any(size == 0 for size in call.true_sizes)  # then no element has a position
        dims = call.build.dims(call.true_sizes) if is_empty else regroup(value.dims, call.true_sizes)
    except Unpaddable:
        value, dims = gather_to(call, value, call.true_sizes)
    node = call.build.emit(aten.view.default, value.node, [padded_size(d) for d in dims])
    return call.result(node, dims, value.fill)


def gather_to(call: RuleContext, value: PaddedValue, sizes: Sequence[Size]) -> tuple[PaddedValue, tuple[Dim, ...]]:
    """Gathers the real elements to the positions of dims of these sizes, one run each. Returns the value and the dims."""
    before = 0
    while before < min(len(sizes), len(value.dims)) and size_of_dim(value.dims[before]) == sizes[before]:
        before += 1
    kept = value.dims[:before]
    new = call.build.dims(sizes[before:])
    old: Dim = tuple(factor for dim in value.dims[before:] for factor in dim)
    flatten = call.build.emit(aten.view.default, value.node, [*map(padded_size, kept), padded_size(old)])
    moved = move_elements(
        call, PaddedValue(flatten, (*kept, old)), before, tuple(factor for dim in new for factor in dim)
    )
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
    return merge_full_factors(taken)


def merge_full_factors(factors: Sequence[Factor]) -> Dim:
    """Merges neighbouring full factors."""
    result: list[Factor] = []
    for factor in factors:
        if result and result[-1].is_full and factor.is_full:
            size = result.pop().padded * factor.padded
            factor = Factor(size, size)
        result.append(factor)
    return tuple(result) or _ONE


@takes()
def view_as_real(call: RuleContext) -> PaddedValue:
    """view_as_real: the new last dim of size 2 has no padding."""
    value: PaddedValue = call.tensors[0]
    return call.result(call.same(), (*value.dims, (Factor(2, 2),)))


@takes()
def view_as_complex(call: RuleContext) -> PaddedValue:
    """view_as_complex: removes the last dim, which has no padding."""
    value: PaddedValue = call.tensors[0]
    return call.result(call.same(), value.dims[:-1])


@takes()
def view_dtype(call: RuleContext) -> PaddedValue:
    """view of another dtype: each element's bytes alone; the last dim may grow or shrink where it does not vary."""
    value: PaddedValue = call.tensors[0]
    before, after = value.node.meta["val"], call.node.meta["val"]
    if before.itemsize == after.itemsize:
        return call.result(call.same(), value.dims)
    if not is_full(value.dims[-1]):
        raise Unpaddable("the dim whose size depends on the dtype's varies")
    node = call.same()
    size = int(node.meta["val"].shape[-1])
    return call.result(node, (*value.dims[:-1], (Factor(size, size),)))


@takes(size=BUCKET_SIZE, stride=TRUE_SIZE, storage_offset=TRUE_SIZE)
def as_strided(call: RuleContext) -> PaddedValue:
    """Storage offsets are those of a row-major tensor of the true sizes; padded elements are undefined."""
    value: PaddedValue = call.tensors[0]
    if call.node.target is not internal.GATHER_STRIDED and not _is_row_major(call):
        raise Unpaddable("it reads the memory of a tensor that is not row-major")
    build, dims = call.build, call.build.dims(call.true_sizes)
    row = flatten(call, value)
    positions = build.scalar(call["storage_offset"] or 0)
    for place, (dim, stride) in enumerate(zip(dims, call["stride"], strict=True)):
        steps = build.emit(
            aten.mul.Tensor, broadcast_along(call, iota(call, padded_size(dim)), len(dims), place), build.scalar(stride)
        )
        positions = build.emit(aten.add.Tensor, positions, steps)
    whole = build.emit(aten.expand.default, positions, [padded_size(d) for d in dims])
    read = build.emit(aten.view.default, whole, [-1])
    read = build.emit(aten.clamp.default, read, 0, padded_size(row.dims[0]) - 1)
    node = build.emit(aten.index_select.default, row.node, 0, read)
    return call.result(build.emit(aten.view.default, node, [padded_size(d) for d in dims]), dims)


def _is_row_major(call: RuleContext) -> bool:
    value = call.node.args[0].meta["val"]  # type: ignore[union-attr]
    return bool(value.is_contiguous()) and value.storage_offset() == 0


@takes(dims=LAYOUT, dim0=LAYOUT, dim1=LAYOUT)
def permute(call: RuleContext) -> PaddedValue:
    """permute, transpose, t: padding moves with its dim."""
    value: PaddedValue = call.tensors[0]
    rank = len(value.dims)
    order = list(range(rank))
    if "dims" in call.given:
        order = [d % rank for d in call["dims"]]
    elif rank > 1:
        first, second = (call["dim0"] % rank, call["dim1"] % rank) if "dim0" in call.given else (0, 1)
        order[first], order[second] = order[second], order[first]
    return call.result(call.same(), tuple(value.dims[d] for d in order), value.fill)


@takes(dim=LAYOUT)
def unsqueeze(call: RuleContext) -> PaddedValue:
    """The new dim has size 1; padding stays padding."""
    value: PaddedValue = call.tensors[0]
    place = call["dim"] % (len(value.dims) + 1)
    return call.result(call.same(), (*value.dims[:place], _ONE, *value.dims[place:]), value.fill)


@takes(dim=LAYOUT)
def squeeze(call: RuleContext) -> PaddedValue:
    """Dims of size 1 are removed; padding stays padding."""
    value: PaddedValue = call.tensors[0]
    rank = len(value.dims)
    asked = call.get("dim", list(range(rank)))
    named = {d % rank for d in ([asked] if isinstance(asked, int) else asked)}
    dims = tuple(d for i, d in enumerate(value.dims) if i not in named or d != _ONE)
    node = call.build.emit(aten.view.default, value.node, [padded_size(d) for d in dims])
    return call.result(node, dims, value.fill)


@takes(size=BUCKET_SIZE)
def expand(call: RuleContext) -> PaddedValue:
    """A dim of size 1 is repeated to any size: padding has copies of the element."""
    value: PaddedValue = call.tensors[0]
    new = call.build.dims(call.true_sizes)
    offset = len(new) - len(value.dims)
    dims = tuple(
        new[i] if i < offset or value.dims[i - offset] == _ONE else value.dims[i - offset] for i in range(len(new))
    )
    node = call.build.emit(aten.expand.default, value.node, [padded_size(d) for d in dims])
    grown = any(dim != old and not is_full(dim) for dim, old in zip(dims[offset:], value.dims, strict=True))
    grown = grown or not all(map(is_full, dims[:offset]))
    return call.result(node, dims, None if grown else value.fill)


@takes(dim=LAYOUT, start=TRUE_SIZE, end=TRUE_SIZE, step=TRUE_SIZE)
def slice_(call: RuleContext) -> PaddedValue:
    """A slice that counts from the front stays a slice; one that counts from the end gathers the true positions."""
    value: PaddedValue = call.tensors[0]
    place = call.dim("dim", value)
    size, step = call.true_sizes[place], call.get("step", 1)
    factor = call.build.factor(size)
    dims = tuple((factor,) if i == place else d for i, d in enumerate(value.dims))
    if have_same_layout(value.dims[place], (factor,)):
        return value
    if is_full(value.dims[place]) and all(is_fixed(call[n]) or call[n] is None for n in ("start", "end", "step")):
        return call.result(call.same(), dims, value.fill)
    return call.result(slice_at(call, value, place, factor, call["start"] or 0, step), dims)


def slice_at(call: RuleContext, value: PaddedValue, place: int, factor: Factor, start: Size, step: Size = 1) -> Node:
    """The elements of a dim from a true position on; elements after the real ones are undefined."""
    value = move_to_front(call, value, place)
    if not is_fixed(start) or start < 0 or not is_fixed(step):
        return _gather_from(call, value, place, factor, start, step)
    end = start + (factor.padded - 1) * step + 1
    node = call.build.emit(aten.slice.Tensor, value.node, place, start, end, step)
    return call.build.resize(node, place, factor.padded)


def _gather_from(call: RuleContext, value: PaddedValue, place: int, factor: Factor, start: Size, step: Size) -> Node:
    """Gathers the elements from a true position on; positions past the end, which only padding has, read the last element."""
    build = call.build
    iota = build.emit(aten.arange.default, factor.padded, dtype=torch.int64, device=build.device)
    if step != 1:
        iota = build.emit(aten.mul.Tensor, iota, build.scalar(step))
    positions = build.emit(aten.add.Tensor, iota, wrapped_position(call, value, place, start))
    last = padded_size(value.dims[place]) - 1
    positions = build.emit(aten.clamp.default, positions, 0, last)
    return build.emit(aten.index_select.default, value.node, place, positions)


def wrapped_position(call: RuleContext, value: PaddedValue, place: int, index: Size) -> Node:
    """A position in a dim as a 0-d tensor: negative positions count from the true end, clamped to the front.

    The sign of a size (`-s`, `s - t`) may be unknown at compile time: the program then tests it.
    """
    build, index = call.build, sympy.sympify(index)
    if index.is_nonnegative:
        return build.scalar(index)
    from_end = build.scalar(sympy.Max(0, sympy.sympify(single_factor(value.dims[place]).size) + index))
    if index.is_negative:
        return from_end
    return build.emit(
        aten.where.self, build.emit(aten.ge.Scalar, build.scalar(index), 0), build.scalar(index), from_end
    )


@takes(dim=LAYOUT, index=TRUE_SIZE)
def select(call: RuleContext) -> PaddedValue:
    """Negative positions count from the true end; padding of the other dims stays padding."""
    value: PaddedValue = call.tensors[0]
    place, index = call.dim("dim", value), call["index"]
    dims = tuple(d for i, d in enumerate(value.dims) if i != place)
    value = value if is_fixed(index) and index == 0 else move_to_front(call, value, place)
    if is_fixed(index) and (index >= 0 or is_full(value.dims[place])):
        return call.result(call.same(self=value), dims, value.fill)
    where = call.build.emit(aten.view.default, wrapped_position(call, value, place, index), [1])
    picked = call.build.emit(aten.index_select.default, value.node, place, where)
    node = call.build.emit(aten.view.default, picked, [padded_size(d) for d in dims])
    return call.result(node, dims)


def _format_dims(dims: Sequence[Dim]) -> str:
    return str([sympy.prod(f.size for f in dim) for dim in dims])
