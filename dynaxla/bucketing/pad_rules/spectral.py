"""Rules of Fourier transforms: dims without padding are transformed by FFT, padded dims by the DFT matrix of the true size.

Element k of the transform of n elements is the sum over i of x[i] * exp(-2 pi j * (i * k mod n) / n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.contiguous import broadcast_along, iota, move_to_front
from dynaxla.bucketing.padded_value import Dim, PaddedValue, Unpaddable, is_full, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size, is_fixed

aten = torch.ops.aten
_LARGEST = 2048
"""Longer dims are compiled per exact shape: the work of the product is quadratic in the length."""
_ROOT, _WHOLE = 1, 2  # torch's numbers of the normalizations


@dataclass(frozen=True, slots=True)
class _Complex:
    """A complex value as real and imaginary parts with equal dims."""

    real: PaddedValue
    imag: PaddedValue | None


@takes(dim=LAYOUT, normalization=LAYOUT)
def fft(call: RuleContext) -> PaddedValue:
    """fft, complex to complex: a padded dim is multiplied by the DFT matrix of the true size."""
    value, dims = call["self"], _transformed_dims(call)
    points = sympy.prod([_size(value, place) for place in dims])
    return _together(call, _normalize(call, _transform_dims(call, value, dims, bool(call["forward"])), points))


@takes(dim=LAYOUT, normalization=LAYOUT)
def rfft(call: RuleContext) -> PaddedValue:
    """rfft: a padded dim is multiplied by the true size's DFT matrix; the last transformed dim keeps its front half."""
    value, dims = call["self"], _transformed_dims(call)
    *others, last = dims
    points = sympy.prod([_size(value, place) for place in dims])
    new = (call.build.factor(call.true_sizes[last]),)
    if is_full(value.dims[last]):
        node = call.build.emit(aten._fft_r2c.default, value.node, [last], 0, call["onesided"])
    else:
        node = _joined(call, _transform_dim(call, _Complex(value, None), last, True, new)).node
    half = PaddedValue(node, (*value.dims[:last], new, *value.dims[last + 1 :]))
    return _together(call, _normalize(call, _transform_dims(call, half, others, True), points))


@takes(dim=LAYOUT, normalization=LAYOUT, last_dim_size=TRUE_SIZE)
def irfft(call: RuleContext) -> PaddedValue:
    """irfft: a padded dim is multiplied by the true size's DFT matrix; the last transformed dim doubles."""
    value, size = call["self"], call["last_dim_size"]
    *others, last = _transformed_dims(call)
    points = sympy.prod([size, *(_size(value, place) for place in others)])
    half = _transform_dims(call, value, others, False)
    if is_full(value.dims[last]) and is_fixed(size):
        node = call.build.emit(aten._fft_c2r.default, _joined(call, half).node, [last], 0, size)
        dims = (*half.real.dims[:last], (call.build.factor(size),), *half.real.dims[last + 1 :])
        result = PaddedValue(node, dims)
    else:
        result = _half_weights(call, half, last, size)
    scaled = _normalize(call, _Complex(result, None), points).real
    return call.result(scaled.node, scaled.dims)


def _transformed_dims(call: RuleContext) -> list[int]:
    """The dims that are transformed.

    Raises:
        Unpaddable: one of them is padded and longer than `_LARGEST`.
    """
    value: PaddedValue = call["self"]
    dims = [d % len(value.dims) for d in call["dim"]]
    longest = max((padded_size(value.dims[d]) for d in dims if not is_full(value.dims[d])), default=0)
    if longest > _LARGEST:
        raise Unpaddable(f"a transform of {longest} elements", of_bucket=True)
    return dims


def _transform_dims(call: RuleContext, value: PaddedValue, dims: Sequence[int], forward: bool) -> _Complex:
    """The transform of a complex value along all these dims."""
    full = [place for place in dims if is_full(value.dims[place])]
    if full:
        value = PaddedValue(call.build.emit(aten._fft_c2c.default, value.node, full, 0, forward), value.dims)
    result = _apart(call, value)
    for place in dims:
        if place not in full:
            result = _transform_dim(call, result, place, forward)
    return result


def _size(value: PaddedValue, place: int) -> Size:
    return sympy.prod([factor.size for factor in value.dims[place]])


def _apart(call: RuleContext, value: PaddedValue) -> _Complex:
    pairs = call.build.emit(aten.view_as_real.default, value.node)
    rank = len(value.dims)
    return _Complex(*(PaddedValue(call.build.emit(aten.select.int, pairs, rank, i), value.dims) for i in range(2)))


def _joined(call: RuleContext, value: _Complex) -> PaddedValue:
    assert value.imag is not None
    return PaddedValue(call.build.emit(aten.complex.default, value.real.node, value.imag.node), value.real.dims)


def _together(call: RuleContext, value: _Complex) -> PaddedValue:
    joined = _joined(call, value)
    return call.result(joined.node, joined.dims)


def _transform_dim(call: RuleContext, value: _Complex, place: int, forward: bool, kept: Dim | None = None) -> _Complex:
    """The transform along one dim, of a real value only forward; `kept` is the result's dim if only a part of it is kept."""
    real = move_to_front(call, value.real, place)
    old = real.dims[place]
    new = old if kept is None else kept
    cosine, sine = _dft_matrix(call, single_factor(old).size, old, new, real.meta.dtype)
    sign = -1 if forward else 1
    if value.imag is None:
        # 0 - product, not -product: where the element is real an FFT gives +0, which decides its angle.
        imag = call.build.emit(aten.rsub.Scalar, _multiply_dim(call, real, sine, place, new).node, 0)
        whole = _multiply_dim(call, real, cosine, place, new)
        return _Complex(whole, PaddedValue(imag, whole.dims))
    other = move_to_front(call, value.imag, place)
    parts = [_multiply_dim(call, x, m, place, new) for x in (real, other) for m in (cosine, sine)]
    across = call.build.emit(aten.sub.Tensor, parts[0].node, parts[3].node, alpha=sign)
    up = call.build.emit(aten.add.Tensor, parts[2].node, parts[1].node, alpha=sign)
    return _Complex(PaddedValue(across, parts[0].dims), PaddedValue(up, parts[0].dims))


def _half_weights(call: RuleContext, value: _Complex, place: int, size: Size) -> PaddedValue:
    """Weights of a half spectrum's elements: 2, except 1 for the first and for the last of an even size."""
    build = call.build
    assert value.imag is not None
    real, imag = (move_to_front(call, part, place) for part in (value.real, value.imag))
    old, new = real.dims[place], (build.factor(size),)
    number = iota(call, padded_size(old))
    mirror = build.emit(aten.sub.Tensor, build.scalar(size), number)
    middle = build.emit(aten.eq.Tensor, mirror, number)
    alone = build.emit(aten.logical_or.default, build.emit(aten.eq.Scalar, number, 0), middle)
    beyond = build.emit(aten.lt.Tensor, mirror, number)
    unread = (beyond, build.emit(aten.logical_or.default, alone, beyond))  # no conjugate: real
    weight = build.emit(aten.add.Scalar, build.emit(aten.logical_not.default, alone), 1)
    weight = build.emit(aten._to_copy.default, build.emit(aten.view.default, weight, [-1, 1]), dtype=real.meta.dtype)
    products = []
    for part, table, mask in zip((real, imag), _dft_matrix(call, size, old, new, real.meta.dtype), unread, strict=True):
        read = build.emit(aten.masked_fill.Scalar, part.node, broadcast_along(call, mask, len(part.dims), place), 0)
        products.append(
            _multiply_dim(call, PaddedValue(read, part.dims), build.emit(aten.mul.Tensor, table, weight), place, new)
        )
    return PaddedValue(build.emit(aten.sub.Tensor, *(p.node for p in products)), products[0].dims)


def _dft_matrix(call: RuleContext, size: Size, old: Dim, new: Dim, dtype: torch.dtype) -> tuple[Node, Node]:
    """Cosines and sines of 2 pi * (i * k mod n) / n; the integers are reduced modulo n first, so that angles are exact.

    Sines of half turns and cosines of quarter turns are zero, not what the angle's rounding leaves of it.
    """
    build = call.build
    steps = build.emit(
        aten.mul.Tensor,
        build.emit(aten.view.default, iota(call, padded_size(old)), [-1, 1]),
        build.emit(aten.view.default, iota(call, padded_size(new)), [1, -1]),
    )
    turned = build.emit(aten.remainder.Tensor, steps, build.scalar(size))
    wide = [build.emit(aten._to_copy.default, n, dtype=torch.float64) for n in (turned, build.scalar(size))]
    angles = build.emit(aten.mul.Scalar, build.emit(aten.div.Tensor, *wide), 2 * math.pi)
    halves, quarters = (_are_parts_of_turn(call, turned, size, parts) for parts in (2, 4))
    odd_quarters = build.emit(aten.logical_xor.default, halves, quarters)
    cosine = build.emit(aten.masked_fill.Scalar, build.emit(aten.cos.default, angles), odd_quarters, 0.0)
    sine = build.emit(aten.masked_fill.Scalar, build.emit(aten.sin.default, angles), halves, 0.0)
    return build.emit(aten._to_copy.default, cosine, dtype=dtype), build.emit(aten._to_copy.default, sine, dtype=dtype)


def _are_parts_of_turn(call: RuleContext, steps: Node, size: Size, parts: int) -> Node:
    """Whether these steps, of which a turn has `size`, are whole halves or quarters of a turn."""
    times = call.build.emit(aten.mul.Scalar, steps, parts)
    return call.build.emit(aten.eq.Scalar, call.build.emit(aten.remainder.Tensor, times, call.build.scalar(size)), 0)


def _multiply_dim(call: RuleContext, value: PaddedValue, matrix: Node, place: int, new: Dim) -> PaddedValue:
    """The product of a dim with a matrix; the dim's padding is set to zero."""
    build, rank = call.build, len(value.dims)
    real = build.mask(value, [place], 0.0)
    order = [*(d for d in range(rank) if d != place), place]
    moved = build.emit(aten.permute.default, real.node, order)
    count = padded_size(value.dims[place])
    rows = build.emit(aten.view.default, moved, [-1, count])
    product = build.emit(aten.mm.default, rows, matrix)
    shape = [*(padded_size(value.dims[d]) for d in order[:-1]), padded_size(new)]
    back = [order.index(d) for d in range(rank)]
    node = build.emit(aten.permute.default, build.emit(aten.view.default, product, shape), back)
    return PaddedValue(node, (*value.dims[:place], new, *value.dims[place + 1 :]))


def _normalize(call: RuleContext, value: _Complex, points: Size) -> _Complex:
    """The value divided by the number of points or its square root, by the call's normalization."""
    if call["normalization"] not in (_ROOT, _WHOLE):
        return value
    build, dtype = call.build, value.real.meta.dtype
    divisor = build.emit(aten._to_copy.default, build.scalar(points), dtype=torch.float64)
    if call["normalization"] == _ROOT:
        divisor = build.emit(aten.sqrt.default, divisor)
    divisor = build.emit(aten._to_copy.default, divisor, dtype=dtype)
    parts = [
        None if part is None else PaddedValue(build.emit(aten.div.Tensor, part.node, divisor), part.dims)
        for part in (value.real, value.imag)
    ]
    assert parts[0] is not None
    return _Complex(parts[0], parts[1])
