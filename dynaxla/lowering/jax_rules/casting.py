"""JAX rules of the ATen ops that copy, fill or change the dtype of a tensor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from dynaxla.lowering.jax_rules.promotion import Operand, cast, torch_dtype
from dynaxla.lowering.jax_rules.rule_set import RuleSet

aten = torch.ops.aten
prims = torch.ops.prims
RULES = RuleSet()


@RULES.rule(aten.clone.default)
def clone(self: jax.Array, memory_format: torch.memory_format | None = None) -> jax.Array:
    del memory_format  # strides are torch's affair: they are restored where the value leaves the compiled part
    return self


@RULES.rule(aten.copy.default)
def copy(self: jax.Array, src: jax.Array, non_blocking: bool = False) -> jax.Array:
    del non_blocking
    return jnp.broadcast_to(cast(src, torch_dtype(self)), self.shape)


@RULES.rule(aten.fill.Scalar, aten.fill.Tensor)
def fill(self: jax.Array, value: Operand) -> jax.Array:
    return jnp.broadcast_to(cast(value, torch_dtype(self)), self.shape)


@RULES.rule(prims.convert_element_type.default)
def convert_element_type(a: jax.Array, dtype: torch.dtype) -> jax.Array:
    return cast(a, dtype)


@RULES.rule(aten._to_copy.default)
def to_copy(self: jax.Array, dtype: torch.dtype | None = None, **placement: object) -> jax.Array:
    """Change the dtype; `placement` (layout, device, pin_memory, non_blocking, memory_format) does not reach XLA."""
    del placement
    return self if dtype is None else cast(self, dtype)
