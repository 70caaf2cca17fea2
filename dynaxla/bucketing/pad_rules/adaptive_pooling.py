"""Rules of adaptive pooling: the windows begin and end at positions computed from the true sizes."""

from __future__ import annotations

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.contiguous import along, counted, fronted
from dynaxla.bucketing.pad_rules.reductions import lowest, results_of, widened
from dynaxla.bucketing.pad_rules.windows import image_dims, is_per_image, pooled_dims
from dynaxla.bucketing.padded_value import Dim, Padded, Results, places, run_of
from dynaxla.bucketing.rule_context import Call

aten = torch.ops.aten


@takes(output_size=TRUE_SIZE)
def adaptive_pool(call: Call) -> Results:
    """The windows are those of the image's true size, so that none reads padding."""
    value: Padded = call["self"]
    image = image_dims(call, value)
    if is_per_image(call, value, image):
        return results_of(call, call.same(), pooled_dims(call, value, image))
    averages = "avg" in call.op_name
    wide = value
    if averages and widened(value.meta.dtype) is not value.meta.dtype:
        wide = Padded(_cast(call, value.node, widened(value.meta.dtype)), value.dims)
    for place in image:
        wide = _pooled(call, fronted(call, wide, place), place, (call.build.factor(call.true_sizes[place]),), averages)
    result = call.result(_cast(call, wide.node, value.meta.dtype), wide.dims)
    # Indices of maxima are flat indices into the padded image.
    return result if averages else (result, None)


def _pooled(call: Call, value: Padded, place: int, dim: Dim, averages: bool) -> Padded:
    build = call.build
    inside, lengths = parts(call, value.dims[place], dim)
    rank = len(value.dims)
    shape = [1] * (rank + 1)
    shape[place : place + 2] = places(dim), places(value.dims[place])
    fill = 0 if averages else lowest(value.meta.dtype)
    filler = build.emit(aten.full.default, [], fill, dtype=value.meta.dtype, device=build.device)
    spread = build.emit(aten.unsqueeze.default, value.node, place)
    chosen = build.emit(aten.where.self, build.emit(aten.view.default, inside, shape), spread, filler)
    dims = (*value.dims[:place], dim, *value.dims[place + 1 :])
    if not averages:
        return Padded(build.emit(aten.amax.default, chosen, [place + 1]), dims)
    total = build.emit(aten.sum.dim_IntList, chosen, [place + 1])
    divisors = along(call, _cast(call, lengths, value.meta.dtype), rank, place)
    return Padded(build.emit(aten.div.Tensor, total, divisors), dims)


def parts(call: Call, old: Dim, new: Dim) -> tuple[Node, Node]:
    """For each output position, whether its window has each position of the image (bool), and the window's length."""
    build = call.build
    size, out = (build.scalar(run_of(dim).size) for dim in (old, new))
    number = counted(call, places(new))
    start = build.emit(aten.mul.Tensor, number, size)
    # The end is rounded up.
    end = build.emit(aten.add.Tensor, build.emit(aten.add.Tensor, start, size), build.emit(aten.sub.Tensor, out, 1))
    first, behind = (build.emit(aten.div.Tensor_mode, n, out, rounding_mode="floor") for n in (start, end))
    read = counted(call, places(old))
    begun = build.emit(aten.ge.Tensor, read, build.emit(aten.view.default, first, [-1, 1]))
    unfinished = build.emit(aten.lt.Tensor, read, build.emit(aten.view.default, behind, [-1, 1]))
    return build.emit(aten.logical_and.default, begun, unfinished), build.emit(aten.sub.Tensor, behind, first)


def _cast(call: Call, node: Node, dtype: torch.dtype) -> Node:
    return node if node.meta["val"].dtype is dtype else call.build.emit(aten._to_copy.default, node, dtype=dtype)
