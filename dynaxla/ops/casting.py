"""Copies, fills and changes of dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import Node

from dynaxla.bucketing.pad_rules import elementwise as elementwise_rules
from dynaxla.custom_ops.barrier import BARRIER, MATERIALIZE
from dynaxla.custom_ops.constrain import CONSTRAIN, CONSTRAIN_LIKE, UNSHARD
from dynaxla.custom_ops.schema import operand_dtype
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.dtypes import FLOATS, STORED, XLA_DTYPES
from dynaxla.ops.eager_errors import check_numbers_fit
from dynaxla.ops.promotion import Operand, cast, torch_dtype
from dynaxla.ops.record import OpFamily
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict

aten = torch.ops.aten
prims = torch.ops.prims
OPS = OpFamily()


@OPS.op(aten.clone.default, pad=elementwise_rules.elementwise, dtypes=STORED)
def clone(self: jax.Array, memory_format: torch.memory_format | None = None) -> jax.Array:
    del memory_format  # strides are restored when the value leaves the compiled part
    return self


@OPS.op(BARRIER, pad=elementwise_rules.elementwise, dtypes=STORED)
def barrier(x: jax.Array) -> jax.Array:
    """Gives its operand; XLA's CPU compiler removes the barrier before it fuses ops."""
    return lax.optimization_barrier(x)  # type: ignore[no-any-return]


@OPS.op(MATERIALIZE, pad=elementwise_rules.elementwise, dtypes=FLOATS, on_tpu=barrier)
def materialize(x: jax.Array) -> jax.Array:
    """Gives its operand through a loop, for which it needs memory. The loop does not run, or negates twice where the first
    element is NaN: no compiler can tell."""
    if x.size == 0:
        return x
    first = x.reshape(-1)[0]
    turns = jnp.where(first != first, 2, 0)
    return lax.while_loop(lambda state: state[0] < turns, lambda state: (state[0] + 1, -state[1]), (0, x))[1]


@OPS.op(CONSTRAIN, pad=elementwise_rules.elementwise)
def constrain(x: jax.Array, spec: str) -> jax.Array:
    """Gives its operand; `lowering/link.py` writes the constraint."""
    del spec
    return x


@OPS.op(CONSTRAIN_LIKE, pad=elementwise_rules.elementwise)
def constrain_like(x: jax.Array, reference: jax.Array) -> jax.Array:
    """Gives its operand, as `constrain` does."""
    del reference
    return x


@OPS.op(UNSHARD, pad=elementwise_rules.elementwise)
def unshard(x: jax.Array, axis: str) -> jax.Array:
    """Gives its operand, as `constrain` does."""
    del axis
    return x


@OPS.op(aten.copy.default, pad=elementwise_rules.elementwise, dtypes=STORED)
def copy(self: jax.Array, src: jax.Array, non_blocking: bool = False) -> jax.Array:
    del non_blocking
    return jnp.broadcast_to(cast(src, torch_dtype(self)), self.shape)


@OPS.op(aten.fill.Scalar, check=check_numbers_fit("value"), pad=elementwise_rules.elementwise)
@OPS.op(aten.fill.Tensor, pad=elementwise_rules.elementwise, as_aten=decompose)
def fill(self: jax.Array, value: Operand) -> jax.Array:
    return jnp.broadcast_to(cast(value, torch_dtype(self)), self.shape)


def _is_complex(call: Node) -> bool:
    return _source(call).is_complex or call.meta["val"].is_complex()


def _source(call: Node) -> torch.dtype:
    return operand_dtype(call, "a" if call.target is prims.convert_element_type.default else "self")


_FINDINGS_OF_CONVERSIONS = (
    Finding(Verdict.CRASHES, XLA_DTYPES, "[(torch.Size([3, 4]), torch.float32), torch.complex64]", calls=_is_complex),
)


@OPS.op(prims.convert_element_type.default, dtypes=STORED, torch_mlir=_FINDINGS_OF_CONVERSIONS)
def convert_element_type(a: jax.Array, dtype: torch.dtype) -> jax.Array:
    return cast(a, dtype)


@OPS.op(aten._to_copy.default, pad=elementwise_rules.elementwise, dtypes=STORED, torch_mlir=_FINDINGS_OF_CONVERSIONS)
def to_copy(self: jax.Array, dtype: torch.dtype | None = None, **placement: object) -> jax.Array:
    """Changes the dtype; ignores `placement` (layout, device, pin_memory, non_blocking, memory_format)."""
    del placement
    return self if dtype is None else cast(self, dtype)
