"""Pooling over windows, and the gradient of adaptive max pooling; unbatched calls have no batch axis."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from dynaxla.bucketing.pad_rules import image_gradients as image_gradients_rules
from dynaxla.bucketing.pad_rules import window_gradients as window_gradients_rules
from dynaxla.bucketing.pad_rules import windows as windows_rules
from dynaxla.custom_ops.max_pool_gradient import MAX_POOL2D_GRADIENT, MAX_POOL3D_GRADIENT
from dynaxla.ops.dtypes import FLOATS, REAL_NUMBERS, WIDE_FLOATS
from dynaxla.ops.eager_errors import check_rank
from dynaxla.ops.promotion import cast, opmath_dtype, torch_dtype
from dynaxla.ops.record import Body, OpFamily

aten = torch.ops.aten
OPS = OpFamily()
_SEARCHED_AT_ONCE = 32
"""Elements of a window of max pooling. Up to 25, a search along one axis after the other took longer on a CPU for most images,
and accessed more bytes in programs for a TPU; with 169 it took less."""
_COMBINED_AT_ONCE = 25
"""Elements of a window that a CPU combines in one loop; of larger ones, those along one axis after the other."""


def _max_pooling(dims: int) -> Body:
    def max_pool(
        x: Array,
        kernel_size: list[int],
        stride: list[int] | None = None,
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> tuple[Array, Array]:
        return _max_pool(x, _Windows.of(x.shape[-dims:], kernel_size, stride, padding, dilation, ceil_mode))

    return max_pool


def _avg_pooling(dims: int, *, by_elements: bool = True) -> Body:
    def avg_pool(
        x: Array,
        kernel_size: list[int],
        stride: list[int] | None = None,
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        windows = _Windows.of(x.shape[-dims:], kernel_size, stride, padding, (1,), ceil_mode)
        return _avg_pool(x, windows, count_include_pad, divisor_override, by_elements)

    return avg_pool


def _max_pooling_backward(dims: int) -> Body:
    """The gradient of max pooling and adaptive max pooling; the last argument is the maxima's indices."""
    return lambda grad_output, x, *settings: _scatter_back(grad_output, x, settings[-1], dims)


def _max_pooling_gradient(dims: int) -> Body:
    def max_pool_gradient(grad_output: Array, self: Array, *settings: Any) -> Array:
        windows = _Windows.of(self.shape[-dims:], *settings)

        def scatter(grad: Array, x: Array) -> Array:
            return _scatter_back(grad, x, _places(x, windows, lowest_of(x)), dims)

        if any(step != 1 for step in windows.dilation):  # XLA's op has no dilated windows
            return scatter(grad_output, self)
        select = functools.partial(_select_and_scatter, windows=windows)
        return lax.platform_dependent(grad_output, self, tpu=select, default=scatter)  # type: ignore[no-any-return]

    return max_pool_gradient


def _avg_pooling_backward(dims: int) -> Body:
    # The gradient of the elementwise form would be a sum of padded gradients, one for each element of a window.
    pool = _avg_pooling(dims, by_elements=False)
    return lambda grad_output, x, *settings: linear_gradient(lambda y: pool(y, *settings), grad_output, x)


OPS.op(aten.max_pool2d_with_indices.default, dtypes=REAL_NUMBERS, pad=windows_rules.max_pool)(_max_pooling(2))
OPS.op(aten.max_pool3d_with_indices.default, dtypes=REAL_NUMBERS, pad=windows_rules.max_pool)(_max_pooling(3))
OPS.op(aten.avg_pool2d.default, dtypes=FLOATS | {torch.int64}, pad=windows_rules.avg_pool)(_avg_pooling(2))
OPS.op(aten.avg_pool3d.default, dtypes=WIDE_FLOATS | {torch.int64}, pad=windows_rules.avg_pool)(_avg_pooling(3))
OPS.op(
    aten.max_pool2d_with_indices_backward.default, dtypes=REAL_NUMBERS, pad=window_gradients_rules.max_pool_backward
)(_max_pooling_backward(2))
OPS.op(
    aten.adaptive_max_pool2d_backward.default,
    dtypes=FLOATS | {torch.int64},
    check=check_rank("grad_output", 3, 4),
    pad=image_gradients_rules.adaptive_pool_backward,
)(_max_pooling_backward(2))
OPS.op(
    aten.max_pool3d_with_indices_backward.default, dtypes=REAL_NUMBERS, pad=window_gradients_rules.max_pool_backward
)(_max_pooling_backward(3))
OPS.op(
    aten.adaptive_max_pool3d_backward.default,
    dtypes=FLOATS | {torch.int64},
    check=check_rank("grad_output", 4, 5),
    pad=image_gradients_rules.adaptive_pool_backward,
)(_max_pooling_backward(3))
OPS.op(MAX_POOL2D_GRADIENT, dtypes=REAL_NUMBERS, pad=window_gradients_rules.max_pool_gradient)(_max_pooling_gradient(2))
OPS.op(MAX_POOL3D_GRADIENT, dtypes=REAL_NUMBERS, pad=window_gradients_rules.max_pool_gradient)(_max_pooling_gradient(3))
OPS.op(aten.avg_pool2d_backward.default, dtypes=FLOATS | {torch.int64}, pad=window_gradients_rules.avg_pool_backward)(
    _avg_pooling_backward(2)
)
OPS.op(
    aten.avg_pool3d_backward.default, dtypes=WIDE_FLOATS | {torch.int64}, pad=window_gradients_rules.avg_pool_backward
)(_avg_pooling_backward(3))


class _Windows:
    """The window parameters of a pooling: plain integers, one per spatial axis."""

    def __init__(
        self,
        space: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
    ) -> None:
        self.space, self.kernel, self.stride, self.padding, self.dilation = space, kernel, stride, padding, dilation
        self.outputs = [
            _pooled_size(n, k, s, p, d, ceil_mode)
            for n, k, s, p, d in zip(space, kernel, stride, padding, dilation, strict=True)
        ]
        self.reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        # Padding after the end for the last window, which with ceil_mode may extend past the op's padding.
        self.behind = [
            max((o - 1) * s + r - n - p, 0)
            for n, s, p, o, r in zip(space, stride, padding, self.outputs, self.reach, strict=True)
        ]
        self.edges = list(zip(padding, self.behind, strict=True))

    @classmethod
    def of(
        cls,
        space: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int] | None,
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
    ) -> _Windows:
        dims = len(space)
        full = [list(v) * dims if len(v) == 1 else list(v) for v in (kernel, stride or kernel, padding, dilation)]
        return cls(space, full[0], full[1], full[2], full[3], ceil_mode)

    def pad(self, x: Array, value: float | int) -> Array:
        """Pads the spatial axes of `x` with `value` as far as the windows reach."""
        edges = [(before, behind, 0) for before, behind in self.edges]
        return lax.pad(x, jnp.asarray(value, x.dtype), [(0, 0, 0)] * (x.ndim - len(edges)) + edges)

    def reduce(self, x: Array, start: float | int, combine: Callable[..., Array]) -> Array:
        lead = x.ndim - len(self.space)
        edges = [(0, 0)] * lead + self.edges
        ones = (1,) * lead
        reduced: Array = lax.reduce_window(
            x,
            np.asarray(start, x.dtype)[()],
            combine,
            (*ones, *self.kernel),
            (*ones, *self.stride),
            edges,
            window_dilation=(*ones, *self.dilation),
        )
        return reduced[(..., *(slice(0, o) for o in self.outputs))]

    def combine_elements(self, x: Array, start: float | int, combine: Callable[..., Array]) -> Array:
        """As `reduce` for a `start` that changes nothing, but elementwise, which XLA's CPU compiler vectorizes."""
        found = self.pad(x, start)
        for axes in self.group_axes(_COMBINED_AT_ONCE):
            offsets = itertools.product(*(range(self.kernel[axis]) for axis in axes))
            found = functools.reduce(combine, (self.elements(found, axes, offset) for offset in offsets))
            if axes.start:
                # Without it, XLA computes these again for each offset along the next axis.
                found = lax.optimization_barrier(found)
        return found

    def elements(self, padded: Array, axes: Sequence[int], offsets: Sequence[int]) -> Array:
        """The elements of every window at offsets along spatial axes."""
        cuts = [slice(None)] * len(self.space)
        for axis, offset in zip(axes, offsets, strict=True):
            first, stride = offset * self.dilation[axis], self.stride[axis]
            cuts[axis] = slice(first, first + (self.outputs[axis] - 1) * stride + 1, stride)
        return padded[(..., *cuts)]

    def group_axes(self, most: int) -> Iterator[range]:
        """Spatial axes, the last ones first: along those of a group a window has up to `most` elements, or it is one axis."""
        behind = len(self.space)
        while behind:
            first = behind - 1
            while first and math.prod(self.kernel[first - 1 : behind]) <= most:
                first -= 1
            yield range(first, behind)
            behind = first


def _pooled_size(n: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Torch's output size: with ceil_mode a last window that would begin in the right padding is dropped."""
    room = n + 2 * padding - dilation * (kernel - 1) - 1
    size = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    return size - 1 if ceil_mode and (size - 1) * stride >= n + padding else size


def _max_pool(x: Array, windows: _Windows) -> tuple[Array, Array]:
    """The maxima and their indices, computed separately, so that XLA removes the search for unused indices."""
    lowest = lowest_of(x)
    return _reduce(x, windows, lowest, lax.max), _places(x, windows, lowest)


def _reduce(x: Array, windows: _Windows, start: float | int, combine: Callable[..., Array]) -> Array:
    """Combines the elements of each window; long windows by a loop, as the compiler's time grows with what is written out."""
    if max(windows.kernel, default=0) > _COMBINED_AT_ONCE:
        return windows.reduce(x, start, combine)
    by_elements, by_windows = (
        functools.partial(method, start=start, combine=combine) for method in (windows.combine_elements, windows.reduce)
    )
    return lax.platform_dependent(x, cpu=by_elements, default=by_windows)  # type: ignore[no-any-return]


def _places(x: Array, windows: _Windows, lowest: float | int, most: int = _SEARCHED_AT_ONCE) -> Array:
    """The flat index of each window's largest value: the first of equal values, the last NaN.

    Large windows are searched along one axis after the other, the last one first, in which order their elements stay: one of
    7 x 7 x 7 takes 21 comparisons, not 343.

    Args:
        most: elements of a window that are searched at once, where that is more than an axis has.
    """
    positions = jnp.arange(math.prod(windows.space), dtype=jnp.int32).reshape(windows.space)
    values, places = windows.pad(x, lowest), windows.pad(positions, -1)
    for axes in windows.group_axes(most):
        is_long = len(axes) == 1 and windows.kernel[axes.start] > _SEARCHED_AT_ONCE
        values, places = (_best_of_long if is_long else _best_along)(axes, values, places, windows)
    return jnp.broadcast_to(places, values.shape).astype(jnp.int64)


def _best_along(axes: range, values: Array, places: Array, windows: _Windows) -> tuple[Array, Array]:
    """The largest value along spatial axes of each window, and its place. Places of padding are negative."""
    offsets = itertools.product(*(range(windows.kernel[axis]) for axis in axes))
    first = next(offsets)
    best, place = windows.elements(values, axes, first), windows.elements(places, axes, first)
    for offset in offsets:
        value, position = windows.elements(values, axes, offset), windows.elements(places, axes, offset)
        better = (position >= 0) & ((value > best) | (value != value) | (place < 0))
        best, place = jnp.where(better, value, best), jnp.where(better, position, place)
    if axes.start == 0:
        return best, place
    # Without it, XLA computes these again for each offset along the next axis.
    found: tuple[Array, Array] = lax.optimization_barrier((best, place))
    return found


def _best_of_long(axes: range, values: Array, places: Array, windows: _Windows) -> tuple[Array, Array]:
    """As `_best_along`, by a loop in the program: the compiler's time grows with the square of what is written out."""
    (axis,) = axes
    lead = values.ndim - len(windows.space)
    kernel, stride, dilation = (
        [1] * (lead + axis) + [setting[axis]] + [1] * (len(windows.space) - axis - 1)
        for setting in (windows.kernel, windows.stride, windows.dilation)
    )
    rows = [slice(None)] * (lead + axis) + [slice(0, windows.outputs[axis])]
    value, place = lax.reduce_window(
        (values, jnp.broadcast_to(places, values.shape)),
        (jnp.asarray(lowest_of(values), values.dtype), jnp.asarray(-1, places.dtype)),
        _better,
        tuple(kernel),
        tuple(stride),
        "VALID",
        window_dilation=tuple(dilation),
    )
    return value[tuple(rows)], place[tuple(rows)]


def _better(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """The larger of two values and its place, in any order: the first of equal values, the last NaN, no padding."""
    (one, here), (other, there) = left, right
    is_nan, was_nan = other != other, one != one
    is_larger = (other > one) | (is_nan & ~was_nan)
    is_tie = jnp.where(is_nan & was_nan, there > here, (other == one) & (there < here))
    chosen = (there >= 0) & ((here < 0) | is_larger | is_tie)
    return jnp.where(chosen, other, one), jnp.where(chosen, there, here)


def _scatter_back(grad: Array, x: Array, indices: Array, dims: int) -> Array:
    """Adds every gradient at the index of its maximum."""
    wide = cast(grad, opmath_dtype(torch_dtype(grad)))
    lead = math.prod(x.shape[:-dims])
    flat = jnp.zeros((lead, math.prod(x.shape[-dims:])), wide.dtype)
    rows = jnp.arange(lead)[:, None]
    by_image = (lead, math.prod(grad.shape[-dims:]))
    return flat.at[rows, indices.reshape(by_image)].add(wide.reshape(by_image)).reshape(x.shape).astype(x.dtype)


def _select_and_scatter(grad: Array, x: Array, windows: _Windows) -> Array:
    """As `_scatter_back`, by the op that XLA has for it."""
    zero = jnp.zeros((), x.dtype)
    # Whether an element stays the largest beside a later one of its window.
    stays = jax.make_jaxpr(lambda best, value: ~((value > best) | (value != value)))(zero, zero)
    added = jax.make_jaxpr(lax.add)(zero, zero)
    lead = x.ndim - len(windows.space)
    result: Array = lax.select_and_scatter_p.bind(
        x,
        grad,
        zero,
        select_jaxpr=stays.jaxpr,
        select_consts=(),
        scatter_jaxpr=added.jaxpr,
        scatter_consts=(),
        window_dimensions=(*[1] * lead, *windows.kernel),
        window_strides=(*[1] * lead, *windows.stride),
        padding=(*[(0, 0)] * lead, *windows.edges),
    )
    return result


def _avg_pool(
    x: Array, windows: _Windows, count_include_pad: bool, divisor_override: int | None, by_elements: bool
) -> Array:
    wide = cast(x, opmath_dtype(torch_dtype(x)))
    total = _sum(wide, windows) if by_elements else windows.reduce(wide, 0, lax.add)
    if divisor_override is not None:
        divisor: np.ndarray | int = divisor_override
    else:
        divisor = _counts(windows, count_include_pad)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, total.dtype), total.shape))
    return (total / jnp.asarray(divisor, total.dtype)).astype(x.dtype)


def _sum(x: Array, windows: _Windows) -> Array:
    """The sum of each window; that of negative zeros is a positive one, as torch begins with zero."""
    total = _reduce(x, windows, 0, lax.add)
    return jnp.where(total == 0, jnp.zeros((), x.dtype), total)


def _counts(windows: _Windows, count_include_pad: bool) -> np.ndarray:
    """Torch's divisors: padding counts with `count_include_pad`, elements after the padding never do."""
    sizes = []
    for n, k, s, p, o in zip(
        windows.space, windows.kernel, windows.stride, windows.padding, windows.outputs, strict=True
    ):
        starts = np.arange(o) * s - p
        ends = np.minimum(starts + k, n + p)
        inside = np.minimum(ends, n) - np.maximum(starts, 0)
        sizes.append(ends - starts if count_include_pad else inside)
    counts = sizes[0]
    for size in sizes[1:]:
        counts = counts[..., None] * size
    return counts


def linear_gradient(pool: Callable[[Array], Array], grad: Array, x: Array) -> Array:
    """The gradient of a pooling that is linear in its input."""
    _, backward = jax.vjp(pool, x)
    result: Array = backward(grad)[0]
    return result


def lowest_of(x: Array) -> float | int:
    return -math.inf if jnp.issubdtype(x.dtype, jnp.floating) else int(jnp.iinfo(x.dtype).min)
