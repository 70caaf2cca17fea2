"""Bodies of the package's own operators (`ops.internal`)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from dynaxla.lowering.jax_rules import views
from dynaxla.lowering.jax_rules.channels_last import convolve
from dynaxla.lowering.jax_rules.rule_set import RuleSet
from dynaxla.ops import internal

RULES = RuleSet()


@RULES.rule(internal.LINEAR)
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [m, k], weight [n, k]. One row is a matrix-vector product, which XLA's CPU emitter runs best weight first."""
    narrow = x.dtype in (jnp.bfloat16, jnp.float16)
    wide = jnp.float32 if narrow else None
    contract = (((1,), (1,)), ((), ()))
    if x.shape[0] == 1:
        product = lax.dot_general(weight, x, contract, preferred_element_type=wide).T
    else:
        product = lax.dot_general(x, weight, contract, preferred_element_type=wide)
    if bias is not None:
        product = product + bias.astype(product.dtype)
    return product.astype(x.dtype)


@RULES.rule(internal.KERNEL)
def kernel_channels_last(weight: Array) -> Array:
    return jnp.transpose(weight, (*range(2, weight.ndim), 1, 0))


@RULES.rule(internal.CONVOLUTION)
def convolution_channels_last(
    x: Array, kernel: Array, bias: Array | None, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Array:
    result = convolve(x, kernel, stride, [(p, p) for p in padding], dilation, groups)
    return result if bias is None else result + bias


RULES.rule(internal.GATHER_STRIDED)(views.as_strided)
