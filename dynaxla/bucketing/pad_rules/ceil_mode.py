"""Rules of pooling with ceil_mode: the last windows may begin in the image and end behind it.

The image is lengthened until all of these windows fit, with elements that change no result, and pooled without ceil_mode.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.pad_rules.contiguous import along, counted, fronted
from dynaxla.bucketing.pad_rules.pool_indices import recounted
from dynaxla.bucketing.pad_rules.reductions import lowest, widened
from dynaxla.bucketing.padded_graph_builder import Builder
from dynaxla.bucketing.padded_value import Dim, Number, Padded, Results, places, run_of
from dynaxla.bucketing.rule_context import Call

aten = torch.ops.aten


def max_pool(call: Call, value: Padded, image: Sequence[int], dims: tuple[Dim, ...]) -> Results:
    """What is added behind the image is below everything; positions of maxima are recounted for the true image."""
    build = call.build
    longer = _lengthened(call, value, image, dims, lowest(value.meta.dtype))
    node = call.same(self=longer, ceil_mode=False)
    highest, found = (_cut(build, build.emit(operator.getitem, node, i), image, dims) for i in range(2))
    numbers = recounted(build, found, _shape(longer, image), [run_of(value.dims[d]).size for d in image])
    return call.result(highest, dims), call.result(numbers, dims)


def max_pool_backward(call: Call, image: Sequence[int]) -> Padded:
    """Positions of maxima are recounted for the longer image, which is cut again; padded gradients are zero."""
    grad, value, indices, build = call["grad_output"], call["self"], call["indices"], call.build
    longer = _lengthened(call, value, image, grad.dims, None)
    numbers = recounted(build, indices.node, [run_of(value.dims[d]).size for d in image], _shape(longer, image))
    numbers = build.mask(Padded(numbers, indices.dims), image, 0).node
    real = build.mask(grad, image, 0).node
    windows = [_windows(call, longer, d, axis) for axis, d in enumerate(image)]
    for d, count in zip(image, windows, strict=True):
        # Gradients that are added are zero, and go to the first place.
        real, numbers = _grown(build, real, d, count), _grown(build, numbers, d, count)
    node = call.same(grad_output=real, self=longer, indices=numbers, ceil_mode=False)
    return call.result(_cut(build, node, image, value.dims), value.dims)


def avg_pool(call: Call, value: Padded, image: Sequence[int], dims: tuple[Dim, ...]) -> Padded:
    """Sums of the windows, over the number of elements that eager counts in each."""
    build, dtype = call.build, value.meta.dtype
    for d in image:
        value = fronted(call, value, d)
    wide = Padded(_cast(build, value.node, widened(dtype)), value.dims, value.fill)
    longer = _lengthened(call, wide, image, dims, 0)
    sums = _cut(build, call.same(self=longer, ceil_mode=False, divisor_override=1), image, dims)
    counts = _counts(call, value, image, dims, widened(dtype))
    if not dtype.is_floating_point:
        return call.result(build.emit(aten.div.Tensor_mode, sums, counts, rounding_mode="trunc"), dims)
    means = build.emit(aten.div.Tensor, sums, counts)
    return call.result(_cast(build, means, dtype), dims)


def avg_pool_backward(call: Call, image: Sequence[int]) -> Padded:
    """Each window's gradient, over the number that eager divides by, goes to its elements; padded gradients are zero."""
    grad, value, build = call["grad_output"], call["self"], call.build
    dtype = value.meta.dtype
    wide = _cast(build, grad.node, widened(dtype))
    shares = build.emit(aten.div.Tensor, wide, _counts(call, value, image, grad.dims, widened(dtype)))
    real = build.mask(Padded(shares, grad.dims), image, 0).node
    longer = _lengthened(call, value, image, grad.dims, None)
    for axis, d in enumerate(image):
        real = _grown(build, real, d, _windows(call, longer, d, axis))
    like = _cast(build, longer.node, widened(dtype))
    node = call.same(grad_output=real, self=like, ceil_mode=False, divisor_override=1)
    return call.result(_cast(build, _cut(build, node, image, value.dims), dtype), value.dims)


def _lengthened(call: Call, value: Padded, image: Sequence[int], dims: Sequence[Dim], fill: Number | None) -> Padded:
    """The value with places for all windows of the result; all that is not the image's holds `fill` (None: anything)."""
    for d in image:
        value = fronted(call, value, d)
    node = value.node if fill is None else call.build.mask(value, image, fill).node
    for axis, d in enumerate(image):
        kernel, stride, own_padding, dilation = _settings(call, axis)
        reach = (places(dims[d]) - 1) * stride + dilation * (kernel - 1) + 1
        node = _grown(call.build, node, d, max(reach - 2 * own_padding, places(value.dims[d])), fill or 0)
    return Padded(node, value.dims)


def _grown(build: Builder, node: Node, d: int, count: int, fill: Number = 0) -> Node:
    """The node with at least `count` places in a dim; new ones hold `fill`."""
    now, rank = node.meta["val"].shape[d], node.meta["val"].dim()
    if now >= count:
        return node
    amounts = [0] * (2 * rank)
    amounts[2 * (rank - 1 - d) + 1] = count - now
    return build.emit(aten.constant_pad_nd.default, node, amounts, fill)


def _cut(build: Builder, node: Node, image: Sequence[int], dims: Sequence[Dim]) -> Node:
    """The node with the places of these dims along the image."""
    for d in image:
        node = build.resized(node, d, places(dims[d]))
    return node


def _windows(call: Call, longer: Padded, d: int, axis: int) -> int:
    """How many windows fit into a longer image."""
    kernel, stride, own_padding, dilation = _settings(call, axis)
    return int((longer.meta.shape[d] + 2 * own_padding - dilation * (kernel - 1) - 1) // stride + 1)


def _settings(call: Call, axis: int) -> tuple[int, int, int, int]:
    """Kernel, stride, own padding and dilation along an axis of the image."""
    kernel = call["kernel_size"]
    given = (kernel, call["stride"] or kernel, call["padding"], call.get("dilation", [1]))
    found = [numbers[axis] if len(numbers) > 1 else numbers[0] for numbers in given]
    return found[0], found[1], found[2], found[3]


def _counts(call: Call, value: Padded, image: Sequence[int], dims: Sequence[Dim], dtype: torch.dtype) -> Node:
    """What each window is divided by: the op's own padding counts if asked for, what lies behind it never does."""
    build, rank = call.build, len(value.dims)
    if call["divisor_override"]:
        return build.emit(aten.full.default, [1] * rank, call["divisor_override"], dtype=dtype, device=build.device)
    result: Node | None = None
    for axis, d in enumerate(image):
        kernel, stride, own_padding, _ = _settings(call, axis)
        size = build.scalar(run_of(value.dims[d]).size)
        starts = build.emit(aten.mul.Tensor, counted(call, places(dims[d])), stride)
        starts = build.emit(aten.sub.Tensor, starts, own_padding)
        ends = build.emit(aten.add.Tensor, starts, kernel)
        if call["count_include_pad"]:
            ends = build.emit(aten.minimum.default, ends, build.emit(aten.add.Tensor, size, own_padding))
        else:
            starts, ends = build.emit(aten.clamp.default, starts, 0), build.emit(aten.minimum.default, ends, size)
        count = along(call, build.emit(aten.sub.Tensor, ends, starts), rank, d)
        result = count if result is None else build.emit(aten.mul.Tensor, result, count)
    assert result is not None
    return _cast(build, result, dtype)


def _shape(value: Padded, image: Sequence[int]) -> list[int]:
    return [int(value.meta.shape[d]) for d in image]


def _cast(build: Builder, node: Node, dtype: torch.dtype) -> Node:
    return node if node.meta["val"].dtype is dtype else build.emit(aten._to_copy.default, node, dtype=dtype)
