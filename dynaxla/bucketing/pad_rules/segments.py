"""Rules of ops over groups of rows: embedding bags, grouped matrix products, histograms."""

from __future__ import annotations

import math
import operator

import torch

from dynaxla.bucketing.argument_roles import CONSTANT, LAYOUT, takes
from dynaxla.bucketing.pad_rules.contiguous import flatten, move_to_front
from dynaxla.bucketing.padded_value import PaddedValue, Results, Unpaddable, is_full, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size

aten = torch.ops.aten


@takes(mode=LAYOUT, padding_idx=CONSTANT)
def embedding_bag(call: RuleContext) -> Results:
    """Padded items go into an additional bag, which is cropped; padded bags are empty."""
    weight, items, offsets = (
        call["weight"],
        move_to_front(call, call["indices"], 0),
        move_to_front(call, call["offsets"], 0),
    )
    if not is_full(weight.dims[0]):
        raise Unpaddable("the rows of the embedding vary")
    if len(items.dims) != 1:
        raise Unpaddable("bags of equal sizes")
    build, bags = call.build, call.true_sizes[0]
    dim = (build.factor(bags),)
    starts = _starts(call, offsets, bags, single_factor(items.dims[0]).size)
    weights = call["per_sample_weights"]
    weights = None if weights is None else move_to_front(call, weights, 0)
    node = call.same(indices=items, offsets=starts, per_sample_weights=weights, include_last_offset=False)
    output = build.emit(operator.getitem, node, 0)
    cut = build.emit(aten.slice.Tensor, output, 0, 0, padded_size(dim))
    # The other results are for the backward pass.
    return (call.result(cut, (dim, weight.dims[1])), None, None, None)


def _starts(call: RuleContext, offsets: PaddedValue, bags: Size, end: Size) -> PaddedValue:
    """The start of each bag, and the end of the last; padded bags start there too."""
    build = call.build
    last = build.emit(aten._to_copy.default, build.scalar(end), dtype=offsets.meta.dtype)
    count = build.factor(bags).padded
    positions = build.emit(aten.arange.default, count + 1, dtype=torch.int64, device=build.device)
    begun = build.emit(aten.lt.Tensor, positions, build.scalar(bags))
    given = build.resize(offsets.node, 0, count + 1)
    node = build.emit(aten.where.self, begun, given, last)
    return PaddedValue(node, offsets.dims)


@takes()
def grouped_product(call: RuleContext) -> PaddedValue:
    """Groups end at their last real rows; padded rows come last and give padding."""
    names = [name for name, value in call.given.items() if isinstance(value, PaddedValue)][:3]
    rows, weight, ends = (call[name] for name in names)
    if len(names) < 3 or len(rows.dims) != 2 or len(weight.dims) != 3:
        raise Unpaddable("the groups are not of rows")
    if not all(map(is_full, (rows.dims[1], weight.dims[0], weight.dims[1], ends.dims[0]))):
        raise Unpaddable("the number of groups or of a row's elements varies")
    rows = move_to_front(call, rows, 0)
    return call.result(call.same(**{names[0]: rows}), (rows.dims[0], weight.dims[2]))


@takes()
def group_products(call: RuleContext) -> PaddedValue:
    """Groups end at their last real rows, so that padded rows, which come last, are in no group."""
    left, right, ends = call["left"], call["right"], call["offs"]
    if not is_full(ends.dims[0]):
        raise Unpaddable("the number of groups varies")
    node = call.same(left=move_to_front(call, left, 0), right=move_to_front(call, right, 0))
    return call.result(node, (ends.dims[0], left.dims[1], right.dims[1]))


@takes(bins=CONSTANT, min=CONSTANT, max=CONSTANT)
def histogram(call: RuleContext) -> PaddedValue:
    """Padding is set to infinity, which is outside of every bin."""
    value: PaddedValue = call["self"]
    low, high = call["min"], call["max"]
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high < math.inf):
        raise Unpaddable("its range depends on the data")
    if not value.meta.dtype.is_floating_point:
        raise Unpaddable("a histogram of integers")
    row = flatten(call, value)
    return call.result(call.same(self=call.build.mask(row, [0], math.inf)), call.build.dims(call.true_sizes))
