"""Copies, fills and changes of dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from dynaxla.bucketing.rules import elementwise as elementwise_rules
from dynaxla.ops.dtypes import WIDE_FLOATS, WORDS
from dynaxla.ops.promotion import Operand, cast, torch_dtype
from dynaxla.ops.record import Family, right

aten = torch.ops.aten
prims = torch.ops.prims
OPS = Family()


@OPS.op(
    aten.clone.default,
    pad=elementwise_rules.elementwise,
    torch_mlir=(right(WIDE_FLOATS | WORDS | {torch.bool, torch.uint8, torch.complex64}),),
)
def clone(self: jax.Array, memory_format: torch.memory_format | None = None) -> jax.Array:
    del memory_format  # strides are torch's affair: they are restored where the value leaves the compiled part
    return self


@OPS.op(aten.copy.default, pad=elementwise_rules.elementwise)
def copy(self: jax.Array, src: jax.Array, non_blocking: bool = False) -> jax.Array:
    del non_blocking
    return jnp.broadcast_to(cast(src, torch_dtype(self)), self.shape)


@OPS.op(aten.fill.Scalar, aten.fill.Tensor, pad=elementwise_rules.elementwise)
def fill(self: jax.Array, value: Operand) -> jax.Array:
    return jnp.broadcast_to(cast(value, torch_dtype(self)), self.shape)


@OPS.op(prims.convert_element_type.default)
def convert_element_type(a: jax.Array, dtype: torch.dtype) -> jax.Array:
    return cast(a, dtype)


@OPS.op(aten._to_copy.default, pad=elementwise_rules.elementwise)
def to_copy(self: jax.Array, dtype: torch.dtype | None = None, **placement: object) -> jax.Array:
    """Change the dtype; `placement` (layout, device, pin_memory, non_blocking, memory_format) does not reach XLA."""
    del placement
    return self if dtype is None else cast(self, dtype)
