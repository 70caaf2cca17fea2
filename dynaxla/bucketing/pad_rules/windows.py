"""Rules of convolutions, pooling and other windows over images."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch

from dynaxla.bucketing.argument_roles import CONSTANT, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules import ceil_mode
from dynaxla.bucketing.pad_rules.contiguous import broadcast_along, iota, move_to_front
from dynaxla.bucketing.pad_rules.pool_indices import convert_pool_indices
from dynaxla.bucketing.pad_rules.reductions import lowest_value
from dynaxla.bucketing.pad_rules.views import merge_full_factors
from dynaxla.bucketing.padded_value import (
    Dim,
    Factor,
    PaddedValue,
    Results,
    Unpaddable,
    is_full,
    padded_size,
    single_factor,
)
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import is_fixed, size_of
from dynaxla.custom_ops import internal
from dynaxla.torch_api.size_functions import FloorDiv

aten = torch.ops.aten


@takes(stride=LAYOUT, padding=LAYOUT, dilation=LAYOUT, output_padding=LAYOUT, groups=LAYOUT)
def convolution(call: RuleContext) -> PaddedValue:
    """Padding along the image is set to zero, like the op's own padding; the result's real elements come first.

    This holds for transposed convolutions too: an element contributes to its own output position and later ones.
    """
    value: PaddedValue = call.tensors[0]
    last = call.node.target is internal.CONVOLUTION
    spatial = list(range(1, len(value.dims) - 1)) if last else list(range(2, len(value.dims)))
    channel = len(value.dims) - 1 if last else 1
    if not is_full(value.dims[channel]):
        raise Unpaddable("the channels vary")
    name = next(n for n, v in call.given.items() if v is value)
    weight = call.tensors[1]
    outputs = len(weight.dims) - 1 if last else int(bool(call.get("transposed")))
    if not all(is_full(d) for i, d in enumerate(weight.dims) if i != outputs):
        raise Unpaddable("the window varies")
    if call["groups"] != 1 and not is_full(weight.dims[outputs]):
        raise Unpaddable("the channels vary, in groups")
    for d in spatial:
        value = move_to_front(call, value, d)
    node = call.same(**{name: call.build.mask(value, spatial, 0)})
    dims = list(call.build.dims(call.true_sizes))
    dims[0] = value.dims[0]
    if call["groups"] == 1:
        dims[channel] = weight.dims[outputs]
    return call.first(node, tuple(dims), spatial)


@takes()
def permute_weight(call: RuleContext) -> PaddedValue:
    """Permutes a weight [out, in, *window] to [*window, in, out]: padding moves with its dim."""
    value: PaddedValue = call["weight"]
    return call.result(call.same(), (*value.dims[2:], value.dims[1], value.dims[0]), value.fill)


@takes(kernel_size=LAYOUT, stride=LAYOUT, padding=LAYOUT, dilation=LAYOUT)
def max_pool(call: RuleContext) -> Results:
    """Padding is set to the lowest value; indices of maxima are converted from the padded image to the true one."""
    value: PaddedValue = call.tensors[0]
    image = image_dims(call, value)
    for d in image:
        value = move_to_front(call, value, d)
    dims = pooled_dims(call, value, image)
    varies = not all(is_full(value.dims[d]) for d in image)
    if call["ceil_mode"] and varies:
        return ceil_mode.max_pool(call, value, image, dims)
    node = call.same(self=call.build.mask(value, image, lowest_value(value.meta.dtype)))
    highest, found = (call.build.emit(operator.getitem, node, place) for place in range(2))
    if varies:
        runs = [single_factor(value.dims[d]) for d in image]
        found = convert_pool_indices(call.build, found, [run.padded for run in runs], [run.size for run in runs])
    return call.first(highest, dims, image), call.first(found, dims, image)


def image_dims(call: RuleContext, value: PaddedValue) -> list[int]:
    """The image's dims, which are the last; before them are the channels and, optionally, a batch."""
    name = call.op_name
    count = next(int(digit) for digit in "123" if f"{digit}d" in name)
    return list(range(len(value.dims) - count, len(value.dims)))


def pooled_dims(call: RuleContext, value: PaddedValue, image: Sequence[int]) -> tuple[Dim, ...]:
    """The result's dims: the value's, with new ones for the image."""
    sizes = call.true_sizes
    return (*value.dims[: image[0]], *((call.build.factor(sizes[d]),) for d in image))


def is_per_image(call: RuleContext, value: PaddedValue, image: Sequence[int]) -> bool:
    """Whether input and output images have fixed sizes."""
    return all(is_full(value.dims[d]) and is_fixed(call.true_sizes[d]) for d in image)


@takes(kernel_size=LAYOUT, stride=LAYOUT, padding=LAYOUT, divisor_override=CONSTANT)
def avg_pool(call: RuleContext) -> PaddedValue:
    """Padding is set to zero; without `count_include_pad`, a window is divided by its number of real elements."""
    value: PaddedValue = call.tensors[0]
    image = image_dims(call, value)
    dims = pooled_dims(call, value, image)
    if all(is_full(value.dims[d]) for d in image):
        return call.result(call.same(), dims)
    if call["ceil_mode"]:
        return ceil_mode.avg_pool(call, value, image, dims)
    for d in image:
        value = move_to_front(call, value, d)
    real = call.build.mask(value, image, 0)
    if call.get("count_include_pad", True) or call.get("divisor_override") or not any(call["padding"]):
        return call.first(call.same(self=real), dims, image)
    build, shape = call.build, [1] * image[0] + [padded_size(value.dims[d]) for d in image]
    ones = build.emit(aten.full.default, shape, 1, dtype=value.meta.dtype, device=build.device)
    iota = build.mask(PaddedValue(ones, (*[((Factor(1, 1)),)] * image[0], *(value.dims[d] for d in image))), image, 0)
    total, count = (call.same(self=operand, count_include_pad=True) for operand in (real, iota))
    return call.first(build.emit(aten.div.Tensor, total, count), dims, image)


@takes(dimension=LAYOUT, size=TRUE_SIZE, step=TRUE_SIZE)
def unfold(call: RuleContext) -> PaddedValue:
    """Windows along a dim, elements in a new last dim: windows that reach into padding come last and are padding."""
    value: PaddedValue = call.tensors[0]
    place = call.dim("dimension", value)
    value = move_to_front(call, value, place)
    build, size, step = call.build, call["size"], call["step"]
    new, window = build.factor(call.true_sizes[place]), build.factor(size)
    dims = (*value.dims[:place], (new,), *value.dims[place + 1 :], (window,))
    if is_fixed(size) and is_fixed(step):
        return call.result(build.resize(call.same(self=value), place, new.padded), dims)
    starts = build.emit(aten.mul.Tensor, iota(call, new.padded), build.scalar(step))
    read = build.emit(aten.add.Tensor, broadcast_along(call, starts, 2, 0), iota(call, window.padded))
    read = build.emit(
        aten.clamp.default, build.emit(aten.view.default, read, [-1]), 0, padded_size(value.dims[place]) - 1
    )
    taken = build.emit(aten.index_select.default, value.node, place, read)
    shape = [padded_size(dim) for dim in (*dims[: place + 1], (window,), *dims[place + 1 : -1])]
    rank = len(value.dims)
    order = [*range(place + 1), *range(place + 2, rank + 1), place + 1]
    node = build.emit(aten.permute.default, build.emit(aten.view.default, taken, shape), order)
    return call.result(node, dims)


@takes(kernel_size=LAYOUT, dilation=LAYOUT, padding=LAYOUT, stride=LAYOUT)
def im2col(call: RuleContext) -> PaddedValue:
    """im2col: padding along the image is set to zero; windows past the true end are padding."""
    value: PaddedValue = call["self"]
    image = range(len(value.dims) - 2, len(value.dims))
    if not is_full(value.dims[image[0] - 1]):
        raise Unpaddable("the channels vary")
    counts: list[Factor] = []
    for axis, d in enumerate(image):
        value = move_to_front(call, value, d)
        reach = call["dilation"][axis] * (call["kernel_size"][axis] - 1) + 1
        size, stride = single_factor(value.dims[d]).size, call["stride"][axis]
        counts.append(call.build.factor(size_of(FloorDiv(size + 2 * call["padding"][axis] - reach, stride) + 1)))
    node = call.same(self=call.build.mask(value, image, 0))
    rows = padded_size(value.dims[image[0] - 1]) * math.prod(call["kernel_size"])
    return call.result(node, (*value.dims[: image[0] - 1], (Factor(rows, rows),), merge_full_factors(counts)))
