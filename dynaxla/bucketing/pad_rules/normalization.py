"""Rules of normalizations: statistics of real elements only."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, CONSTANT, LAYOUT, takes
from dynaxla.bucketing.pad_rules.reductions import masked_moments
from dynaxla.bucketing.padded_value import (
    Dim,
    Factor,
    PaddedValue,
    Results,
    Unpaddable,
    have_same_layout,
    is_full,
    padded_size,
)
from dynaxla.bucketing.rule_context import RuleContext

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)


@takes(normalized_shape=BUCKET_SIZE, eps=CONSTANT)
def layer_norm(call: RuleContext) -> Results:
    """Mean and variance are those of the real elements; padding stays padding."""
    value: PaddedValue = call["input"]
    normalized = len(call["normalized_shape"])
    kept = value.dims[: len(value.dims) - normalized]
    if not all(map(is_full, value.dims[len(kept) :])):
        return _layer_norm_over_padding(call, value, len(kept))
    statistics = (*kept, *[_ONE] * normalized)
    node = call.same()
    if isinstance(node.meta["val"], torch.Tensor):
        return call.result(node, value.dims)
    shapes = (value.dims, statistics, statistics)
    picks = [call.build.emit(operator.getitem, node, i) for i in range(len(node.meta["val"]))]
    return tuple(call.result(pick, dims) for pick, dims in zip(picks, shapes, strict=False))


def _layer_norm_over_padding(call: RuleContext, value: PaddedValue, first: int) -> Results:
    """Normalizes with the mean and the variance of the real elements."""
    if call.node.target is not aten.native_layer_norm.default:
        raise Unpaddable("it normalizes over a dim that varies")
    build, reduced = call.build, range(first, len(value.dims))
    x, count, average, squares = masked_moments(call, value, reduced)
    spread = build.emit(aten.add.Scalar, build.emit(aten.div.Tensor, squares, count), call["eps"])
    rstd = build.emit(aten.rsqrt.default, spread)
    node = build.emit(aten.mul.Tensor, build.emit(aten.sub.Tensor, x.node, average), rstd)
    for name, target in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if call[name] is None:
            continue
        if not all(map(have_same_layout, call[name].dims, value.dims[first:])):
            raise Unpaddable("weights and elements are in different places")
        node = build.emit(target, node, call[name].node)
    statistics = (*value.dims[:first], *[_ONE] * len(reduced))
    every = zip((node, average, rstd), call.node.meta["val"], (value.dims, statistics, statistics), strict=True)
    return tuple(call.result(_as(call, n, r.dtype), d) for n, r, d in every)


@takes(momentum=CONSTANT, eps=CONSTANT)
def batch_norm(call: RuleContext) -> Results:
    """Batch norm with running statistics is elementwise: padding stays padding."""
    value: PaddedValue = call["input"]
    if not is_full(value.dims[1]):
        raise Unpaddable("the channels vary")
    node = call.same()
    first = call.result(call.build.emit(operator.getitem, node, 0), value.dims)
    others = [call.build.emit(operator.getitem, node, i) for i in range(1, len(node.meta["val"]))]
    return (first, *(PaddedValue(n, tuple((Factor(s, s),) for s in n.meta["val"].shape)) for n in others))


@takes(momentum=CONSTANT, eps=CONSTANT)
def batch_norm_training(call: RuleContext) -> Results:
    """Batch norm in training: mean and variance are those of the real elements; padding stays padding."""
    value: PaddedValue = call["input"]
    rows = [call[name] for name in ("weight", "bias", "running_mean", "running_var") if call.get(name) is not None]
    if not all(have_same_layout(row.dims[0], value.dims[1]) for row in rows):
        raise Unpaddable("channels and statistics hold their real elements in different places")
    functional = "running_mean" in call.given
    reduced = [0, *range(2, len(value.dims))]
    if not call["training"]:
        raise Unpaddable("it normalizes with given statistics")
    if all(is_full(value.dims[d]) for d in reduced):
        return call.results(call.same(), [value.dims, *[value.dims[1:2]] * (len(call.node.meta["val"]) - 1)])
    build, results = call.build, call.node.meta["val"]
    x, count, average, squares = masked_moments(call, value, reduced)
    variance = build.emit(aten.div.Tensor, squares, count)
    rstd = build.emit(aten.rsqrt.default, build.emit(aten.add.Scalar, variance, call["eps"]))
    made = [_normalized(call, x, average, rstd), _row(call, average), _row(call, rstd)]
    if functional:
        fewer = build.emit(aten.sub.Tensor, count, 1)
        unbiased = build.emit(aten.div.Tensor, squares, fewer)
        made += [_update_running(call, "running_mean", average), _update_running(call, "running_var", unbiased)]
    channels = (value.dims[1],)
    dims = [value.dims, *[channels] * (len(made) - 1)]
    return tuple(call.result(_as(call, n, r.dtype), d) for n, r, d in zip(made, results, dims, strict=True))


def _update_running(call: RuleContext, name: str, new: Node) -> Node:
    """The running statistic: momentum * new + (1 - momentum) * old."""
    build, old = call.build, call[name]
    step = build.emit(aten.mul.Tensor, _row(call, new), call["momentum"])
    return build.emit(aten.add.Tensor, step, build.emit(aten.mul.Tensor, old.node, 1 - call["momentum"]))


@takes(N=BUCKET_SIZE, C=BUCKET_SIZE, HxW=BUCKET_SIZE, group=LAYOUT, eps=CONSTANT)
def group_norm(call: RuleContext) -> Results:
    """Mean and variance of each group of channels are those of the real pixels; padding stays padding."""
    value: PaddedValue = call["input"]
    batch, channels, *image = value.dims
    if not is_full(channels):
        raise Unpaddable("the channels vary")
    build, groups = call.build, call["group"]
    size = padded_size(channels) // groups
    dims = (batch, (Factor(groups, groups),), (Factor(size, size),), *image)
    grouped = PaddedValue(build.emit(aten.view.default, value.node, [padded_size(d) for d in dims]), dims)
    x, count, average, squares = masked_moments(call, grouped, range(2, len(dims)))
    rstd = build.emit(
        aten.rsqrt.default, build.emit(aten.add.Scalar, build.emit(aten.div.Tensor, squares, count), call["eps"])
    )
    centred = build.emit(aten.mul.Tensor, build.emit(aten.sub.Tensor, x.node, average), rstd)
    node = _scaled(call, build.emit(aten.view.default, centred, [padded_size(d) for d in value.dims]))
    statistics = (batch, (Factor(groups, groups),))
    shape = [padded_size(d) for d in statistics]
    made = [node, *(build.emit(aten.view.default, n, shape) for n in (average, rstd))]
    every = zip(made, call.node.meta["val"], (value.dims, statistics, statistics), strict=True)
    return tuple(call.result(_as(call, n, r.dtype), d) for n, r, d in every)


def _normalized(call: RuleContext, x: PaddedValue, average: Node, rstd: Node) -> Node:
    build = call.build
    return _scaled(call, build.emit(aten.mul.Tensor, build.emit(aten.sub.Tensor, x.node, average), rstd))


def _scaled(call: RuleContext, node: Node) -> Node:
    """Multiplies by the weight and adds the bias of each channel."""
    shape = [-1, *[1] * (node.meta["val"].dim() - 2)]
    for name, target in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if call.get(name) is not None:
            node = call.build.emit(target, node, call.build.emit(aten.view.default, call[name].node, shape))
    return node


def _row(call: RuleContext, node: Node) -> Node:
    return call.build.emit(aten.view.default, node, [-1])


def _as(call: RuleContext, node: Node, dtype: torch.dtype) -> Node:
    return node if node.meta["val"].dtype is dtype else call.build.emit(aten._to_copy.default, node, dtype=dtype)
