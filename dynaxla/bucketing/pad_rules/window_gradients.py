"""Rules of the gradients of convolutions and pooling."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, CONSTANT, LAYOUT, takes
from dynaxla.bucketing.pad_rules import ceil_mode
from dynaxla.bucketing.pad_rules.contiguous import move_to_front
from dynaxla.bucketing.pad_rules.pool_indices import convert_pool_indices
from dynaxla.bucketing.pad_rules.reductions import lowest_value
from dynaxla.bucketing.pad_rules.windows import image_dims
from dynaxla.bucketing.padded_value import (
    Dim,
    Factor,
    Operand,
    PaddedValue,
    Unpaddable,
    have_same_layout,
    is_full,
    padded_size,
    single_factor,
)
from dynaxla.bucketing.rule_context import RuleContext

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)
_MAX_POOLS = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}
_POOLS = {2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}


@takes(bias_sizes=BUCKET_SIZE, stride=LAYOUT, padding=LAYOUT, dilation=LAYOUT, output_padding=LAYOUT, groups=LAYOUT)
def convolution_backward(call: RuleContext) -> tuple[PaddedValue | None, ...]:
    """Padding along the image is set to zero, and so are padded images for the gradients of weight and bias."""
    grad, value, weight = call["grad_output"], call["input"], call["weight"]
    output = _output_of_convolution(call, grad, value, weight)
    wanted = call["output_mask"]
    masked = list(range(2, len(value.dims)))
    if wanted[1] or wanted[2]:
        masked.append(0)
    changed: dict[str, Operand] = {"grad_output": _of_outputs(call, call.build.mask(grad, masked, 0), output)}
    if wanted[1]:
        changed["input"] = call.build.mask(value, masked, 0)
    node = call.same(**changed)
    dims = (value.dims, weight.dims, (grad.dims[1],))
    return tuple(_pick(call, node, i, d) if wanted[i] else None for i, d in enumerate(dims))


def _pick(call: RuleContext, node: Node, position: int, dims: tuple[Dim, ...]) -> PaddedValue:
    return call.result(call.build.emit(operator.getitem, node, position), dims)


def _output_of_convolution(
    call: RuleContext, grad: PaddedValue, value: PaddedValue, weight: PaddedValue
) -> torch.Tensor:
    """The padded output. Raises Unpaddable if channels or windows vary, or gradients are not aligned with it."""
    if not all(map(is_full, (value.dims[1], grad.dims[1], *weight.dims))):
        raise Unpaddable("the channels or the window vary")
    if not have_same_layout(grad.dims[0], value.dims[0]):
        raise Unpaddable("images and gradients hold their real elements in different places")
    for dim in (*grad.dims[2:], *value.dims[2:]):
        single_factor(dim)
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    with call.build.mode:
        output: torch.Tensor = aten.convolution.default(value.meta, weight.meta, None, *(call[name] for name in names))
    return output


def _of_outputs(call: RuleContext, masked: PaddedValue, output: torch.Tensor) -> Node:
    """Returns a value with an element per output, zero-padded or cropped to the outputs of the padded op.

    The sizes differ if a guard has fixed the number of outputs: the padded op has more.
    """
    node = masked.node
    for place, size in enumerate(output.shape):
        node = call.build.resize(node, place, size)
    return node


@takes(kernel_size=LAYOUT, stride=LAYOUT, padding=LAYOUT, dilation=LAYOUT)
def max_pool_backward(call: RuleContext) -> PaddedValue:
    """Padded gradients are set to zero; indices of maxima are converted from the true image to the padded one."""
    grad, value, indices = call["grad_output"], call["self"], call["indices"]
    image = image_dims(call, value)
    _require_same(grad, indices)
    if all(is_full(value.dims[d]) for d in image):
        return call.result(call.same(), value.dims)
    if call["ceil_mode"]:
        return ceil_mode.max_pool_backward(call, image)
    names = ("kernel_size", "stride", "padding", "dilation")
    with call.build.mode:
        output = _MAX_POOLS[len(image)](value.meta, *(call[name] for name in names))[0]
    runs = [single_factor(value.dims[d]) for d in image]
    build = call.build
    moved = convert_pool_indices(build, indices.node, [run.size for run in runs], [run.padded for run in runs])
    changed = {
        "grad_output": _of_outputs(call, build.mask(grad, image, 0), output),
        "indices": _of_outputs(call, build.mask(PaddedValue(moved, indices.dims), image, 0), output),
    }
    return call.result(call.same(**changed), value.dims)


@takes(kernel_size=LAYOUT, stride=LAYOUT, padding=LAYOUT, dilation=LAYOUT)
def max_pool_gradient(call: RuleContext) -> PaddedValue:
    """Padding is set to the lowest value; padded gradients are set to zero."""
    grad, value = call["grad_output"], call["self"]
    image = image_dims(call, value)
    _require_same_images(grad, value, image)
    if all(is_full(value.dims[d]) for d in image):
        return call.result(call.same(), value.dims)
    for d in image:
        grad, value = (move_to_front(call, each, d) for each in (grad, value))
    if call["ceil_mode"]:
        return ceil_mode.max_pool_gradient(call, grad, value, image)
    names = ("kernel_size", "stride", "padding", "dilation")
    with call.build.mode:
        output = _MAX_POOLS[len(image)](value.meta, *(call[name] for name in names))[0]
    real = _of_outputs(call, call.build.mask(grad, image, 0), output)
    lowest = call.build.mask(value, image, lowest_value(value.meta.dtype))
    return call.result(call.same(grad_output=real, self=lowest), value.dims)


def _require_same_images(grad: PaddedValue, value: PaddedValue, image: Sequence[int]) -> None:
    _require_same(PaddedValue(grad.node, grad.dims[: image[0]]), PaddedValue(value.node, value.dims[: image[0]]))


def _require_same(left: PaddedValue, right: PaddedValue) -> None:
    if not all(map(have_same_layout, left.dims, right.dims)):
        raise Unpaddable("gradient and input hold their real elements in different places")


@takes(kernel_size=LAYOUT, stride=LAYOUT, padding=LAYOUT, divisor_override=CONSTANT)
def avg_pool_backward(call: RuleContext) -> PaddedValue:
    """Gradients of padded windows are set to zero; the others are divided by eager PyTorch's divisor."""
    grad, value = call["grad_output"], call["self"]
    image = image_dims(call, value)
    _require_same_images(grad, value, image)
    if all(is_full(value.dims[d]) for d in image):
        return call.result(call.same(), value.dims)
    if call["ceil_mode"]:
        return ceil_mode.avg_pool_backward(call, image)
    for d in image:
        single_factor(value.dims[d])
        single_factor(grad.dims[d])
    with call.build.mode:
        output = _POOLS[len(image)](value.meta, *(call[n] for n in ("kernel_size", "stride", "padding")))
    real = _of_outputs(call, call.build.mask(grad, image, 0), output)
    if call["count_include_pad"] or call["divisor_override"] or not any(call["padding"]):
        return call.result(call.same(grad_output=real), value.dims)
    shared = call.build.emit(aten.div.Tensor, real, _window_counts(call, value, image))
    return call.result(call.same(grad_output=shared, count_include_pad=True, divisor_override=1), value.dims)


def _window_counts(call: RuleContext, value: PaddedValue, image: Sequence[int]) -> Node:
    """The number of real elements in each window; 1 if it has none."""
    build = call.build
    shape = [1] * image[0] + [padded_size(value.dims[d]) for d in image]
    ones = build.emit(aten.full.default, shape, 1, dtype=value.meta.dtype, device=build.device)
    real = build.mask(PaddedValue(ones, (*[_ONE] * image[0], *(value.dims[d] for d in image))), image, 0)
    settings = (call["kernel_size"], call["stride"], call["padding"], False, True, 1)
    return build.emit(aten.clamp_min.default, build.emit(_POOLS[len(image)], real.node, *settings), 1)
