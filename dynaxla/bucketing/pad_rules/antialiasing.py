"""Rules of interpolation with antialiasing: an axis is multiplied by the matrix of the filters that the true sizes ask for.

The arithmetic is that of torch's CPU kernels, as in ops/resampling_weights.py, which makes tables for fixed sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import CONSTANT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.contiguous import iota, move_to_front
from dynaxla.bucketing.pad_rules.image_gradients import (
    compute_per_image,
    has_fixed_images,
    image_dims_of_result,
)
from dynaxla.bucketing.pad_rules.resampling import Axis, cubic_far, cubic_near, scale_factor
from dynaxla.bucketing.pad_rules.windows import image_dims, is_per_image, pooled_dims
from dynaxla.bucketing.padded_value import Dim, PaddedValue, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.custom_ops.weighted_sums import WEIGHTED_SUMS

aten = torch.ops.aten
_CUBIC = -0.5  # Pillow's coefficient, which torch takes for antialiasing

Filter = Callable[[Axis, Node], Node]
"""The weights of elements at these distances, in steps of the filter."""


@takes(output_size=TRUE_SIZE, scales_h=CONSTANT, scales_w=CONSTANT)
def antialias(call: RuleContext) -> PaddedValue:
    """Filters are placed by the true sizes, axis by axis, so that no padding is read."""
    value: PaddedValue = call["self"]
    image = image_dims(call, value)
    if is_per_image(call, value, image):
        return call.result(call.same(), pooled_dims(call, value, image))
    sum_up = _sum_up if value.meta.dtype.is_floating_point else _sum_bytes_up
    for place in reversed(image):
        value = move_to_front(call, value, place)
        dim = (call.build.factor(call.true_sizes[place]),)
        value = sum_up(call, value, place, dim, *_place_filters(call, value.dims[place], dim, place))
    return call.result(value.node, value.dims)


@takes(output_size=TRUE_SIZE, input_size=TRUE_SIZE, scales_h=CONSTANT, scales_w=CONSTANT)
def antialias_backward(call: RuleContext) -> PaddedValue:
    """A gradient goes to the elements under its filter, times their weights; padded gradients are set to zero."""
    grad: PaddedValue = call["grad_output"]
    image = image_dims(call, grad)
    if has_fixed_images(call, image):
        return compute_per_image(call, image)
    for place, dim in zip(image, image_dims_of_result(call, image), strict=True):
        grad = move_to_front(call, grad, place)
        filters = _place_filters(call, dim, grad.dims[place], place)
        grad = _sum_up(call, grad, place, dim, *(call.build.emit(aten.t.default, node) for node in filters))
    return call.result(grad.node, grad.dims)


def _sum_up(call: RuleContext, value: PaddedValue, place: int, dim: Dim, weights: Node, is_read: Node) -> PaddedValue:
    """The weighted sums [dim, old dim] along a dim, whose padding is set to zero."""
    build, rank = call.build, len(value.dims)
    real = build.mask(value, range(rank), 0)
    order = [*(d for d in range(rank) if d != place), place]
    rows = build.emit(aten.permute.default, real.node, order)
    sums = build.emit(WEIGHTED_SUMS, rows, weights, is_read)
    node = build.emit(aten.permute.default, sums, [order.index(d) for d in range(rank)])
    return PaddedValue(node, (*value.dims[:place], dim, *value.dims[place + 1 :]))


def _sum_bytes_up(
    call: RuleContext, value: PaddedValue, place: int, dim: Dim, weights: Node, is_read: Node
) -> PaddedValue:
    """The same for uint8, by weights of 16 bits: as many of them are fraction as the largest weight leaves."""
    emit = call.build.emit
    real = call.build.mask(PaddedValue(weights, (dim, value.dims[place])), [0, 1], 0)
    bits = _fraction_bits(call, emit(aten.amax.default, real.node))
    unit = emit(aten.bitwise_left_shift.Tensor, emit(aten.ones_like.default, bits), bits)
    scaled = emit(aten.mul.Tensor, weights, unit)
    halves = emit(aten.copysign.Tensor, emit(aten.full_like.default, scaled, 0.5), scaled)
    whole = emit(aten.trunc.default, emit(aten.add.Tensor, scaled, halves))
    whole = emit(aten._to_copy.default, whole, dtype=torch.int32)
    total = _sum_up(call, value, place, dim, whole, is_read)
    rounded = emit(aten.add.Tensor, total.node, emit(aten.div.Tensor_mode, unit, 2, rounding_mode="floor"))
    result = emit(aten.clamp.default, emit(aten.bitwise_right_shift.Tensor, rounded, bits), 0, 255)
    return PaddedValue(emit(aten._to_copy.default, result, dtype=value.meta.dtype), total.dims)


def _fraction_bits(call: RuleContext, largest: Node) -> Node:
    """The most bits, up to 22, by which the largest weight is below 2**15 in whole numbers; int32, of no dims."""
    emit = call.build.emit
    powers = emit(aten.arange.start, 1, 23, dtype=torch.float64, device=call.build.device)
    scaled = emit(aten.mul.Tensor, emit(aten.exp2.default, powers), largest)
    whole = emit(aten.trunc.default, emit(aten.add.Scalar, scaled, 0.5))
    return emit(aten.sum.default, emit(aten.lt.Scalar, whole, 1 << 15), dtype=torch.int32)


def _place_filters(call: RuleContext, read: Dim, made: Dim, place: int) -> tuple[Node, Node]:
    """The weights [made, read] of elements along the dim `read` for outputs along the dim `made`, and whether they are read.

    A filter covers as many elements as it is wide, or as many steps of the outputs where these are wider.
    """
    axis = _axis(call, read, made, place)
    emit, cast, elements = axis.emit, axis.cast, iota(call, padded_size(read))
    filter_, width = _FILTERS[call.op_name.removesuffix("_backward")]
    scale = cast(axis.scale(), torch.float64)
    step = emit(aten.clamp.default, scale, 1.0)
    middles = emit(aten.add.Scalar, cast(_as_column(axis, axis.places), torch.float64), 0.5)
    centers = cast(emit(aten.mul.Tensor, scale, middles), axis.dtype)
    is_read = _are_covered(axis, elements, centers, cast(emit(aten.mul.Scalar, step, width / 2), axis.dtype))
    offsets = cast(emit(aten.sub.Tensor, cast(elements, axis.dtype), centers), torch.float64)
    inverse = cast(cast(emit(aten.reciprocal.default, step), axis.dtype), torch.float64)
    distances = emit(aten.mul.Tensor, emit(aten.add.Scalar, offsets, 0.5), inverse)
    weights = filter_(axis, cast(distances, axis.dtype))
    weights = emit(aten.where.self, is_read, weights, emit(aten.zeros_like.default, weights))
    total = emit(aten.sum.dim_IntList, weights, [1], True)
    divisor = emit(aten.masked_fill.Scalar, total, emit(aten.eq.Scalar, total, 0), 1)
    # An axis that keeps its size is not resized.
    itself, keeps = (
        emit(aten.eq.Tensor, *pair) for pair in ((elements, _as_column(axis, axis.places)), (axis.size, axis.out))
    )
    return emit(aten.div.Tensor, weights, divisor), emit(aten.where.self, keeps, itself, is_read)


def _are_covered(axis: Axis, elements: Node, centers: Node, reach: Node) -> Node:
    """Whether elements are in the input and within the reach of the centers: their bounds are rounded to whole numbers."""
    emit = axis.emit
    first, behind = (_nearest_whole(axis, emit(op, centers, reach)) for op in (aten.sub.Tensor, aten.add.Tensor))
    behind = emit(aten.minimum.default, behind, axis.size)
    return emit(aten.logical_and.default, emit(aten.ge.Tensor, elements, first), emit(aten.lt.Tensor, elements, behind))


def _nearest_whole(axis: Axis, bounds: Node) -> Node:
    """The nearest whole numbers, by truncation toward zero in float64."""
    halves = axis.emit(aten.add.Scalar, axis.cast(bounds, torch.float64), 0.5)
    return axis.cast(axis.emit(aten.trunc.default, halves), torch.int64)


def _as_column(axis: Axis, row: Node) -> Node:
    return axis.emit(aten.view.default, row, [-1, 1])


def _axis(call: RuleContext, read: Dim, made: Dim, place: int) -> Axis:
    build, value = call.build, call.tensors[0]
    size, out = (build.scalar(single_factor(dim).size) for dim in (read, made))
    dtype = value.meta.dtype if value.meta.dtype.is_floating_point else torch.float64
    factor = scale_factor(call, len(value.dims), place)
    return Axis(build, size, out, padded_size(made), factor, dtype, bool(call["align_corners"]), None)


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
