"""Rules of ops that move elements by position, and of ops that create tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, CONSTANT, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import finest, relaid, together
from dynaxla.bucketing.pad_rules.contiguous import fronted, lengthened
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.padded_value import (
    Dim,
    Factor,
    Number,
    Padded,
    Unpaddable,
    is_full,
    joined,
    places,
    run_of,
    same_places,
)
from dynaxla.bucketing.rule_context import Call
from dynaxla.bucketing.size_expressions import Size, is_fixed, is_varying
from dynaxla.custom_ops.dynamic_slice import WINDOW_SCATTER

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)


@takes(padding_idx=CONSTANT)
def embedding(call: Call) -> Padded:
    """Padded indices give padded rows."""
    weight, indices = fronted(call, call["weight"], 0), call["indices"]
    return call.result(call.same(weight=weight), (*indices.dims, weight.dims[1]))


@takes(dim=LAYOUT)
def gather(call: Call) -> Padded:
    """Real elements are brought to the front, where real positions point to; padded positions give padding."""
    value, index = call["self"], call["index"]
    place = call.dim("dim", value)
    for i in range(len(value.dims)):
        if i != place and places(index.dims[i]) != 1 and not same_places(index.dims[i], value.dims[i]):
            value, index = fronted(call, value, i), fronted(call, index, i)
            value = lengthened(call, value, i, places(index.dims[i]))
    if value.dims:
        value = fronted(call, value, place)
    return call.result(call.same(self=value, index=index), index.dims)


@takes(dim=LAYOUT)
def index_select(call: Call) -> Padded:
    """Real elements are brought to the front, where real positions point to; padded positions give padding."""
    index: Padded = call["index"]
    place = call.dim("dim", call["self"])
    value = fronted(call, call["self"], place)
    picked = index.dims[0] if index.dims else _ONE
    return call.result(call.same(self=value), (*value.dims[:place], picked, *value.dims[place + 1 :]))


@takes()
def index(call: Call) -> Padded:
    """x[i, j]: negative positions count from the true end; padded positions give padding."""
    value: Padded = call["self"]
    value, entries = in_front(call, value, call["indices"])
    taken = [i for i, entry in enumerate(entries) if entry is not None]
    given = [entry for entry in entries if entry is not None]
    if any(entry.meta.dtype in (torch.bool, torch.uint8) for entry in given):
        raise Unpaddable("a boolean index")
    for place in taken:
        value = fronted(call, value, place)
    met = iter(together(call, given))
    entries = [None if e is None else from_front(call, next(met), value.dims[i]) for i, e in enumerate(entries)]
    picked = broadcast([entry.dims for entry in entries if entry is not None])
    dims = (*value.dims[: taken[0]], *picked, *value.dims[taken[-1] + 1 :])
    return call.result(call.same(self=value, indices=entries), dims)


def in_front(call: Call, value: Padded, indices: Sequence[Padded | None]) -> tuple[Padded, list[Padded | None]]:
    """Returns the value and its indices, with the indexed dims moved to the front if they are not neighbours."""
    taken = [i for i, entry in enumerate(indices) if entry is not None]
    if taken == list(range(taken[0], taken[-1] + 1)):
        return value, list(indices)
    order = [*taken, *(d for d in range(len(value.dims)) if d not in taken)]
    node = call.build.emit(aten.permute.default, value.node, order)
    return Padded(node, tuple(value.dims[d] for d in order), value.fill), [indices[i] for i in taken]


def from_front(call: Call, index: Padded, dim: Dim) -> Padded:
    """Returns the index with negative positions, which count from the true end of `dim`, made non-negative."""
    if is_full(dim):
        return index
    build = call.build
    size = build.scalar(run_of(dim).size)
    if index.meta.dtype is not torch.int64:
        size = build.emit(aten._to_copy.default, size, dtype=index.meta.dtype)
    wrapped = build.emit(aten.add.Tensor, index.node, size)
    negative = build.emit(aten.lt.Scalar, index.node, 0)
    return Padded(build.emit(aten.where.self, negative, wrapped, index.node), index.dims)


@takes(dim=LAYOUT)
def concatenate(call: Call) -> Padded:
    """Tensors are joined as they are if only the last has padding; else each is written at the true end of the one before."""
    values: list[Padded] = [v for v in call["tensors"] if tuple(v.meta.shape) != (0,)]
    place = call["dim"] % len(values[0].dims)
    for i in range(len(values[0].dims)):
        if i != place:
            dim = finest([v.dims[i] for v in values])
            values = [relaid(call, v, i, dim) for v in values]
    around = list(values[0].dims)
    size = call.true_sizes[place]
    around[place] = (call.build.factor(size),)
    dims = tuple(around)
    values = [fronted(call, v, place) for v in values]
    if all(is_full(v.dims[place]) for v in values[:-1]):
        return call.first(call.same(tensors=values), dims, [place])
    some = [v for v in values if places(v.dims[place])]
    return call.result(_concatenate_padded(call, some, place, places(dims[place])), dims)


def _concatenate_padded(call: Call, values: Sequence[Padded], place: int, count: int) -> Node:
    """Writes each tensor at the true end of those before it, over their padding.

    Returns:
        The result, with `count` elements along the dim.
    """
    build = call.build
    wanted = call.node.meta["val"].dtype
    pieces = [
        v.node if v.meta.dtype is wanted else build.emit(aten._to_copy.default, v.node, dtype=wanted) for v in values
    ]
    # Large enough for all tensors with their padding, as dynamic_update_slice clamps windows that reach past the end.
    result = build.resized(pieces[0], place, sum(places(v.dims[place]) for v in values))
    start: Size = 0
    for before, piece in zip(values, pieces[1:]):
        start = start + run_of(before.dims[place]).size
        result = build.emit(WINDOW_SCATTER, result, piece, _start_indices(call, len(before.dims), place, start))
    return build.resized(result, place, count)


def _start_indices(call: Call, rank: int, place: int, start: Size) -> Node:
    """The start indices of a window, int64 [rank]: 0 except along one dim."""
    build = call.build
    counted = build.emit(aten.arange.default, rank, dtype=torch.int64, device=build.device)
    here = build.emit(aten.eq.Scalar, counted, place)
    return build.emit(aten.mul.Tensor, here, build.scalar(start))


@takes(dims=LAYOUT)
def flip(call: Call) -> Padded:
    """Positions count from the true end; a dim of several runs is flipped within and across its runs."""
    value: Padded = call.tensors[0]
    return call.result(_flip(call, value, {d % len(value.dims) for d in call["dims"]}), value.dims)


@takes(k=LAYOUT, dims=LAYOUT)
def turn(call: Call) -> Padded:
    """rot90: flips from the true end, and an exchange of two dims."""
    value: Padded = call["self"]
    first, second = (d % len(value.dims) for d in call["dims"])
    quarters = call["k"] % 4
    node = _flip(call, value, ((), (second,), (first, second), (first,))[quarters])
    dims = list(value.dims)
    if quarters % 2:
        node = call.build.emit(aten.transpose.int, node, first, second)
        dims[first], dims[second] = dims[second], dims[first]
    return call.result(node, tuple(dims))


def _flip(call: Call, value: Padded, flipped: Collection[int]) -> Node:
    build = call.build
    factors = [(factor, i in flipped) for i, dim in enumerate(value.dims) for factor in joined(dim)]
    node = build.emit(aten.view.default, value.node, [factor.padded for factor, _ in factors])
    for place, (factor, is_flipped) in enumerate(factors):
        if is_flipped:
            node = _flipped(call, node, place, factor)
    return build.emit(aten.view.default, node, [places(d) for d in value.dims])


def _flipped(call: Call, node: Node, place: int, factor: Factor) -> Node:
    build = call.build
    if factor.is_full:
        return build.emit(aten.flip.default, node, [place])
    counted = build.emit(aten.arange.default, factor.padded, dtype=torch.int64, device=build.device)
    last = build.emit(aten.sub.Tensor, build.scalar(factor.size), build.scalar(1))
    positions = build.emit(aten.clamp.default, build.emit(aten.sub.Tensor, last, counted), 0)
    return build.emit(aten.index_select.default, node, place, positions)


@takes(size=BUCKET_SIZE, stride=BUCKET_SIZE, physical_layout=LAYOUT, fill_value=TRUE_SIZE)
def creation(call: Call) -> Padded:
    """full, zeros, ones and similar ops: padding has the same value."""
    like = call.op_name.endswith("_like")
    dims = call.tensors[0].dims if like else call.build.true_dims(call.node.meta["val"])
    value, dtype, build = _created(call), call.node.meta["val"].dtype, call.build
    shape = [places(d) for d in dims]
    if isinstance(value, (int, float, complex)):
        return call.result(build.emit(aten.full.default, shape, value, dtype=dtype, device=build.device), dims, value)
    if not is_varying(value):
        raise Unpaddable("its fill value depends on a size")
    filler = build.emit(aten._to_copy.default, build.scalar(value), dtype=dtype)
    return call.result(build.emit(aten.expand.default, filler, shape), dims)


def _created(call: Call) -> Number | Size:
    name = call.op_name
    if "fill_value" in call.given:
        return call["fill_value"]
    kind = name.removeprefix("new_").removesuffix("_like")
    return 0 if kind.startswith("empty") else {"zeros": 0, "ones": 1}[kind]


@takes(start=TRUE_SIZE, end=TRUE_SIZE, step=TRUE_SIZE)
def arange(call: Call) -> Padded:
    """Padding continues the sequence."""
    (size,) = call.true_sizes
    dims = ((call.build.factor(size),),)
    start, step = call.get("start", 0), call.get("step", 1)
    dtype, build = call.node.meta["val"].dtype, call.build
    if not all(map(_is_whole, (start, step))):
        return call.result(_fractions(call, places(dims[0]), start, step), dims)
    node = build.emit(aten.arange.default, places(dims[0]), dtype=torch.int64, device=build.device)
    node = node if is_fixed(step) and step == 1 else build.emit(aten.mul.Tensor, node, build.scalar(step))
    node = node if is_fixed(start) and start == 0 else build.emit(aten.add.Tensor, node, build.scalar(start))
    return call.result(node if dtype is torch.int64 else build.emit(aten._to_copy.default, node, dtype=dtype), dims)


def _is_whole(number: Size) -> bool:
    return isinstance(number, int) or bool(getattr(number, "is_integer", False) and not isinstance(number, float))


def _fractions(call: Call, count: int, start: Size, step: Size) -> Node:
    """A floating-point range, computed in float64 as in torch and rounded once."""
    build = call.build
    number = build.emit(aten.arange.default, count, dtype=torch.float64, device=build.device)
    first, apart = (
        build.emit(aten._to_copy.default, build.scalar(number), dtype=torch.float64) for number in (start, step)
    )
    moved = build.emit(aten.add.Tensor, build.emit(aten.mul.Tensor, number, apart), first)
    return build.emit(aten._to_copy.default, moved, dtype=call.node.meta["val"].dtype)


@takes(start=TRUE_SIZE, end=TRUE_SIZE, steps=LAYOUT)
def linspace(call: Call) -> Padded:
    """A fixed number of steps from one true size to another: nothing is padded."""
    build, wanted = call.build, call.node.meta["val"]
    ends = [build.scalar(call[name]) for name in ("start", "end")]
    node = build.emit(aten.linspace.Tensor_Tensor, *ends, call["steps"], dtype=wanted.dtype, device=build.device)
    return call.result(node, build.dims(call.true_sizes))


@takes(n=BUCKET_SIZE, m=BUCKET_SIZE)
def eye(call: Call) -> Padded:
    """Ones on the diagonal, in padding too."""
    dims, build, dtype = call.build.dims(call.true_sizes), call.build, call.node.meta["val"].dtype
    rows, columns = (build.emit(aten.arange.default, places(d), dtype=torch.int64, device=build.device) for d in dims)
    ones = build.emit(aten.eq.Tensor, build.emit(aten.view.default, rows, [-1, 1]), columns)
    return call.result(build.emit(aten._to_copy.default, ones, dtype=dtype), dims)


@takes(s=TRUE_SIZE)
def scalar_tensor(call: Call) -> Padded:
    """A 0-d tensor of a number or of a true size: nothing is padded."""
    value, wanted = call["s"], call.node.meta["val"].dtype
    if not is_varying(value):
        return call.result(call.same(), ())
    return call.result(call.build.emit(aten._to_copy.default, call.build.scalar(value), dtype=wanted), ())
