"""Rules of adaptive pooling: the windows begin and end at positions computed from the true sizes."""

from __future__ import annotations

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.contiguous import broadcast_along, iota, move_to_front
from dynaxla.bucketing.pad_rules.reductions import accumulation_dtype, lowest_value, make_results
from dynaxla.bucketing.pad_rules.windows import image_dims, is_per_image, pooled_dims
from dynaxla.bucketing.padded_value import Dim, PaddedValue, Results, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext

aten = torch.ops.aten


@takes(output_size=TRUE_SIZE)
def adaptive_pool(call: RuleContext) -> Results:
    """The windows are those of the image's true size, so that none reads padding."""
    value: PaddedValue = call["self"]
    image = image_dims(call, value)
    if is_per_image(call, value, image):
        return make_results(call, call.same(), pooled_dims(call, value, image))
    averages = "avg" in call.op_name
    wide = value
    if averages and accumulation_dtype(value.meta.dtype) is not value.meta.dtype:
        wide = PaddedValue(_cast(call, value.node, accumulation_dtype(value.meta.dtype)), value.dims)
    for place in image:
        wide = _pooled(
            call, move_to_front(call, wide, place), place, (call.build.factor(call.true_sizes[place]),), averages
        )
    result = call.result(_cast(call, wide.node, value.meta.dtype), wide.dims)
    # Indices of maxima are flat indices into the padded image.
    return result if averages else (result, None)


def _pooled(call: RuleContext, value: PaddedValue, place: int, dim: Dim, averages: bool) -> PaddedValue:
    build = call.build
    inside, lengths = pooling_windows(call, value.dims[place], dim)
    rank = len(value.dims)
    shape = [1] * (rank + 1)
    shape[place : place + 2] = padded_size(dim), padded_size(value.dims[place])
    fill = 0 if averages else lowest_value(value.meta.dtype)
    filler = build.emit(aten.full.default, [], fill, dtype=value.meta.dtype, device=build.device)
    spread = build.emit(aten.unsqueeze.default, value.node, place)
    chosen = build.emit(aten.where.self, build.emit(aten.view.default, inside, shape), spread, filler)
    dims = (*value.dims[:place], dim, *value.dims[place + 1 :])
    if not averages:
        return PaddedValue(build.emit(aten.amax.default, chosen, [place + 1]), dims)
    total = build.emit(aten.sum.dim_IntList, chosen, [place + 1])
    divisors = broadcast_along(call, _cast(call, lengths, value.meta.dtype), rank, place)
    return PaddedValue(build.emit(aten.div.Tensor, total, divisors), dims)


def pooling_windows(call: RuleContext, old: Dim, new: Dim) -> tuple[Node, Node]:
    """For each output position, whether its window has each position of the image (bool), and the window's length."""
    build = call.build
    size, out = (build.scalar(single_factor(dim).size) for dim in (old, new))
    number = iota(call, padded_size(new))
    start = build.emit(aten.mul.Tensor, number, size)
    # The end is rounded up.
    end = build.emit(aten.add.Tensor, build.emit(aten.add.Tensor, start, size), build.emit(aten.sub.Tensor, out, 1))
    first, behind = (build.emit(aten.div.Tensor_mode, n, out, rounding_mode="floor") for n in (start, end))
    read = iota(call, padded_size(old))
    begun = build.emit(aten.ge.Tensor, read, build.emit(aten.view.default, first, [-1, 1]))
    unfinished = build.emit(aten.lt.Tensor, read, build.emit(aten.view.default, behind, [-1, 1]))
    return build.emit(aten.logical_and.default, begun, unfinished), build.emit(aten.sub.Tensor, behind, first)


def _cast(call: RuleContext, node: Node, dtype: torch.dtype) -> Node:
    return node if node.meta["val"].dtype is dtype else call.build.emit(aten._to_copy.default, node, dtype=dtype)
