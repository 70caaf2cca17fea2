"""PyTorch's type promotion and rounding, for the bodies.

JAX promotes differently from torch (it has no weak 0-d tensors, and another result for int64 with float16), so every
body casts its operands to a common dtype first.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection
from functools import partial

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.ops.dtypes import FLOAT8
from dynaxla.ops.record import Body

JNP_DTYPES = {
    torch.float64: jnp.float64,
    torch.float32: jnp.float32,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
    torch.int64: jnp.int64,
    torch.int32: jnp.int32,
    torch.int16: jnp.int16,
    torch.int8: jnp.int8,
    torch.uint8: jnp.uint8,
    torch.uint16: jnp.uint16,
    torch.uint32: jnp.uint32,
    torch.uint64: jnp.uint64,
    torch.bool: jnp.bool_,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
}

Scalar = bool | int | float | complex
Operand = jax.Array | Scalar

_TORCH_DTYPES = {jnp.dtype(theirs): ours for ours, theirs in JNP_DTYPES.items()}
_BY_INT32 = frozenset({torch.int8, torch.int16, torch.uint16, torch.int32})
_HAS_LEAST_INTEGER = platform.machine() in ("x86_64", "AMD64")
_OPMATH = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def torch_dtype(array: jax.Array) -> torch.dtype:
    """The torch dtype of a JAX array."""
    return _TORCH_DTYPES[jnp.dtype(array.dtype)]


def result_dtype(*operands: Operand) -> torch.dtype:
    """The dtype that torch computes `operands` in.

    Tensors with dims decide; a 0-d tensor, and after it a Python scalar, counts only if its category (bool, integer,
    floating, complex) is higher.
    """
    arrays = [o for o in operands if isinstance(o, jax.Array)]
    scalars = [o for o in operands if not isinstance(o, jax.Array)]
    levels = [
        _promote_all([torch_dtype(a) for a in arrays if a.ndim > 0]),
        _promote_all([torch_dtype(a) for a in arrays if a.ndim == 0]),
        _promote_all([_scalar_dtype(s) for s in scalars]),
    ]
    result: torch.dtype | None = None
    for lower in levels:
        result = _combine(result, lower)
    if result is None:
        raise ValueError("type promotion needs at least one operand")
    return result


def inexact_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 (torch's default dtype) for integers and bool."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.float32


def opmath_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that torch's CPU kernels compute in: float32 for the 16-bit floats."""
    return _OPMATH.get(dtype, dtype)


def round_float(array: jax.Array, dtype: torch.dtype) -> jax.Array:
    """The array in `dtype` where it is a float of more bits, else unchanged."""
    made = torch_dtype(array)
    is_wider = dtype.is_floating_point and made.is_floating_point and made.itemsize > dtype.itemsize
    return array.astype(JNP_DTYPES[dtype]) if is_wider else array


def cast(operand: Operand, dtype: torch.dtype) -> jax.Array:
    """Casts `operand` to `dtype` as torch does: integers wrap, -1.0 is 255 in uint8, every nonzero number is True."""
    if not isinstance(operand, jax.Array):
        # An out-of-range Python integer wraps, as torch's 0-d int64 does; numpy would refuse it.
        operand = jnp.asarray(operand, JNP_DTYPES[_widest(operand)])
    source = torch_dtype(operand)
    if source == dtype:
        return operand
    if source.is_complex and not dtype.is_complex and dtype != torch.bool:
        operand = operand.real
        source = torch_dtype(operand)
    if FLOAT8 & {source, dtype}:
        return _cast_float8(operand, dtype)
    if source.is_floating_point and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        on_cpu, elsewhere = (partial(convert, dtype=dtype) for convert in (_to_integer_on_cpu, _to_integer))
        return lax.platform_dependent(operand, cpu=on_cpu, default=elsewhere)  # type: ignore[no-any-return]
    return operand.astype(JNP_DTYPES[dtype])


def _to_integer(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    return x.astype(jnp.int64).astype(JNP_DTYPES[dtype])


def _to_integer_on_cpu(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Converts floats by the integers whose low bits torch's CPU kernels take: int32 for int8, int16 and int32, else int64.

    NaN and what is out of their range is the least integer on x86 (`cvttss2si` and its like, Intel SDM volume 1, table 4-1);
    other processors saturate, as XLA does.
    """
    wide = jnp.int32 if dtype in _BY_INT32 else jnp.int64
    least = jnp.iinfo(wide).min
    converted = x.astype(wide)
    if _HAS_LEAST_INTEGER:
        beyond = -float(least) if jnp.finfo(x.dtype).max > -float(least) else jnp.inf
        converted = jnp.where(x < beyond, converted, least)
    return converted.astype(JNP_DTYPES[dtype])


def _cast_float8(operand: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Casts to or from float8 by way of float32, as torch does: what is beyond the range of a dtype without infinity is its
    largest number."""
    wide = operand.astype(jnp.float32)
    if dtype not in FLOAT8:
        return cast(wide, dtype)
    if dtype == torch.float8_e4m3fn:
        most = torch.finfo(dtype).max
        wide = jnp.where(wide != wide, wide, jnp.clip(wide, -most, most))
    return wide.astype(JNP_DTYPES[dtype])


def promote(*operands: Operand) -> tuple[jax.Array, ...]:
    """Casts `operands` to their common torch dtype (without broadcasting)."""
    dtype = result_dtype(*operands)
    return tuple(cast(operand, dtype) for operand in operands)


def compute(
    function: Callable[..., jax.Array], *operands: Operand, inexact: bool = False, exact_scalars: Collection[int] = ()
) -> jax.Array:
    """Applies an elementwise function in torch's computation dtype and rounds to torch's result dtype.

    `inexact` casts integers to float32 first. `exact_scalars` are the places of operands that, if they are Python scalars or
    0-d tensors, are cast to the computation dtype without rounding them to the result dtype, as torch's add, sub, mul and div
    do for the 16-bit floats.
    """
    dtype = result_dtype(*operands)
    if inexact:
        dtype = inexact_dtype(dtype)
    wide = opmath_dtype(dtype)
    arguments = []
    for place, operand in enumerate(operands):
        is_scalar = not isinstance(operand, jax.Array) or operand.ndim == 0
        rounded = operand if place in exact_scalars and is_scalar else cast(operand, dtype)
        arguments.append(cast(rounded, wide))
    return cast(function(*arguments), dtype)


def round_to(array: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Rounds a float32 `array` to the precision of a 16-bit `dtype`; XLA may remove a cast there and back, but not this."""
    if dtype not in _OPMATH:
        return array
    exponent_bits, mantissa_bits = (5, 10) if dtype == torch.float16 else (8, 7)
    return lax.reduce_precision(array, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)


def elementwise(function: Callable[..., jax.Array]) -> Body:
    """Makes a body of tensors and scalars only: promote, widen, apply, round."""
    return lambda *operands: compute(function, *operands)


def inexact_elementwise(function: Callable[..., jax.Array]) -> Body:
    """Like `elementwise`, for functions that convert integers to float32."""
    return lambda *operands: compute(function, *operands, inexact=True)


def _promote_all(dtypes: list[torch.dtype]) -> torch.dtype | None:
    result: torch.dtype | None = None
    for dtype in dtypes:
        result = dtype if result is None else torch.promote_types(result, dtype)
    return result


def _scalar_dtype(value: Scalar) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    return torch.float32 if isinstance(value, float) else torch.complex64


def _widest(value: Scalar) -> torch.dtype:
    if isinstance(value, (bool, int)):
        return _scalar_dtype(value)
    return torch.float64 if isinstance(value, float) else torch.complex128


def _category(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return lower if higher is None else higher
    if _category(lower) <= _category(higher):
        return higher
    if higher.is_floating_point:
        return higher.to_complex()
    return lower
