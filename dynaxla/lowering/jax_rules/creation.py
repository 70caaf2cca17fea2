"""Tensors made from sizes and numbers, and the triangles of a matrix.

Keyword arguments that say where and how torch would lay the tensor out (layout, device, pin_memory, memory_format) do
not reach XLA. A dtype that the call leaves out is torch's default dtype at the time of tracing. The `empty` ops give
zeros: what torch gives is whatever the memory held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.lowering.jax_rules.axes_and_dtypes import Scalar, constant, default_dtype, widened
from dynaxla.lowering.jax_rules.promotion import cast
from dynaxla.lowering.jax_rules.rule_set import JNP_DTYPES, RuleSet

aten = torch.ops.aten
RULES = RuleSet()

Size = Sequence[int]
End = Scalar | jax.Array  # what linspace and logspace begin and end with


def filled(size: Size, value: Scalar, dtype: torch.dtype | None) -> jax.Array:
    """A tensor of one value, in the dtype given or torch's default."""
    chosen = JNP_DTYPES[dtype or torch.get_default_dtype()]
    return jnp.full(tuple(size), constant(value, chosen))


@RULES.rule(aten.full.default)
def full(size: Size, fill_value: Scalar, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled(size, fill_value, dtype or default_dtype(fill_value))


@RULES.rule(aten.zeros.default, aten._efficientzerotensor.default, aten.empty.memory_format)
def zeros(size: Size, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled(size, 0, dtype)


@RULES.rule(aten.ones.default)
def ones(size: Size, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled(size, 1, dtype)


@RULES.rule(aten.empty_strided.default, aten.empty_permuted.default)
def empty_strided(size: Size, layout: Size, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled(size, 0, dtype)


def filled_like(x: jax.Array, size: Size, value: Scalar, dtype: torch.dtype | None) -> jax.Array:
    """A tensor of one value, in the dtype given or that of `x`."""
    chosen = x.dtype if dtype is None else JNP_DTYPES[dtype]
    return jnp.full(tuple(size), constant(value, chosen))


@RULES.rule(aten.full_like.default)
def full_like(x: jax.Array, fill_value: Scalar, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled_like(x, x.shape, fill_value, dtype)


@RULES.rule(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(x: jax.Array, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled_like(x, x.shape, 0, dtype)


@RULES.rule(aten.ones_like.default)
def ones_like(x: jax.Array, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled_like(x, x.shape, 1, dtype)


@RULES.rule(aten.new_full.default)
def new_full(
    x: jax.Array, size: Size, fill_value: Scalar, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    return filled_like(x, size, fill_value, dtype)


@RULES.rule(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(x: jax.Array, size: Size, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled_like(x, size, 0, dtype)


@RULES.rule(aten.new_empty_strided.default)
def new_empty_strided(
    x: jax.Array, size: Size, stride: Size, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    return filled_like(x, size, 0, dtype)


@RULES.rule(aten.new_ones.default)
def new_ones(x: jax.Array, size: Size, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled_like(x, size, 1, dtype)


@RULES.rule(aten.scalar_tensor.default)
def scalar_tensor(s: Scalar, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled((), s, dtype)


@RULES.rule(aten.eye.m)
def eye_of(n: int, m: int, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return jnp.eye(n, m, dtype=JNP_DTYPES[dtype or torch.get_default_dtype()])


@RULES.rule(aten.eye.default)
def eye(n: int, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return eye_of(n, n, dtype=dtype)


@RULES.rule(aten.arange.start_step)
def arange(start: float, end: float, step: float = 1, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    """`start + i * step`, counted in int64 if all three are integers and in float64 otherwise."""
    bounds = (start, end, step)
    whole = all(isinstance(bound, int) for bound in bounds)
    chosen = dtype or (torch.int64 if whole else torch.get_default_dtype())
    counted = [int(bound) for bound in bounds] if whole or chosen == torch.int64 else bounds
    count = _steps_between(*counted)
    if not chosen.is_floating_point:  # torch cuts the fractions off, though it has counted with them
        whole, bounds = True, (int(start), int(end), int(step))
    exact = jnp.int64 if whole else jnp.float64
    values = lax.iota(exact, count) * constant(bounds[2], exact) + constant(bounds[0], exact)
    return cast(values, chosen)


def _steps_between(start: float, end: float, step: float) -> int:
    if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        return -((start - end) // step)
    return math.ceil((end - start) / step)


@RULES.rule(aten.arange.start)
def arange_start(start: float, end: float, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return arange(start, end, dtype=dtype)


@RULES.rule(aten.arange.default)
def arange_end(end: float, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return arange(0, end, dtype=dtype)


def spaced(start: End, end: End, steps: int, dtype: torch.dtype) -> jax.Array:
    """`steps` values from start to end, each counted from the nearer end; float64 if `dtype` is an integer.

    The step is rounded to a 16-bit `dtype`, as in torch, whose last bits then depend on its vector width.
    """
    exact = JNP_DTYPES[dtype] if dtype.is_floating_point or dtype.is_complex else jnp.float64
    first, last = (jnp.asarray(e).astype(exact) for e in (start, end))
    if steps <= 1:
        return jnp.full((steps,), first)
    step = widened((last - first) / (steps - 1))
    place = lax.iota(jnp.int64, steps)
    upward = widened(first) + _rounded_product(step, place)
    downward = widened(last) - _rounded_product(step, steps - 1 - place)
    return jnp.where(place < steps // 2, upward, downward)


def _rounded_product(step: jax.Array, count: jax.Array) -> jax.Array:
    """`step * count`, which XLA cannot fuse with the addition after it: torch's result is rounded in between."""
    if step.dtype == jnp.float32:
        return (step.astype(jnp.float64) * count).astype(jnp.float32)
    return step * count.astype(step.dtype)


@RULES.rule(
    aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor
)
def linspace(start: End, end: End, steps: int, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    chosen = dtype or _default_for(start, end)
    return cast(spaced(start, end, steps, chosen), chosen)


@RULES.rule(
    aten.logspace.default, aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor
)
def logspace(
    start: End, end: End, steps: int, base: float = 10.0, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    chosen = dtype or _default_for(start, end)
    powers = widened(spaced(start, end, steps, chosen))
    return cast(jnp.power(constant(base, powers.dtype), powers), chosen)


def _default_for(*ends: End) -> torch.dtype:
    default = torch.get_default_dtype()
    return default.to_complex() if any(jnp.iscomplexobj(end) for end in ends) else default


def _on_triangle(x: jax.Array, diagonal: int, lower: bool) -> jax.Array:
    row = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 2)
    column = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    kept = column - row <= diagonal if lower else column - row >= diagonal
    return jnp.where(kept, x, jnp.zeros((), x.dtype))


@RULES.rule(aten.tril.default)
def tril(x: jax.Array, diagonal: int = 0) -> jax.Array:
    return _on_triangle(x, diagonal, lower=True)


@RULES.rule(aten.triu.default)
def triu(x: jax.Array, diagonal: int = 0) -> jax.Array:
    return _on_triangle(x, diagonal, lower=False)


def _window(values: jax.Array, length: int, dtype: torch.dtype | None) -> jax.Array:
    chosen = dtype or torch.get_default_dtype()
    return filled((length,), 1, chosen) if length <= 1 else cast(values, chosen)


def _turn(length: int, periodic: bool) -> jax.Array:
    """float64 positions from 0: a periodic window would be at 1 after its last sample, another is there at its last."""
    return lax.iota(jnp.float64, length) / max(length if periodic else length - 1, 1)


@RULES.rule(
    aten.hamming_window.default,
    aten.hamming_window.periodic,
    aten.hamming_window.periodic_alpha,
    aten.hamming_window.periodic_alpha_beta,
)
def hamming_window(
    window_length: int,
    periodic: bool = True,
    alpha: float = 0.54,
    beta: float = 0.46,
    *,
    dtype: torch.dtype | None = None,
    **_: object,
) -> jax.Array:
    values = alpha - beta * jnp.cos(2 * math.pi * _turn(window_length, periodic))
    return _window(values, window_length, dtype)


@RULES.rule(aten.hann_window.default, aten.hann_window.periodic)
def hann_window(
    window_length: int, periodic: bool = True, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    return hamming_window(window_length, periodic, 0.5, 0.5, dtype=dtype)


@RULES.rule(aten.blackman_window.default, aten.blackman_window.periodic)
def blackman_window(
    window_length: int, periodic: bool = True, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    angle = 2 * math.pi * _turn(window_length, periodic)
    return _window(0.42 - 0.5 * jnp.cos(angle) + 0.08 * jnp.cos(2 * angle), window_length, dtype)


@RULES.rule(aten.bartlett_window.default, aten.bartlett_window.periodic)
def bartlett_window(
    window_length: int, periodic: bool = True, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    return _window(1 - jnp.abs(2 * _turn(window_length, periodic) - 1), window_length, dtype)


@RULES.rule(aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta)
def kaiser_window(
    window_length: int,
    periodic: bool = True,
    beta: float = 12.0,
    *,
    dtype: torch.dtype | None = None,
    **_: object,
) -> jax.Array:
    side = jnp.maximum(1 - (2 * _turn(window_length, periodic) - 1) ** 2, 0)
    return _window(jnp.i0(beta * jnp.sqrt(side)) / jnp.i0(beta), window_length, dtype)
