"""Rules of pooling with ceil_mode: the last windows may begin in the image and end after it.

The image is padded with elements that change no result until all these windows fit, and pooled without ceil_mode.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.pad_rules.contiguous import broadcast_along, iota, move_to_front
from dynaxla.bucketing.pad_rules.pool_indices import convert_pool_indices
from dynaxla.bucketing.pad_rules.reductions import accumulation_dtype, lowest_value
from dynaxla.bucketing.padded_graph_builder import PaddedGraphBuilder
from dynaxla.bucketing.padded_value import Dim, Number, PaddedValue, Results, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext

aten = torch.ops.aten


def max_pool(call: RuleContext, value: PaddedValue, image: Sequence[int], dims: tuple[Dim, ...]) -> Results:
    """The image is padded with the lowest value; indices of maxima are converted to the true image."""
    build = call.build
    longer = _fit_windows(call, value, image, dims, lowest_value(value.meta.dtype))
    node = call.same(self=longer, ceil_mode=False)
    highest, found = (_crop(build, build.emit(operator.getitem, node, i), image, dims) for i in range(2))
    numbers = convert_pool_indices(
        build, found, _shape(longer, image), [single_factor(value.dims[d]).size for d in image]
    )
    return call.result(highest, dims), call.result(numbers, dims)


def max_pool_backward(call: RuleContext, image: Sequence[int]) -> PaddedValue:
    """Indices of maxima are converted to the longer image, whose gradient is cropped; padded gradients are set to zero."""
    grad, value, indices, build = call["grad_output"], call["self"], call["indices"], call.build
    longer = _fit_windows(call, value, image, grad.dims, None)
    numbers = convert_pool_indices(
        build, indices.node, [single_factor(value.dims[d]).size for d in image], _shape(longer, image)
    )
    numbers = build.mask(PaddedValue(numbers, indices.dims), image, 0).node
    real = build.mask(grad, image, 0).node
    windows = [_count_windows(call, longer, d, axis) for axis, d in enumerate(image)]
    for d, count in zip(image, windows, strict=True):
        # The added gradients are zero; their index is 0.
        real, numbers = _pad_dim(build, real, d, count), _pad_dim(build, numbers, d, count)
    node = call.same(grad_output=real, self=longer, indices=numbers, ceil_mode=False)
    return call.result(_crop(build, node, image, value.dims), value.dims)


def max_pool_gradient(call: RuleContext, grad: PaddedValue, value: PaddedValue, image: Sequence[int]) -> PaddedValue:
    """The image is padded with the lowest value, and its gradient is cropped; padded gradients are set to zero."""
    build = call.build
    longer = _fit_windows(call, value, image, grad.dims, lowest_value(value.meta.dtype))
    real = build.mask(grad, image, 0).node
    for axis, d in enumerate(image):
        real = _pad_dim(build, real, d, _count_windows(call, longer, d, axis))
    node = call.same(grad_output=real, self=longer, ceil_mode=False)
    return call.result(_crop(build, node, image, value.dims), value.dims)


def avg_pool(call: RuleContext, value: PaddedValue, image: Sequence[int], dims: tuple[Dim, ...]) -> PaddedValue:
    """The sum of each window is divided by the number of elements that eager PyTorch counts."""
    build, dtype = call.build, value.meta.dtype
    for d in image:
        value = move_to_front(call, value, d)
    wide = PaddedValue(_cast(build, value.node, accumulation_dtype(dtype)), value.dims, value.fill)
    longer = _fit_windows(call, wide, image, dims, 0)
    sums = _crop(build, call.same(self=longer, ceil_mode=False, divisor_override=1), image, dims)
    counts = _make_divisors(call, value, image, dims, accumulation_dtype(dtype))
    if not dtype.is_floating_point:
        return call.result(build.emit(aten.div.Tensor_mode, sums, counts, rounding_mode="trunc"), dims)
    means = build.emit(aten.div.Tensor, sums, counts)
    return call.result(_cast(build, means, dtype), dims)


def avg_pool_backward(call: RuleContext, image: Sequence[int]) -> PaddedValue:
    """Each window's gradient is divided by eager PyTorch's divisor; padded gradients are set to zero."""
    grad, value, build = call["grad_output"], call["self"], call.build
    dtype = value.meta.dtype
    wide = _cast(build, grad.node, accumulation_dtype(dtype))
    shares = build.emit(aten.div.Tensor, wide, _make_divisors(call, value, image, grad.dims, accumulation_dtype(dtype)))
    real = build.mask(PaddedValue(shares, grad.dims), image, 0).node
    longer = _fit_windows(call, value, image, grad.dims, None)
    for axis, d in enumerate(image):
        real = _pad_dim(build, real, d, _count_windows(call, longer, d, axis))
    like = _cast(build, longer.node, accumulation_dtype(dtype))
    node = call.same(grad_output=real, self=like, ceil_mode=False, divisor_override=1)
    return call.result(_cast(build, _crop(build, node, image, value.dims), dtype), value.dims)


def _fit_windows(
    call: RuleContext, value: PaddedValue, image: Sequence[int], dims: Sequence[Dim], fill: Number | None
) -> PaddedValue:
    """Returns the value padded until all windows of the result fit. Padding holds `fill` (None: undefined)."""
    for d in image:
        value = move_to_front(call, value, d)
    node = value.node if fill is None else call.build.mask(value, image, fill).node
    for axis, d in enumerate(image):
        kernel, stride, own_padding, dilation = _window_settings(call, axis)
        reach = (padded_size(dims[d]) - 1) * stride + dilation * (kernel - 1) + 1
        node = _pad_dim(call.build, node, d, max(reach - 2 * own_padding, padded_size(value.dims[d])), fill or 0)
    return PaddedValue(node, value.dims)


def _pad_dim(build: PaddedGraphBuilder, node: Node, d: int, count: int, fill: Number = 0) -> Node:
    """Returns the node padded with `fill` to at least `count` elements in a dim."""
    now, rank = node.meta["val"].shape[d], node.meta["val"].dim()
    if now >= count:
        return node
    amounts = [0] * (2 * rank)
    amounts[2 * (rank - 1 - d) + 1] = count - now
    return build.emit(aten.constant_pad_nd.default, node, amounts, fill)


def _crop(build: PaddedGraphBuilder, node: Node, image: Sequence[int], dims: Sequence[Dim]) -> Node:
    """Returns the node cropped to the padded sizes of `dims` along the image's axes."""
    for d in image:
        node = build.resize(node, d, padded_size(dims[d]))
    return node


def _count_windows(call: RuleContext, longer: PaddedValue, d: int, axis: int) -> int:
    """The number of windows that fit into the longer image."""
    kernel, stride, own_padding, dilation = _window_settings(call, axis)
    return int((longer.meta.shape[d] + 2 * own_padding - dilation * (kernel - 1) - 1) // stride + 1)


def _window_settings(call: RuleContext, axis: int) -> tuple[int, int, int, int]:
    """Kernel size, stride, padding and dilation of the op along an axis of the image."""
    kernel = call["kernel_size"]
    given = (kernel, call["stride"] or kernel, call["padding"], call.get("dilation", [1]))
    found = [numbers[axis] if len(numbers) > 1 else numbers[0] for numbers in given]
    return found[0], found[1], found[2], found[3]


def _make_divisors(
    call: RuleContext, value: PaddedValue, image: Sequence[int], dims: Sequence[Dim], dtype: torch.dtype
) -> Node:
    """The divisor of each window: the op's own padding counts with `count_include_pad`, elements after it never do."""
    build, rank = call.build, len(value.dims)
    if call["divisor_override"]:
        return build.emit(aten.full.default, [1] * rank, call["divisor_override"], dtype=dtype, device=build.device)
    result: Node | None = None
    for axis, d in enumerate(image):
        kernel, stride, own_padding, _ = _window_settings(call, axis)
        size = build.scalar(single_factor(value.dims[d]).size)
        starts = build.emit(aten.mul.Tensor, iota(call, padded_size(dims[d])), stride)
        starts = build.emit(aten.sub.Tensor, starts, own_padding)
        ends = build.emit(aten.add.Tensor, starts, kernel)
        if call["count_include_pad"]:
            ends = build.emit(aten.minimum.default, ends, build.emit(aten.add.Tensor, size, own_padding))
        else:
            starts, ends = build.emit(aten.clamp.default, starts, 0), build.emit(aten.minimum.default, ends, size)
        count = broadcast_along(call, build.emit(aten.sub.Tensor, ends, starts), rank, d)
        result = count if result is None else build.emit(aten.mul.Tensor, result, count)
    assert result is not None
    return _cast(build, result, dtype)


def _shape(value: PaddedValue, image: Sequence[int]) -> list[int]:
    return [int(value.meta.shape[d]) for d in image]


def _cast(build: PaddedGraphBuilder, node: Node, dtype: torch.dtype) -> Node:
    return node if node.meta["val"].dtype is dtype else build.emit(aten._to_copy.default, node, dtype=dtype)
