"""Alignment of values that have the same real elements at different positions.

A graph input has all its real elements in front: a dim of 3 * s elements is one run. The same dim made in the graph by a
view of (3, s) is three runs of s, each followed by padding. Gathering the elements of one of them aligns the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy
import torch
from torch.fx import Node

from dynaxla.bucketing.padded_graph_builder import PaddedGraphBuilder
from dynaxla.bucketing.padded_value import Dim, PaddedValue, have_same_layout, is_full, merge_factors, padded_size
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size

aten = torch.ops.aten


def move_elements(call: RuleContext, value: PaddedValue, place: int, dim: Dim) -> PaddedValue:
    """Returns `value` with the real elements of one dim gathered, in order, to the positions of `dim`; padding is undefined.

    The two dims have the same true size, as the op that broadcasts them would have raised otherwise.
    """
    found = value.dims[place]
    if have_same_layout(found, dim):
        return value
    build = call.build
    positions = _positions(build, found, _ordinals(build, dim))
    clamped = build.emit(aten.clamp.default, positions, 0, padded_size(found) - 1)
    node = build.emit(aten.index_select.default, value.node, place, clamped)
    return PaddedValue(node, (*value.dims[:place], dim, *value.dims[place + 1 :]))


def align_operands(call: RuleContext) -> RuleContext:
    """Returns the call with its tensors aligned: in dims that broadcast together, real elements have equal positions."""
    names = [name for name, value in call.given.items() if isinstance(value, PaddedValue)]
    values = align_values(call, [call[name] for name in names])
    return replace(call, given={**call.given, **dict(zip(names, values, strict=True))})


def align_values(call: RuleContext, values: Sequence[PaddedValue], behind: int = 0) -> list[PaddedValue]:
    """Returns the values aligned: in dims that broadcast together (from the last), real elements have equal positions.

    The last `behind` dims of each value are not changed, nor are dims without padding: keys may have fewer heads than queries.
    """
    result = list(values)
    for position in range(-max((len(value.dims) for value in result), default=0), -behind):
        found = [v.dims[position] for v in result if len(v.dims) >= -position and padded_size(v.dims[position]) != 1]
        if not all(map(is_full, found)) and not all(have_same_layout(dim, found[0]) for dim in found):
            result = [_align_dim(call, value, position, most_factored_dim(found)) for value in result]
    return result


def align_to(call: RuleContext, value: PaddedValue, dims: Sequence[Dim]) -> PaddedValue:
    """Returns a value whose real elements have the positions of the dims that it broadcasts to."""
    for position in range(-len(value.dims), 0):
        value = _align_dim(call, value, position, dims[position])
    return value


def most_factored_dim(dims: Sequence[Dim]) -> Dim:
    """Returns the dim with the most factors: a later view is least likely to split one of its runs."""
    return max(dims, key=lambda dim: len(merge_factors(dim)))


def size_of_dim(dim: Dim) -> Size:
    """The true size of the dim: its number of real elements."""
    return sympy.prod([factor.size for factor in dim])


def _align_dim(call: RuleContext, value: PaddedValue, position: int, dim: Dim) -> PaddedValue:
    if len(value.dims) < -position or padded_size(value.dims[position]) == 1:
        return value
    return move_elements(call, value, len(value.dims) + position, dim)


def _ordinals(build: PaddedGraphBuilder, dim: Dim) -> Node:
    """For each position of a dim, the number of real elements before it; defined for real positions only."""
    factors = merge_factors(dim)
    result: Node | None = None
    for position, factor in enumerate(factors):
        shape = [1] * len(factors)
        shape[position] = factor.padded
        counted = build.emit(aten.arange.default, factor.padded, dtype=torch.int64, device=build.device)
        counted = build.emit(aten.view.default, counted, shape)
        if result is not None:
            counted = build.emit(
                aten.add.Tensor, build.emit(aten.mul.Tensor, result, build.scalar(factor.size)), counted
            )
        result = counted
    return build.emit(aten.view.default, result, [padded_size(dim)])


def _positions(build: PaddedGraphBuilder, dim: Dim, ordinals: Node) -> Node:
    """The positions of a dim's real elements with these ordinals."""
    _, *others = merge_factors(dim)  # the first factor's index is the remaining quotient
    rest, stride = ordinals, 1
    result: Node | None = None
    for factor in reversed(others):
        size = build.scalar(factor.size)
        here = build.emit(aten.mul.Tensor, build.emit(aten.remainder.Tensor, rest, size), stride)
        rest = build.emit(aten.div.Tensor_mode, rest, size, rounding_mode="floor")
        result = here if result is None else build.emit(aten.add.Tensor, result, here)
        stride *= factor.padded
    whole = build.emit(aten.mul.Tensor, rest, stride)
    return whole if result is None else build.emit(aten.add.Tensor, result, whole)
