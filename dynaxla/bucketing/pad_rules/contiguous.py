"""Dims whose real elements all come first, as ops on positions, sorts and windows require."""

from __future__ import annotations

import torch
from torch.fx import Node

from dynaxla.bucketing.pad_rules.alignment import relaid, size_of_dim
from dynaxla.bucketing.padded_value import Dim, Factor, Padded, joined, places
from dynaxla.bucketing.rule_context import Call

aten = torch.ops.aten


def fronted(call: Call, value: Padded, place: int) -> Padded:
    """Returns the value with the real elements of a dim in front, in order. Gathers them only if they are elsewhere."""
    dim = value.dims[place]
    if len(joined(dim)) <= 1 or places(dim) == 0:
        return value
    return relaid(call, value, place, (Factor(places(dim), size_of_dim(dim)),))


def lengthened(call: Call, value: Padded, place: int, count: int) -> Padded:
    """Returns the value with at least `count` elements in a dim whose real elements are in front."""
    if places(value.dims[place]) >= count:
        return value
    return recut(call, value, place, count)


def recut(call: Call, value: Padded, place: int, count: int) -> Padded:
    """Returns the value with a dim, whose real elements are in front, padded or cropped to `count` elements."""
    dim = (Factor(count, size_of_dim(value.dims[place])),)
    node = call.build.resized(value.node, place, count)
    return Padded(node, (*value.dims[:place], dim, *value.dims[place + 1 :]))


def flat(call: Call, value: Padded) -> Padded:
    """Returns the value flattened to one dim, its real elements in front."""
    dim: Dim = tuple(factor for each in value.dims for factor in each) or (Factor(1, 1),)
    node = call.build.emit(aten.view.default, value.node, [places(dim)])
    return fronted(call, Padded(node, (dim,), value.fill), 0)


def counted(call: Call, count: int) -> Node:
    """The int64 tensor 0, 1, ..., count - 1."""
    return call.build.emit(aten.arange.default, count, dtype=torch.int64, device=call.build.device)


def along(call: Call, node: Node, rank: int, place: int) -> Node:
    """Returns a vector reshaped to this rank, with its elements along one dim and size 1 elsewhere."""
    shape = [1] * rank
    shape[place] = -1
    return call.build.emit(aten.view.default, node, shape)
