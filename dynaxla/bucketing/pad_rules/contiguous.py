"""Dims whose real elements all come first, as ops on positions, sorts and windows require."""

from __future__ import annotations

import torch
from torch.fx import Node

from dynaxla.bucketing.pad_rules.alignment import move_elements, size_of_dim
from dynaxla.bucketing.padded_value import Dim, Factor, PaddedValue, merge_factors, padded_size
from dynaxla.bucketing.rule_context import RuleContext

aten = torch.ops.aten


def move_to_front(call: RuleContext, value: PaddedValue, place: int) -> PaddedValue:
    """Returns the value with the real elements of a dim in front, in order. Gathers them only if they are elsewhere."""
    dim = value.dims[place]
    if len(merge_factors(dim)) <= 1 or padded_size(dim) == 0:
        return value
    return move_elements(call, value, place, (Factor(padded_size(dim), size_of_dim(dim)),))


def extend_dim(call: RuleContext, value: PaddedValue, place: int, count: int) -> PaddedValue:
    """Returns the value with at least `count` elements in a dim whose real elements are in front."""
    if padded_size(value.dims[place]) >= count:
        return value
    return resize_dim(call, value, place, count)


def resize_dim(call: RuleContext, value: PaddedValue, place: int, count: int) -> PaddedValue:
    """Returns the value with a dim, whose real elements are in front, padded or cropped to `count` elements."""
    dim = (Factor(count, size_of_dim(value.dims[place])),)
    node = call.build.resize(value.node, place, count)
    return PaddedValue(node, (*value.dims[:place], dim, *value.dims[place + 1 :]))


def flatten(call: RuleContext, value: PaddedValue) -> PaddedValue:
    """Returns the value flattened to one dim, its real elements in front."""
    dim: Dim = tuple(factor for each in value.dims for factor in each) or (Factor(1, 1),)
    node = call.build.emit(aten.view.default, value.node, [padded_size(dim)])
    return move_to_front(call, PaddedValue(node, (dim,), value.fill), 0)


def iota(call: RuleContext, count: int) -> Node:
    """The int64 tensor 0, 1, ..., count - 1."""
    return call.build.emit(aten.arange.default, count, dtype=torch.int64, device=call.build.device)


def broadcast_along(call: RuleContext, node: Node, rank: int, place: int) -> Node:
    """Returns a vector reshaped to this rank, with its elements along one dim and size 1 elsewhere."""
    shape = [1] * rank
    shape[place] = -1
    return call.build.emit(aten.view.default, node, shape)
