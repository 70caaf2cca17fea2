"""Rules of Fourier transforms: along dims without padding as they are, along others as a product with the true size's matrix.

Element k of a transform of n elements is the sum over all i of x[i] * exp(-2 pi j * (i * k mod n) / n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.contiguous import along, counted, fronted
from dynaxla.bucketing.padded_value import Dim, Padded, Unpaddable, is_full, places, run_of
from dynaxla.bucketing.rule_context import Call
from dynaxla.bucketing.size_expressions import Size, is_fixed

aten = torch.ops.aten
_LARGEST = 2048
"""Longer dims are compiled per exact shape: a product takes their length squared."""
_ROOT, _WHOLE = 1, 2  # torch's numbers of the normalizations


@dataclass(frozen=True, slots=True)
class _Complex:
    """A complex value as two real ones of equal dims."""

    real: Padded
    imag: Padded | None


@takes(dim=LAYOUT, normalization=LAYOUT)
def transform(call: Call) -> Padded:
    """fft, complex to complex: a padded dim is transformed by a product with the true size's matrix."""
    value, dims = call["self"], _named(call)
    points = sympy.prod([_size(value, place) for place in dims])
    return _together(call, _scaled(call, _transformed(call, value, dims, bool(call["forward"])), points))


@takes(dim=LAYOUT, normalization=LAYOUT)
def transform_real(call: Call) -> Padded:
    """rfft: as transform; the last dim that is named keeps its front half, by the true size."""
    value, dims = call["self"], _named(call)
    *others, last = dims
    points = sympy.prod([_size(value, place) for place in dims])
    new = (call.build.factor(call.true_sizes[last]),)
    if is_full(value.dims[last]):
        node = call.build.emit(aten._fft_r2c.default, value.node, [last], 0, call["onesided"])
    else:
        node = _joined(call, _along(call, _Complex(value, None), last, True, new)).node
    half = Padded(node, (*value.dims[:last], new, *value.dims[last + 1 :]))
    return _together(call, _scaled(call, _transformed(call, half, others, True), points))


@takes(dim=LAYOUT, normalization=LAYOUT, last_dim_size=TRUE_SIZE)
def transform_to_real(call: Call) -> Padded:
    """irfft: as transform; the last dim that is named becomes twice as long, by the true size."""
    value, size = call["self"], call["last_dim_size"]
    *others, last = _named(call)
    points = sympy.prod([size, *(_size(value, place) for place in others)])
    half = _transformed(call, value, others, False)
    if is_full(value.dims[last]) and is_fixed(size):
        node = call.build.emit(aten._fft_c2r.default, _joined(call, half).node, [last], 0, size)
        dims = (*half.real.dims[:last], (call.build.factor(size),), *half.real.dims[last + 1 :])
        result = Padded(node, dims)
    else:
        result = _from_half(call, half, last, size)
    scaled = _scaled(call, _Complex(result, None), points).real
    return call.result(scaled.node, scaled.dims)


def _named(call: Call) -> list[int]:
    """The dims that are transformed.

    Raises:
        Unpaddable: one of them is padded, and too long for a product.
    """
    value: Padded = call["self"]
    dims = [d % len(value.dims) for d in call["dim"]]
    longest = max((places(value.dims[d]) for d in dims if not is_full(value.dims[d])), default=0)
    if longest > _LARGEST:
        raise Unpaddable(f"a transform of {longest} elements", of_bucket=True)
    return dims


def _transformed(call: Call, value: Padded, dims: Sequence[int], forward: bool) -> _Complex:
    """A complex value transformed along all these dims."""
    full = [place for place in dims if is_full(value.dims[place])]
    if full:
        value = Padded(call.build.emit(aten._fft_c2c.default, value.node, full, 0, forward), value.dims)
    result = _apart(call, value)
    for place in dims:
        if place not in full:
            result = _along(call, result, place, forward)
    return result


def _size(value: Padded, place: int) -> Size:
    return sympy.prod([factor.size for factor in value.dims[place]])


def _apart(call: Call, value: Padded) -> _Complex:
    pairs = call.build.emit(aten.view_as_real.default, value.node)
    rank = len(value.dims)
    return _Complex(*(Padded(call.build.emit(aten.select.int, pairs, rank, i), value.dims) for i in range(2)))


def _joined(call: Call, value: _Complex) -> Padded:
    assert value.imag is not None
    return Padded(call.build.emit(aten.complex.default, value.real.node, value.imag.node), value.real.dims)


def _together(call: Call, value: _Complex) -> Padded:
    joined = _joined(call, value)
    return call.result(joined.node, joined.dims)


def _along(call: Call, value: _Complex, place: int, forward: bool, kept: Dim | None = None) -> _Complex:
    """A transform along one dim; `kept` is the dim of the result, where it is not all of it."""
    real = fronted(call, value.real, place)
    old = real.dims[place]
    new = old if kept is None else kept
    cosine, sine = _matrix(call, run_of(old).size, old, new, real.meta.dtype)
    sign = -1 if forward else 1
    if value.imag is None:
        imag = call.build.emit(aten.mul.Scalar, _product(call, real, sine, place, new).node, sign)
        whole = _product(call, real, cosine, place, new)
        return _Complex(whole, Padded(imag, whole.dims))
    other = fronted(call, value.imag, place)
    parts = [_product(call, x, m, place, new) for x in (real, other) for m in (cosine, sine)]
    across = call.build.emit(aten.sub.Tensor, parts[0].node, parts[3].node, alpha=sign)
    up = call.build.emit(aten.add.Tensor, parts[2].node, parts[1].node, alpha=sign)
    return _Complex(Padded(across, parts[0].dims), Padded(up, parts[0].dims))


def _from_half(call: Call, value: _Complex, place: int, size: Size) -> Padded:
    """Every element of the half stands for two, but for the first, and the last of an even number."""
    build = call.build
    assert value.imag is not None
    real, imag = (fronted(call, part, place) for part in (value.real, value.imag))
    old, new = real.dims[place], (build.factor(size),)
    number = counted(call, places(old))
    mirror = build.emit(aten.sub.Tensor, build.scalar(size), number)
    middle = build.emit(aten.eq.Tensor, mirror, number)
    alone = build.emit(aten.logical_or.default, build.emit(aten.eq.Scalar, number, 0), middle)
    beyond = build.emit(aten.lt.Tensor, mirror, number)
    unread = (beyond, build.emit(aten.logical_or.default, alone, beyond))  # what stands alone is real
    weight = build.emit(aten.add.Scalar, build.emit(aten.logical_not.default, alone), 1)
    weight = build.emit(aten._to_copy.default, build.emit(aten.view.default, weight, [-1, 1]), dtype=real.meta.dtype)
    products = []
    for part, table, mask in zip((real, imag), _matrix(call, size, old, new, real.meta.dtype), unread, strict=True):
        read = build.emit(aten.masked_fill.Scalar, part.node, along(call, mask, len(part.dims), place), 0)
        products.append(_product(call, Padded(read, part.dims), build.emit(aten.mul.Tensor, table, weight), place, new))
    return Padded(build.emit(aten.sub.Tensor, *(p.node for p in products)), products[0].dims)


def _matrix(call: Call, size: Size, old: Dim, new: Dim, dtype: torch.dtype) -> tuple[Node, Node]:
    """Cosines and sines of 2 pi * (i * k mod n) / n; whole numbers are reduced first, so that angles are exact."""
    build = call.build
    steps = build.emit(
        aten.mul.Tensor,
        build.emit(aten.view.default, counted(call, places(old)), [-1, 1]),
        build.emit(aten.view.default, counted(call, places(new)), [1, -1]),
    )
    turned = build.emit(aten.remainder.Tensor, steps, build.scalar(size))
    wide = [build.emit(aten._to_copy.default, n, dtype=torch.float64) for n in (turned, build.scalar(size))]
    angles = build.emit(aten.mul.Scalar, build.emit(aten.div.Tensor, *wide), 2 * math.pi)
    tables = (build.emit(target, angles) for target in (aten.cos.default, aten.sin.default))
    cosine, sine = (build.emit(aten._to_copy.default, table, dtype=dtype) for table in tables)
    return cosine, sine


def _product(call: Call, value: Padded, matrix: Node, place: int, new: Dim) -> Padded:
    """The sum along a dim of the elements times the rows of a matrix; padding is zero."""
    build, rank = call.build, len(value.dims)
    real = build.mask(value, [place], 0.0)
    order = [*(d for d in range(rank) if d != place), place]
    moved = build.emit(aten.permute.default, real.node, order)
    count = places(value.dims[place])
    rows = build.emit(aten.view.default, moved, [-1, count])
    product = build.emit(aten.mm.default, rows, matrix)
    shape = [*(places(value.dims[d]) for d in order[:-1]), places(new)]
    back = [order.index(d) for d in range(rank)]
    node = build.emit(aten.permute.default, build.emit(aten.view.default, product, shape), back)
    return Padded(node, (*value.dims[:place], new, *value.dims[place + 1 :]))


def _scaled(call: Call, value: _Complex, points: Size) -> _Complex:
    """Divided by the number of points, or its root."""
    if call["normalization"] not in (_ROOT, _WHOLE):
        return value
    build, dtype = call.build, value.real.meta.dtype
    divisor = build.emit(aten._to_copy.default, build.scalar(points), dtype=torch.float64)
    if call["normalization"] == _ROOT:
        divisor = build.emit(aten.sqrt.default, divisor)
    divisor = build.emit(aten._to_copy.default, divisor, dtype=dtype)
    parts = [
        None if part is None else Padded(build.emit(aten.div.Tensor, part.node, divisor), part.dims)
        for part in (value.real, value.imag)
    ]
    assert parts[0] is not None
    return _Complex(parts[0], parts[1])
