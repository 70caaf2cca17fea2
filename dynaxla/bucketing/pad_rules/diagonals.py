"""Rules of diagonals and triangles: rows and columns count from the front; the diagonal's offset may be a symbolic size."""

from __future__ import annotations

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import move_elements
from dynaxla.bucketing.pad_rules.contiguous import broadcast_along, iota, move_to_front
from dynaxla.bucketing.padded_value import Dim, PaddedValue, padded_size
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import is_fixed

aten = torch.ops.aten


@takes(offset=TRUE_SIZE, dim1=LAYOUT, dim2=LAYOUT)
def diagonal(call: RuleContext) -> PaddedValue:
    """The diagonal becomes the last dim, its real elements first."""
    value: PaddedValue = call.tensors[0]
    rows, columns = taken = [call.dim(name, value) for name in ("dim1", "dim2")]
    for place in taken:
        value = move_to_front(call, value, place)
    others = [d for d in range(len(value.dims)) if d not in taken]
    dim = (call.build.factor(call.true_sizes[-1]),)
    matrices = call.build.emit(aten.permute.default, value.node, [*others, rows, columns])
    row, column = _positions(call, padded_size(dim))
    read = [
        call.build.emit(aten.clamp.default, position, 0, padded_size(value.dims[place]) - 1)
        for position, place in ((row, rows), (column, columns))
    ]
    node = call.build.emit(aten.index.Tensor, matrices, [*[None] * len(others), *read])
    return call.result(node, (*(value.dims[d] for d in others), dim))


def _positions(call: RuleContext, count: int) -> tuple[Node, Node]:
    """The row and the column of each element of the diagonal."""
    build = call.build
    below, right = _first_position(call)
    numbers = iota(call, count)
    return build.emit(aten.add.Tensor, numbers, below), build.emit(aten.add.Tensor, numbers, right)


def _first_position(call: RuleContext) -> tuple[Node, Node]:
    """The row and the column of the diagonal's first element, as 0-d tensors."""
    below, right = (call.build.scalar(sign * call["offset"]) for sign in (-1, 1))
    return call.build.emit(aten.clamp.default, below, 0), call.build.emit(aten.clamp.default, right, 0)


@takes(offset=TRUE_SIZE, dim1=LAYOUT, dim2=LAYOUT)
def diagonal_scatter(call: RuleContext) -> PaddedValue:
    """Elements on the diagonal are replaced by the source's; all others, padding included, are kept."""
    value: PaddedValue = call["self"]
    for name in ("dim1", "dim2"):
        value = move_to_front(call, value, call.dim(name, value))
    return call.result(_write_diagonal(call, value, call["src"]), value.dims)


@takes(input_sizes=BUCKET_SIZE, offset=TRUE_SIZE, dim1=LAYOUT, dim2=LAYOUT)
def diagonal_backward(call: RuleContext) -> PaddedValue:
    """Elements on the diagonal get the gradient; all others, padding included, are zero."""
    grad, build = call["grad_output"], call.build
    rank = len(call["input_sizes"])
    taken = {int(call["dim1"]) % rank, int(call["dim2"]) % rank}
    others = iter(grad.dims)
    dims = tuple((build.factor(s),) if i in taken else next(others) for i, s in enumerate(call["input_sizes"]))
    shape, dtype = [padded_size(dim) for dim in dims], call.node.meta["val"].dtype
    zeros = PaddedValue(build.emit(aten.full.default, shape, 0, dtype=dtype, device=build.device), dims, 0)
    return call.result(_write_diagonal(call, zeros, grad), dims)


def _write_diagonal(call: RuleContext, value: PaddedValue, source: PaddedValue) -> Node:
    """Returns the value with the diagonal of each of its matrices replaced by the last dim of the source."""
    build, rank = call.build, len(value.dims)
    rows, columns = (call.dim(name, value) for name in ("dim1", "dim2"))
    others = [d for d in range(rank) if d not in (rows, columns)]
    for i, d in enumerate(others):
        source = move_elements(call, source, i, value.dims[d])
    source = move_to_front(call, source, len(source.dims) - 1)
    row, column = (broadcast_along(call, iota(call, padded_size(value.dims[d])), rank, d) for d in (rows, columns))
    here = build.emit(aten.eq.Tensor, build.emit(aten.sub.Tensor, column, row), build.scalar(call["offset"]))
    if padded_size(source.dims[-1]) == 0:
        return value.node
    number = build.emit(aten.sub.Tensor, iota(call, padded_size(value.dims[rows])), _first_position(call)[0])
    number = build.emit(aten.clamp.default, number, 0, padded_size(source.dims[-1]) - 1)
    read = build.emit(aten.index_select.default, source.node, rank - 2, number)
    order = {**{d: i for i, d in enumerate(others)}, rows: rank - 2, columns: rank - 1}
    laid = build.emit(
        aten.permute.default, build.emit(aten.unsqueeze.default, read, -1), [order[d] for d in range(rank)]
    )
    if laid.meta["val"].dtype is not value.meta.dtype:
        laid = build.emit(aten._to_copy.default, laid, dtype=value.meta.dtype)
    return build.emit(aten.where.self, here, laid, value.node)


@takes(offset=TRUE_SIZE, dim1=LAYOUT, dim2=LAYOUT)
def diag_embed(call: RuleContext) -> PaddedValue:
    """Zeros except for the diagonal, whose padding is in padded rows and columns."""
    value: PaddedValue = call["self"]
    rank = len(value.dims) + 1
    value = move_to_front(call, value, len(value.dims) - 1)
    taken = [int(call[name]) % rank for name in ("dim1", "dim2")]
    others = iter(value.dims)
    sizes = call.true_sizes
    dims: tuple[Dim, ...] = tuple((call.build.factor(sizes[d]),) if d in taken else next(others) for d in range(rank))
    shape = [padded_size(dim) for dim in dims]
    zeros = call.build.emit(aten.full.default, shape, 0, dtype=value.meta.dtype, device=call.build.device)
    return call.result(_write_diagonal(call, PaddedValue(zeros, dims), value), dims)


@takes()
def trace(call: RuleContext) -> PaddedValue:
    """The sum of the diagonal: padding of rows and columns is set to zero."""
    value: PaddedValue = call["self"]
    for place in (0, 1):
        value = move_to_front(call, value, place)
    return call.result(call.same(self=call.build.mask(value, [0, 1], 0)), ())


@takes(diagonal=TRUE_SIZE)
def triangle(call: RuleContext) -> PaddedValue:
    """tril, triu: rows and columns count from the front, where the real ones are."""
    value: PaddedValue = call.tensors[0]
    build, rank = call.build, len(value.dims)
    for place in range(rank - 2, rank):
        value = move_to_front(call, value, place)
    if is_fixed(call["diagonal"]):
        return call.result(call.same(self=value), value.dims)
    row, column = (iota(call, padded_size(dim)) for dim in value.dims[-2:])
    moved = build.emit(aten.sub.Tensor, column, build.emit(aten.view.default, row, [-1, 1]))
    lower = call.op_name == "tril"
    kept = build.emit((aten.le if lower else aten.ge).Tensor, moved, build.scalar(call["diagonal"]))
    zero = build.emit(aten.full.default, [], 0, dtype=value.meta.dtype, device=build.device)
    return call.result(build.emit(aten.where.self, kept, value.node, zero), value.dims)
