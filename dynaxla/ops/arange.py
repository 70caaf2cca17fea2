"""Evenly spaced numbers, and powers with evenly spaced exponents.

Bodies ignore keyword arguments about the tensor's memory (layout, device, pin_memory).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import indexing as indexing_rules
from dynaxla.custom_ops.schema import argument, operand_dtype
from dynaxla.ops.axes_and_dtypes import Scalar, constant, widen
from dynaxla.ops.promotion import JNP_DTYPES, cast
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()


def check_fractions(node: torch.fx.Node) -> str | None:
    """Refuse evenly spaced integers, and real numbers between complex ones."""
    dtype = argument(node, "dtype")
    if (
        dtype is not None
        and not dtype.is_complex
        and any(operand_dtype(node, end).is_complex for end in ("start", "end"))
    ):
        return f"complex ends of {dtype}"
    is_whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return "integers are truncated from floats whose rounding depends on the processor" if is_whole else None


End = Scalar | jax.Array  # start or end of linspace and logspace


@OPS.op(aten.arange.start_step, pad=indexing_rules.arange)
def arange(start: float, end: float, step: float = 1, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    """`start + i * step`, computed in int64 if all three are integers and in float64 otherwise."""
    bounds = (start, end, step)
    whole = all(isinstance(bound, int) for bound in bounds)
    chosen = dtype or (torch.int64 if whole else torch.get_default_dtype())
    counted = [int(bound) for bound in bounds] if whole or chosen == torch.int64 else bounds
    count = _steps_between(*counted)
    if not chosen.is_floating_point:  # torch computes with fractions and truncates at the end
        whole, bounds = True, (int(start), int(end), int(step))
    exact = jnp.int64 if whole else jnp.float64
    values = lax.iota(exact, count) * constant(bounds[2], exact) + constant(bounds[0], exact)
    is_upward = isinstance(bounds[2], int | float) and bounds[2] > 0
    return cast(values if whole or is_upward else _without_negative_zero(values), chosen)


def _without_negative_zero(values: jax.Array) -> jax.Array:
    """Makes 0 of -0. XLA leaves out that 0 is added to the first value, which is 0 times a step below zero."""
    return jnp.where(values == 0, jnp.zeros_like(values), values)


def _steps_between(start: float, end: float, step: float) -> int:
    if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        return -((start - end) // step)
    return math.ceil((end - start) / step)


@OPS.op(aten.arange.start, pad=indexing_rules.arange)
def arange_start(start: float, end: float, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return arange(start, end, dtype=dtype)


@OPS.op(aten.arange.default, pad=indexing_rules.arange)
def arange_end(end: float, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return arange(0, end, dtype=dtype)


def evenly_spaced(start: End, end: End, steps: int, dtype: torch.dtype) -> jax.Array:
    """`steps` evenly spaced values, each computed from the nearer end; float64 if `dtype` is an integer.

    The step is rounded to a 16-bit `dtype`, as in torch, whose last bits then depend on the CPU's vector width.
    """
    exact = JNP_DTYPES[dtype] if dtype.is_floating_point or dtype.is_complex else jnp.float64
    first, last = (jnp.asarray(e).astype(exact) for e in (start, end))
    if steps <= 1:
        return jnp.full((steps,), first)
    step = widen((last - first) / (steps - 1))
    place = lax.iota(jnp.int64, steps)
    upward = widen(first) + _rounded_product(step, place)
    downward = widen(last) - _rounded_product(step, steps - 1 - place)
    return _without_negative_zero(jnp.where(place < steps // 2, upward, downward))


def _rounded_product(step: jax.Array, count: jax.Array) -> jax.Array:
    """`step * count`, rounded as in torch: XLA cannot fuse it with the addition after it."""
    if step.dtype == jnp.float32:
        return (step.astype(jnp.float64) * count).astype(jnp.float32)
    return step * count.astype(step.dtype)


@OPS.op(
    aten.linspace.default,
    check=check_fractions,
    pad=indexing_rules.linspace,
    limits="no integers; 16-bit floats differ by up to one rounding of the largest value",
)
@OPS.op(
    aten.linspace.Tensor_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
    check=check_fractions,
    limits="no integers; 16-bit floats differ by up to one rounding of the largest value",
)
def linspace(start: End, end: End, steps: int, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    chosen = dtype or _default_for(start, end)
    return cast(evenly_spaced(start, end, steps, chosen), chosen)


@OPS.op(
    aten.logspace.default,
    aten.logspace.Tensor_Tensor,
    aten.logspace.Tensor_Scalar,
    aten.logspace.Scalar_Tensor,
    check=check_fractions,
    limits="no integers; 16-bit floats differ by up to one rounding of the largest value",
)
def logspace(
    start: End, end: End, steps: int, base: float = 10.0, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    chosen = dtype or _default_for(start, end)
    powers = widen(evenly_spaced(start, end, steps, chosen))
    return cast(jnp.power(constant(base, powers.dtype), powers), chosen)


def _default_for(*ends: End) -> torch.dtype:
    default = torch.get_default_dtype()
    return default.to_complex() if any(jnp.iscomplexobj(end) for end in ends) else default
