"""Rules of reductions over dims: padding is filled with the op's identity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import sympy
import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import CONSTANT, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.contiguous import flatten, move_to_front
from dynaxla.bucketing.padded_value import Dim, Factor, PaddedValue, Results, Unpaddable, is_full, padded_size
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size, is_varying

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)


def lowest_value(dtype: torch.dtype) -> float:
    """The lowest value of the dtype."""
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest_value(dtype: torch.dtype) -> float:
    """The highest value of the dtype, except NaN."""
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def sorts_last_value(dtype: torch.dtype) -> float:
    """The value that an ascending sort puts last (equal values aside)."""
    return math.nan if dtype.is_floating_point else highest_value(dtype)


_IDENTITIES: Mapping[str, Callable[[torch.dtype], float]] = {
    "sum": lambda dtype: 0,
    "nansum": lambda dtype: 0,
    "count_nonzero": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "amax": lowest_value,
    "amin": highest_value,
    "max": lowest_value,
    "min": highest_value,
    "argmax": lowest_value,
    "argmin": highest_value,
    "any": lambda dtype: 0,
    "all": lambda dtype: 1,
    "logsumexp": lambda dtype: -math.inf,
}


_POINTING = frozenset({"argmax", "argmin", "max", "min"})  # return the index of an element


@takes(dim=LAYOUT, ord=CONSTANT, p=CONSTANT)
def reduction(call: RuleContext) -> Results:
    """Padding along the reduced dims is set to the op's identity; along the others it stays padding."""
    value: PaddedValue = call.tensors[0]
    name = call.op_name
    reduced = reduced_dims(call, value)
    if name in _POINTING and call.node.target not in (aten.max.default, aten.min.default):
        if len(reduced) != 1:
            return _position_of_all(call, value, name)
        value = move_to_front(call, value, reduced[0])
    if name == "logsumexp" and not value.meta.dtype.is_floating_point:
        value = PaddedValue(
            call.build.emit(aten._to_copy.default, value.node, dtype=call.node.meta["val"].dtype), value.dims
        )
    filled = call.build.mask(value, reduced, _identity(call, name, value.meta.dtype))
    return make_results(call, call.same(**{_first(call): filled}), reduced_shape(call, value, reduced))


@takes(dim=LAYOUT)
def both_extremes(call: RuleContext) -> Results:
    """aminmax: padding is set to the highest value for the minimum, to the lowest for the maximum."""
    value: PaddedValue = call.tensors[0]
    reduced = reduced_dims(call, value)
    dims = reduced_shape(call, value, reduced)
    results = []
    for op, fill in ((aten.amin.default, highest_value), (aten.amax.default, lowest_value)):
        filled = call.build.mask(value, reduced, fill(value.meta.dtype))
        results.append(call.result(call.build.emit(op, filled.node, reduced, bool(call.get("keepdim"))), dims))
    return tuple(results)


def _position_of_all(call: RuleContext, value: PaddedValue, name: str) -> PaddedValue:
    """argmax or argmin over all dims: the result is an index into the flattened value."""
    row = flatten(call, value)
    filled = call.build.mask(row, [0], _identity(call, name, value.meta.dtype))
    node = call.build.emit(call.op, filled.node)
    dims = tuple(_ONE for _ in value.dims) if call["keepdim"] else ()
    return call.result(call.build.emit(aten.view.default, node, [1] * len(dims)), dims)


def _identity(call: RuleContext, name: str, dtype: torch.dtype) -> float:
    """The identity element of the reduction."""
    if name in ("linalg_vector_norm", "norm"):
        order = call["ord"] if name == "linalg_vector_norm" else call["p"]
        return 0 if order is None or order >= 0 else math.inf
    return _typed(_IDENTITIES[name](dtype), dtype)


@takes(dim=LAYOUT)
def mean(call: RuleContext) -> PaddedValue:
    """Padding is set to zero, and the sum is divided by the true count."""
    value: PaddedValue = call.tensors[0]
    reduced = reduced_dims(call, value)
    dims = reduced_shape(call, value, reduced)
    if all(is_full(value.dims[d]) for d in reduced):
        return call.result(call.same(), dims)
    return call.result(masked_mean(call, value, reduced, bool(call.get("keepdim")), call.node.meta["val"].dtype), dims)


def masked_mean(
    call: RuleContext, value: PaddedValue, reduced: Sequence[int], keepdim: bool, dtype: torch.dtype
) -> Node:
    """The mean over the real elements, accumulated in float32 for the 16-bit floats."""
    build, wide = call.build, accumulation_dtype(dtype)
    real = build.mask(value, reduced, _typed(0, value.meta.dtype))
    total = build.emit(aten.sum.dim_IntList, real.node, list(reduced), keepdim, dtype=wide)
    count = build.emit(aten._to_copy.default, build.scalar(count_real_elements(value, reduced)), dtype=wide)
    quotient = build.emit(aten.div.Tensor, total, count)
    return quotient if wide is dtype else build.emit(aten._to_copy.default, quotient, dtype=dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The accumulation dtype of a dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def masked_moments(
    call: RuleContext, value: PaddedValue, reduced: Sequence[int]
) -> tuple[PaddedValue, Node, Node, Node]:
    """The value in its accumulation dtype; count, mean and sum of squared deviations of its real elements, with keepdim."""
    build, wide = call.build, accumulation_dtype(value.meta.dtype)
    x = value
    if wide is not value.meta.dtype:
        x = PaddedValue(build.emit(aten._to_copy.default, value.node, dtype=wide), value.dims, value.fill)
    count = build.emit(aten._to_copy.default, build.scalar(count_real_elements(value, reduced)), dtype=wide)
    total = build.emit(aten.sum.dim_IntList, build.mask(x, reduced, 0).node, list(reduced), True)
    average = build.emit(aten.div.Tensor, total, count)
    distance = PaddedValue(build.emit(aten.sub.Tensor, x.node, average), value.dims)
    square = build.emit(aten.mul.Tensor, *[build.mask(distance, reduced, 0).node] * 2)
    return x, count, average, build.emit(aten.sum.dim_IntList, square, list(reduced), True)


@takes(dim=LAYOUT, correction=TRUE_SIZE)
def variance(call: RuleContext) -> Results:
    """var, std, var_mean: squared deviations of the real elements, divided by the true count minus the correction."""
    value: PaddedValue = call.tensors[0]
    reduced = reduced_dims(call, value)
    dims = reduced_shape(call, value, reduced)
    if all(is_full(value.dims[d]) for d in reduced):
        return make_results(call, call.same(), dims)
    if value.meta.dtype.is_complex:
        raise Unpaddable("a complex variance over a dim that varies")
    build = call.build
    _, count, average, squares = masked_moments(call, value, reduced)
    correction = 1 if call["correction"] is None else call["correction"]
    lost = build.scalar(correction) if is_varying(correction) else correction
    freedom = build.emit(aten.clamp.default, build.emit(aten.sub.Tensor, count, lost), 0)
    spread = build.emit(aten.div.Tensor, squares, freedom)
    return _spread(call, spread, average, dims)


def _spread(call: RuleContext, variance: Node, average: Node, dims: tuple[Dim, ...]) -> Results:
    """The variance or standard deviation (and the mean if the op returns it) in the op's dtype and dims."""
    build, value = call.build, call.node.meta["val"]
    name = call.op_name
    variance = build.emit(aten.sqrt.default, variance) if name.startswith("std") else variance
    results = []
    for node, wanted in zip((variance, average), value if isinstance(value, (tuple, list)) else (value,), strict=False):
        shaped = build.emit(aten.view.default, node, [padded_size(d) for d in dims])
        same = shaped.meta["val"].dtype is wanted.dtype
        results.append(shaped if same else build.emit(aten._to_copy.default, shaped, dtype=wanted.dtype))
    padded = tuple(call.result(node, dims) for node in results)
    return padded if isinstance(value, (tuple, list)) else padded[0]


@takes(dim=LAYOUT)
def softmax(call: RuleContext) -> PaddedValue:
    """Padding along the dim is set to minus infinity, so that its weight is zero."""
    value: PaddedValue = call.tensors[0]
    place = call.dim("dim", value)
    masked = call.build.mask(value, [place], -math.inf)
    return call.result(call.same(**{_first(call): masked}), value.dims)


def reduced_dims(call: RuleContext, value: PaddedValue) -> list[int]:
    """The dims that the call reduces, as non-negative indices."""
    rank = len(value.dims)
    asked = call.get("dim")
    if asked is None or asked == []:
        return list(range(rank))
    return sorted({d % max(rank, 1) for d in ([asked] if isinstance(asked, int) else asked)}) if rank else []


def reduced_shape(call: RuleContext, value: PaddedValue, reduced: Sequence[int]) -> tuple[Dim, ...]:
    """The dims of the result."""
    if call.get("keepdim"):
        return tuple(_ONE if i in reduced else d for i, d in enumerate(value.dims))
    return tuple(d for i, d in enumerate(value.dims) if i not in reduced)


def count_real_elements(value: PaddedValue, dims: Sequence[int]) -> Size:
    """The number of real elements in these dims."""
    return sympy.prod([factor.size for d in dims for factor in value.dims[d]])


def _typed(value: float, dtype: torch.dtype) -> float:
    if dtype is torch.bool:
        return bool(value)
    return value if dtype.is_floating_point or dtype.is_complex else int(value)


def _first(call: RuleContext) -> str:
    return next(name for name, value in call.given.items() if isinstance(value, PaddedValue))


def make_results(call: RuleContext, node: Node, dims: tuple[Dim, ...]) -> Results:
    """The call's result, or its tuple of results, all with these dims."""
    if isinstance(node.meta["val"], torch.Tensor):
        return call.result(node, dims)
    return call.results(node, [dims] * len(node.meta["val"]))
