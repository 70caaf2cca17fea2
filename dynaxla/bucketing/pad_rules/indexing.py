"""Rules of ops that move elements by position, and of ops that create tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, CONSTANT, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import align_values, most_factored_dim, move_elements
from dynaxla.bucketing.pad_rules.contiguous import extend_dim, move_to_front
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.padded_value import (
    Dim,
    Factor,
    Number,
    PaddedValue,
    Unpaddable,
    have_same_layout,
    is_full,
    merge_factors,
    padded_size,
    single_factor,
)
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size, is_fixed, is_varying
from dynaxla.custom_ops.dynamic_slice import WINDOW_SCATTER

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)


@takes(padding_idx=CONSTANT)
def embedding(call: RuleContext) -> PaddedValue:
    """Padded indices give padded rows."""
    weight, indices = move_to_front(call, call["weight"], 0), call["indices"]
    return call.result(call.same(weight=weight), (*indices.dims, weight.dims[1]))


@takes(dim=LAYOUT)
def gather(call: RuleContext) -> PaddedValue:
    """Real elements are brought to the front, where real positions point to; padded positions give padding."""
    value, index = call["self"], call["index"]
    place = call.dim("dim", value)
    for i in range(len(value.dims)):
        if i != place and padded_size(index.dims[i]) != 1 and not have_same_layout(index.dims[i], value.dims[i]):
            value, index = move_to_front(call, value, i), move_to_front(call, index, i)
            value = extend_dim(call, value, i, padded_size(index.dims[i]))
    if value.dims:
        value = move_to_front(call, value, place)
    return call.result(call.same(self=value, index=index), index.dims)


@takes(dim=LAYOUT)
def index_select(call: RuleContext) -> PaddedValue:
    """Real elements are brought to the front, where real positions point to; padded positions give padding."""
    index: PaddedValue = call["index"]
    place = call.dim("dim", call["self"])
    value = move_to_front(call, call["self"], place)
    picked = index.dims[0] if index.dims else _ONE
    return call.result(call.same(self=value), (*value.dims[:place], picked, *value.dims[place + 1 :]))


@takes()
def index(call: RuleContext) -> PaddedValue:
    """x[i, j]: negative positions count from the true end; padded positions give padding."""
    value: PaddedValue = call["self"]
    value, entries = move_indexed_dims_to_front(call, value, call["indices"])
    taken = [i for i, entry in enumerate(entries) if entry is not None]
    given = [entry for entry in entries if entry is not None]
    if any(entry.meta.dtype in (torch.bool, torch.uint8) for entry in given):
        raise Unpaddable("a boolean index")
    for place in taken:
        value = move_to_front(call, value, place)
    met = iter(align_values(call, given))
    entries = [
        None if e is None else wrap_negative_index(call, next(met), value.dims[i]) for i, e in enumerate(entries)
    ]
    picked = broadcast([entry.dims for entry in entries if entry is not None])
    dims = (*value.dims[: taken[0]], *picked, *value.dims[taken[-1] + 1 :])
    return call.result(call.same(self=value, indices=entries), dims)


def move_indexed_dims_to_front(
    call: RuleContext, value: PaddedValue, indices: Sequence[PaddedValue | None]
) -> tuple[PaddedValue, list[PaddedValue | None]]:
    """Returns the value and its indices, with the indexed dims moved to the front if they are not neighbours."""
    taken = [i for i, entry in enumerate(indices) if entry is not None]
    if taken == list(range(taken[0], taken[-1] + 1)):
        return value, list(indices)
    order = [*taken, *(d for d in range(len(value.dims)) if d not in taken)]
    node = call.build.emit(aten.permute.default, value.node, order)
    return PaddedValue(node, tuple(value.dims[d] for d in order), value.fill), [indices[i] for i in taken]


def wrap_negative_index(call: RuleContext, index: PaddedValue, dim: Dim) -> PaddedValue:
    """Returns the index with negative positions, which count from the true end of `dim`, made non-negative."""
    if is_full(dim):
        return index
    build = call.build
    size = build.scalar(single_factor(dim).size)
    if index.meta.dtype is not torch.int64:
        size = build.emit(aten._to_copy.default, size, dtype=index.meta.dtype)
    wrapped = build.emit(aten.add.Tensor, index.node, size)
    negative = build.emit(aten.lt.Scalar, index.node, 0)
    return PaddedValue(build.emit(aten.where.self, negative, wrapped, index.node), index.dims)


@takes(size=BUCKET_SIZE, fill_value=CONSTANT)
def nonzero_static(call: RuleContext) -> PaddedValue:
    """Padding is set to zero; real elements are in front of it along each dim, so that their positions are the true ones."""
    value: PaddedValue = call["self"]
    for place in range(len(value.dims)):
        value = move_to_front(call, value, place)
    value = call.build.mask(value, range(len(value.dims)), 0)
    return call.result(call.same(self=value), call.build.dims(call.true_sizes))


@takes(dim=LAYOUT)
def concatenate(call: RuleContext) -> PaddedValue:
    """Tensors are joined as they are if only the last has padding; else each is written at the true end of the one before."""
    values: list[PaddedValue] = [v for v in call["tensors"] if tuple(v.meta.shape) != (0,)]
    place = call["dim"] % len(values[0].dims)
    for i in range(len(values[0].dims)):
        if i != place:
            dim = most_factored_dim([v.dims[i] for v in values])
            values = [move_elements(call, v, i, dim) for v in values]
    around = list(values[0].dims)
    size = call.true_sizes[place]
    around[place] = (call.build.factor(size),)
    dims = tuple(around)
    values = [move_to_front(call, v, place) for v in values]
    if all(is_full(v.dims[place]) for v in values[:-1]):
        return call.first(call.same(tensors=values), dims, [place])
    some = [v for v in values if padded_size(v.dims[place])]
    return call.result(_concatenate_padded(call, some, place, padded_size(dims[place])), dims)


def _concatenate_padded(call: RuleContext, values: Sequence[PaddedValue], place: int, count: int) -> Node:
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
    result = build.resize(pieces[0], place, sum(padded_size(v.dims[place]) for v in values))
    start: Size = 0
    for before, piece in zip(values, pieces[1:]):
        start = start + single_factor(before.dims[place]).size
        result = build.emit(WINDOW_SCATTER, result, piece, _start_indices(call, len(before.dims), place, start))
    return build.resize(result, place, count)


def _start_indices(call: RuleContext, rank: int, place: int, start: Size) -> Node:
    """The start indices of a window, int64 [rank]: 0 except along one dim."""
    build = call.build
    counted = build.emit(aten.arange.default, rank, dtype=torch.int64, device=build.device)
    here = build.emit(aten.eq.Scalar, counted, place)
    return build.emit(aten.mul.Tensor, here, build.scalar(start))


@takes(dims=LAYOUT)
def flip(call: RuleContext) -> PaddedValue:
    """Positions count from the true end; a dim of several runs is flipped within and across its runs."""
    value: PaddedValue = call.tensors[0]
    return call.result(_flip(call, value, {d % len(value.dims) for d in call["dims"]}), value.dims)


@takes(k=LAYOUT, dims=LAYOUT)
def rot90(call: RuleContext) -> PaddedValue:
    """rot90: flips from the true end, and an exchange of two dims."""
    value: PaddedValue = call["self"]
    first, second = (d % len(value.dims) for d in call["dims"])
    quarters = call["k"] % 4
    node = _flip(call, value, ((), (second,), (first, second), (first,))[quarters])
    dims = list(value.dims)
    if quarters % 2:
        node = call.build.emit(aten.transpose.int, node, first, second)
        dims[first], dims[second] = dims[second], dims[first]
    return call.result(node, tuple(dims))


def _flip(call: RuleContext, value: PaddedValue, flipped: Collection[int]) -> Node:
    build = call.build
    factors = [(factor, i in flipped) for i, dim in enumerate(value.dims) for factor in merge_factors(dim)]
    node = build.emit(aten.view.default, value.node, [factor.padded for factor, _ in factors])
    for place, (factor, is_flipped) in enumerate(factors):
        if is_flipped:
            node = _flipped(call, node, place, factor)
    return build.emit(aten.view.default, node, [padded_size(d) for d in value.dims])


def _flipped(call: RuleContext, node: Node, place: int, factor: Factor) -> Node:
    build = call.build
    if factor.is_full:
        return build.emit(aten.flip.default, node, [place])
    counted = build.emit(aten.arange.default, factor.padded, dtype=torch.int64, device=build.device)
    last = build.emit(aten.sub.Tensor, build.scalar(factor.size), build.scalar(1))
    positions = build.emit(aten.clamp.default, build.emit(aten.sub.Tensor, last, counted), 0)
    return build.emit(aten.index_select.default, node, place, positions)


@takes(size=BUCKET_SIZE, stride=BUCKET_SIZE, physical_layout=LAYOUT, fill_value=TRUE_SIZE)
def creation(call: RuleContext) -> PaddedValue:
    """full, zeros, ones and similar ops: padding has the same value."""
    like = call.op_name.endswith("_like")
    dims = call.tensors[0].dims if like else call.build.true_dims(call.node.meta["val"])
    value, dtype, build = _created(call), call.node.meta["val"].dtype, call.build
    shape = [padded_size(d) for d in dims]
    if isinstance(value, (int, float, complex)):
        return call.result(build.emit(aten.full.default, shape, value, dtype=dtype, device=build.device), dims, value)
    if not is_varying(value):
        raise Unpaddable("its fill value depends on a size")
    filler = build.emit(aten._to_copy.default, build.scalar(value), dtype=dtype)
    return call.result(build.emit(aten.expand.default, filler, shape), dims)


def _created(call: RuleContext) -> Number | Size:
    name = call.op_name
    if "fill_value" in call.given:
        return call["fill_value"]
    kind = name.removeprefix("new_").removesuffix("_like")
    return 0 if kind.startswith("empty") else {"zeros": 0, "ones": 1}[kind]


@takes(start=TRUE_SIZE, end=TRUE_SIZE, step=TRUE_SIZE)
def arange(call: RuleContext) -> PaddedValue:
    """Padding continues the sequence."""
    (size,) = call.true_sizes
    dims = ((call.build.factor(size),),)
    start, step = call.get("start", 0), call.get("step", 1)
    dtype, build = call.node.meta["val"].dtype, call.build
    if not all(map(_is_whole, (start, step))):
        return call.result(_fractions(call, padded_size(dims[0]), start, step), dims)
    node = build.emit(aten.arange.default, padded_size(dims[0]), dtype=torch.int64, device=build.device)
    node = node if is_fixed(step) and step == 1 else build.emit(aten.mul.Tensor, node, build.scalar(step))
    node = node if is_fixed(start) and start == 0 else build.emit(aten.add.Tensor, node, build.scalar(start))
    return call.result(node if dtype is torch.int64 else build.emit(aten._to_copy.default, node, dtype=dtype), dims)


def _is_whole(number: Size) -> bool:
    return isinstance(number, int) or bool(getattr(number, "is_integer", False) and not isinstance(number, float))


def _fractions(call: RuleContext, count: int, start: Size, step: Size) -> Node:
    """A floating-point range, computed in float64 as in torch and rounded once."""
    build = call.build
    number = build.emit(aten.arange.default, count, dtype=torch.float64, device=build.device)
    first, apart = (
        build.emit(aten._to_copy.default, build.scalar(number), dtype=torch.float64) for number in (start, step)
    )
    moved = build.emit(aten.add.Tensor, build.emit(aten.mul.Tensor, number, apart), first)
    return build.emit(aten._to_copy.default, moved, dtype=call.node.meta["val"].dtype)


@takes(start=TRUE_SIZE, end=TRUE_SIZE, steps=LAYOUT)
def linspace(call: RuleContext) -> PaddedValue:
    """A fixed number of steps from one true size to another: nothing is padded."""
    build, wanted = call.build, call.node.meta["val"]
    ends = [build.scalar(call[name]) for name in ("start", "end")]
    node = build.emit(aten.linspace.Tensor_Tensor, *ends, call["steps"], dtype=wanted.dtype, device=build.device)
    return call.result(node, build.dims(call.true_sizes))


@takes(n=BUCKET_SIZE, m=BUCKET_SIZE)
def eye(call: RuleContext) -> PaddedValue:
    """Ones on the diagonal, in padding too."""
    dims, build, dtype = call.build.dims(call.true_sizes), call.build, call.node.meta["val"].dtype
    rows, columns = (
        build.emit(aten.arange.default, padded_size(d), dtype=torch.int64, device=build.device) for d in dims
    )
    ones = build.emit(aten.eq.Tensor, build.emit(aten.view.default, rows, [-1, 1]), columns)
    return call.result(build.emit(aten._to_copy.default, ones, dtype=dtype), dims)


@takes(s=TRUE_SIZE)
def scalar_tensor(call: RuleContext) -> PaddedValue:
    """A 0-d tensor of a number or of a true size: nothing is padded."""
    value, wanted = call["s"], call.node.meta["val"].dtype
    if not is_varying(value):
        return call.result(call.same(), ())
    return call.result(call.build.emit(aten._to_copy.default, call.build.scalar(value), dtype=wanted), ())
