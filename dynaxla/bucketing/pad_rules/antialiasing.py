"""Rules of interpolation with antialiasing: filters as wide as the true sizes ask, in windows as wide as the bucket's need.

The arithmetic is that of torch's CPU kernels, as in ops/resampling_weights.py, which makes tables for fixed sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import CONSTANT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.contiguous import move_to_front
from dynaxla.bucketing.pad_rules.image_gradients import (
    compute_per_image,
    has_fixed_images,
    image_dims_of_result,
)
from dynaxla.bucketing.pad_rules.resampling import Axis, cubic_far, cubic_near, scale_factor
from dynaxla.bucketing.pad_rules.windows import image_dims, is_per_image, pooled_dims
from dynaxla.bucketing.padded_value import Dim, Factor, PaddedValue, Unpaddable, is_full, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)
_CUBIC = -0.5  # Pillow's coefficient, which torch takes for antialiasing

Filter = Callable[[Axis, Node], Node]
"""The weights of elements at these distances, in steps of the filter."""


@dataclass(frozen=True, slots=True)
class _Windows:
    """The elements that each output reads, as many for each.

    Attributes:
        positions: of the elements in the input, int64 [width, outputs].
        weights: [width, outputs], zero where an element is not under the filter.
        is_read: bool [width, outputs], whether it is.
    """

    positions: Node
    weights: Node
    is_read: Node


@takes(output_size=TRUE_SIZE, scales_h=CONSTANT, scales_w=CONSTANT)
def antialias(call: RuleContext) -> PaddedValue:
    """Windows are placed by the true sizes, axis by axis, so that no padding is read."""
    value: PaddedValue = call["self"]
    image = image_dims(call, value)
    if is_per_image(call, value, image):
        return call.result(call.same(), pooled_dims(call, value, image))
    weigh = _weigh if value.meta.dtype.is_floating_point else _weigh_bytes
    for place in reversed(image):
        value = move_to_front(call, value, place)
        dim = (call.build.factor(call.true_sizes[place]),)
        value = weigh(call, value, place, dim, _windows(call, value.dims[place], dim, len(value.dims), place))
    return call.result(value.node, value.dims)


@takes(output_size=TRUE_SIZE, input_size=TRUE_SIZE, scales_h=CONSTANT, scales_w=CONSTANT)
def antialias_backward(call: RuleContext) -> PaddedValue:
    """A gradient goes to the elements of its window, times their weights; padded gradients are set to zero."""
    grad: PaddedValue = call["grad_output"]
    image = image_dims(call, grad)
    if has_fixed_images(call, image):
        return compute_per_image(call, image)
    for place, dim in zip(image, image_dims_of_result(call, image), strict=True):
        grad = move_to_front(call, grad, place)
        grad = _spread(call, grad, place, dim, _windows(call, dim, grad.dims[place], len(grad.dims), place))
    return call.result(grad.node, grad.dims)


def _weigh(call: RuleContext, value: PaddedValue, place: int, dim: Dim, windows: _Windows) -> PaddedValue:
    """The weighted sums of the windows along a dim. What the filter does not cover is not read, as zero times NaN is NaN."""
    shares = _shares(call, _read(call, value, place, dim, windows), place, windows)
    total = call.build.emit(aten.sum.dim_IntList, shares, [place])
    return PaddedValue(total, (*value.dims[:place], dim, *value.dims[place + 1 :]))


def _weigh_bytes(call: RuleContext, value: PaddedValue, place: int, dim: Dim, windows: _Windows) -> PaddedValue:
    """The same for uint8, by weights of 16 bits: as many of them are fraction as the largest weight leaves."""
    emit = call.build.emit
    real = call.build.mask(PaddedValue(windows.weights, (_ONE, dim)), [1], 0)
    bits = _fraction_bits(call, emit(aten.amax.default, real.node))
    unit = emit(aten.bitwise_left_shift.Tensor, emit(aten.ones_like.default, bits), bits)
    scaled = emit(aten.mul.Tensor, windows.weights, unit)
    halves = emit(aten.copysign.Tensor, emit(aten.full_like.default, scaled, 0.5), scaled)
    weights = emit(
        aten._to_copy.default, emit(aten.trunc.default, emit(aten.add.Tensor, scaled, halves)), dtype=torch.int64
    )
    read = emit(aten._to_copy.default, _read(call, value, place, dim, windows), dtype=torch.int64)
    total = emit(aten.sum.dim_IntList, _shares(call, read, place, replace(windows, weights=weights)), [place])
    rounded = emit(aten.add.Tensor, total, emit(aten.div.Tensor_mode, unit, 2, rounding_mode="floor"))
    result = emit(aten.clamp.default, emit(aten.bitwise_right_shift.Tensor, rounded, bits), 0, 255)
    result = emit(aten._to_copy.default, result, dtype=value.meta.dtype)
    return PaddedValue(result, (*value.dims[:place], dim, *value.dims[place + 1 :]))


def _fraction_bits(call: RuleContext, largest: Node) -> Node:
    """The most bits, up to 22, by which the largest weight is below 2**15 in whole numbers; int64, of no dims."""
    emit = call.build.emit
    powers = emit(aten.arange.start, 1, 23, dtype=torch.int64, device=call.build.device)
    scaled = emit(
        aten.mul.Tensor, emit(aten.exp2.default, emit(aten._to_copy.default, powers, dtype=torch.float64)), largest
    )
    whole = emit(aten.trunc.default, emit(aten.add.Scalar, scaled, 0.5))
    return emit(aten.sum.default, emit(aten.lt.Scalar, whole, 1 << 15), dtype=torch.int64)


def _read(call: RuleContext, value: PaddedValue, place: int, dim: Dim, windows: _Windows) -> Node:
    """The elements of the windows, along the dims `place` and the next."""
    shape = list(value.meta.shape)
    positions = call.build.emit(aten.view.default, windows.positions, [-1])
    shape[place : place + 1] = windows.weights.meta["val"].shape[0], padded_size(dim)
    return call.build.emit(
        aten.view.default, call.build.emit(aten.index_select.default, value.node, place, positions), shape
    )


def _spread(call: RuleContext, grad: PaddedValue, place: int, dim: Dim, windows: _Windows) -> PaddedValue:
    """The gradients of the elements of `dim`, which the outputs along the same place of `grad` read."""
    build, shape = call.build, list(grad.meta.shape)
    real = build.mask(grad, [place], 0)
    shares = _shares(call, build.emit(aten.unsqueeze.default, real.node, place), place, windows)
    positions = build.emit(aten.view.default, windows.positions, [-1])
    shape[place] = positions.meta["val"].shape[0]
    rows = build.emit(aten.view.default, shares, shape)
    shape[place] = padded_size(dim)
    zeros = build.emit(aten.full.default, shape, 0, dtype=grad.meta.dtype, device=build.device)
    total = build.emit(aten.index_add.default, zeros, place, positions, rows)
    return PaddedValue(total, (*grad.dims[:place], dim, *grad.dims[place + 1 :]))


def _shares(call: RuleContext, elements: Node, place: int, windows: _Windows) -> Node:
    """Elements, with the windows along the dims `place` and the next, times their weights; zero beyond the filter."""
    emit = call.build.emit
    behind = elements.meta["val"].dim() - place - 2
    weights, is_read = (
        emit(aten.view.default, node, [*node.meta["val"].shape, *[1] * behind])
        for node in (windows.weights, windows.is_read)
    )
    product = emit(aten.mul.Tensor, elements, weights)
    return emit(aten.where.self, is_read, product, emit(aten.zeros_like.default, product))


def _windows(call: RuleContext, read: Dim, made: Dim, rank: int, place: int) -> _Windows:
    """The windows of outputs along the dim `made` over the elements along the dim `read`."""
    build, value = call.build, call.tensors[0]
    size, out = (build.scalar(single_factor(dim).size) for dim in (read, made))
    corners, factor = bool(call["align_corners"]), scale_factor(call, rank, place)
    dtype = value.meta.dtype if value.meta.dtype.is_floating_point else torch.float64
    axis = Axis(build, size, out, padded_size(made), factor, dtype, corners, None)
    filter_, width = _FILTERS[call.op_name.removesuffix("_backward")]
    return _place_windows(axis, filter_, width, _widest(axis, read, made, width))


def _widest(axis: Axis, read: Dim, made: Dim, width: int) -> int:
    """The most elements that a window has at any size of the bucket."""
    if axis.factor is not None and axis.factor > 0 and not axis.align_corners:
        scale = 1 / axis.factor
    elif is_full(made):
        scale = padded_size(read) / max(padded_size(made) - axis.align_corners, 1)
    else:
        raise Unpaddable("the width of the filter varies with both sizes")
    return min(math.ceil(width / 2 * max(scale, 1)) * 2 + 1, padded_size(read))


def _place_windows(axis: Axis, filter_: Filter, width: int, most: int) -> _Windows:
    """The filter covers `width` elements, or as many steps of the outputs where these are wider."""
    emit, cast = axis.emit, axis.cast
    scale = axis.scale()
    stretch = emit(aten.clamp.default, cast(scale, torch.float64), 1.0)
    reach = cast(emit(aten.mul.Scalar, stretch, width / 2), axis.dtype)
    inverse = cast(cast(emit(aten.reciprocal.default, stretch), axis.dtype), torch.float64)
    middles = emit(aten.add.Scalar, cast(axis.places, torch.float64), 0.5)
    centers = cast(emit(aten.mul.Tensor, cast(scale, torch.float64), middles), axis.dtype)
    first = emit(aten.clamp.default, _nearest_edge(axis, emit(aten.sub.Tensor, centers, reach)), 0)
    behind = emit(aten.minimum.default, _nearest_edge(axis, emit(aten.add.Tensor, centers, reach)), axis.size)
    steps = emit(
        aten.view.default, emit(aten.arange.default, most, dtype=torch.int64, device=axis.build.device), [-1, 1]
    )
    positions = emit(aten.add.Tensor, first, steps)
    offsets = cast(emit(aten.sub.Tensor, cast(positions, axis.dtype), centers), torch.float64)
    distances = emit(aten.mul.Tensor, emit(aten.add.Scalar, offsets, 0.5), inverse)
    is_read = emit(aten.lt.Tensor, positions, behind)
    weights = filter_(axis, cast(distances, axis.dtype))
    weights = emit(aten.where.self, is_read, weights, emit(aten.zeros_like.default, weights))
    total = emit(aten.sum.dim_IntList, weights, [0], True)
    divisor = emit(aten.masked_fill.Scalar, total, emit(aten.eq.Scalar, total, 0), 1)
    # An axis that keeps its size is not resized.
    itself = emit(aten.eq.Tensor, positions, axis.places)
    is_read = emit(aten.where.self, emit(aten.eq.Tensor, axis.size, axis.out), itself, is_read)
    inside = emit(aten.clamp.default, emit(aten.minimum.default, positions, axis.last), 0)
    return _Windows(inside, emit(aten.div.Tensor, weights, divisor), is_read)


def _nearest_edge(axis: Axis, bounds: Node) -> Node:
    """The whole number nearest to a bound, truncated toward zero in float64."""
    halves = axis.emit(aten.add.Scalar, axis.cast(bounds, torch.float64), 0.5)
    return axis.cast(axis.emit(aten.trunc.default, halves), torch.int64)


def _triangle(axis: Axis, distances: Node) -> Node:
    """1 - |x|, down to 0."""
    slope = axis.emit(aten.rsub.Scalar, axis.emit(aten.abs.default, distances), 1)
    return axis.emit(aten.clamp.default, slope, 0)


def _cubic(axis: Axis, distances: Node) -> Node:
    """Two pieces of third degree, from 0 to 1 and from 1 to 2."""
    emit = axis.emit
    x = emit(aten.abs.default, distances)
    far = emit(aten.masked_fill.Scalar, cubic_far(axis, x, _CUBIC), emit(aten.ge.Scalar, x, 2), 0)
    return emit(aten.where.self, emit(aten.lt.Scalar, x, 1), cubic_near(axis, x, _CUBIC), far)


def _lanczos(axis: Axis, distances: Node) -> Node:
    """sinc(x) sinc(x / 3), three lobes wide."""
    emit = axis.emit
    product = emit(
        aten.mul.Tensor,
        emit(aten.sinc.default, distances),
        emit(aten.sinc.default, emit(aten.div.Scalar, distances, 3)),
    )
    return emit(aten.masked_fill.Scalar, product, emit(aten.ge.Scalar, emit(aten.abs.default, distances), 3), 0)


_FILTERS: Mapping[str, tuple[Filter, int]] = MappingProxyType(
    {
        "_upsample_bilinear2d_aa": (_triangle, 2),
        "_upsample_bicubic2d_aa": (_cubic, 4),
        "_upsample_lanczos2d_aa": (_lanczos, 6),
    }
)
"""By op, its filter and how many elements it covers."""
