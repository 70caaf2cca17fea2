"""Copies, fills and changes of dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from dynaxla.bucketing.rules import elementwise as elementwise_rules
from dynaxla.ops.dtypes import HALVES, INTEGERS, WIDE_NUMBERS
from dynaxla.ops.findings import CONSTANTS, MOVED
from dynaxla.ops.promotion import Operand, cast, torch_dtype
from dynaxla.ops.record import Family, right, rounds, wrong

aten = torch.ops.aten
prims = torch.ops.prims
OPS = Family()


@OPS.op(aten.clone.default, pad=elementwise_rules.elementwise, torch_mlir=MOVED)
def clone(self: jax.Array, memory_format: torch.memory_format | None = None) -> jax.Array:
    del memory_format  # strides are torch's affair: they are restored where the value leaves the compiled part
    return self


@OPS.op(
    aten.copy.default,
    pad=elementwise_rules.elementwise,
    torch_mlir=(
        right(WIDE_NUMBERS | {torch.bool}),
        rounds(HALVES),
    ),
)
def copy(self: jax.Array, src: jax.Array, non_blocking: bool = False) -> jax.Array:
    del non_blocking
    return jnp.broadcast_to(cast(src, torch_dtype(self)), self.shape)


@OPS.op(aten.fill.Scalar, pad=elementwise_rules.elementwise)
@OPS.op(aten.fill.Tensor, pad=elementwise_rules.elementwise, torch_mlir=CONSTANTS)
def fill(self: jax.Array, value: Operand) -> jax.Array:
    return jnp.broadcast_to(cast(value, torch_dtype(self)), self.shape)


@OPS.op(prims.convert_element_type.default)
def convert_element_type(a: jax.Array, dtype: torch.dtype) -> jax.Array:
    return cast(a, dtype)


@OPS.op(
    aten._to_copy.default,
    pad=elementwise_rules.elementwise,
    torch_mlir=(
        right(INTEGERS),
        wrong(HALVES | {torch.float32}, "whole numbers of NaN, infinities and what is out of range"),
    ),
)
def to_copy(self: jax.Array, dtype: torch.dtype | None = None, **placement: object) -> jax.Array:
    """Change the dtype; `placement` (layout, device, pin_memory, non_blocking, memory_format) does not reach XLA."""
    del placement
    return self if dtype is None else cast(self, dtype)
