"""Rules of ops over groups of rows: embedding bags, grouped matrix products, histograms."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, CONSTANT, LAYOUT, takes
from dynaxla.bucketing.pad_rules.alignment import size_of_dim
from dynaxla.bucketing.pad_rules.contiguous import flatten, move_to_front
from dynaxla.bucketing.padded_value import (
    Dim,
    PaddedValue,
    Results,
    Unpaddable,
    have_same_layout,
    is_full,
    padded_size,
    single_factor,
)
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
    return (call.result(cut, (dim, weight.dims[1])), *_results_for_backward(call, node, items.dims[0], dim))


def _results_for_backward(call: RuleContext, node: Node, of_items: Dim, of_bags: Dim) -> Iterator[PaddedValue | None]:
    """The bag of each item, the size of each bag and the items of its maxima; None for a result of other sizes, which no
    gradient reads."""
    for place, dim in ((1, of_items), (2, of_bags), (3, of_bags)):
        sizes = call.build.known_sizes(call.node.meta["val"][place])
        dims = (dim, *call.build.dims(sizes[1:]))
        if sizes[0] == 0 and dim is of_items:  # where the mode needs none
            yield call.result(call.build.emit(operator.getitem, node, place), call.build.dims(sizes))
        elif sizes[0] == size_of_dim(dim):
            yield call.first(call.build.emit(operator.getitem, node, place), dims, [0])
        else:
            yield None


@takes(num_weights=BUCKET_SIZE, mode=LAYOUT, padding_idx=CONSTANT)
def embedding_bag_backward(call: RuleContext) -> PaddedValue:
    """Padded items, and the items of padded bags' maxima, are set to the row after the last one, which is dropped."""
    rows = call.build.factor(call["num_weights"])
    changed = _items_in_bags(call)
    weights = call["per_sample_weights"]
    if weights is not None:
        changed["per_sample_weights"] = move_to_front(call, weights, 0)
    for name, value in (("indices", changed["indices"]), ("maximum_indices", call["maximum_indices"])):
        changed[name] = call.build.mask(value, [0], rows.padded)
    node = call.same(**changed, num_weights=rows.padded)
    return call.result(node, ((rows,), changed["grad"].dims[1]))


@takes(mode=LAYOUT, padding_idx=CONSTANT)
def embedding_bag_per_sample_weights_backward(call: RuleContext) -> PaddedValue:
    """Padding along the rows of the embedding and of the gradient is set to zero; padded items read the first row."""
    weight, mask = call["weight"], call.build.mask
    if not is_full(weight.dims[0]):
        raise Unpaddable("the rows of the embedding vary")
    changed = _items_in_bags(call)
    items = changed["indices"]
    changed |= {
        "grad": mask(changed["grad"], [1], 0),
        "weight": mask(weight, [1], 0),
        "indices": mask(items, [0], 0),
    }
    return call.result(call.same(**changed), items.dims)


def _items_in_bags(call: RuleContext) -> dict[str, PaddedValue]:
    """Gradients of bags and the items, real ones in front, and what says the bag of each: padded items are in the first."""
    grad, items = (move_to_front(call, call[name], 0) for name in ("grad", "indices"))
    changed = {"grad": grad, "indices": items}
    bag = call["offset2bag"]
    if bag.meta.shape[0]:
        if not have_same_layout(bag.dims[0], call["indices"].dims[0]):
            raise Unpaddable("items and their bags hold their real elements in different places")
        changed["offset2bag"] = call.build.mask(move_to_front(call, bag, 0), [0], 0)
    if "offsets" in call.given:
        offsets = move_to_front(call, call["offsets"], 0)
        bags, end = size_of_dim(grad.dims[0]), single_factor(items.dims[0]).size
        starts = _starts(call, offsets, bags, end)
        node = call.build.resize(starts.node, 0, padded_size(grad.dims[0]))
        changed["offsets"] = PaddedValue(node, starts.dims)
    return changed


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
