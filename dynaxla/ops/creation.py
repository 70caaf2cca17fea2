"""Tensors of sizes and numbers, and triangles of matrices.

Bodies ignore keyword arguments about the tensor's memory (layout, device, pin_memory, memory_format). An omitted dtype
is torch's default dtype at the time of tracing. The `empty` ops give zeros, where torch gives uninitialized memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from dynaxla.bucketing.pad_rules import diagonals as diagonals_rules
from dynaxla.bucketing.pad_rules import indexing as indexing_rules
from dynaxla.ops.axes_and_dtypes import Scalar, constant, default_dtype
from dynaxla.ops.dtypes import STORED, XLA_DTYPES
from dynaxla.ops.eager_errors import check_numbers_fit
from dynaxla.ops.promotion import JNP_DTYPES
from dynaxla.ops.record import OpFamily
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict

aten = torch.ops.aten
OPS = OpFamily(STORED)


Size = Sequence[int]


def fill_tensor(size: Size, value: Scalar, dtype: torch.dtype | None) -> jax.Array:
    """A tensor of one value, in `dtype` or torch's default dtype."""
    chosen = JNP_DTYPES[dtype or torch.get_default_dtype()]
    return jnp.full(tuple(size), constant(value, chosen))


_LOWEST_BIT = Finding(
    Verdict.WRONG,
    XLA_DTYPES,
    "full([1], 2, dtype=bool) is False: its lowest bit",
    calls=lambda node: node.meta["val"].dtype is torch.bool,
)


@OPS.op(
    aten.full.default, check=check_numbers_fit("fill_value"), pad=indexing_rules.creation, torch_mlir=(_LOWEST_BIT,)
)
def full(size: Size, fill_value: Scalar, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return fill_tensor(size, fill_value, dtype or default_dtype(fill_value))


@OPS.op(aten.zeros.default, aten._efficientzerotensor.default, pad=indexing_rules.creation)
@OPS.op(aten.empty.memory_format, pad=indexing_rules.creation, limits="gives zeros")
def zeros(size: Size, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return fill_tensor(size, 0, dtype)


@OPS.op(aten.ones.default, pad=indexing_rules.creation)
def ones(size: Size, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return fill_tensor(size, 1, dtype)


@OPS.op(
    aten.empty_strided.default,
    aten.empty_permuted.default,
    pad=indexing_rules.creation,
    limits="gives zeros",
)
def empty_strided(size: Size, strides_or_order: Size, /, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return fill_tensor(size, 0, dtype)


def filled_like(x: jax.Array, size: Size, value: Scalar, dtype: torch.dtype | None) -> jax.Array:
    """A tensor of one value, in `dtype` or that of `x`."""
    chosen = x.dtype if dtype is None else JNP_DTYPES[dtype]
    return jnp.full(tuple(size), constant(value, chosen))


@OPS.op(aten.full_like.default, check=check_numbers_fit("fill_value"), pad=indexing_rules.creation)
def full_like(x: jax.Array, fill_value: Scalar, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled_like(x, x.shape, fill_value, dtype)


@OPS.op(aten.zeros_like.default, pad=indexing_rules.creation)
@OPS.op(aten.empty_like.default, pad=indexing_rules.creation, limits="gives zeros")
def zeros_like(x: jax.Array, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled_like(x, x.shape, 0, dtype)


@OPS.op(aten.ones_like.default, pad=indexing_rules.creation)
def ones_like(x: jax.Array, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled_like(x, x.shape, 1, dtype)


@OPS.op(
    aten.new_full.default, check=check_numbers_fit("fill_value"), pad=indexing_rules.creation, torch_mlir=(_LOWEST_BIT,)
)
def new_full(
    x: jax.Array, size: Size, fill_value: Scalar, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    return filled_like(x, size, fill_value, dtype)


@OPS.op(aten.new_zeros.default, pad=indexing_rules.creation)
@OPS.op(aten.new_empty.default, pad=indexing_rules.creation, limits="gives zeros")
def new_zeros(x: jax.Array, size: Size, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled_like(x, size, 0, dtype)


@OPS.op(aten.new_empty_strided.default, pad=indexing_rules.creation, limits="gives zeros")
def new_empty_strided(
    x: jax.Array, size: Size, stride: Size, *, dtype: torch.dtype | None = None, **_: object
) -> jax.Array:
    return filled_like(x, size, 0, dtype)


@OPS.op(aten.new_ones.default, pad=indexing_rules.creation)
def new_ones(x: jax.Array, size: Size, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return filled_like(x, size, 1, dtype)


@OPS.op(aten.scalar_tensor.default, check=check_numbers_fit("s"), pad=indexing_rules.scalar_tensor)
def scalar_tensor(s: Scalar, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return fill_tensor((), s, dtype)


@OPS.op(aten.eye.m, pad=indexing_rules.eye)
def eye_of(n: int, m: int, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return jnp.eye(n, m, dtype=JNP_DTYPES[dtype or torch.get_default_dtype()])


@OPS.op(aten.eye.default, pad=indexing_rules.eye)
def eye(n: int, *, dtype: torch.dtype | None = None, **_: object) -> jax.Array:
    return eye_of(n, n, dtype=dtype)


def _on_triangle(x: jax.Array, diagonal: int, lower: bool) -> jax.Array:
    row = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 2)
    column = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    kept = column - row <= diagonal if lower else column - row >= diagonal
    return jnp.where(kept, x, jnp.zeros((), x.dtype))


@OPS.op(aten.tril.default, dtypes=XLA_DTYPES, pad=diagonals_rules.triangle)
def tril(x: jax.Array, diagonal: int = 0) -> jax.Array:
    return _on_triangle(x, diagonal, lower=True)


@OPS.op(aten.triu.default, dtypes=XLA_DTYPES, pad=diagonals_rules.triangle)
def triu(x: jax.Array, diagonal: int = 0) -> jax.Array:
    return _on_triangle(x, diagonal, lower=False)
