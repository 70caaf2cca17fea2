"""The registry one rules module fills: ATen overload -> JAX function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import torch
from torch._ops import OpOverload

Rule = Callable[..., Any]
_Function = TypeVar("_Function", bound=Rule)

JNP_DTYPES = {
    torch.float64: jnp.float64,
    torch.float32: jnp.float32,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
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


class RuleSet(dict[OpOverload, Rule]):
    """A dict with a decorator: `@rules.rule(aten.topk.default)` stores the function under each overload named.

    A rule mirrors the ATen schema: tensors arrive as JAX arrays, everything else as the plain Python value in the FX
    node (ints, floats, lists, `torch.dtype`, None); arguments the node leaves out take the rule's own Python defaults,
    which therefore equal the schema's. It returns an array, or a tuple of arrays for an op with several results, with
    exactly the shapes and dtypes that torch gives. It is traced with 64-bit types on.
    """

    def rule(self, *targets: OpOverload) -> Callable[[_Function], _Function]:
        def register(function: _Function) -> _Function:
            for target in targets:
                if target in self:
                    raise ValueError(f"{target} has two rules")
                self[target] = function
            return function

        return register
