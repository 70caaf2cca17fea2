"""Rules of convolutions, of pooling and of other windows over images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from dynaxla.bucketing.call import Call
from dynaxla.bucketing.rules.image_places import recounted
from dynaxla.bucketing.rules.reductions import lowest
from dynaxla.bucketing.values import Dim, Factor, Padded, Refusal, is_full, places, run_of
from dynaxla.ops import internal

aten = torch.ops.aten


def convolution(call: Call) -> Padded:
    """Padding along the image is zero, as the convolution's own padding is; what is real of the result comes first."""
    value: Padded = call.tensors[0]
    last = call.node.target is internal.CONVOLUTION
    spatial = list(range(1, len(value.dims) - 1)) if last else list(range(2, len(value.dims)))
    channel = len(value.dims) - 1 if last else 1
    if call.get("transposed"):
        raise Refusal("a transposed convolution")
    if not is_full(value.dims[channel]):
        raise Refusal("the channels vary")
    name = next(n for n, v in call.given.items() if v is value)
    weight = call.tensors[1]
    outputs = len(weight.dims) - 1 if last else 0
    if not all(is_full(d) for i, d in enumerate(weight.dims) if i != outputs):
        raise Refusal("the window varies")
    if call["groups"] != 1 and not is_full(weight.dims[outputs]):
        raise Refusal("the channels vary, in groups")
    node = call.same(**{name: call.build.mask(value, spatial, 0)})
    dims = list(call.build.dims(call.true_sizes))
    dims[0], dims[channel] = value.dims[0], weight.dims[outputs]
    return call.result(node, tuple(dims))


def max_pool(call: Call) -> Any:
    """Padding is below everything; places are counted in rows of the true image."""
    value: Padded = call.tensors[0]
    image = image_dims(call, value)
    dims = pooled_dims(call, value, image)
    varies = not all(is_full(value.dims[d]) for d in image)
    if call["ceil_mode"] and varies:
        raise Refusal("ceil_mode over a dim that varies")
    node = call.same(self=call.build.mask(value, image, lowest(value.meta.dtype)))
    highest, found = call.results(node, [dims, dims])
    if varies:
        runs = [run_of(value.dims[d]) for d in image]
        numbers = recounted(call.build, found.node, [run.padded for run in runs], [run.size for run in runs])
        found = call.result(numbers, dims)
    return highest, found


def image_dims(call: Call, value: Padded) -> list[int]:
    """The dims of the image: the last ones; in front are channels, and perhaps a batch."""
    name = call.node.target._opname  # type: ignore[union-attr]
    count = next(int(digit) for digit in "123" if f"{digit}d" in name)
    return list(range(len(value.dims) - count, len(value.dims)))


def pooled_dims(call: Call, value: Padded, image: Sequence[int]) -> tuple[Dim, ...]:
    """The result's dims: new ones for the image."""
    sizes = call.true_sizes
    return (*value.dims[: image[0]], *((call.build.factor(sizes[d]),) for d in image))


def pool_per_image(call: Call) -> Any:
    """Pooling of images whose sizes are fixed; the batch may be padded."""
    value: Padded = call.tensors[0]
    image = image_dims(call, value)
    if not all(is_full(value.dims[d]) for d in image):
        raise Refusal("the image's size varies")
    return _per_image(call, call.same(), pooled_dims(call, value, image))


def _per_image(call: Call, node: Node, dims: tuple[Dim, ...]) -> Any:
    """One result, or the values and where they were found."""
    if isinstance(node.meta["val"], torch.Tensor):
        return call.result(node, dims)
    return call.results(node, [dims] * len(node.meta["val"]))


def avg_pool(call: Call) -> Padded:
    """Padding is zero; where the op's own padding does not count, the true elements of each window are counted."""
    value: Padded = call.tensors[0]
    image = image_dims(call, value)
    dims = pooled_dims(call, value, image)
    if all(is_full(value.dims[d]) for d in image):
        return call.result(call.same(), dims)
    if call["ceil_mode"]:
        raise Refusal("ceil_mode over a dim that varies")
    for d in image:
        run_of(value.dims[d])
    real = call.build.mask(value, image, 0)
    if call.get("count_include_pad", True) or call.get("divisor_override") or not any(call["padding"]):
        return call.result(call.same(self=real), dims)
    build, shape = call.build, [1] * image[0] + [places(value.dims[d]) for d in image]
    ones = build.emit(aten.full.default, shape, 1, dtype=value.meta.dtype, device=build.device)
    counted = build.mask(Padded(ones, (*[((Factor(1, 1)),)] * image[0], *(value.dims[d] for d in image))), image, 0)
    total, count = (call.same(self=operand, count_include_pad=True) for operand in (real, counted))
    return call.result(build.emit(aten.div.Tensor, total, count), dims)


def unfold(call: Call) -> Padded:
    """Windows along a dim, in a new last dim; those that reach into padding come last."""
    value: Padded = call.tensors[0]
    place = call.dim("dimension", value)
    run_of(value.dims[place])
    new = (call.build.factor(call.true_sizes[place]),)
    size = call["size"]
    dims = tuple(new if i == place else dim for i, dim in enumerate(value.dims))
    return call.result(call.same(), (*dims, (Factor(size, size),)))
